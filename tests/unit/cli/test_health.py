"""How findings of the training-health checks are written for people."""

from flotilla.cli.health import finding_lines, rule_lines
from flotilla.shared.schemas.experiment import RuleFired, RuleView
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


def test_a_rule_shows_how_near_it_is_to_acting_and_what_it_did() -> None:
    done = RuleFired(
        rule="slower", at="now", step=7, version=7, value=0.25, did="optimisation.learning_rate: 2.0 to 1.0"
    )
    rule = RuleView(
        name="slower", metric="evaluation/accuracy", times=3, num_fired=1, num_points=4, num_met=2, patience=5,
        fired=(done,),
    )  # fmt: skip

    assert rule_lines(rule) == [
        "slower: 2 of 5 points of evaluation/accuracy meet it, acted 1 of 3 times",
        "  step 7, 0.25: optimisation.learning_rate: 2.0 to 1.0",
    ]
