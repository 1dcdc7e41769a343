"""A finding names the command that makes the change which would help, where there is one."""

import shlex
from typing import Any

import pytest

from flotilla.cli.command_line import build_parser
from flotilla.services.gateway.monitoring.health.remedies import KEYS, command_for
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.health import CheckName
from flotilla.shared.config.spec import ExperimentSpec
from tests.unit.gateway.builders import spec_document


def spec(**sections: Any) -> ExperimentSpec:
    document = spec_document()
    return validate_spec(document | {name: document.get(name, {}) | values for name, values in sections.items()})


@pytest.mark.parametrize(
    ("check", "subject", "sections", "expected"),
    [
        (CheckName.DIVERGING, None, {"optimisation": {"learning_rate": 1e-3}}, "optimisation.learning_rate=0.0005"),
        (
            CheckName.KL_EXPLODING,
            None,
            {"algorithm": {"kl": {"placement": "loss", "coefficient": 0.01}}},
            "algorithm.kl.coefficient=0.02",
        ),
        (
            CheckName.ENTROPY_GONE,
            None,
            {"rollout": {"sampling": {"max_new_tokens": 8, "temperature": 1.0}}},
            "rollout.sampling.temperature=1.2",
        ),
        (
            CheckName.DEAD_SOURCE,
            "easy",
            {
                "data": {
                    "path": None,
                    "data_source_column": "source",
                    "sources": [
                        {"path": "a.jsonl", "data_source": "easy", "weight": 1},
                        {"path": "b.jsonl", "data_source": "hard", "weight": 1},
                    ],
                }
            },
            "data.sources.0.weight=0",
        ),
        (
            CheckName.COMPONENTS_DRIFT,
            "style",
            {"reward": {"components": [{"kind": "exact"}, {"kind": "regex", "pattern": "a", "name": "style"}]}},
            "reward.components.1.weight=0.5",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, CheckName) else "",
)
def test_what_can_change_while_it_runs_is_set(
    check: CheckName, subject: str | None, sections: dict[str, Any], expected: str
) -> None:
    of = spec(**sections)

    assert command_for(check, subject, of) == f"flotilla set {of.name} {expected}"


def test_what_cannot_change_is_forked_with() -> None:
    of = spec(rollout={"sampling": {"max_new_tokens": 8}})

    command = command_for(CheckName.ALWAYS_TRUNCATED, None, of)

    assert command == f"flotilla fork {of.name} --set rollout.sampling.max_new_tokens=16"


@pytest.mark.parametrize(
    ("check", "subject", "expected"),
    [
        (CheckName.ROLLOUT_DIFFERS, "rollout-2", "flotilla drain rollout-2"),
        (CheckName.MEMORY_CREEPS, "reward-1", "flotilla drain reward-1"),
        (CheckName.MEMORY_CREEPS, "gateway", None),
        (CheckName.NEVER_RIGHT, None, None),
        (CheckName.COMPONENTS_DRIFT, "unknown", None),
        (CheckName.DEAD_SOURCE, "of a column", None),
    ],
)
def test_a_service_begins_anew_and_the_rest_has_no_command(
    check: CheckName, subject: str | None, expected: str | None
) -> None:
    assert command_for(check, subject, spec()) == expected


@pytest.mark.parametrize("check", [*KEYS, CheckName.NOTHING_LEFT, CheckName.ROLLOUT_DIFFERS])
def test_every_command_is_one_of_the_command_line(check: CheckName) -> None:
    of = spec()
    command = command_for(check, "exact", of.model_copy(update={"name": "two words"}))

    if command is not None:
        build_parser().parse_args(shlex.split(command)[1:])


def test_a_warmer_temperature_has_a_bound() -> None:
    warm = spec(rollout={"sampling": {"max_new_tokens": 8, "temperature": 2.0}})

    assert command_for(CheckName.NEAR_DUPLICATES, None, warm) is None
