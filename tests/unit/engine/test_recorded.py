"""An engine that answers out of a dump: the recorded tokens, lengths and log-probabilities, under the version that
serves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla.services.rollout.engines.base import Completion, GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.own import embedded_engine
from flotilla.services.rollout.engines.recorded import RecordedEngine
from flotilla.shared.config.sections.engine import TorchEngineConfig
from flotilla.shared.errors import ModelError
from flotilla.shared.locations.allowed import Places
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleFile
from flotilla.shared.schemas.task import sample_seed
from flotilla.shared.schemas.trajectory import FinishReason, Trajectory
from flotilla.shared.schemas.turns import Turn
from tests.unit.gateway.builders import a_spec
from tests.unit.samples.builders import a_step
from tests.unit.samples.test_dump import a_run


@asynccontextmanager
async def an_engine(run: Path, *, slots: int = 4) -> AsyncIterator[RecordedEngine]:
    engine = RecordedEngine(run, token_seconds=0.0, slots=slots, context_tokens=64)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def asking(prompt: list[int], *seeds: int, most: int = 32) -> GenerationRequest:
    return GenerationRequest("r", tuple(prompt), seeds, SamplingParameters(max_new_tokens=most))


def a_shared_step(**named: Any) -> SampleFile:
    """Make a step in which all members of a group answer the same prompt."""
    step = a_step(**named)
    return replace(step, groups=[_shared(kept) for kept in step.groups])


def _shared(kept: KeptGroup) -> KeptGroup:
    first = kept.group.trajectories[0]
    members = tuple(
        replace(each, token_ids=np.where(each.loss_mask, each.token_ids, first.token_ids).astype(np.int32))
        for each in kept.group.trajectories
    )
    return replace(kept, group=replace(kept.group, trajectories=members))


def cut(trajectory: Trajectory) -> tuple[list[int], list[int], list[float]]:
    """Give prompt, completion and the completion's log-probabilities of a single turn."""
    start = int(np.argmax(trajectory.loss_mask))
    tokens = trajectory.token_ids.tolist()
    return tokens[:start], tokens[start:], trajectory.log_probs[start:].tolist()


def told(completion: Completion) -> tuple[list[int], list[float]]:
    return completion.token_ids.tolist(), completion.log_probs.tolist()


async def test_a_seed_that_was_recorded_gets_its_own_completion_again(tmp_path: Path) -> None:
    step = a_shared_step(rewards=(1.0, 0.0, 0.5))
    group = step.groups[1].group
    recorded = [cut(trajectory) for trajectory in group.trajectories]
    seeds = [sample_seed(group.task.seed, member) for member in range(3)]

    async with an_engine(a_run(tmp_path / "run", step), slots=2) as engine:
        found = await engine.generate(asking(recorded[0][0], seeds[2], seeds[0]))

    assert [told(each) for each in found] == [recorded[2][1:], recorded[0][1:]]
    assert {each.finish_reason for each in found} == {FinishReason.STOP}
    assert {each.versions for each in found} == {((0, 0),)}


async def test_the_version_that_serves_is_told_and_a_limit_cuts(tmp_path: Path) -> None:
    step = a_step()
    prompt, completion, log_probs = cut(step.groups[0].group.trajectories[0])
    seed = sample_seed(step.groups[0].group.task.seed, 0)

    async with an_engine(a_run(tmp_path / "run", step)) as engine:
        engine.version = 7
        [found] = await engine.generate(asking(prompt, seed, most=2))

    assert told(found) == (completion[:2], log_probs[:2])
    assert (found.finish_reason, found.versions) == (FinishReason.LENGTH, ((0, 7),))


async def test_other_seeds_and_prompts_get_whole_completions_and_the_same_ones_each_time(tmp_path: Path) -> None:
    step = a_step()
    every = [cut(t)[1] for each in step.groups for t in each.group.trajectories]
    prompt = cut(step.groups[0].group.trajectories[0])[0]

    async with an_engine(a_run(tmp_path / "run", step)) as engine:
        of_prompt = await engine.generate(asking(prompt, 5, 5))
        elsewhere = await engine.generate(asking([63, 62], 11))
        again = await engine.generate(asking([63, 62], 11))

    assert told(of_prompt[0]) == told(of_prompt[1])
    assert of_prompt[0].token_ids.tolist() in every
    assert elsewhere[0].token_ids.tolist() in every
    assert told(elsewhere[0]) == told(again[0])


async def test_each_turn_of_an_episode_follows_what_was_shown_before_it(tmp_path: Path) -> None:
    step = a_step(rewards=(1.0,), num_groups=1)
    kept = step.groups[0]
    turns = (
        Turn(0, 2, 4, FinishReason.STOP, is_fresh=True),
        Turn(4, 6, 7, FinishReason.LENGTH),
        Turn(7, 9, 10, FinishReason.STOP, is_fresh=True),
    )
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 0, 0, 1], np.uint8)
    tokens = np.arange(20, 30, dtype=np.int32)
    episode = replace(
        kept.group.trajectories[0],
        token_ids=tokens,
        loss_mask=mask,
        log_probs=np.where(mask, -0.5, 0.0).astype(np.float32),
        turns=turns,
    )
    group = replace(kept, group=replace(kept.group, trajectories=(episode,)), tokens=())
    run = a_run(tmp_path / "run", replace(step, groups=[group]))

    async with an_engine(run) as engine:
        found = [(await engine.generate(asking(prompt, 3)))[0] for prompt in (
            [20, 21], [20, 21, 22, 23, 24, 25], [27, 28],
        )]  # fmt: skip

    assert [each.token_ids.tolist() for each in found] == [[22, 23], [26], [29]]
    assert [each.finish_reason for each in found] == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]


async def test_a_dump_without_completions_is_an_error_of_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"rollout.engine.recorded: dump: .* has no groups"):
        await RecordedEngine(tmp_path, token_seconds=0.0, slots=1, context_tokens=8).start()


def test_one_key_of_the_spec_takes_the_models_place(tmp_path: Path) -> None:
    spec = a_spec(rollout={"engine": {"recorded": {"dump": str(tmp_path)}, "slots": 3, "context_tokens": 2048}})
    assert isinstance(spec.rollout.engine, TorchEngineConfig)

    assert isinstance(embedded_engine(spec, spec.rollout.engine), RecordedEngine)


async def test_a_dump_that_is_where_no_data_may_be_is_not_read(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", a_shared_step())
    spec = a_spec(rollout={"engine": {"recorded": {"dump": str(run)}}})
    assert isinstance(spec.rollout.engine, TorchEngineConfig)
    engine = embedded_engine(spec, spec.rollout.engine, Places(data=(tmp_path / "ok",)).check_file)

    with pytest.raises(ModelError, match="is in no folder that this fleet reads data from"):
        await engine.start()
