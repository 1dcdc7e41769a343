"""Experiments that go on: forked, given more steps, resumed after a stop."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.core import url_to_fs

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.feeder.feeder import Feeder
from flotilla.services.gateway.feeder.rows import RowOrder
from flotilla.services.gateway.lifecycle.commands import DOWNLOADS
from flotilla.services.gateway.lifecycle.states import Action, LifecycleEvent
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.routes.checkpoints import check_upload, checkpoints
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.writes import CURRICULUM, PutCheckpoint
from flotilla.services.gateway.tinker.jobs import TinkerJobs
from flotilla.services.gateway.uploads.uploads import Uploads
from flotilla.shared.checkpoints.folders import complete
from flotilla.shared.config.load.spec_text import with_changes
from flotilla.shared.errors import ActionNotAllowed, InvalidSpec, ModelError, NotFound
from flotilla.shared.schemas.experiment import CheckpointView, ExperimentState, ForkRequest
from flotilla.shared.schemas.service import ObservedState, ServiceKind, WorkState
from flotilla.shared.streams.hop import HopName, Resolution
from tests.unit.gateway.builders import a_gateway, a_spec, add_experiment, add_service, say
from tests.unit.gateway.stored import store_checkpoint

ROWS = [{"prompt": f"p{n}", "label": str(n)} for n in range(8)]
LONGER = {"optimisation": {"steps": 5}}


@pytest.fixture
def gateway(tmp_path: Path) -> GatewayState:
    """A gateway, and the files of a spec."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1?", "label": "1"}\n' * 8)
    return a_gateway(data=tmp_path)


async def add_ended(gateway: GatewayState, state: ExperimentState = ExperimentState.COMPLETED) -> Experiment:
    """Add an experiment that came to rest after two steps of two, with a checkpoint of each."""
    folder = gateway.settings.data
    paths = {"model": {"path": str(folder / "model")}, "data": {"path": str(folder / "train.jsonl")}}
    document = a_spec(**paths).model_dump(mode="json")
    directory = folder / "experiments" / "tiny-1"
    facts: dict[str, Any] = {"step": 2, "policy_version": 2, "published_step": 2, "final_ledger": {}}
    experiment = await add_experiment(gateway, state=state, spec=document, directory=str(directory), **facts)
    for step in (1, 2):
        path = store_checkpoint(directory, step, document)
        view = CheckpointView(step=step, version=step, path=str(path), at="2026-01-01T00:00:00.000Z")
        async with gateway.store.transaction() as change:
            change.write(PutCheckpoint(experiment.id, view))
    return experiment


async def test_a_fork_takes_groups_after_those_of_its_checkpoint_for_the_steps_that_are_left(
    gateway: GatewayState,
) -> None:
    parent = await add_ended(gateway)
    fork = await gateway.commands.fork(parent.id, ForkRequest(changes=LONGER), start=True)
    await gateway.repository.update(fork, state=ExperimentState.RUNNING)
    feeder = Feeder(
        fork,
        RowOrder(fork, Dataset(ROWS, fork.spec.data, 0)),
        gateway.store,
        gateway.clock,
        gateway.feeder_status.of(fork),
    )
    issued = []
    for _ in range(9):
        await feeder.feed()
        hop = fork.train.hop(HopName.TASKS, "rollout")
        for claim in await hop.claim(9, wait_seconds=0):
            issued.append((claim.header.group_id, claim.task().min_version))
            await hop.resolve(claim, Resolution.FILTERED, "test")
        if len(issued) >= 6:
            break

    assert issued[:6] == [(group_id, 2) for group_id in range(4, 10)], "two groups of each of steps 3, 4 and 5"
    assert (fork.record.step, fork.record.published_step, fork.spec.checkpoint.resume_from) == (2, 2, parent.id)
    assert parent.record.step == 2 and (await parent.train.ledger()).issued == 0


async def test_an_experiment_begins_from_a_checkpoint_at_a_url(gateway: GatewayState, tmp_path: Path) -> None:
    url = f"memory://{tmp_path}"
    parent = await add_ended(gateway)
    document = parent.record.spec | {
        "name": "another",
        "optimisation": parent.record.spec["optimisation"] | {"steps": 5},
    }
    document["checkpoint"] = document["checkpoint"] | {"resume_from": f"{url}/{parent.id}@2"}
    with pytest.raises(InvalidSpec, match="FLOTILLA_CHECKPOINT_URLS"):
        await gateway.commands.create(json.dumps(document))
    places = replace(gateway.settings.places, checkpoint_urls=(url,))
    gateway.commands._places = places
    uploads = Uploads(gateway.store, gateway.clock, gateway.events, places)
    parent.spec = with_changes(parent.spec, {"checkpoint": {"upload_to": url}})
    jobs = TinkerJobs(None, tmp_path)
    assert [each.upload.state for each in (await checkpoints(parent.id, gateway, jobs)).items] == ["pending"] * 2
    await uploads.finish(parent)
    assert [each.upload.state for each in (await checkpoints(parent.id, gateway, jobs)).items] == ["uploaded"] * 2
    system, root = url_to_fs(f"{url}/{parent.id}")
    system.rm_file(f"{root}/step-00000001/optimizer.safetensors")
    allowed = copy.copy(gateway)
    object.__setattr__(allowed, "settings", replace(gateway.settings, places=places))
    assert (await check_upload(parent.id, 2, allowed)).is_whole
    check = await check_upload(parent.id, 1, allowed)
    assert (check.url, check.missing) == (f"{url}/{parent.id}/step-00000001", ("optimizer.safetensors",))
    with pytest.raises(InvalidSpec, match="FLOTILLA_CHECKPOINT_URLS"):
        await check_upload(parent.id, 2, gateway)
    shutil.rmtree(parent.record.directory)

    begun = await gateway.commands.create(json.dumps(document))

    origin = begun.record.origin
    assert origin is not None
    assert (origin["experiment_id"], origin["step"], origin["path"]) == ("tiny-1", 2, f"{url}/{parent.id}@2")
    assert [each.step for each in complete(Path(begun.record.directory) / "checkpoints")] == [2]
    assert not list((gateway.settings.experiments / DOWNLOADS).iterdir())


async def test_a_fork_ends_when_its_own_steps_have_their_groups(gateway: GatewayState) -> None:
    parent = await add_ended(gateway)
    fork = await gateway.commands.fork(parent.id, ForkRequest(changes={"optimisation": {"steps": 3}}), start=True)
    await gateway.repository.update(fork, state=ExperimentState.RUNNING)
    feeder = Feeder(
        fork,
        RowOrder(fork, Dataset(ROWS, fork.spec.data, 0)),
        gateway.store,
        gateway.clock,
        gateway.feeder_status.of(fork),
    )

    for _ in range(5):
        await feeder.feed()

    assert (await fork.train.ledger()).issued == 2


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (ForkRequest(), InvalidSpec, "contains 2 steps already, got 2"),
        (ForkRequest(step=7, changes=LONGER), ModelError, "steps that are there: 1, 2"),
        (ForkRequest(changes={"optimisation": {"stepz": 9}}), InvalidSpec, "did you mean"),
        (ForkRequest(changes=LONGER | {"model": {"dtype": "bfloat16"}}), ModelError, r"model\.dtype"),
    ],
)
async def test_a_fork_that_cannot_be_says_why_and_leaves_nothing(
    gateway: GatewayState, request_: ForkRequest, error: type[Exception], words: str
) -> None:
    parent = await add_ended(gateway)

    with pytest.raises(error, match=words):
        await gateway.commands.fork(parent.id, request_, start=True)

    assert [each.id for each in gateway.repository] == [parent.id]
    assert [path.name for path in (gateway.settings.data / "experiments").iterdir()] == [parent.id]


async def test_a_spec_may_name_an_experiment_to_begin_from(gateway: GatewayState) -> None:
    parent = await add_ended(gateway)
    body = parent.spec.model_copy(
        update={"checkpoint": parent.spec.checkpoint.model_copy(update={"resume_from": "tiny@1"})}
    )

    begun = await gateway.commands.create(body.model_dump_json())

    view = gateway.commands.view(begun)
    assert view.origin is not None
    assert (view.origin.experiment_id, view.origin.step, view.state) == (parent.id, 1, ExperimentState.DRAFT)
    with pytest.raises(NotFound, match="no experiment tidy"):
        await gateway.commands.create(body.model_dump_json().replace("tiny@1", "tidy"))


async def test_more_steps_appoint_the_trainer_again_and_move_nobody_else(gateway: GatewayState) -> None:
    experiment = await add_experiment(gateway, trainer_epoch=1, is_trained=True)
    services = {kind: await add_service(gateway, kind, kind.value, experiment.id) for kind in ServiceKind}
    epoch = experiment.record.trainer_epoch
    await gateway.repository.update(experiment, is_trained=True)
    old = ObservedState(experiment_id=experiment.id, state=WorkState.FINISHED, step=2)

    extended = await gateway.commands.extend(experiment.id, 5)
    told = {kind: await say(gateway, each, old) for kind, each in services.items()}

    assert (extended.record.is_trained, gateway.commands.view(extended).total_steps) == (False, 5)
    assert told[ServiceKind.TRAINER].assignment.trainer_epoch == epoch + 1
    assert {each.assignment.revision for each in told.values()} == {1}
    assert told[ServiceKind.ROLLOUT].assignment.trainer_epoch == 0
    async with gateway.store.transaction() as change:
        gateway.commands.stage_conclusion(change, experiment, LifecycleEvent.TRAINED, outcome="completed")
    assert experiment.state is ExperimentState.RUNNING, "it was concluded before there were more steps"


@pytest.mark.parametrize("state", [ExperimentState.STOPPED, ExperimentState.COMPLETED, ExperimentState.FAILED])
async def test_what_has_ended_goes_on_with_more_steps(gateway: GatewayState, state: ExperimentState) -> None:
    experiment = await add_ended(gateway, state)
    await gateway.repository.update(experiment, is_trained=True, outcome=state.value)

    with pytest.raises(InvalidSpec, match="more than the 2 that there are"):
        await gateway.commands.extend(experiment.id, 2)
    await gateway.commands.extend(experiment.id, 3)

    record = experiment.record
    assert (record.state, record.step, record.spec["optimisation"]["steps"]) == (ExperimentState.STARTING, 2, 3)
    assert (record.final_ledger, record.outcome, record.is_trained) == (None, None, False)


async def test_what_is_coming_to_rest_is_not_extended(gateway: GatewayState) -> None:
    experiment = await add_experiment(gateway, state=ExperimentState.STOPPING, outcome="completed")

    with pytest.raises(ActionNotAllowed, match="extend an experiment that is stopping"):
        await gateway.commands.extend(experiment.id, 9)

    assert experiment.spec.optimisation.steps == 2


@pytest.mark.parametrize("action", ["resume", "extend"])
async def test_nothing_goes_on_from_checkpoints_that_are_gone(gateway: GatewayState, action: str) -> None:
    experiment = await add_ended(gateway, ExperimentState.STOPPED)
    for path in (Path(experiment.record.directory) / "checkpoints").iterdir():
        shutil.rmtree(path)

    with pytest.raises(ActionNotAllowed, match="its checkpoints are gone"):
        if action == "resume":
            await gateway.commands.act(experiment.id, Action.RESUME)
        else:
            await gateway.commands.extend(experiment.id, 9)

    assert experiment.state is ExperimentState.STOPPED


@pytest.mark.parametrize(("step", "rate"), [(1, 1e-6), (2, 0.5), (None, 0.5)])
async def test_a_fork_begins_with_the_settings_that_held_for_its_checkpoint(
    gateway: GatewayState, step: int | None, rate: float
) -> None:
    parent = await add_ended(gateway)
    key = {"path": "optimisation.learning_rate", "before": 1e-6, "after": 0.5}
    change = {"id": "c", "at": "2026", "actor": "anna", "effect": "trainer", "keys": [key], "version": 2, "step": 2}
    async with gateway.repository.transaction() as staged:
        gateway.repository.stage_spec(
            staged, parent, with_changes(parent.spec, {"optimisation": {"learning_rate": 0.5}})
        )
        gateway.repository.stage(staged, parent, changes=[change])

    fork = await gateway.commands.fork(parent.id, ForkRequest(step=step, changes=LONGER), start=False)

    assert fork.spec.optimisation.learning_rate == rate
    assert fork.steering.changes == ()
    [state] = [each.state for each in complete(Path(fork.record.directory) / "checkpoints")]
    assert (state.changes, state.spec["optimisation"]["learning_rate"]) == ((), rate)


async def test_a_fork_and_its_fork_take_turns_among_sources_as_their_parents_did(gateway: GatewayState) -> None:
    sources = [{"path": str(gateway.settings.data / "train.jsonl"), "weight": weight} for weight in (3.0, 1.0)]
    folder = gateway.settings.data
    paths = {"model": {"path": str(folder / "model")}, "data": {"sources": sources}}
    document = a_spec(**paths).model_dump(mode="json")
    directory = folder / "experiments" / "tiny-1"
    key = {"path": "data.sources.0.weight", "before": 3.0, "after": 2.0}
    change = {"id": "c", "at": "2026", "actor": "a", "effect": "group", "keys": [key], "version": 1, "group_id": 3}
    store_checkpoint(directory, 2, document, changes=[change])
    facts: dict[str, Any] = {"step": 2, "policy_version": 2, "published_step": 2, "final_ledger": {}}
    parent = await add_experiment(
        gateway, state=ExperimentState.COMPLETED, spec=document, directory=str(directory), **facts
    )
    after = with_changes(parent.spec, {"data": {"sources": {"0": {"weight": 2.0}}}})
    async with gateway.repository.transaction() as staged:
        gateway.repository.stage_spec(staged, parent, after)
        gateway.repository.stage(staged, parent, changes=[change])

    fork = await gateway.commands.fork(parent.id, ForkRequest(changes=LONGER), start=False)
    again = await gateway.commands.fork(fork.id, ForkRequest(changes=LONGER), start=False)

    expected = [{"group_id": 0, "weights": [3.0, 1.0]}, {"group_id": 3, "weights": [2.0, 1.0]}]
    for each in (fork, again):
        assert each.record.origin is not None
        found = [
            {"group_id": e["group_id"], "weights": list(e["weights"])} for e in each.record.origin["source_weights"]
        ]
        assert found == expected
        assert [source.weight for source in each.spec.data.sources or ()] == [2.0, 1.0]


@pytest.mark.parametrize("is_same", [True, False])
async def test_a_fork_goes_on_with_what_the_checkpoint_knows_of_the_rows_of_a_curriculum(
    gateway: GatewayState, is_same: bool
) -> None:
    folder = gateway.settings.data
    data = {"path": str(folder / "train.jsonl"), "curriculum": {"pools": [{"name": "all"}]}}
    document = a_spec(model={"path": str(folder / "model")}, data=data).model_dump(mode="json")
    known = {"group_id": 3, "rows": [[0, 2, 0.5], [4, 1, None]], "seen": {"s": 2}, "drawn": []}
    store_checkpoint(folder / "experiments" / "tiny-1", 2, document, curriculum=known)
    facts: dict[str, Any] = {"step": 2, "policy_version": 2, "published_step": 2, "final_ledger": {}}
    parent = await add_experiment(
        gateway,
        state=ExperimentState.COMPLETED,
        spec=document,
        directory=str(folder / "experiments" / "tiny-1"),
        **facts,
    )

    changes = LONGER if is_same else LONGER | {"data": {"shuffle": False}}
    fork = await gateway.commands.fork(parent.id, ForkRequest(changes=changes), start=False)

    assert await gateway.store.window(fork.id, CURRICULUM) == (known if is_same else {})
    [state] = [each.state for each in complete(Path(fork.record.directory) / "checkpoints")]
    assert state.curriculum is not None and state.curriculum.model_dump(mode="json") == known
