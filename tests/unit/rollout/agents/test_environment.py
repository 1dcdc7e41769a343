"""The agent of an environment is the command that a user would type, with all that the spec says."""

import json
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from flotilla.agents.__main__ import _parser
from flotilla.services.rollout.agents.environment import Door, command_of, open_environment
from flotilla.shared.children.processes import python_module
from flotilla.shared.config.sections.agents import AgentsConfig
from flotilla.shared.environment.settings import LOOPBACK
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.service import Assignment
from tests.unit.config.test_agents import GYM, HARBOR, TASKSET

DOOR = Door("http://gateway", "e-1", "the token", LOOPBACK)


def typed(environment: dict[str, Any], door: Door = DOOR) -> tuple[list[str], dict[str, Any]]:
    """Return the interpreter's words, and what the command reads of the others."""
    config = AgentsConfig.model_validate({"environment": environment}).environment
    assert config is not None
    *program, kind, source, experiment = (words := command_of(config, door))[:7]
    return program, vars(_parser().parse_args([kind, source, experiment, *words[7:]]))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (HARBOR, {"kind": "harbor", "source": "/tasks", "harness": "play", "seconds": 600.0, "readable": [],
                  "secret": [], "skip_run": False, "closed": False, "keep": None, "parallel": 16}),
        ({**HARBOR, "harness": "-x 'a b'; c", "seconds": 1.5, "readable": ["/a b", "/c"], "secrets": ["A", "B"],
          "skip_run": True, "closed": True, "parallel": 3},
         {"harness": "-x 'a b'; c", "seconds": 1.5, "readable": [Path("/a b"), Path("/c")], "secret": ["A", "B"],
          "skip_run": True, "closed": True, "parallel": 3}),
        (GYM, {"kind": "nemo-gym", "source": "http://127.0.0.1:8300", "max_steps": None, "networks": LOOPBACK}),
        ({**GYM, "max_steps": 4}, {"max_steps": 4}),
        (TASKSET, {"kind": "verifiers", "source": "gsm8k", "options": {}}),
        ({**TASKSET, "options": {"a": {"b": [1, "c"]}}}, {"options": {"a": {"b": [1, "c"]}}}),
    ],
)  # fmt: skip
def test_all_that_a_spec_says_reaches_the_command(environment: dict[str, Any], said: dict[str, Any]) -> None:
    program, read = typed(environment)

    assert {name: read[name] for name in said} == said
    assert read["experiment"] == "e-1"
    ours = python_module("flotilla.agents")
    assert program == ([environment["python"], *ours[1:]] if "python" in environment else ours)
    assert DOOR.token not in json.dumps([program, str(read)]), "everybody on the machine can read a command"


@pytest.mark.parametrize("networks", [(), (IPv4Network("10.3.0.0/16"), *LOOPBACK)])
def test_a_server_is_where_the_operator_lets_it_be(networks: Any) -> None:
    _, read = typed(GYM, Door("http://gateway", "e-1", "t", networks))

    assert read["networks"] == networks


def test_an_environment_needs_the_gateways_token_and_others_need_none() -> None:
    assignment = Assignment(experiment_id="e-1", revision=1, spec={}, directory="/d")

    assert open_environment(AgentsConfig(), assignment, "http://gateway", (), lambda: 0) is None
    config = AgentsConfig.model_validate({"environment": GYM})
    with pytest.raises(Unavailable, match="no token"):
        open_environment(config, assignment, "http://gateway", (), lambda: 0)
    assert open_environment(config, assignment.model_copy(update={"token": "t"}), "http://gateway", (), lambda: 0)
