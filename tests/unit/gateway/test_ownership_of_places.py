"""Folders above the fleet's, patterns, links and URLs lead no owner to what is another's."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.access.caller import caller
from flotilla.services.gateway.datasets.loading import load_dump
from flotilla.services.gateway.datasets.made import open_maker
from flotilla.services.gateway.lifecycle.origins import UNKNOWN, check_owned
from flotilla.services.gateway.runtime.work import ExperimentWork
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.errors import DataError, InvalidSpec
from flotilla.shared.locations.allowed import Places
from tests.unit.gateway.builders import a_spec
from tests.unit.gateway.test_ownership import _restored, add_ended, begin, gateway, of
from tests.unit.samples.builders import a_step
from tests.unit.samples.test_dump import a_run

__all__ = ["_restored", "gateway"]
OWNERS = {"a-1": "alice", "b-1": "bob"}
ROWS = '{"prompt": "1?", "label": "1"}\n' * 8


def check(root: Path, **changes: Any) -> None:
    check_owned(a_spec(**changes), "alice", OWNERS.get, root / "fleet" / "experiments")


@pytest.mark.parametrize(
    "text",
    [
        "{run}",
        "{run}/fleet",
        "{run}/fleet/experiments",
        "{run}/*/experiments/b-1/samples/x.jsonl",
        "{run}/fl??t/experiments/*/samples/*.jsonl",
        "{run}/**/x.jsonl",
        "{run}/fleet/experiments/[b]-1/samples/x.jsonl",
        "{run}/fleet/experiments/a-1/*/../../b-1/samples/x.jsonl",
        "{run}/other/*/../../fleet/experiments/b-1/samples/x.jsonl",
        "{run}/fleet/*.jsonl",
    ],
)
def test_folders_above_and_patterns_that_can_match_anothers_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidSpec, match=r"data\.path: .* in no experiment of alice"):
        check(tmp_path, data={"path": text.format(run=tmp_path)})


@pytest.mark.parametrize("environment", [{"tasks": "{run}"}, {"readable": ["/usr", "{run}/fleet/experiments/b-1"]}])
def test_what_an_environment_of_agents_reads_is_not_anothers(tmp_path: Path, environment: dict[str, Any]) -> None:
    named = json.loads(json.dumps(environment).replace("{run}", str(tmp_path)))
    agents = {"environment": {"kind": "harbor", "tasks": "/tasks", "harness": "true", **named}}

    with pytest.raises(InvalidSpec, match=r"rollout\.agents\.environment\.\w+: .* in no experiment of alice"):
        check(tmp_path, rollout={"agents": agents}, reward={"components": [{"kind": "agent"}]})


@pytest.mark.parametrize(
    "text",
    [
        "{run}/rows/*.jsonl",
        "{run}/*.jsonl",
        "{run}/rows-*/x.jsonl",
        "{run}/fleet/experiments/a-1/samples/*.jsonl",
        "{run}/fleets",
    ],
)
def test_other_folders_and_patterns_of_ones_own_are_not(tmp_path: Path, text: str) -> None:
    check(tmp_path, data={"path": text.format(run=tmp_path)})


def test_a_text_that_is_no_place_may_look_like_a_folder_above(tmp_path: Path) -> None:
    check(tmp_path, rollout={"sampling": {"stop": ["/", "/*/*/*/*/*"]}})


@pytest.mark.parametrize("where", ["data.dump", "recorded engine", "recorded reward"])
def test_a_dump_is_of_no_folder_above(tmp_path: Path, where: str) -> None:
    dump = str(tmp_path)
    changes: dict[str, Any] = {
        "data.dump": {"data": {"dump": dump}},
        "recorded engine": {"rollout": {"engine": {"recorded": {"dump": dump}}}},
        "recorded reward": {"reward": {"components": [{"name": "r", "kind": "recorded", "dump": dump}]}},
    }
    with pytest.raises(InvalidSpec, match=r"dump: .* in no experiment of alice"):
        check(tmp_path, **changes[where])


@pytest.mark.parametrize(
    "url", ["file://{path}", "file:{path}", "file://localhost{path}", "sqlite:///{path}", "~/b-1/x"]
)
def test_local_urls_and_homes_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "fleet" / "experiments"))
    path = tmp_path / "fleet" / "experiments" / "b-1" / "x"
    tracker = {"kind": "mlflow", "tracking_uri": url.format(path=path)}

    with pytest.raises(InvalidSpec, match=r"tracking_uri: .* in no experiment of alice"):
        check(tmp_path, tracking={"trackers": [tracker]})


async def test_a_run_that_holds_the_fleet_is_begun_from_by_administrators_alone(gateway: GatewayState) -> None:
    await add_ended(gateway, of("bob"), "b-1")
    run = str(gateway.settings.data.parent)

    with pytest.raises(InvalidSpec, match="in no experiment of alice"):
        await begin(gateway, of("alice"), resume_from=run)


async def test_where_links_in_a_folder_and_in_a_pattern_lead_is_looked_at(gateway: GatewayState) -> None:
    directory = await add_ended(gateway, of("bob"), "b-1")
    outside = gateway.settings.data.parent / "outside"
    (directory / "samples").mkdir()
    (directory / "samples" / "x.jsonl").write_text(ROWS)
    outside.mkdir()
    (outside / "linked").symlink_to(directory / "samples")
    (outside / "fleet").symlink_to(gateway.settings.data)
    caller.set(of("alice"))

    model = {"path": str(outside.parent / "model")}
    with pytest.raises(DataError, match=r"linked/x\.jsonl is in the fleet's own directory"):
        await gateway.commands.create(a_spec(model=model, data={"path": f"{outside}/*/x.jsonl"}).model_dump_json())
    with pytest.raises(DataError, match="is in the fleet's own directory"):
        await begin(gateway, of("alice"), resume_from=str(outside))
    assert (await begin(gateway, of("bob"), resume_from=str(outside))).record.owner == "bob"


@pytest.mark.parametrize("reads", ["rows", "held out", "dump"])
async def test_what_is_read_while_an_experiment_works_is_its_owners_too(gateway: GatewayState, reads: str) -> None:
    theirs = await add_ended(gateway, of("bob"), "b-1")
    folder = gateway.settings.data.parent
    a_run(theirs, a_step(1))
    (theirs / "samples" / "x.jsonl").write_text(ROWS)
    (folder / "a.jsonl").symlink_to(folder / "train.jsonl")
    a_run(folder / "run", a_step(1))
    (folder / "dump").symlink_to(folder / "run")
    changes: dict[str, Any] = {
        "rows": {"data": {"path": str(folder / "a.jsonl")}},
        "held out": {"data": {"path": str(folder / "train.jsonl")}, "evaluation": {"path": str(folder / "a.jsonl")}},
        "dump": {"data": {"dump": str(folder / "dump")}},
    }
    caller.set(of("alice"))
    spec = a_spec(model={"path": str(folder / "model")}, **changes[reads])
    experiment = await gateway.commands.create(spec.model_dump_json())
    for link, target in (("a.jsonl", theirs / "samples" / "x.jsonl"), ("dump", theirs)):
        (folder / link).unlink()
        (folder / link).symlink_to(target)

    caller.set(None)  # the work that follows is the gateway's own
    with pytest.raises(DataError, match=r"is in the fleet's own directory, and in no experiment of alice"):
        await ExperimentWork(gateway).run(experiment)


def test_a_dump_is_looked_at_again_when_its_groups_are_made(tmp_path: Path) -> None:
    spec = a_spec(data={"dump": str(a_run(tmp_path / "run", a_step(1)))})
    dataset = load_dump(spec.data, spec.reward, seed=0)
    refused: list[str] = []
    maker = open_maker(spec, Places(refuse=refused.append))
    assert maker is not None

    maker.groups(dataset, range(1))

    samples = tmp_path / "run" / "samples"
    assert refused == [str(samples), str(samples / "step-00000001.parquet")]


async def test_the_name_in_a_checkpoints_file_is_no_claim_to_anothers_experiment(gateway: GatewayState) -> None:
    await add_ended(gateway, of("bob"), "b-1")
    own = await add_ended(gateway, of("alice"), "a-1")
    (state,) = own.rglob("state.json")
    for claimed, origin in (("b-1", UNKNOWN), ("a-1", "a-1"), ("far-1", "far-1")):
        state.write_text(json.dumps(json.loads(state.read_text()) | {"experiment_id": claimed}))

        begun = await begin(gateway, of("alice"), resume_from="a-1")

        assert begun.record.origin is not None and begun.record.origin["experiment_id"] == origin
