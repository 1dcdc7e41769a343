"""How findings of the training-health checks are written for people."""

from flotilla.cli.health import finding_lines
from flotilla.shared.schemas.health import HealthFinding, SampleExcerpt


def grade_line(sample: SampleExcerpt) -> str:
    finding = HealthFinding(
        check="graders_disagree", component="reward", since_step=4, at="now", seen="seen", advice="advice",
        samples=(sample,),
    )  # fmt: skip
    (line,) = [each for each in finding_lines(finding) if each.strip().startswith("grade ")]
    return line


def test_a_sample_shows_its_hidden_second_grade_beside_its_reward() -> None:
    sample = SampleExcerpt(prompt="2 + 2", completion="5", reward=1.0, audit_reward=0.0)

    assert "reward 1, second grade 0" in grade_line(sample)
    assert "second grade" not in grade_line(sample.model_copy(update={"audit_reward": None}))
