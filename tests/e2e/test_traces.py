"""Spans and the timeline of a real run: each trained group is followed from its issue into a publication."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from flotilla.cli.command_line import build_parser
from flotilla.cli.commands.timeline import timeline
from flotilla.shared.schemas.task import Lane
from flotilla.shared.telemetry.tracing.tracer import issue_of
from tests.fleet import make_experiment, running_fleet, until

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

STEPS, GROUPS, MEMBERS, TURNS = 4, 4, 4, 2
WAY = ("issue", "rollout", "reward", "train", "publication")
LAKE = """
from flotilla.services.rollout.environments.frozen_lake import FrozenLake

class Lake(FrozenLake):
    def step(self, text):
        # What a random policy writes is an action like others.
        return super().step(("Left", "Down", "Right", "Up")[len(text) % 4])
"""


class Seen(NamedTuple):
    """A span as it was written."""

    name: str
    service: str
    id: str
    parent: str | None
    began: int
    ended: int
    facts: dict[str, Any]


def spans_in(folder: Path) -> dict[str, list[Seen]]:
    """Read all files as a collector would; gives the spans of each trace."""
    traces: dict[str, list[Seen]] = defaultdict(list)
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    for resource in (each for line in lines for each in json.loads(line)["resourceSpans"]):
        service = next(
            each["value"]["stringValue"] for each in resource["resource"]["attributes"] if each["key"] == "service.name"
        )
        for span in resource["scopeSpans"][0]["spans"]:
            facts = {each["key"].removeprefix("flotilla."): each["value"] for each in span["attributes"]}
            began, ended = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
            seen = Seen(span["name"], service, span["spanId"], span.get("parentSpanId"), began, ended, facts)
            traces[span["traceId"]].append(seen)
    return traces


def run(directory: Path, traces: Path) -> str:
    """Train episodes of two turns to the end, and end the fleet; gives the experiment's id."""
    spec = make_experiment(
        directory,
        data={"path": str(directory / "tasks.jsonl"), "label_column": None},
        rollout={
            "group_size": MEMBERS,
            "sampling": {"max_new_tokens": 6, "ignore_eos": True},
            "engine": {"slots": 16, "context_tokens": 768, "threads": 1},
            "episodes": {
                "kind": "environment",
                "environments": [{"environment": f"{directory / 'lake.py'}:Lake"}],
                "max_turns": TURNS,
            },
        },
        optimisation={"steps": STEPS, "groups_per_mini_batch": GROUPS},
    )
    (directory / "tasks.jsonl").write_text("".join(f'{{"prompt": "Go.", "seed": {seed}}}\n' for seed in range(300)))
    (directory / "lake.py").write_text(LAKE)
    with running_fleet(directory / "fleet", FLOTILLA_TRACES=str(traces)) as fleet:
        client = httpx.Client(base_url=fleet.url, headers={"Authorization": f"Bearer {fleet.token}"}, timeout=30)
        with client:
            made = client.post("/v1/experiments?start=true", json=spec)
            assert made.is_success, made.text
            experiment_id = str(made.json()["id"])
            path = f"/v1/experiments/{experiment_id}"
            until(lambda: client.get(path).json()["state"] == "completed", 200, "the end of the run", pause_seconds=0.5)
    return experiment_id


async def test_a_trace_and_a_flow_follow_each_group_of_a_real_run(tmp_path: Path) -> None:
    experiment_id = run(tmp_path, tmp_path / "traces")

    traces = spans_in(tmp_path / "traces")
    trained = {trace: spans for trace, spans in traces.items() if any(each.name == "publication" for each in spans)}
    assert len(trained) == STEPS * GROUPS
    steps = set()
    for trace, spans in trained.items():
        by_name: dict[str, list[Seen]] = defaultdict(list)
        for each in spans:
            by_name[each.name].append(each)
        counts = {name: len(found) for name, found in by_name.items()}
        assert counts.pop("tool") >= MEMBERS
        assert MEMBERS <= counts.pop("turn") <= MEMBERS * TURNS
        assert counts == dict.fromkeys(WAY, 1)
        issue, rollout, reward, train, publication = (by_name[name][0] for name in WAY)
        group = int(issue.facts["group"]["intValue"])
        assert (trace, issue.id) == issue_of(experiment_id, Lane.TRAIN, group) and issue.parent is None
        assert {rollout.parent, reward.parent, train.parent} == {issue.id}
        assert {each.parent for each in by_name["turn"] + by_name["tool"]} == {rollout.id}
        assert publication.parent == train.id
        assert [each.service for each in (issue, rollout, reward, train)] == [
            "flotilla-gateway", "flotilla-rollout", "flotilla-reward", "flotilla-trainer-worker",
        ]  # fmt: skip
        assert issue.began <= rollout.began <= rollout.ended <= reward.ended <= train.ended <= publication.ended
        steps.add(int(train.facts["step"]["intValue"]))
    assert steps == set(range(1, STEPS + 1))

    output = tmp_path / "timeline.json"
    assert await timeline(build_parser().parse_args(["timeline", str(tmp_path / "fleet"), "-o", str(output)])) == 0
    events = json.loads(output.read_text())["traceEvents"]
    rows = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    flows: dict[int, list[str]] = defaultdict(list)
    for each in events:
        if each["ph"] in {"s", "t", "f"}:
            flows[each["id"]].append(rows[each["pid"]])
    assert sum(flow == ["gateway", "rollout", "reward", "trainer"] for flow in flows.values()) == STEPS * GROUPS
