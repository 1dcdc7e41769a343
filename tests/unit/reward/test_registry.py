from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from flotilla.services.reward.verifiers.registry import CombinedVerifier, Surroundings, build_verifier
from flotilla.shared.config.sections.reward import CodeConfig, ExactConfig, RemoteConfig, RewardConfig
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.grading import Grade, GradingSample
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.reward.builders import a_sample


class Fixed:
    """A verifier that always answers the same."""

    def __init__(self, grade: Grade) -> None:
        self.grade = grade
        self.asked: list[str] = []
        self.is_closed = False

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        self.asked += [sample.id for sample in samples]
        return [self.grade] * len(samples)

    async def aclose(self) -> None:
        self.is_closed = True


def a_part(name: str, grade: Grade, weight: float = 1.0, **fields: object) -> tuple[ExactConfig, Fixed]:
    return ExactConfig.model_validate({"name": name, "weight": weight} | fields), Fixed(grade)


async def test_the_reward_is_the_weighted_sum() -> None:
    inner = Grade.scored(0.5, components={"clarity": 0.1}, metrics={"words": 7.0})
    verifier = CombinedVerifier([a_part("right", Grade.scored(1.0), 2.0), a_part("style", inner, -0.5)])

    (grade,) = await verifier.score([a_sample()])

    assert grade.reward == pytest.approx(1.75)
    assert grade.components == {"right": 1.0, "style": 0.5, "style/clarity": 0.1}
    assert grade.metrics == {"style/words": 7.0}


async def test_one_failed_component_makes_the_sample_an_error() -> None:
    verifier = CombinedVerifier([a_part("right", Grade.scored(1.0)), a_part("judge", Grade.error("is down"))])

    (grade,) = await verifier.score([a_sample()])

    assert (grade.status, grade.reason) == (GradeStatus.ERROR, "judge: is down")


async def test_a_component_that_abstains_adds_nothing() -> None:
    verifier = CombinedVerifier([a_part("right", Grade.scored(1.0)), a_part("judge", Grade.abstained())])

    (grade,) = await verifier.score([a_sample()])

    assert grade.reward == 1.0
    assert "judge" not in grade.components


async def test_if_all_abstain_so_does_the_whole() -> None:
    verifier = CombinedVerifier([a_part("judge", Grade.abstained("not mine"))])

    (grade,) = await verifier.score([a_sample()])

    assert (grade.status, grade.reason) == (GradeStatus.ABSTAINED, "judge: not mine")


async def test_a_component_sees_only_its_data_sources() -> None:
    part = a_part("math", Grade.scored(1.0), data_sources=["gsm8k"])
    verifier = CombinedVerifier([part])

    mine, other = await verifier.score([a_sample(id="a", data_source="gsm8k"), a_sample(id="b", data_source="code")])

    assert part[1].asked == ["a"]
    assert (mine.reward, other.status) == (1.0, GradeStatus.ABSTAINED)


async def test_a_sum_beyond_the_floats_is_an_error() -> None:
    verifier = CombinedVerifier([a_part("huge", Grade.scored(1e308), 1e10)])

    (grade,) = await verifier.score([a_sample()])

    assert grade.status is GradeStatus.ERROR


async def test_closing_closes_every_component() -> None:
    parts = [a_part("a", Grade.scored(1.0)), a_part("b", Grade.scored(1.0))]

    await CombinedVerifier(parts).aclose()

    assert all(part.is_closed for _, part in parts)


async def test_a_section_becomes_a_verifier() -> None:
    config = RewardConfig.model_validate(
        {"components": [{"kind": "numeric"}, {"kind": "exact", "pattern": "<(.*?)>", "weight": 0.5}]}
    )
    verifier = build_verifier(config, Surroundings("e"))

    (grade,) = await verifier.score([a_sample("<7> #### 7", "7")])

    assert grade.reward == 1.5
    await verifier.aclose()


def test_code_without_a_sandbox_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="sandbox"):
        build_verifier(RewardConfig(components=(CodeConfig(),)), Surroundings("e"))


def test_a_secret_that_is_not_set_is_refused() -> None:
    config = RewardConfig(components=(RemoteConfig(url="https://grader.example/x", secret_env="GRADER_SECRET"),))

    with pytest.raises(InvalidSpec, match="GRADER_SECRET"):
        build_verifier(config, Surroundings("e"))


@pytest.mark.parametrize(
    "section",
    [
        {"components": []},
        {"components": [{"kind": "exact"}, {"kind": "exact"}]},
        {"components": [{"kind": "guess"}]},
        {"components": [{"kind": "exact", "tolerance": 1}]},
        {"components": [{"kind": "custom", "path": "graders.py"}]},
        {"components": [{"kind": "remote", "url": "ftp://x"}]},
    ],
)
def test_a_bad_section_is_refused(section: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RewardConfig.model_validate(section)


async def test_a_constant_component_looks_at_nothing() -> None:
    config = RewardConfig.model_validate({"components": [{"kind": "constant", "value": 0.5, "weight": 2.0}]})

    grades = await build_verifier(config, Surroundings("exp")).score([a_sample("right"), a_sample("wrong")])

    assert [grade.reward for grade in grades] == [1.0, 1.0]


async def test_what_each_component_does_is_counted_with_its_time() -> None:
    ticks = iter([0.0, 1.0, 10.0, 13.0])
    failing = a_part("style", Grade.error("no"))
    verifier = CombinedVerifier([failing], now=lambda: next(ticks))

    await verifier.score([a_sample(), a_sample()])
    failing[1].grade = Grade.abstained("not mine")
    await verifier.score([a_sample()])

    report = verifier.graders["style"]
    assert (report.calls, report.samples, report.errors, report.abstained) == (2, 3, 2, 1)
    assert (report.seconds, report.slowest_seconds) == (4.0, 3.0)
