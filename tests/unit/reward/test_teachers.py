"""Teachers behind URLs: what they are asked, what their answers mean, and that nothing is trained without one."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from flotilla.services.reward.consumer import RewardConsumer, RewardLane
from flotilla.services.reward.teacher.teachers import (
    MOST_BROKEN,
    Teachers,
    last_run,
    log_probs_of,
    open_teachers,
    read_answer,
    reads_alike,
    score_request,
)
from flotilla.services.reward.verifiers.registry import Surroundings
from flotilla.shared.config.sections.distillation import DistillationConfig, TeacherServerConfig
from flotilla.shared.config.sections.reward import RewardConfig
from flotilla.shared.errors import GradingFailed, InvalidSpec
from flotilla.shared.schemas.trajectory import GradeStatus, Group, Trajectory
from flotilla.shared.testing.builders import a_group, a_task, a_trajectory
from tests.unit.reward.test_consumer import World, by_index, grading

URL = "http://93.184.215.14:30000"
IDS, START = [7, 8, 9, 10], 2
Handler = Callable[[httpx.Request], httpx.Response]


def a_config(kind: str = "sglang", **fields: Any) -> TeacherServerConfig:
    return TeacherServerConfig.model_validate({"url": URL, "kind": kind} | fields)


def sglang_answer(ids: Sequence[int], start: int, value: Callable[[int], Any] = lambda place: -0.5 * place) -> Any:
    entries = [[None, ids[start - 1], None], *([value(place), ids[place], None] for place in range(start, len(ids)))]
    return {"text": "", "meta_info": {"input_token_logprobs": entries}}


def vllm_answer(ids: Sequence[int], values: Sequence[Any]) -> Any:
    entries = [{str(token): {"logprob": value, "rank": 3}} for token, value in zip(ids[1:], values, strict=True)]
    return {"choices": [{"prompt_logprobs": [None, *entries]}]}


def openai_answer(values: Sequence[Any]) -> Any:
    return {"choices": [{"logprobs": {"token_logprobs": [None, *values]}}]}


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("sglang", {}, ("/generate", {"input_ids": IDS, "return_logprob": True, "logprob_start_len": 1})),
        (
            "vllm",
            {"model": "m"},
            ("/v1/completions", {"model": "m", "prompt": IDS, "max_tokens": 1, "prompt_logprobs": 0}),
        ),
        ("openai", {}, ("/v1/completions", {"prompt": IDS, "max_tokens": 1, "echo": True, "logprobs": 1})),
    ],
)
def test_a_server_is_asked_for_the_tokens_that_were_sampled(kind: str, fields: Any, expected: Any) -> None:
    path, body = score_request(a_config(kind, **fields), IDS, START)

    assert path == expected[0]
    sampling = body.pop("sampling_params", None) or {"temperature": body.pop("temperature")}
    assert sampling["temperature"] == 1.0
    assert body == expected[1]


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("sglang", sglang_answer(IDS, START)),
        ("vllm", vllm_answer(IDS, [-9.0, -1.0, -1.5])),
        ("openai", openai_answer([-9.0, -1.0, -1.5])),
        ("openai", openai_answer([-9.0, -1.0, -1.5, -0.1])),
    ],
    ids=["sglang", "vllm", "echo", "echo and one sampled"],
)
def test_the_log_probs_of_the_sampled_tokens_are_read(kind: str, answer: Any) -> None:
    parsed = read_answer(json.dumps(answer).encode(), len(IDS))

    assert log_probs_of(a_config(kind), parsed, IDS, START) == [-1.0, -1.5]


@pytest.mark.parametrize(
    ("kind", "answer", "said"),
    [
        ("sglang", sglang_answer(IDS[:3], START), "1 log-probabilities for 2 tokens"),
        ("sglang", sglang_answer([7, 8, 9, 11], START), "token 11.0 at position 3, which is 10"),
        ("sglang", sglang_answer(IDS, START, lambda _: float("nan")), "position 2 is none: nan"),
        ("sglang", sglang_answer(IDS, START, lambda _: float("-inf")), "position 2 is none: -inf"),
        ("sglang", sglang_answer(IDS, START, lambda _: 0.5), "position 2 is none: 0.5"),
        ("sglang", sglang_answer(IDS, START, lambda _: None), "is none: a NoneType"),
        ("sglang", sglang_answer(IDS, START, lambda _: "-1"), "is none: a str"),
        ("sglang", {"meta_info": {}}, "not as kind sglang gives it"),
        ("sglang", ["?"], "not as kind sglang gives it"),
        ("sglang", {"meta_info": {"input_token_logprobs": [1, 2, 3]}}, "not as kind sglang gives it"),
        ("vllm", vllm_answer(IDS, [-1.0, -1.0, -9999.0]), "position 3 is none: -9999.0"),
        ("vllm", vllm_answer([7, 8, 9, 11], [-1.0, -1.0, -1.0]), "not as kind vllm gives it"),
        ("vllm", vllm_answer(IDS[:3], [-1.0, -1.0]), "3 entries for 4 tokens"),
        ("openai", openai_answer([-1.0]), "2 entries for 4 tokens"),
        ("openai", openai_answer([-1.0] * 9), "10 entries for 4 tokens"),
    ],
)
def test_an_answer_that_is_not_about_these_tokens_is_an_error(kind: str, answer: Any, said: str) -> None:
    parsed = read_answer(json.dumps(answer).encode(), len(IDS))

    with pytest.raises(GradingFailed, match=said):
        log_probs_of(a_config(kind), parsed, IDS, START)


@pytest.mark.parametrize(
    ("content", "said"), [(b"no", "is not JSON"), (b"[" * 100_000, "levels|values"), (b"[" + b"1," * 9999, "more than")]
)
def test_an_answer_is_bounded_before_it_is_parsed(content: bytes, said: str) -> None:
    with pytest.raises(GradingFailed, match=said):
        read_answer(content, len(IDS))


def test_a_long_answer_of_a_server_is_not_too_much() -> None:
    ids = list(range(20_000))

    for kind, answer in (
        ("sglang", sglang_answer(ids, 1, lambda _: -1.25)),
        ("vllm", vllm_answer(ids, [-1.25] * 19_999)),
    ):
        parsed = read_answer(json.dumps(answer).encode(), len(ids))
        assert set(log_probs_of(a_config(kind), parsed, ids, 1)) == {-1.25}


def test_decodings_are_compared_without_special_tokens_and_white_space() -> None:
    assert reads_alike(" 1 + 2 = 3<|im_end|>", "1 + 2 =3")
    assert reads_alike("caf\ufffd", "caf")
    assert not reads_alike("Paris", "12 pens")


def test_the_text_was_decoded_from_the_last_run_of_sampled_tokens() -> None:
    turns = a_trajectory(prompt_tokens=2, sampled_tokens=5)
    mask = np.array([0, 0, 1, 1, 0, 1, 1], np.uint8)
    turns = replace(turns, loss_mask=mask, log_probs=np.zeros(7, np.float32))

    assert last_run(turns) == turns.token_ids[5:].tolist()


def answering(request: httpx.Request) -> httpx.Response:
    """Answer as SGLang would; what is decoded is what was sampled."""
    body = json.loads(request.content)
    if request.url.path == "/detokenize":
        return httpx.Response(200, json={"text": "an answer"})
    return httpx.Response(200, json=sglang_answer(body["input_ids"], body["logprob_start_len"] + 1))


def teachers_of(handler: Handler, *configs: TeacherServerConfig) -> Teachers:
    client = httpx.AsyncClient(transport=httpx.MockTransport(handler))
    return Teachers(configs or [a_config()], client, {0: "key"}, pause_seconds=0.001)


def expected_of(trajectory: Trajectory) -> list[float]:
    return [-0.5 * place if trajectory.loss_mask[place] else 0.0 for place in range(len(trajectory.token_ids))]


@asynccontextmanager
async def a_world(handler: Handler, *configs: TeacherServerConfig, **reward: Any) -> AsyncIterator[World]:
    config = RewardConfig.model_validate(reward)
    world = World(by_index, config)
    lanes = [RewardLane("train", world.hop, True)]
    teachers = teachers_of(handler, *configs)
    world.worker = RewardConsumer(lanes, world.verifier, config, concurrency=4, kept=world.kept, teachers=teachers)
    async with grading(world):
        yield world
    await teachers.aclose()


async def test_what_a_teacher_says_travels_with_the_group() -> None:
    requests: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return answering(request)

    async with a_world(handler) as world:
        await world.generate(a_group(0))
        await world.until(lambda ledger: ledger.waiting.scored == 1)
        (group,) = await world.scored()

    assert [t.teacher_log_probs.tolist() for t in group.trajectories if t.teacher_log_probs is not None] == [
        expected_of(t) for t in group.trajectories
    ]
    assert group.rewards() == [0.0, 1.0]
    assert {request.headers["authorization"] for request in requests} == {"Bearer key"}
    names = [request.headers["idempotency-key"] for request in requests if request.url.path == "/generate"]
    assert len(set(names)) == len(names) == 2


async def test_a_teacher_that_does_not_answer_is_waited_for_and_named() -> None:
    is_up = False

    def handler(request: httpx.Request) -> httpx.Response:
        if is_up:
            return answering(request)
        raise httpx.ConnectError("connection refused")

    async with a_world(handler) as world:
        await world.generate(a_group(0), a_group(1))
        while world.worker.problem is None:
            await asyncio.sleep(0.001)
        waiting = await world.plane.ledger()
        named, hopeless = world.worker.problem, world.worker.why_hopeless
        is_up = True
        ledger = await world.until(lambda ledger: ledger.waiting.scored == 2)

        assert world.worker.problem is None

    assert (waiting.claimed.generated, waiting.waiting.scored) == (2, 0)
    assert f"the teacher {URL} does not answer" in named.cause
    assert hopeless is None
    assert not ledger.failed


@pytest.mark.parametrize(
    "refusing", [httpx.Response(400, json={"error": "too long"}), httpx.Response(200, content=b"x" * 9_000_000)]
)
async def test_a_sample_that_a_teacher_refuses_is_left_out_and_the_others_are_trained(refusing: httpx.Response) -> None:
    group = a_group(0)
    first = group.trajectories[0].token_ids.tolist()

    def handler(request: httpx.Request) -> httpx.Response:
        return refusing if json.loads(request.content).get("input_ids") == first else answering(request)

    async with a_world(handler) as world:
        await world.generate(group)
        await world.until(lambda ledger: ledger.waiting.scored == 1)
        (found,) = await world.scored()

    assert [t.status for t in found.trajectories] == [GradeStatus.ERROR, GradeStatus.SCORED]
    assert (found.trajectories[0].reason or "").startswith(f"teacher: the teacher {URL}")
    assert found.trajectories[1].teacher_log_probs is not None


@pytest.mark.parametrize("status", [401, 500])
async def test_groups_that_no_teacher_judges_fail_and_too_many_end_the_experiment(status: int) -> None:
    asked = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += request.url.path == "/generate"
        return httpx.Response(status if request.url.path == "/generate" else 404, json={"error": "no"})

    async with a_world(handler, max_consecutive_failures=2) as world:
        await world.generate(a_group(0), a_group(1))
        ledger = await world.until(lambda ledger: sum(ledger.failed.values()) == 2)

    assert ledger.failed == {"teacher_error": 2}
    assert f"the last error: teacher: the teacher {URL}" in (world.worker.why_hopeless or "")
    assert asked == 4 * (MOST_BROKEN if status == 500 else 1)


async def test_a_teacher_that_reads_other_tokens_ends_the_experiment_and_nothing_is_trained() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"prompt": "bonjour"}) if "detok" in request.url.path else answering(request)

    async with a_world(handler) as world:
        await world.generate(a_group(0))
        while world.worker.why_hopeless is None:
            await asyncio.sleep(0.001)
        ledger = await world.until(lambda ledger: ledger.waiting.generated == 1)

    assert (ledger.waiting.scored, ledger.failed) == (0, {})
    assert "reads the tokens of 'an answer' as 'bonjour'" in (world.worker.why_hopeless or "")


async def test_a_private_address_is_refused_unless_the_spec_and_the_operator_allow_it() -> None:
    local = a_config(url="http://127.0.0.1:9")
    async with a_world(answering, local) as world:
        await world.generate(a_group(0))
        while world.worker.why_hopeless is None:
            await asyncio.sleep(0.001)

    assert "allow_private" in (world.worker.why_hopeless or "")
    async with a_world(answering, a_config(url="http://127.0.0.1:9", allow_private=True)) as world:
        await world.generate(a_group(0))
        await world.until(lambda ledger: ledger.waiting.scored == 1)


async def test_each_data_source_has_its_own_teacher() -> None:
    asked: dict[str, set[str]] = {}

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/generate":
            asked.setdefault(str(request.url.host), set()).add(request.url.path)
        return answering(request)

    mathematics = a_config(url="http://93.184.215.14", data_sources=["maths"])
    code = a_config(url="http://93.184.215.15", data_sources=["code"])
    groups = [a_group(a_task(number, data_source=source)) for number, source in enumerate(("maths", "code", "law"))]
    async with a_world(handler, mathematics, code) as world:
        await world.generate(*groups[:1])
        await world.until(lambda ledger: ledger.waiting.scored == 1)
        assert set(asked) == {"93.184.215.14"}
        await world.generate(*groups[1:])
        ledger = await world.until(lambda ledger: ledger.waiting.scored == 2 and bool(ledger.failed))

    assert set(asked) == {"93.184.215.14", "93.184.215.15"}
    assert ledger.failed == {"teacher_error": 1}


async def test_only_what_is_trained_is_judged() -> None:
    asked = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += request.url.path == "/generate"
        return answering(request)

    def mixed(group: Group) -> Group:
        baseline = replace(group.trajectories[0], is_baseline=True)
        return Group(group.task, (baseline, *group.trajectories[1:]), group.prompt)

    async with a_world(handler, filter_zero_spread=True) as world:
        world.verifier.grade = lambda sample: (
            by_index(sample) if sample.id.startswith("1/") else by_index(sample).model_copy(update={"reward": 0.0})
        )
        await world.generate(a_group(0), mixed(a_group(1)))
        await world.until(lambda ledger: ledger.waiting.scored == 1 and ledger.filtered == {"zero_spread": 1})

    assert asked == 1


def test_a_key_that_is_not_set_is_named() -> None:
    config = DistillationConfig(servers=(a_config(api_key_env="TEACHER_KEY"),))

    with pytest.raises(InvalidSpec, match="TEACHER_KEY"):
        open_teachers(config, Surroundings("exp"))
    assert open_teachers(DistillationConfig(path="/teacher"), Surroundings("exp")) is None
