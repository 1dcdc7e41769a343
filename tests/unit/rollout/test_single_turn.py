"""How one prompt's completions are sampled, in training and in evaluation."""

import asyncio
from collections.abc import Sequence

import pytest

from flotilla.services.rollout.engines.base import UNMIXED, Completion, GenerationRequest
from flotilla.services.rollout.engines.scripted import ScriptedEngine
from flotilla.services.rollout.episodes.single_turn import SingleTurnEpisodes
from flotilla.services.rollout.episodes.turns import Requests, Turns
from flotilla.shared.config.sections.evaluation import EvaluationConfig
from flotilla.shared.config.sections.rollout import SamplingConfig
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.task import Message, Task
from flotilla.shared.testing.builders import a_task
from tests.contract.engine.requests import a_request


class Letters:
    """Renders a prompt as one number."""

    stop_token_ids: tuple[int, ...] = ()

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return (5,)

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


class Recording(ScriptedEngine):
    """Remembers how it was asked to sample."""

    def __init__(self) -> None:
        super().__init__(version=0, eos_token_id=999, slots=4)
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        self.requests.append(request)
        return await super().generate(request)


async def requested(evaluation: EvaluationConfig, *tasks: Task) -> list[GenerationRequest]:
    rare = {"min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4}
    training = SamplingConfig(temperature=0.9, top_k=7, top_p=0.8, max_new_tokens=6, **rare)
    engine = Recording()
    await engine.start()
    episodes = SingleTurnEpisodes(engine, Letters(), Turns(training, evaluation.sampling(training)), UNMIXED)
    for task in tasks:
        await episodes.run(task)
    await engine.close()
    return engine.requests


async def test_an_evaluation_samples_by_its_own_settings_and_training_by_its_own() -> None:
    own = EvaluationConfig(path="held.jsonl", greedy=False, temperature=0.6, top_k=0, max_new_tokens=3)

    trained, evaluated = await requested(own, a_task(0), a_task(1, pinned_version=0))

    sampling = trained.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_new_tokens) == (0.9, 7, 0.8, 6)
    sampling = evaluated.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_new_tokens) == (0.6, 0, 0.8, 3)
    assert {(each.sampling.min_p, *each.sampling.penalties) for each in (trained, evaluated)} == {(0.1, 1.2, 0.3, 0.4)}


async def test_a_group_is_sampled_with_what_it_was_issued_with_and_an_evaluation_is_not() -> None:
    settings = {"rollout.sampling.temperature": 0.5, "rollout.sampling.max_new_tokens": 2, "rollout.group_size": 2}
    held_out = EvaluationConfig(path="held.jsonl", greedy=False)

    changed, plain, evaluated = await requested(
        held_out, a_task(0, settings=settings), a_task(1), a_task(2, settings=settings, pinned_version=0)
    )

    assert (changed.sampling.temperature, changed.sampling.max_new_tokens, changed.sampling.top_k) == (0.5, 2, 7)
    assert plain.sampling == evaluated.sampling
    assert (plain.sampling.temperature, plain.sampling.max_new_tokens) == (0.9, 6)


async def test_an_evaluation_without_settings_samples_as_training_does() -> None:
    trained, evaluated = await requested(
        EvaluationConfig(path="held.jsonl", greedy=False), a_task(0), a_task(1, pinned_version=0)
    )

    assert evaluated.sampling == trained.sampling


async def test_a_baseline_is_answered_greedily_beside_the_group_in_training_alone() -> None:
    engine = Recording()
    await engine.start()
    sampling = SamplingConfig(max_new_tokens=3)
    episodes = SingleTurnEpisodes(engine, Letters(), Turns(sampling, sampling, greedy_baseline=True), UNMIXED)

    trained = await episodes.run(a_task(0, group_size=2))
    again = await episodes.run(a_task(0, group_size=2), trained.trajectories)
    evaluated = await episodes.run(a_task(1, group_size=2, pinned_version=0))
    await engine.close()

    assert [member.is_baseline for member in trained.trajectories] == [False, False, True]
    assert [(request.sampling.greedy, len(request.seeds)) for request in engine.requests] == [
        (False, 2),
        (True, 1),
        (False, 2),
    ]
    assert [member.token_ids.tolist() for member in again.trajectories] == [
        member.token_ids.tolist() for member in trained.trajectories
    ], "finished members are kept, the baseline too"
    assert [member.is_baseline for member in evaluated.trajectories] == [False, False]


async def test_a_request_that_fails_ends_the_other_one_of_its_group() -> None:
    class FailsGreedily(ScriptedEngine):
        """Fails the baseline once the group is being sampled."""

        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            if request.sampling.greedy:
                while not self.request_ids:
                    await asyncio.sleep(0)
                raise Unavailable("the server dropped a connection")
            return await super().generate(request)

    engine = FailsGreedily(token_seconds=60)
    await engine.start()
    sampling = SamplingConfig(max_new_tokens=3)
    episodes = SingleTurnEpisodes(engine, Letters(), Turns(sampling, sampling, greedy_baseline=True), UNMIXED)

    with pytest.raises(Unavailable, match="dropped a connection"):
        await episodes.run(a_task(0, group_size=2))

    assert engine.request_ids == (), "nobody waits for it any more"
    await engine.close()


async def test_an_interruption_aborts_all_requests_at_once() -> None:
    class EndsTogether(ScriptedEngine):
        """Ends nothing before it was asked to end everything, as a server that answers late."""

        are_asked = asyncio.Barrier(3)

        async def abort(self, request_id: str) -> None:
            await self.are_asked.wait()
            await super().abort(request_id)

    engine = EndsTogether(token_seconds=60)
    await engine.start()
    requests = Requests(engine)
    running = [asyncio.create_task(requests.generate(a_request(request_id=name))) for name in "abc"]
    await asyncio.sleep(0)

    async with asyncio.timeout(5):
        await requests.abort_all()
        await asyncio.gather(*running)
    await engine.close()
