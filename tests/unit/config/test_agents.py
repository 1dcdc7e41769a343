"""What a spec may say of an environment whose agent the rollouts start."""

from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.preflight.checks import check_paths
from flotilla.shared.config.load.paths import resolve_paths
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.redaction import HIDDEN, redacted
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec

HARBOR = {"kind": "harbor", "tasks": "/tasks", "harness": "play"}
GYM = {"kind": "nemo_gym", "url": "http://127.0.0.1:8300"}
TASKSET = {"kind": "verifiers", "python": "/venv/bin/python", "taskset": "gsm8k"}
GIVEN = {"components": [{"kind": "agent"}]}


def spec_with(environment: Any, **sections: Any) -> ExperimentSpec:
    return validate_spec(
        {
            "name": "x",
            "model": {"path": "/nowhere"},
            "data": {"path": "/rows.jsonl", "label_column": None},
            "rollout": {"agents": {"environment": environment}},
            "reward": GIVEN,
            "optimisation": {"steps": 1},
        }
        | sections
    )


@pytest.mark.parametrize("environment", [HARBOR, GYM, TASKSET])
def test_an_environment_is_named_by_its_kind(environment: dict[str, Any]) -> None:
    spec = spec_with(environment)

    assert spec.rollout.starts_agents
    assert spec.rollout.agents is not None and spec.rollout.agents.environment is not None
    assert spec.rollout.agents.environment.model_dump(exclude_defaults=True) == environment
    assert not spec_with(None).rollout.starts_agents


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"kind": "gym"}, "'harbor', 'nemo_gym', 'verifiers'"),
        ({"kind": "openenv", "url": "http://a"}, "the kinds here are harbor, nemo_gym and verifiers"),
        ({"kind": "gymnasium"}, r"environments: \[\{environment: 'gymnasium:NAME'\}\]"),
        ({**HARBOR, "harnes": "x"}, "did you mean rollout.agents.environment.harness"),
        ({"kind": "harbor", "tasks": "/t"}, "harness: this key is required"),
        ({**HARBOR, "secrets": ["A B"]}, "secrets"),
        ({**HARBOR, "parallel": 0}, "parallel"),
        ({**GYM, "url": "ftp://a"}, "url"),
        ({**GYM, "url": "http://me:pw@a"}, "url"),
        ({**TASKSET, "taskset": "--options"}, "taskset"),
        ({"kind": "verifiers", "taskset": "x"}, "python: this key is required"),
    ],
)
def test_what_is_no_environment_is_refused_with_what_is(environment: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        spec_with(environment)


def test_rewards_that_nothing_takes_are_refused() -> None:
    with pytest.raises(InvalidSpec, match=r"rollout\.agents\.environment gives rewards.* add \{kind: agent\}"):
        spec_with(HARBOR, reward={"components": [{"kind": "numeric"}]}, data={"path": "/rows.jsonl"})


@pytest.mark.parametrize(
    ("environment", "paths"),
    [
        ({**HARBOR, "tasks": "t", "readable": ["r", "/usr/share"]},
         {"tasks": "{}/t", "readable": ["{}/r", "/usr/share"]}),
        ({**TASKSET, "python": "v/bin/python", "taskset": "t.py"}, {"python": "{}/v/bin/python", "taskset": "{}/t.py"}),
        ({**TASKSET, "taskset": "gsm8k"}, {"python": "/venv/bin/python", "taskset": "gsm8k"}),
        (GYM, GYM),
    ],
)  # fmt: skip
def test_paths_start_at_the_folder_of_the_file_and_are_absolute_in_a_request(
    environment: dict[str, Any], paths: dict[str, Any], tmp_path: Path
) -> None:
    resolved = resolve_paths({"rollout": {"agents": {"environment": environment}}}, tmp_path)
    found = resolved["rollout"]["agents"]["environment"]

    placed = {
        name: [each.format(tmp_path) for each in value] if isinstance(value, list) else value.format(tmp_path)
        for name, value in paths.items()
    }
    assert found == environment | placed
    check_paths(spec_with(found))
    if found != environment:
        with pytest.raises(InvalidSpec, match=r"rollout\.agents\.environment\.\w+.*: an absolute path"):
            check_paths(spec_with(environment))


def test_keys_in_a_harness_are_not_shown_to_others() -> None:
    shown = redacted({"harness": "OPENAI_API_KEY=sk-abc play --token t0k3n 'it'"})["harness"]

    assert "sk-abc" not in shown and "t0k3n" not in shown
    assert shown.count(HIDDEN) == 2 and shown.endswith("'it'")
