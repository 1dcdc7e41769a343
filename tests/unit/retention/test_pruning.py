"""What finished experiments left goes once its time is over, by REST, by the hour, and never while it is needed."""

import errno
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.lifecycle.states import Action
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.retention import pruning
from flotilla.services.gateway.retention.plan import DAY_SECONDS
from flotilla.services.gateway.retention.pruning import Retainer
from flotilla.services.gateway.runtime.cleaning import Cleaning
from flotilla.services.gateway.settings import read_retention
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import ActionNotAllowed, Conflict, InvalidRequest
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.retention import Part, Retention
from tests.unit.gateway.builders import a_gateway, acting, add_experiment, spec_document
from tests.unit.gateway.stored import store_checkpoint

MONTH = Retention(run_days=30)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def gateway(tmp_path: Path, clock: ManualClock) -> GatewayState:
    return a_gateway(clock=clock, data=tmp_path)


async def add_finished(gateway: GatewayState, experiment_id: str, **changes: Any) -> Path:
    """Add an experiment that has ended, with a checkpoint and samples; return its directory."""
    directory = gateway.settings.experiments / experiment_id
    store_checkpoint(directory, 2, spec_document())
    (directory / "samples").mkdir()
    (directory / "samples" / "step-00000001.jsonl").write_text("sample")
    usual = {"state": ExperimentState.COMPLETED, "final_ledger": {}, "directory": str(directory)}
    await add_experiment(gateway, experiment_id, **(usual | changes))
    return directory


@pytest.fixture
async def client(gateway: GatewayState) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(gateway.settings)

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"gateway": gateway}}, receive, send)

    headers = {"Authorization": "Bearer t"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://x", headers=headers) as it:
        yield it


async def test_one_that_cannot_be_read_is_kept_and_keeps_none_of_the_others(
    gateway: GatewayState, clock: ManualClock, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, other = [await add_finished(gateway, name) for name in ("broken-1", "old-1")]
    clock.advance(31 * DAY_SECONDS)
    sizes_of = pruning.sizes_of

    def failing(directory: Path) -> Mapping[Part, int]:
        if directory == broken:
            raise OSError(errno.ESTALE, "Stale file handle")
        return sizes_of(directory)

    monkeypatch.setattr(pruning, "sizes_of", failing)
    answer = (await client.post("/v1/fleet/prunings", json={"run_days": 30, "dry_run": False})).json()

    assert [each["experiment_id"] for each in answer["removed"]] == ["old-1"]
    assert [(each["experiment_id"], each["why"]) for each in answer["kept"]] == [
        ("broken-1", "its size could not be read: Stale file handle")
    ]
    assert broken.exists() and not other.exists()


async def test_a_part_of_the_cleaning_that_fails_ends_neither_the_others_nor_those_of_the_next_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = a_gateway(data=tmp_path, retention=MONTH)
    cleaning, done = Cleaning(parts), []

    async def fails(*_given: Any, **_named: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def works(*_given: Any, **_named: Any) -> None:
        done.append("experiments")

    monkeypatch.setattr(parts.store, "delete_answers", fails)
    monkeypatch.setattr(parts.tokens, "delete_expired", fails)
    monkeypatch.setattr(cleaning.retainer, "prune", works)
    await cleaning.clean()
    monkeypatch.setattr(cleaning.retainer, "prune", fails)
    await cleaning.clean()

    assert done == ["experiments"]


async def test_a_dry_run_says_what_would_go_and_deletes_nothing(
    gateway: GatewayState, clock: ManualClock, client: httpx.AsyncClient
) -> None:
    directory = await add_finished(gateway, "old-1")
    clock.advance(31 * DAY_SECONDS)

    answer = await client.post("/v1/fleet/prunings", json={"samples_days": 30})

    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["removed"]
    assert (found["experiment_id"], found["part"], found["bytes"]) == ("old-1", "samples", 6)
    assert found["why"] == "it ended 31.0 days ago, samples are kept for 30"
    assert answer.json()["bytes"] == 6
    assert (directory / "samples").exists()


async def test_a_part_goes_and_the_run_stays_with_a_record_of_it(
    gateway: GatewayState, clock: ManualClock, client: httpx.AsyncClient
) -> None:
    directory = await add_finished(gateway, "old-1")
    clock.advance(31 * DAY_SECONDS)

    await client.post("/v1/fleet/prunings", json={"samples_days": 30, "dry_run": False})

    assert not (directory / "samples").exists()
    assert (directory / "checkpoints").exists()
    (event,) = await gateway.store.events("old-1", after=0, limit=10)
    assert (event.type, event.data["part"], event.data["bytes"]) == ("experiment_pruned", "samples", 6)
    assert (await gateway.store.audit("experiments/old-1", limit=1))[0].action == "prune"


async def test_a_run_goes_with_files_record_and_data_plane(gateway: GatewayState, clock: ManualClock) -> None:
    directory = await add_finished(gateway, "old-1")
    clock.advance(31 * DAY_SECONDS)

    await gateway.cleaning.retainer.prune(MONTH, dry_run=False)

    assert not directory.exists()
    assert list(gateway.repository) == []
    assert await gateway.store.experiments() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"state": ExperimentState.RUNNING, "final_ledger": None},
        {"state": ExperimentState.PAUSED, "final_ledger": None},
        {"state": ExperimentState.DRAFT, "final_ledger": None},
        {"state": ExperimentState.FAILED, "final_ledger": None},
        {"directory": "/nowhere/else"},
    ],
    ids=["running", "paused", "draft", "coming to rest", "elsewhere"],
)
async def test_only_what_has_ended_and_lies_with_the_fleet_goes(
    gateway: GatewayState, clock: ManualClock, changes: dict[str, Any]
) -> None:
    directory = await add_finished(gateway, "other-1", **changes)
    clock.advance(1000 * DAY_SECONDS)

    found = await gateway.cleaning.retainer.prune(Retention(run_days=0, samples_days=0, max_bytes=0), dry_run=False)

    assert (found.removed, found.kept) == ((), ())
    assert (directory / "samples").exists()


@pytest.mark.parametrize("state", [ExperimentState.RUNNING, ExperimentState.DRAFT, ExperimentState.COMPLETED])
async def test_what_a_fork_began_from_stays_while_the_fork_does(
    gateway: GatewayState, clock: ManualClock, state: ExperimentState
) -> None:
    directory = await add_finished(gateway, "parent-1")
    clock.advance(31 * DAY_SECONDS)
    origin = {"experiment_id": "parent-1", "step": 2, "version": 2, "path": "/nowhere", "first_group_id": 4}
    await add_experiment(gateway, "child-1", origin=origin, state=state)

    found = await gateway.cleaning.retainer.prune(MONTH, dry_run=False)

    assert [(each.experiment_id, each.why) for each in found.kept] == [("parent-1", "child-1 began from its step 2")]
    assert (directory / "checkpoints").exists()


async def test_what_somebody_began_from_meanwhile_stays(
    gateway: GatewayState, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = await add_finished(gateway, "parent-1")
    clock.advance(31 * DAY_SECONDS)
    retainer, decided = gateway.cleaning.retainer, Retainer._remove
    origin = {"experiment_id": "parent-1", "step": 2, "version": 2, "path": "/nowhere", "first_group_id": 4}

    async def after_a_fork(self: Retainer, decision: Any) -> str | None:
        await add_experiment(gateway, "child-1", origin=origin)
        return await decided(self, decision)

    monkeypatch.setattr(Retainer, "_remove", after_a_fork)
    found = await retainer.prune(MONTH, dry_run=False)

    assert (found.removed, [each.why for each in found.kept]) == ((), ["child-1 began from its step 2"])
    assert directory.exists()


async def test_an_experiment_that_was_resumed_meanwhile_stays(
    gateway: GatewayState, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = await add_finished(gateway, "old-1", state=ExperimentState.STOPPED)
    clock.advance(31 * DAY_SECONDS)
    decided = Retainer._remove

    async def after_a_resume(self: Retainer, decision: Any) -> str | None:
        async with gateway.repository.transaction() as change:
            gateway.commands._stage_action(change, gateway.repository.get("old-1"), Action.RESUME)
        return await decided(self, decision)

    monkeypatch.setattr(Retainer, "_remove", after_a_resume)
    found = await gateway.cleaning.retainer.prune(MONTH, dry_run=False)

    assert [each.why for each in found.kept] == ["it was resumed or changed meanwhile"]
    assert directory.exists()


async def test_an_experiment_cannot_be_resumed_while_its_files_go(gateway: GatewayState) -> None:
    await add_finished(gateway, "old-1", state=ExperimentState.STOPPED)
    experiment = gateway.repository.get("old-1")

    with gateway.commands.at_rest(experiment):
        async with gateway.repository.transaction() as change:
            with pytest.raises(ActionNotAllowed, match="is being deleted"):
                gateway.commands._stage_action(change, experiment, Action.RESUME)
        with pytest.raises(ActionNotAllowed, match="is being deleted already"), gateway.commands.at_rest(experiment):
            pass

    assert experiment.state is ExperimentState.STOPPED


async def test_what_cannot_be_deleted_is_told_and_others_go(
    gateway: GatewayState, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_finished(gateway, "bad-1")
    good = await add_finished(gateway, "good-1")
    clock.advance(31 * DAY_SECONDS)
    removing = Retainer._remove_files

    async def refusing(self: Retainer, experiment: Any, part: Part) -> None:
        if experiment.id == "bad-1":
            raise PermissionError(13, "Permission denied", "/data/x")
        await removing(self, experiment, part)

    monkeypatch.setattr(Retainer, "_remove_files", refusing)
    found = await gateway.cleaning.retainer.prune(MONTH, dry_run=False)

    assert [each.experiment_id for each in found.removed] == ["good-1"]
    assert found.kept[0].why == "it could not be deleted: [Errno 13] Permission denied: '/data/x'"
    assert not good.exists()
    assert gateway.repository.knows("bad-1")


async def test_the_settings_hold_where_a_request_says_nothing(
    tmp_path: Path, clock: ManualClock, gateway: GatewayState, client: httpx.AsyncClient
) -> None:
    answer = await client.post("/v1/fleet/prunings", json={})
    assert answer.status_code == 422
    assert "FLOTILLA_RETENTION_RUN_DAYS" in answer.json()["detail"]

    object.__setattr__(gateway.settings, "retention", MONTH)
    await add_finished(gateway, "old-1")
    clock.advance(31 * DAY_SECONDS)
    answer = await client.post("/v1/fleet/prunings", json={})
    assert [each["part"] for each in answer.json()["removed"]] == ["run"]


async def test_the_gateway_prunes_by_its_settings_every_hour(tmp_path: Path, clock: ManualClock) -> None:
    gateway = a_gateway(clock=clock, data=tmp_path, retention=MONTH)
    directory = await add_finished(gateway, "old-1")
    clock.advance(31 * DAY_SECONDS)

    await gateway.cleaning.clean()

    assert not directory.exists()


async def test_one_look_at_a_time(gateway: GatewayState) -> None:
    gateway.cleaning.retainer._is_busy = True

    with pytest.raises(Conflict, match="already"):
        await gateway.cleaning.retainer.prune(MONTH, dry_run=True)


def test_settings_are_read_and_refused_by_name() -> None:
    values = {
        "FLOTILLA_RETENTION_RUN_DAYS": "30",
        "FLOTILLA_RETENTION_MAX_BYTES": "5",
        "FLOTILLA_RETENTION_LOGS_DAYS": "",
    }

    assert read_retention(values) == Retention(run_days=30, max_bytes=5)
    assert not read_retention({}).is_set
    for name, text in (("RUN_DAYS", "-1"), ("SAMPLES_DAYS", "soon"), ("MAX_BYTES", "1.5")):
        with pytest.raises(InvalidRequest, match=f"FLOTILLA_RETENTION_{name} must be a .*number.*, got '{text}'"):
            read_retention({f"FLOTILLA_RETENTION_{name}": text})


async def test_what_begins_again_is_not_deleted_and_what_is_deleted_does_not_begin(
    gateway: GatewayState, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = await add_finished(gateway, "old-1", state=ExperimentState.STOPPED, step=2, policy_version=2)
    clock.advance(31 * DAY_SECONDS)
    monkeypatch.setattr("flotilla.services.gateway.preflight.checks.check", lambda *_: None)
    look, whys = gateway.repository.has_lost_checkpoints, list[str]()

    async def slow(experiment: Experiment) -> bool:
        is_lost = await look(experiment)
        pruning = await gateway.cleaning.retainer.prune(Retention(checkpoints_days=30), dry_run=False)
        whys.extend(str(each.why) for each in pruning.kept)
        return is_lost

    monkeypatch.setattr(gateway.repository, "has_lost_checkpoints", slow)
    begun = await gateway.commands.act("old-1", Action.RESUME)

    assert not begun.state.is_final and (directory / "checkpoints").exists()
    assert ["about to be used again" in why for why in whys] == [True]

    later = await add_finished(gateway, "old-2", state=ExperimentState.STOPPED, step=2, policy_version=2)
    with gateway.commands.at_rest(gateway.repository.get("old-2")):
        with pytest.raises(ActionNotAllowed, match="is being deleted"):
            await gateway.commands.act("old-2", Action.RESUME)
        with pytest.raises(ActionNotAllowed, match="is being deleted"):
            await gateway.commands.extend("old-2", 100)
    assert later.exists()


async def test_one_is_deleted_with_its_files_only_where_that_is_asked_for(
    gateway: GatewayState, client: httpx.AsyncClient
) -> None:
    first, second = [await add_finished(gateway, name) for name in ("first-1", "second-1")]

    assert (await client.delete("/v1/experiments/first-1")).status_code == 204
    assert (await client.delete("/v1/experiments/second-1", params={"files": "true"})).status_code == 204

    assert first.exists() and not second.exists()
    assert list(gateway.repository) == []
    assert (await client.delete("/v1/experiments/second-1?files=true")).status_code == 404


async def test_files_that_another_one_needs_or_that_lie_elsewhere_are_not_deleted(
    gateway: GatewayState, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    needed = await add_finished(gateway, "first-1")
    origin = {"experiment_id": "first-1", "step": 2, "version": 2, "path": "/nowhere", "first_group_id": 4}
    await add_finished(gateway, "fork-1", origin=origin)
    elsewhere = await add_finished(gateway, "far-1", directory=str(tmp_path))
    await add_finished(gateway, "busy-1", state=ExperimentState.RUNNING, final_ledger=None)

    answers = {
        name: await client.delete(f"/v1/experiments/{name}?files=true") for name in ("first-1", "far-1", "busy-1")
    }

    assert {name: each.status_code for name, each in answers.items()} == dict.fromkeys(answers, 409)
    assert "fork-1" in answers["first-1"].json()["detail"]
    assert "deletes no files there" in answers["far-1"].json()["detail"]
    assert needed.exists() and elsewhere.exists() and len(list(gateway.repository)) == 4


@pytest.mark.parametrize(
    ("whose", "is_kept", "told"), [(None, True, "another owner"), ("alice", True, "fork-1"), ("bob", False, "")]
)
async def test_an_owner_is_told_of_no_others_experiment_that_needs_the_files(
    gateway: GatewayState, whose: str | None, is_kept: bool, told: str
) -> None:
    """One of the fleet's own may need them; what another owner's names, it may not read."""
    origin = {"experiment_id": "first-1", "step": 2, "version": 2, "path": "/nowhere", "first_group_id": 4}
    with acting("alice"):
        directory = await add_finished(gateway, "first-1")
    with acting(whose):
        await add_finished(gateway, "fork-1", origin=origin)

    with acting("alice"):
        if not is_kept:
            await gateway.cleaning.retainer.delete("first-1")
        else:
            with pytest.raises(Conflict, match=told) as refused:
                await gateway.cleaning.retainer.delete("first-1")
            assert ("fork-1" in refused.value.detail) is (whose == "alice")

    assert directory.exists() is is_kept


async def test_where_a_file_cannot_be_deleted_the_record_stays(
    gateway: GatewayState, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_finished(gateway, "first-1")

    def refuses(*_: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(pruning, "remove", refuses)
    answer = await client.delete("/v1/experiments/first-1?files=true")

    assert (answer.status_code, "Permission denied" in answer.json()["detail"]) == (409, True)
    assert [each.id for each in gateway.repository] == ["first-1"]
