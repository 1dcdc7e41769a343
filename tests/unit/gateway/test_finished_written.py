"""Answers that were written before are graded as they are, with no rollout."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.finished import WrittenAnswers, check_written
from flotilla.services.gateway.evaluation.evaluator import Evaluator
from flotilla.services.gateway.monitoring.diagnosis import diagnose
from flotilla.services.gateway.scheduler.demands import quotas_of
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError, InvalidSpec
from flotilla.shared.models.prompts import PromptTemplate
from flotilla.shared.schemas.service import ServiceKind
from flotilla.shared.schemas.trajectory import NO_VERSION, FinishReason, GradeStatus
from flotilla.shared.streams.hop import HopName
from flotilla.shared.testing.builders import graded
from tests.unit.gateway.builders import a_gateway, add_experiment, running, until
from tests.unit.gateway.test_diagnosis import WELL
from tests.unit.gateway.test_finished import InThisProcess, a_tokenizer

ROWS: list[dict[str, Any]] = [
    {"prompt": f"p{n}", "label": str(n), "answers": [f"it is {n}", "no idea"]} for n in range(3)
]
WRITTEN: dict[str, Any] = {
    "name": "scored",
    "job": {"kind": "evaluation", "response_column": "answers"},
    "model": {"path": "/model"},
    "data": {"label_column": "label"},
    "evaluation": {"path": "/rows.jsonl"},
    "reward": {"components": [{"kind": "exact"}]},
}


def spec_of(**changes: Any) -> ExperimentSpec:
    return validate_spec(WRITTEN | changes)


def answers_of(spec: ExperimentSpec) -> WrittenAnswers:
    def open_process(stack: ExitStack) -> Any:
        return InThisProcess(a_tokenizer(), PromptTemplate.of(spec.data))

    return WrittenAnswers(spec, open_process)


def test_it_needs_graders_and_no_rollout() -> None:
    spec = spec_of()

    assert set(quotas_of(spec)) == {ServiceKind.REWARD}
    assert not spec.needs_rollouts
    found = diagnose(replace(WELL, services=(), trains=False, needs_rollouts=False))
    assert found == ("reward", "no live reward service")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rollout": {"group_size": 4}}, "rollout.group_size"),
        ({"resources": {"rollouts": {"min": 2}}}, "resources.rollouts"),
        ({"evaluation": {"path": "/rows.jsonl", "greedy": False}}, "evaluation.greedy"),
        ({"evaluation": {"path": "/rows.jsonl", "max_new_tokens": 9}}, "evaluation.max_new_tokens"),
        ({"data": {"label_column": "label", "max_prompt_tokens": 9}}, "data.max_prompt_tokens"),
        ({"reward": {"components": [{"kind": "environment"}]}}, "of kind environment"),
    ],
)
def test_what_says_how_a_model_answers_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidSpec, match=named):
        spec_of(**changes)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "p"}, "row 1 has in column 'answers' .* it is missing"),
        ({"prompt": "p", "answers": 7}, "no text and no list of texts"),
        ({"prompt": "p", "answers": []}, "no text and no list of texts"),
        ({"prompt": "p", "answers": "one"}, "row 1 has 1 answers in column 'answers' and row 0 has 2"),
    ],
)
def test_a_row_without_as_many_answers_is_named(row: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        check_written(Dataset([ROWS[0], row], spec_of().data, 0), "answers")


async def test_they_are_issued_to_the_graders_and_summed_up() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway, spec=spec_of(samples=None).model_dump(mode="json"))
    dataset = Dataset(ROWS, experiment.spec.data, 0)
    written = answers_of(experiment.spec)
    evaluator = Evaluator(experiment, dataset, gateway.repository, gateway.events, gateway.clock, written)
    hop = experiment.evaluation.hop(HopName.GENERATED, "reward")

    async with running(evaluator.run()):
        claims = []
        while len(claims) < len(ROWS):
            claims += await hop.claim(9, wait_seconds=0.05)
        groups = [claim.group() for claim in claims]
        for claim, group in zip(claims, groups, strict=True):
            await hop.forward(claim, graded(group, [1.0, 0.0]))
        await until(lambda: experiment.record.evaluated_version == 0)

    assert [group.prompt for group in groups] == ["p0", "p1", "p2"]
    assert [t.text for t in groups[1].trajectories] == ["it is 1", "no idea"]
    assert {(t.status, t.versions, t.finish_reason) for g in groups for t in g.trajectories} == {
        (GradeStatus.PENDING, ((0, NO_VERSION),), FinishReason.STOP)
    }
    assert groups[2].task.label == "2"
    (event,) = [e for e in await gateway.store.events(experiment.id, after=0, limit=99) if e.type == "evaluation"]
    metrics = event.data["metrics"]
    assert (metrics["evaluation/accuracy"], metrics["evaluation/pass@2"]) == (0.5, 1.0)
    assert (await experiment.evaluation.ledger()).balanced
