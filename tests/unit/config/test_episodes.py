"""What a spec may say of episodes."""

from typing import Any

import pytest

from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.episodes import EnvironmentConfig
from flotilla.shared.errors import InvalidSpec

LAKE = {"environment": "frozen_lake"}


def spec_with(rollout: dict[str, Any], **sections: Any) -> Any:
    return validate_spec(
        {
            "name": "x",
            "model": {"path": "/nowhere"},
            "data": {"path": "rows.jsonl"} | sections.pop("data", {}),
            "rollout": rollout,
            "reward": {"components": [{"kind": "environment"}]},
            "optimisation": {"steps": 1, "groups_per_mini_batch": 4, "learning_rate": 1e-3},
        }
        | sections
    )


def test_an_environment_is_named_and_an_algorithm_may_compare_its_turns() -> None:
    for name in ("frozen_lake", "lake.py:Lake", "gymnasium:CliffWalking-v1"):
        spec = spec_with(
            {"episodes": {"kind": "environment", "environments": [{"environment": name}]}},
            algorithm={"advantage": {"kind": "gigpo"}},
        )
        assert spec.environment_weight == 1.0


@pytest.mark.parametrize(
    ("rollout", "sections", "words"),
    [
        ({}, {}, "reward.components.0 is of kind environment, and rollout.episodes.kind single_turn has none"),
        ({"episodes": {"kind": "environment", "environments": [{"environment": "chess"}]}}, {}, "must be one of"),
        ({"episodes": {"kind": "environment", "environments": [LAKE, LAKE]}}, {}, "those after it have no effect"),
        ({"episodes": {"kind": "environment", "environments": [LAKE], "max_tokens": 10**7}}, {}, "context_tokens"),
        (
            {"episodes": {"kind": "environment", "environments": [LAKE]}},
            {"data": {"input_template": "{}"}},
            "data.input_template has no messages",
        ),
        (
            {},
            {"algorithm": {"advantage": {"kind": "gigpo"}}, "reward": {"components": [{"kind": "numeric"}]}},
            "compares the turns of an environment",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(rollout: dict[str, Any], sections: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        spec_with(rollout, **sections)


@pytest.mark.parametrize(
    "name",
    ["openenv:", "openenv:8000", "openenv:ftp://host", "openenv:http://user:secret@host", "openenv:http://host?a=1"],
)
def test_an_openenv_server_is_named_by_its_url_alone(name: str) -> None:
    assert EnvironmentConfig(environment="openenv:http://127.0.0.1:8000/echo").is_code is False
    with pytest.raises(ValueError, match="openenv:http://HOST:PORT"):
        EnvironmentConfig(environment=name)
