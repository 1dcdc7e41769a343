"""Jobs on finished answers through the real trainer: they learn, and a killed one ends with the same bits."""

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from flotilla.services.trainer.checkpoint.manager import CheckpointManager
from flotilla.services.trainer.learning.finished import FinishedLearner
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.held_out import HeldOutAnswer, HeldOutPage
from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import NO_VERSION, FinishReason, GradeStatus, Group, Trajectory
from flotilla.shared.streams.admission import IssueOutcome
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from tests.integration.trainer.fleet import END, VOCABULARY, YesGateway, a_session, save_tiny_model
from tests.integration.trainer.test_crash_replay import Crash, crash_once, files_of

JOBS: dict[str, dict[str, Any]] = {
    "sft": {"kind": "sft", "response_column": "answer"},
    "dpo": {"kind": "preference"},
    "ipo": {"kind": "preference", "loss": {"kind": "ipo", "beta": 0.5}, "supervised_coefficient": 0.1},
    "kto": {"kind": "kto", "undesirable_weight": 1.25},
    "reward_model": {"kind": "reward_model"},
}
RATES = {"preference": 5e-4, "kto": 5e-4}
STEPS = 24
HELD_OUT = 10_000


def spec_of(model: Path, job: dict[str, Any], steps: int) -> ExperimentSpec:
    return validate_spec(
        {
            "name": "job",
            "model": {"path": str(model)},
            "data": {"path": "unused.jsonl"},
            "job": job | {"held_out": {"path": "unused.jsonl"}},
            "optimisation": {"steps": steps, "groups_per_mini_batch": 8, "learning_rate": RATES.get(job["kind"], 3e-3)},
            "checkpoint": {"every_steps": 4},
        }
    )


def trajectory(tokens: list[int], length: int, reward: float) -> Trajectory:
    return Trajectory(
        token_ids=np.array(tokens, dtype=np.int32),
        loss_mask=np.array([0] * length + [1] * (len(tokens) - length), dtype=np.uint8),
        log_probs=np.zeros(len(tokens), dtype=np.float32),
        versions=((0, NO_VERSION),),
        finish_reason=FinishReason.STOP,
    ).graded(GradeStatus.SCORED, reward)


def group_of(number: int, spec: ExperimentSpec) -> Group:
    """Prefer even tokens to odd ones; of single answers with a label, every other one has odd ones."""
    generator = np.random.default_rng(number)
    prompt = [int(token) for token in generator.integers(2, VOCABULARY, generator.integers(3, 9))]
    members = []
    shown = {"sft": 1, "kto": 1}.get(spec.job.kind, 2)
    answers = ((1, 0.0), (0, 1.0)) if spec.job.kind == "kto" and number % 2 else ((0, 1.0), (1, 0.0))
    for offset, reward in answers[:shown]:
        drawn = 2 * generator.integers(1, VOCABULARY // 2, generator.integers(2, 7)) + offset
        answer = [int(token) % VOCABULARY for token in drawn]
        members.append(trajectory([*prompt, *answer, END], len(prompt), reward))
    task = Task(group_id=number, row=number, messages=(), group_size=len(members), seed=number)
    return Group(task, tuple(members))


class Gateway(YesGateway):
    """Has held-out rows, too."""

    async def call(self, method: str, path: str, *, body: Any = None, params: Any = None, **named: Any) -> Any:
        if not path.endswith("/held_out_rows"):
            return await super().call(method, path, body=body, params=params, **named)
        first = params["first"]
        rows = [group_of(HELD_OUT + number, self.spec).trajectories for number in range(first, first + 16)]
        answers = tuple(
            tuple(
                HeldOutAnswer(token_ids=t.token_ids.tolist(), loss_mask=t.loss_mask.tolist(), reward=t.reward or 0.0)
                for t in row
            )
            for row in rows
        )
        return HeldOutPage(rows=answers, next=first + 16 if first < 48 else None).model_dump(mode="json")


async def feed(spec: ExperimentSpec, plane: MemoryDataPlane) -> None:
    while True:
        number = await plane.admission.next_group_id()
        groups = [group_of(number + index, spec) for index in range(8)]
        issued = await plane.admission.issue_groups(groups, hop=HopName.SCORED, limit=spec.admission_budget)
        if issued.outcome is not IssueOutcome.ISSUED:
            await asyncio.sleep(0.01)


async def train(spec: ExperimentSpec, directory: Path, plane: MemoryDataPlane, gateway: YesGateway) -> bool:
    async with a_session(spec, directory, plane, gateway) as (session, _), asyncio.timeout(240):
        feeding = asyncio.create_task(feed(spec, plane))
        try:
            return await session.run()
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)


@pytest.mark.parametrize("kind", JOBS)
async def test_a_job_learns_what_its_rows_show(tmp_path: Path, kind: str) -> None:
    spec = spec_of(save_tiny_model(tmp_path / "model"), JOBS[kind], STEPS)
    plane = MemoryDataPlane()
    gateway = Gateway(plane)

    assert await train(spec, tmp_path / "run", plane, gateway)

    before, after = gateway.metrics[0], gateway.metrics[STEPS]
    assert after["held_out/loss"] < before["held_out/loss"]
    if kind == "kto":
        assert before["held_out/loss"] == pytest.approx((1 + 1.25) / 4), "the policy is the reference"
        assert after["held_out/preference/chosen"] > 0 > after["held_out/preference/rejected"]
    elif kind != "sft":
        assert before["held_out/preference/accuracy"] == 0.5 or kind == "reward_model", "the policy is the reference"
        assert after["held_out/preference/accuracy"] > 0.8, "chance is a half of 64 pairs"
    ledger = await plane.ledger()
    assert (ledger.trained, ledger.planned, ledger.balanced) == (8 * STEPS, 0, True)
    assert gateway.published == list(range(1, STEPS // 4 + 1)), "a version with each checkpoint"
    assert not any(name.startswith(("reward/", "lag/")) for name in after), "nothing was sampled or graded"


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "reward_model"])
@pytest.mark.parametrize(("owner", "name", "at_call"), [(FinishedLearner, "train", 7), (CheckpointManager, "copy", 2)])
async def test_a_killed_job_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, owner: type, name: str, at_call: int
) -> None:
    spec = spec_of(save_tiny_model(tmp_path / "model"), JOBS[kind], 10)
    undisturbed = MemoryDataPlane()
    calm = Gateway(undisturbed)
    await train(spec, tmp_path / "undisturbed", undisturbed, calm)
    plane = MemoryDataPlane()
    gateway = Gateway(plane)

    with monkeypatch.context() as patched:
        crash_once(patched, owner, name, at_call=at_call)
        with pytest.raises(ExceptionGroup) as failure:
            await train(spec, tmp_path / "run", plane, gateway)
    is_finished = await train(spec, tmp_path / "run", plane, gateway)

    assert failure.group_contains(Crash)
    assert is_finished
    assert files_of(tmp_path / "run", 10) == files_of(tmp_path / "undisturbed", 10)
    losses = [(gateway.metrics[step]["loss/total"], calm.metrics[step]["loss/total"]) for step in range(1, 11)]
    assert all(found == expected for found, expected in losses)
    ledger = await plane.ledger()
    assert (ledger.trained, ledger.planned, ledger.balanced) == (80, 0, True)


async def test_a_reward_models_checkpoint_is_a_sequence_classifier(tmp_path: Path) -> None:
    spec = spec_of(save_tiny_model(tmp_path / "model"), JOBS["reward_model"], STEPS)
    plane = MemoryDataPlane()
    gateway = Gateway(plane)
    await train(spec, tmp_path / "run", plane, gateway)

    path = tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}" / "model"
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()

    def score(answer: Trajectory) -> float:
        with torch.no_grad():
            return float(model(torch.tensor(answer.token_ids.tolist())[None]).logits[0, 0])

    pairs = [group_of(HELD_OUT + number, spec).trajectories for number in range(64)]
    margins = [score(chosen) - score(rejected) for chosen, rejected in pairs]
    measured = cast(dict[str, float], gateway.metrics[STEPS])
    assert float(np.mean(margins)) == pytest.approx(measured["held_out/preference/margin"], abs=1e-5)
    assert np.mean([margin > 0 for margin in margins]) == measured["held_out/preference/accuracy"]
