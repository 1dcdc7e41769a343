"""The component that chooses among verl's scorers: what it cannot grade, and what it asks of the sandbox."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from flotilla.services.gateway.preflight.checks import evaluation_dataset, train_dataset
from flotilla.services.reward.verifiers.matching import ExactVerifier
from flotilla.services.reward.verifiers.registry import Surroundings, build_verifier
from flotilla.services.reward.verifiers.verl import VerlDefaultVerifier
from flotilla.shared.config.sections.reward import ExactConfig, RewardConfig, VerlDefaultConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError, InvalidSpec
from flotilla.shared.schemas.grading import Grade, GradingSample
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.gateway.builders import a_spec
from tests.unit.reward.builders import a_sample


class Programs:
    """A sandbox's verifier that keeps what it is asked."""

    def __init__(self) -> None:
        self.responses: list[str] = []

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        self.responses += [sample.response for sample in samples]
        return [Grade.scored(0.7)] * len(samples)

    async def aclose(self) -> None:
        self.responses.clear()


def a_verifier(code: Programs | None = None) -> VerlDefaultVerifier:
    return VerlDefaultVerifier(VerlDefaultConfig(), ExactVerifier(ExactConfig(pattern="boxed{(.*)}")), code)


@pytest.mark.parametrize(
    ("source", "label", "said"),
    [
        ("mine", "1", "'mine'; known: openai/gsm8k, lighteval/MATH"),
        (None, "1", "no data source"),
        ("taco", "{}", "set runs_code"),
        ("openai/gsm8k", None, "no label"),
        ("searchR1_nq", "Paris", "the label cannot be read by the scorer search"),
        ("searchR1_nq", '{"answers": ["Paris"]}', "the label cannot be read by the scorer search"),
    ],
)
async def test_what_cannot_be_graded_is_an_error(source: str | None, label: str | None, said: str) -> None:
    (grade,) = await a_verifier().score([a_sample("#### 1", label, data_source=source)])

    assert grade.status is GradeStatus.ERROR
    assert said in str(grade.reason)


async def test_the_program_that_verl_would_take_goes_to_the_sandbox() -> None:
    code = Programs()
    response = "```cpp\nint a;\n```\n```python\nprint(1)\n``` and ```\nx\n```"

    (grade,) = await a_verifier(code).score([a_sample(response, "{}", data_source="apps")])

    assert grade.reward == 0.7
    assert code.responses == ["```python\n\nprint(1)\n```\n"]


async def test_geometry_asks_for_mathematics_where_the_texts_differ() -> None:
    samples = [a_sample(f"\\boxed{{{answer}}}", "x+1", data_source="hiyouga/geometry3k") for answer in (" x + 1 ", "2")]

    grades = await a_verifier().score(samples)

    assert [grade.reward for grade in grades] == [pytest.approx(0.9), 0.0]


@pytest.mark.parametrize(
    ("response", "reward"),
    [("So x is 3. The answer is \\boxed{\\frac12}.", 1.0), ("Answer: x + 1", 0.0), ("no idea", 0.0)],
)
async def test_numina_is_graded_by_the_answer_of_prime(response: str, reward: float) -> None:
    (grade,) = await a_verifier().score([a_sample(response, "\\frac{1}{2}", data_source="numina_olympiads")])

    assert (grade.status, grade.reward) == (GradeStatus.SCORED, reward)


def test_programs_need_a_sandbox() -> None:
    config = RewardConfig(components=(VerlDefaultConfig(runs_code=True),))

    with pytest.raises(InvalidSpec, match="needs a sandbox service"):
        build_verifier(config, Surroundings("e"))


def written(path: Path, *sources: str) -> str:
    path.write_text("".join(json.dumps({"prompt": "p", "label": "1", "origin": each}) + "\n" for each in sources))
    return str(path)


def spec_of(folder: Path, training: Sequence[str], held_out: Sequence[str], **component: object) -> ExperimentSpec:
    data = {"path": written(folder / "train.jsonl", *training), "data_source_column": "origin"}
    evaluation = {"path": written(folder / "held_out.jsonl", *held_out)}
    return a_spec(data=data, evaluation=evaluation, reward={"components": [{"kind": "verl_default", **component}]})


def test_rows_of_unknown_data_sources_are_refused_before_the_start(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, ["openai/gsm8k", "aime2025"], ["math_dapo", "mine"])

    assert len(train_dataset(spec).rows) == 2
    with pytest.raises(DataError, match=r"rows of evaluation: .* 'mine'; known: openai/gsm8k, .*aime\*"):
        evaluation_dataset(spec)


def test_only_rows_that_the_component_grades_need_a_scorer(tmp_path: Path) -> None:
    train_dataset(spec_of(tmp_path, ["openai/gsm8k", "mine"], ["math"], data_sources=["openai/gsm8k"]))
    with pytest.raises(DataError, match=r"rows of data: .* 'mine'"):
        train_dataset(spec_of(tmp_path, ["openai/gsm8k", "mine"], ["math"]))


def test_programs_are_refused_before_the_start_unless_asked_for(tmp_path: Path) -> None:
    train_dataset(spec_of(tmp_path, ["taco"], ["taco"], runs_code=True))
    with pytest.raises(DataError, match="set runs_code"):
        train_dataset(spec_of(tmp_path, ["taco"], ["taco"]))


def test_a_scorer_cannot_be_chosen_without_a_column_of_data_sources() -> None:
    with pytest.raises(InvalidSpec, match="verl_default, which chooses a scorer by data source"):
        a_spec(reward={"components": [{"kind": "verl_default"}]})


def test_a_sandbox_is_needed_only_where_programs_run(tmp_path: Path) -> None:
    assert spec_of(tmp_path, ["taco"], ["taco"], runs_code=True).runs_code
    assert not spec_of(tmp_path, ["math"], ["math"]).runs_code
