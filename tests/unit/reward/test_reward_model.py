"""What becomes of samples while a reward model's process dies, hangs or talks nonsense: they wait, or are errors.

Small programs stand in for the process here; the real one is in ``tests/integration/reward/test_reward_model.py``.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flotilla.services.reward.verifiers import reward_model
from flotilla.services.reward.verifiers.reward_model import RewardModelVerifier, text_of
from flotilla.shared.config.sections.judge import JudgeModelConfig, RewardModelConfig
from flotilla.shared.errors import InvalidSpec, Unavailable
from flotilla.shared.schemas.grading import GradingMessage, GradingTurn
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.reward.builders import a_sample

CHILD = """
import json, os, pathlib, sys, time
print('"serving"', flush=True)
folder = pathlib.Path(__file__).parent
starts = len(list(folder.glob("start-*")))
(folder / f"start-{starts}").touch()
config = json.loads(sys.stdin.readline())
def say(value):
    print(json.dumps(value), flush=True)
def reply(asked, found):
    say([json.loads(asked)[0], found])
def answer(asked):
    reply(asked, [[float(len(each["response"])), 1, None] for each in json.loads(asked)[1]])
"""
FIRST = "say({'ready': None})\nline = sys.stdin.readline()\n"
LATER = "else: answer(line)\nsys.stdin.readline()\n"
BEHAVIOURS = {
    "dies in its first batch": f"{FIRST}if starts == 0: os._exit(9)\n{LATER}",
    "cannot start twice": f"if starts in (1, 2): os._exit(3)\n{FIRST}if starts == 0: os._exit(9)\n{LATER}",
    "hangs once": f"{FIRST}if starts == 0: time.sleep(60)\n{LATER}",
    "answers too few once": f"{FIRST}if starts == 0: reply(line, [])\n{LATER}",
    "says what is no JSON once": f"{FIRST}if starts == 0: print('chatter', flush=True)\n{LATER}",
}


@asynccontextmanager
async def a_verifier(folder: Path, body: str, **fields: Any) -> AsyncIterator[RewardModelVerifier]:
    (folder / "child.py").write_text(CHILD + body)
    config = RewardModelConfig(path="/models/judge", **fields)
    command = (sys.executable, str(folder / "child.py"))
    verifier = RewardModelVerifier(config, folder, command=command, first_pause_seconds=0.001)
    try:
        yield verifier
    finally:
        await verifier.aclose()


@pytest.mark.parametrize("behaviour", list(BEHAVIOURS))
async def test_samples_wait_until_the_process_is_back_and_are_scored_then(tmp_path: Path, behaviour: str) -> None:
    samples = [a_sample("a" * length) for length in (3, 5, 8)]

    async with a_verifier(tmp_path, BEHAVIOURS[behaviour], timeout_seconds=2.0) as verifier:
        grades = await verifier.score(samples)

    assert [grade.reward for grade in grades] == [3.0, 5.0, 8.0]
    assert len(list(tmp_path.glob("start-*"))) > 1


async def test_a_batch_on_which_it_always_dies_is_an_error_and_no_other_is(tmp_path: Path) -> None:
    body = "say({'ready': None})\nfor line in sys.stdin:\n    if 'poison' in line: os._exit(9)\n    answer(line)\n"

    async with a_verifier(tmp_path, body, batch_samples=1) as verifier:
        good, bad, other = await verifier.score([a_sample("good"), a_sample("poison"), a_sample("other")])

    assert (good.reward, other.reward) == (4.0, 5.0)
    assert (bad.status, bad.reward) == (GradeStatus.ERROR, None)
    assert "failed 4 times on this batch, at last: the reward model's process ended with code 9" in str(bad.reason)


async def test_samples_of_several_groups_share_batches(tmp_path: Path) -> None:
    scoring = "    size = len(json.loads(line)[1])\n    reply(line, [[size, 1, None]] * size)\n"
    body = f"say({{'ready': None}})\nfor line in sys.stdin:\n{scoring}"

    async with a_verifier(tmp_path, body, batch_samples=8) as verifier:
        await verifier.start()
        groups = await asyncio.gather(*(verifier.score([a_sample(str(n)) for n in range(4)]) for _ in range(4)))

    assert [grade.reward for group in groups for grade in group] == [8.0] * 16


async def test_a_score_that_is_none_is_an_error_of_its_sample_alone(tmp_path: Path) -> None:
    body = (
        f"{FIRST}reply(line, [[float('nan'), 1, None], [None, 9, 'too long'], [0.5, 2, None]])\nsys.stdin.readline()\n"
    )

    async with a_verifier(tmp_path, body) as verifier:
        grades = await verifier.score([a_sample("a"), a_sample("b"), a_sample("c")])

    assert [grade.status for grade in grades] == [GradeStatus.ERROR, GradeStatus.ERROR, GradeStatus.SCORED]
    assert grades[1].reason == "too long"


async def test_what_cannot_be_loaded_is_said_at_the_start(tmp_path: Path) -> None:
    async with a_verifier(tmp_path, "say({'error': ['invalid_spec', 'it has two outputs', [], {}]})\n") as verifier:
        with pytest.raises(InvalidSpec, match="it has two outputs"):
            await verifier.start()


async def test_closing_it_leaves_nobody_waiting_and_no_process(tmp_path: Path) -> None:
    async with a_verifier(
        tmp_path, "say({'ready': None})\nsys.stdin.readline()\ntime.sleep(60)\n", batch_samples=1
    ) as verifier:
        await verifier.start()
        scoring = asyncio.create_task(verifier.score([a_sample("a"), a_sample("b")]))
        await asyncio.sleep(0)
        child = verifier._process.child

    assert {grade.status for grade in await scoring} == {GradeStatus.ERROR}
    assert child is not None and child.has_ended


async def test_closing_it_while_two_start_it_leaves_no_process(tmp_path: Path) -> None:
    async with a_verifier(tmp_path, f"time.sleep(0.5)\n{FIRST}answer(line)\nsys.stdin.readline()\n") as verifier:
        scoring = [asyncio.create_task(verifier.score([a_sample("a")])) for _ in range(2)]
        while not list(tmp_path.glob("start-*")):
            await asyncio.sleep(0.01)
        await verifier.aclose()
        async with asyncio.timeout(20):
            grades = [grade for each in scoring for grade in await each]
        pid = verifier.pid

    assert [grade.status for grade in grades] == [GradeStatus.ERROR] * 2
    assert pid is None and len(list(tmp_path.glob("start-*"))) == 1


async def test_what_is_asked_of_a_closed_one_is_an_error(tmp_path: Path) -> None:
    async with a_verifier(tmp_path, f"{FIRST}answer(line)\nsys.stdin.readline()\n") as verifier:
        await verifier.score([a_sample("a")])
        await verifier.aclose()
        async with asyncio.timeout(20):
            (grade,) = await verifier.score([a_sample("a")])

    assert (grade.status, grade.reason) == (GradeStatus.ERROR, "the reward model was closed")


async def test_an_error_that_nobody_expected_is_one_of_what_waits_and_the_next_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "say({'ready': None})\nfor line in sys.stdin: answer(line)\n"

    async with a_verifier(tmp_path, body, batch_samples=1) as verifier, asyncio.timeout(20):
        with monkeypatch.context() as broken:
            broken.setattr(verifier, "_ask", 0)
            failed = await verifier.score([a_sample("a"), a_sample("b")])
        (grade,) = await verifier.score([a_sample("aaa")])

    assert {each.status for each in failed} == {GradeStatus.ERROR}
    assert "the reward model failed: TypeError" in str(failed[0].reason)
    assert grade.reward == 3.0


async def test_its_environment_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOTILLA_SERVICE_TOKEN", "secret")
    body = f"{FIRST}reply(line, [[float('secret' in os.environ.values()), 1, None]])\nsys.stdin.readline()\n"

    async with a_verifier(tmp_path, body) as verifier:
        (grade,) = await verifier.score([a_sample("a")])

    assert grade.reward == 0.0


def test_the_turns_of_an_episode_are_one_conversation() -> None:
    sample = a_sample(
        "third",
        messages=(GradingMessage(role="system", content="play"), GradingMessage(role="user", content="board 1")),
        turns=tuple(
            GradingTurn(observation=seen, response=said)
            for seen, said in (("", "first"), ("board 2", "second"), ("board 3", "third"))
        ),
    )

    read = text_of(sample, RewardModelConfig(path="/m"))

    assert [(each["role"], each["content"]) for each in json.loads(json.dumps(read))["messages"]] == [
        ("system", "play"),
        ("user", "board 1"),
        ("assistant", "first"),
        ("user", "board 2"),
        ("assistant", "second"),
        ("user", "board 3"),
        ("assistant", "third"),
    ]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"template": "{{ x }}", "reads": "text"}, "template has no effect"),
        ({"revision": "main"}, "revision has an effect only"),
        ({"normalise": {"std": 0.0}}, "greater than 0"),
        ({"normalise": {"mean": 0.0}}, "changes no score"),
    ],
)
def test_settings_without_effect_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        RewardModelConfig(path="/m", **fields)


async def test_a_busy_machine_gives_the_process_more_time_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_model, "START_SECONDS", 0.2)
    slow = f"time.sleep(1)\n{FIRST}answer(line)\nsys.stdin.readline()\n"

    async with a_verifier(tmp_path, slow) as verifier:
        with pytest.raises(Unavailable, match=r"was not loaded within 0\.2 s"):
            await verifier.start()
        monkeypatch.setenv("FLOTILLA_START_PATIENCE", "300")
        await verifier.start()
        grades = await verifier.score([a_sample("aaa")])

    assert [grade.reward for grade in grades] == [3.0]


def test_a_judge_is_asked_a_question_about_the_sample_with_nothing_of_it_taken_for_a_place() -> None:
    sample = a_sample("{label}", label="7", messages=(GradingMessage(role="user", content="3+4"),))

    found = text_of(sample, JudgeModelConfig(path="/m", template="{prompt}={response} or {label}"))

    assert found == {"question": "3+4={label} or 7"}


def test_a_greedy_judge_has_no_top_p() -> None:
    with pytest.raises(ValidationError, match="temperature 0"):
        JudgeModelConfig(path="/m", top_p=0.5)
