"""Evidence for tests of training-health checks; each default is a healthy run's."""

from typing import Any

from flotilla.services.gateway.monitoring.health.checks import find
from flotilla.services.gateway.monitoring.health.evidence import Evidence, Facts, Graded, Sampled, StepFigures
from flotilla.shared.config.sections.health import CheckName, HealthConfig
from flotilla.shared.schemas.health import SampleExcerpt

FIGURES = {
    "updates/in_step": 1.0,
    "updates/skipped": 0.0,
    "grad_norm": 0.8,
    "loss/total": -0.5,
    "entropy": 0.28,
    "lag/max": 0.0,
    "ratio/approx_kl": 0.0003,
    "kl/mean": 0.01,
    "groups/flat_fraction": 0.0,
}
SAMPLES = (
    SampleExcerpt(prompt="1+1?", completion="#### 2", label="2", answer="2", reward=1.0),
    SampleExcerpt(prompt="1+1?", completion="#### 3", label="2", answer="3", reward=0.0),
)


def facts(**changes: Any) -> Facts:
    defaults: dict[str, Any] = {
        "thresholds": HealthConfig(),
        "groups_per_step": 8,
        "names_answers": True,
        "max_new_tokens": 40,
        "updates_per_version": 1,
        "learning_rate": 1e-4,
    }
    return Facts(**(defaults | changes))


def graded(**changes: int) -> Graded:
    defaults = {
        "groups": 48,
        "flat_groups": 6,
        "signalless_groups": 6,
        "filtered_groups": 6,
        "samples": 384,
        "scored": 384,
        "answered": 380,
        "repeated": 200,
    }
    return Graded(**(defaults | changes))


def steps(count: int = 6, **last: float) -> tuple[StepFigures, ...]:
    """Make steps of healthy figures; those of the last three are changed."""
    return tuple(StepFigures(number, FIGURES | (last if number > count - 3 else {})) for number in range(1, count + 1))


def evidence(**changes: Any) -> Evidence:
    defaults: dict[str, Any] = {
        "facts": facts(),
        "graded": graded(),
        "graded_ever": graded(),
        "sampled": Sampled(prompts=48, completions=384),
        "steps": steps(),
        "last_reward": 0.0,
        "highest_reward": 1.0,
        "lowest_reward": 0.0,
        "samples": SAMPLES,
    }
    return Evidence(**(defaults | changes))


def found(**changes: Any) -> list[CheckName]:
    """Name what the checks find."""
    return [each.check.name for each in find(evidence(**changes))]
