"""What every store does."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from flotilla.services.gateway.store import locks, tables, transaction
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.records import (
    AuditRecord,
    DeliveryRecord,
    PublicationRecord,
    ServiceRecord,
    StoredAnswer,
    TokenRecord,
)
from flotilla.services.gateway.store.sql import SqlStore, open_engine, upgrade
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import (
    AppendAudit,
    AppendEvent,
    DeleteAnswers,
    DeleteCheckpoints,
    DeleteDeliveries,
    DeleteExperiment,
    DeleteRecord,
    PointRecord,
    PutCheckpoint,
    PutMetrics,
    PutRecord,
    PutWindow,
    QueueDelivery,
    Write,
)
from flotilla.shared.errors import InvalidRequest, NotLeading, Unavailable
from flotilla.shared.schemas.experiment import CheckpointView, Event, ExperimentState
from tests.postgres import new_database
from tests.unit.gateway.builders import a_manifest, a_record

LATER = {"notice_ends_at", "number", "silent_since", "trainer_epoch"}
"""Columns of services that the first release had not."""
SERVICE = ServiceRecord("s1", "rollout", "http://h", "h", 3, {"cores": 2}, "i1", 1.5)
PUBLICATION = PublicationRecord(
    experiment_id="a",
    version=1,
    step=2,
    epoch=3,
    phase="preparing",
    service_id="t",
    manifest=a_manifest().model_dump(mode="json"),
    members=[{"service_id": "s1", "rank": 1}],
    rendezvous=None,
    reason=None,
    announced_at=1.0,
)


def a_point(name: str, step: int, value: float) -> PointRecord:
    return PointRecord(name=name, step=step, version=step, value=value, at="2026-01-01T00:00:00.000Z")


async def test_experiments_come_back_as_they_were_oldest_first(store: Store) -> None:
    young = a_record("b", created_at=2.0)
    old = a_record("c", created_at=1.0, problem={"component": "x", "cause": "y", "at": "z"}, final_ledger={"n": [1]})
    for record in (young, old):
        await store.apply([PutRecord(record)])

    await store.apply([PutRecord(replace(young, state=ExperimentState.RUNNING, step=7, evaluated_version=0))])

    changed = replace(young, state=ExperimentState.RUNNING, step=7, evaluated_version=0)
    found = await store.experiments()
    assert found == [old, changed]
    assert found[1].state is ExperimentState.RUNNING


def note_statements(engine: sa.Engine, statements: list[str]) -> None:
    """Note what an engine's database is asked; of SQLite by its driver, which is asked without SQLAlchemy, too."""

    def note(_connection: object, _cursor: object, statement: str, *_others: object) -> None:
        statements.append(statement)

    if engine.dialect.name == "sqlite":
        connection: Any = engine.raw_connection()
        connection.driver_connection.set_trace_callback(statements.append)
        connection.close()
    else:
        sa.event.listen(engine, "before_cursor_execute", note)


async def test_of_an_experiment_that_changes_only_what_changed_is_written(database_url: str) -> None:
    record = a_record("a")
    opened = await SqlStore.open(database_url)
    statements: list[str] = []

    try:
        await opened.apply([PutRecord(record)])
        note_statements(opened._engine, statements)
        await opened.apply([PutRecord(replace(record, step=1)), PutRecord(replace(record, step=2, updated_at=9.5))])
        writes = [each for each in statements if "experiments" in each]
        assert len(writes) == 2
        assert all("step=" in each and "spec" not in each for each in writes), writes
        with pytest.raises(InvalidRequest):
            await opened.apply([PutRecord(replace(record, step=3)), PutRecord(replace(record, name="\ud800"))])
        await opened.apply([PutRecord(replace(record, step=3))])
        assert await opened.experiments() == [replace(record, step=3)]
        await opened.apply([DeleteExperiment("a"), PutRecord(record)])
        assert await opened.experiments() == [record]
    finally:
        await opened.close()


async def test_experiments_and_services_come_in_the_order_of_their_numbers(
    store: Store,
) -> None:
    records = [a_record("first", number=1, created_at=9.0), a_record("then", number=2, created_at=1.0)]
    services = [replace(SERVICE, number=1, registered_at=9.0), replace(SERVICE, id="s0", number=2, registered_at=1.0)]
    await store.apply([PutRecord(record) for record in reversed(records)])
    await store.apply([PutRecord(record) for record in reversed(services)])

    assert await store.experiments() == records
    assert await store.services() == services


async def test_services_come_back_until_they_are_deleted(store: Store) -> None:
    await store.apply([PutRecord(SERVICE)])
    await store.apply([PutRecord(replace(SERVICE, experiment_id="a", is_draining=True, notice_ends_at=1.7e9 + 0.1))])
    assert await store.services() == [replace(SERVICE, experiment_id="a", is_draining=True, notice_ends_at=1.7e9 + 0.1)]

    await store.apply([DeleteRecord(ServiceRecord, "s1")])
    await store.apply([DeleteRecord(ServiceRecord, "s1")])
    assert await store.services() == []


async def test_publications_are_kept_by_version(store: Store) -> None:
    second = replace(PUBLICATION, version=2, rendezvous={"host": "h", "port": 1, "epoch": 3, "world_size": 2})
    for record in (second, PUBLICATION, replace(PUBLICATION, experiment_id="b")):
        await store.apply([PutRecord(record)])
    committed = replace(PUBLICATION, phase="committed", ended_at=2.0, reason="why")
    await store.apply([PutRecord(committed)])

    assert await store.publications("a") == [committed, second]
    assert await store.publication("a", 2) == second
    assert await store.publication("a", 3) is None


async def test_a_step_that_is_trained_again_replaces_its_values_and_followers_see_it(store: Store) -> None:
    await store.put_metrics("a", [a_point("loss", 1, 0.5), a_point("kl", 1, 0.1), a_point("loss", 2, 0.4)])
    await store.put_metrics("b", [a_point("loss", 1, 9.0)])
    first = await store.metrics("a", names=[], after=0, limit=10)
    assert [(p.name, p.step, p.value) for _, p in first] == [("loss", 1, 0.5), ("kl", 1, 0.1), ("loss", 2, 0.4)]

    await store.put_metrics("a", [a_point("loss", 1, 0.3), a_point("loss", 1, 0.2)])

    later = await store.metrics("a", names=[], after=first[-1][0], limit=10)
    assert [(p.name, p.step, p.value) for _, p in later] == [("loss", 1, 0.2)]
    losses = await store.metrics("a", names=["loss"], after=0, limit=10)
    assert [(p.step, p.value) for _, p in losses] == [(2, 0.4), (1, 0.2)]


async def test_the_names_of_an_experiments_metrics_are_its_own(store: Store) -> None:
    await store.put_metrics("a", [a_point("loss", 1, 0.5), a_point("kl", 1, 0.1), a_point("loss", 2, 0.4)])
    await store.put_metrics("b", [a_point("entropy", 1, 9.0)])

    assert await store.metric_names("a") == {"loss", "kl"}
    assert await store.metric_names("c") == set()


async def test_metrics_are_read_in_pages(store: Store) -> None:
    await store.put_metrics("a", [a_point("loss", step, float(step)) for step in range(5)])

    first = await store.metrics("a", names=[], after=0, limit=3)
    second = await store.metrics("a", names=[], after=first[-1][0], limit=3)

    assert [p.step for _, p in [*first, *second]] == [0, 1, 2, 3, 4]
    await store.put_metrics("a", [])


async def test_series_are_read_by_name_and_by_how_names_begin(store: Store) -> None:
    names = ["loss", "reward/mean", "reward/a_b/mean", "reward/aXb/mean", "rewards"]
    await store.put_metrics("a", [a_point(name, 1, float(place)) for place, name in enumerate(names)])
    await store.put_metrics("b", [a_point("loss", 1, 9.0)])

    found = await store.metrics("a", names=["loss", "reward/a_*"], after=0, limit=10)
    rewards = await store.metrics("a", names=["reward/*"], after=0, limit=2)
    later = await store.metrics("a", names=["reward/*"], after=rewards[-1][0], limit=10)

    assert [point for _, point in found] == [a_point("loss", 1, 0.0), a_point("reward/a_b/mean", 1, 2.0)]
    assert [point.name for _, point in rewards] == ["reward/mean", "reward/a_b/mean"]
    assert [point.name for _, point in later] == ["reward/aXb/mean"]


async def test_event_ids_grow_and_events_are_replayed_from_any_of_them(store: Store) -> None:
    events = [await store.append_event("a", f"kind{n}", float(n), {"n": n}) for n in range(3)]
    await store.append_event("b", "other", 0.0, {})

    assert [event.id for event in events] == sorted({event.id for event in events})
    assert await store.events("a", after=events[0].id, limit=10) == events[1:]
    assert await store.events("a", after=0, limit=2) == events[:2]
    assert await store.events("a", after=0, limit=1, types={"kind1", "kind2"}) == [events[1]]
    assert await store.events("a", after=events[1].id, limit=9, types={"kind1", "kind2"}) == [events[2]]
    assert events[1].at == "1970-01-01T00:00:01.000Z" and events[1].data == {"n": 1}


async def test_ids_do_not_return_after_a_deletion(store: Store) -> None:
    before = await store.append_event("a", "kind", 0.0, {})
    await store.apply([DeleteExperiment("a")])

    assert (await store.append_event("a", "kind", 0.0, {})).id > before.id


async def test_the_audit_trail_is_newest_first_and_survives_its_resource(store: Store) -> None:
    await store.apply([PutRecord(a_record("a"))])
    for n, action in enumerate(["create", "start", "delete"]):
        await store.apply([AppendAudit(AuditRecord(float(n), action, "experiments/a", {"n": n}))])
    await store.apply([AppendAudit(AuditRecord(9.0, "create", "experiments/b"))])

    await store.apply([DeleteExperiment("a")])

    assert [record.action for record in await store.audit("experiments/a", limit=2)] == ["delete", "start"]


async def test_checkpoints_are_kept_by_step(store: Store) -> None:
    later, earlier = (CheckpointView(step=step, version=step, path=f"/c/{step}", at="now") for step in (20, 10))
    for checkpoint in (later, earlier):
        await store.apply([PutCheckpoint("a", checkpoint)])
    moved = earlier.model_copy(update={"path": "/elsewhere"})
    await store.apply([PutCheckpoint("a", moved)])

    assert await store.checkpoints("a") == [moved, later]
    await store.apply([DeleteCheckpoints("a", 10), DeleteCheckpoints("b", 0)])
    assert await store.checkpoints("a") == [moved]


async def test_a_deleted_experiment_takes_everything_of_its_own_with_it(store: Store) -> None:
    for experiment_id in ("a", "b"):
        await store.apply([PutRecord(a_record(experiment_id))])
        await store.apply([PutRecord(replace(PUBLICATION, experiment_id=experiment_id))])
        await store.put_metrics(experiment_id, [a_point("loss", 1, 1.0)])
        await store.append_event(experiment_id, "kind", 0.0, {})
        await store.apply([PutCheckpoint(experiment_id, CheckpointView(step=1, version=1, path="/c", at="now"))])

    await store.apply([DeleteExperiment("a")])

    left = [
        await store.publications("a"),
        await store.metrics("a", names=[], after=0, limit=9),
        await store.events("a", after=0, limit=9),
        await store.checkpoints("a"),
    ]
    assert left == [[], [], [], []]
    assert [record.id for record in await store.experiments()] == ["b"]
    assert len(await store.publications("b")) == len(await store.checkpoints("b")) == 1


async def test_answers_to_idempotency_keys_are_kept_until_they_are_old(store: Store) -> None:
    answer = StoredAnswer("/v1/x key", "d" * 64, 201, "application/json", '{"ä": "ö"}', 5.0)
    await store.put_answer(answer)

    assert await store.answer("/v1/x key") == answer
    assert await store.answer("/v1/x other") is None
    await store.delete_answers(5.0)
    assert await store.answer("/v1/x key") == answer
    await store.delete_answers(5.1)
    assert await store.answer("/v1/x key") is None


async def test_tokens_are_kept_until_they_are_deleted(store: Store) -> None:
    one = TokenRecord("1", "ci", "reader", None, "e", None, "d" * 64, 1.0, 2.5, "operator")
    other = TokenRecord("2", "gpu", "service", "rollout", None, None, "e" * 64, 0.5, None, "operator")
    await store.apply([PutRecord(one), PutRecord(other)])
    assert await store.tokens() == [other, one]

    await store.apply([DeleteRecord(TokenRecord, "2"), DeleteRecord(TokenRecord, "2")])

    assert await store.tokens() == [one]


async def test_windows_are_kept_by_name_and_go_with_their_experiment(store: Store) -> None:
    await store.apply([PutWindow("a", "w", {"n": 1}), PutWindow("b", "w", {})])
    await store.apply([PutWindow("a", "w", {"n": [2.5, None]})])

    assert await store.window("a", "w") == {"n": [2.5, None]}
    await store.apply([DeleteExperiment("a")])
    assert await store.window("a", "w") == await store.window("c", "w") == {}


def a_delivery(message_id: str, experiment_id: str = "a") -> DeliveryRecord:
    return DeliveryRecord(message_id, experiment_id, "hook-1", "stalled", 1.5, '{"type":"stalled"}')


async def test_deliveries_are_kept_in_the_order_of_writing_until_they_end_or_their_experiment_is_deleted(
    store: Store,
) -> None:
    kept = [a_delivery("msg_2"), a_delivery("msg_1", "b"), a_delivery("msg_3")]
    await store.apply([AppendEvent("a", "stalled", 1.5, {}), *map(QueueDelivery, kept)])
    assert await store.deliveries() == kept

    await store.delete_deliveries(["msg_2", "msg_9"])
    assert await store.deliveries() == kept[1:]
    await store.apply([DeleteExperiment("b")])
    assert await store.deliveries() == kept[2:]
    await store.apply([DeleteDeliveries(["msg_3"])])
    assert await store.deliveries() == []


async def test_what_a_database_cannot_hold_is_the_callers_fault(store: Store) -> None:
    if isinstance(store, MemoryStore):
        pytest.skip("holds everything")
    for point in (a_point("loss", 2**70, 1.0), a_point("lo\ud800ss", 1, 1.0)):
        with pytest.raises(InvalidRequest, match="cannot be stored"):
            await store.put_metrics("a", [point])
    with pytest.raises(InvalidRequest):
        await store.publication("a", 2**70)

    await store.put_metrics("a", [a_point("loss", 1, 1.0)])
    assert len(await store.metrics("a", names=[], after=0, limit=9)) == 1


NO_WRITE = cast(Write, object())
"""What no store can write."""


async def test_writes_that_belong_together_are_stored_all_or_not_at_all(store: Store) -> None:
    await store.apply([PutRecord(a_record("a")), AppendEvent("a", "first", 0.0, {})])
    writes: list[Write] = [
        PutRecord(a_record("a", step=7)),
        PutRecord(a_record("b")),
        PutRecord(SERVICE),
        PutRecord(PUBLICATION),
        PutMetrics("a", [a_point("loss", 1, 0.5)]),
        AppendAudit(AuditRecord(0.0, "create", "experiments/a")),
        PutCheckpoint("a", CheckpointView(step=1, version=1, path="/c", at="now")),
        PutRecord(StoredAnswer("k", "d", 200, "application/json", "{}", 1.0)),
        AppendEvent("a", "second", 0.0, {}),
        DeleteExperiment("a"),
    ]

    for number in range(len(writes) + 1):
        with pytest.raises(AssertionError):
            await store.apply([*writes[:number], NO_WRITE, *writes[number:]])

        assert await store.experiments() == [a_record("a")]
        assert [event.type for event in await store.events("a", after=0, limit=9)] == ["first"]
        assert await store.services() == [] and await store.publications("a") == []
        assert await store.metrics("a", names=[], after=0, limit=9) == [] and await store.checkpoints("a") == []
        assert await store.audit("experiments/a", limit=9) == [] and await store.answer("k") is None

    events = await store.apply(writes)
    assert [event.type for event in events] == ["second"]
    assert [record.id for record in await store.experiments()] == ["b"]


async def test_what_a_failed_change_replaced_or_deleted_is_there_again(store: Store) -> None:
    answer = StoredAnswer("k", "d", 200, "application/json", "{}", 1.0)
    checkpoint = CheckpointView(step=1, version=1, path="/c", at="now")
    kept: list[Write] = [
        PutRecord(a_record("a")),
        PutRecord(SERVICE),
        PutRecord(PUBLICATION),
        PutMetrics("a", [a_point("loss", step, 0.5) for step in (1, 2, 3)]),
        PutCheckpoint("a", checkpoint),
        PutRecord(answer),
        PutWindow("a", "w", {"begun": 1}),
        AppendEvent("a", "first", 0.0, {}),
        QueueDelivery(a_delivery("msg_1")),
        QueueDelivery(a_delivery("msg_2")),
    ]
    await store.apply(kept)
    changes: list[Write] = [
        PutMetrics("a", [a_point("loss", 2, 0.1), a_point("kl", 1, 0.1), a_point("loss", 2, 0.2)]),
        PutMetrics("a", [a_point("loss", 2, 0.3)]),
        PutCheckpoint("a", checkpoint.model_copy(update={"version": 9})),
        PutWindow("a", "w", {"begun": 2}),
        AppendEvent("a", "second", 0.0, {}),
        DeleteCheckpoints("a", 0),
        DeleteRecord(ServiceRecord, SERVICE.id),
        DeleteAnswers(2.0),
        QueueDelivery(a_delivery("msg_3")),
        DeleteDeliveries(["msg_1"]),
        DeleteExperiment("a"),
        PutMetrics("a", [a_point("loss", 2, 0.4)]),
        AppendEvent("a", "third", 0.0, {}),
    ]

    async def rows() -> list[object]:
        return [
            await store.experiments(),
            await store.services(),
            await store.publications("a"),
            await store.metrics("a", names=[], after=0, limit=9),
            await store.metric_names("a"),
            await store.checkpoints("a"),
            await store.answer("k"),
            await store.window("a", "w"),
            await store.events("a", after=0, limit=9),
            await store.deliveries(),
        ]

    before = await rows()
    for number in range(len(changes) + 1):
        with pytest.raises(AssertionError):
            await store.apply([*changes[:number], NO_WRITE])
        assert await rows() == before

    await store.apply(changes)
    points = [point for _, point in await store.metrics("a", names=[], after=0, limit=9)]
    assert points == [a_point("loss", 2, 0.4)]
    assert [event.type for event in await store.events("a", after=0, limit=9)] == ["third"]


async def test_points_that_are_written_again_and_again_are_each_read_once_in_the_order_of_writing(
    store: Store,
) -> None:
    for value in range(5):
        await store.put_metrics("a", [a_point("loss", step, float(value)) for step in (3, 1, 2)])
    first = await store.metrics("a", names=[], after=0, limit=2)
    await store.put_metrics("a", [a_point("loss", 3, 9.0)])

    rest = await store.metrics("a", names=[], after=first[-1][0], limit=9)

    assert [point.step for _, point in first] == [3, 1]
    assert [(point.step, point.value) for _, point in rest] == [(2, 4.0), (3, 9.0)]


async def test_memory_follows_what_is_stored_and_nothing_else(store: Store) -> None:
    memory: list[str] = []
    async with store.transaction() as change:
        change.write(PutRecord(a_record("a")))
        change.then(lambda: memory.append("a"))
        assert memory == []
    assert memory == ["a"]

    with pytest.raises(AssertionError):
        async with store.transaction() as change:
            change.write(PutRecord(a_record("b")), NO_WRITE)
            change.then(lambda: memory.append("b"))
    with pytest.raises(ZeroDivisionError):
        async with store.transaction() as change:
            change.write(PutRecord(a_record("c")))
            change.then(lambda: memory.append("c"))
            raise ZeroDivisionError

    assert memory == ["a"]
    assert [record.id for record in await store.experiments()] == ["a"]


async def test_changes_take_turns_and_one_that_is_staged_is_seen_by_the_next(store: Store) -> None:
    memory = 0

    async def count() -> None:
        nonlocal memory
        async with store.transaction() as change:
            change.stage("n", change.staged("n", memory) + 1)
            found = change.staged("n", memory) + 1

            def follow() -> None:
                nonlocal memory
                memory = found

            change.write(PutRecord(a_record("a", step=found)))
            change.then(follow)

    await asyncio.gather(*(count() for _ in range(5)))

    assert memory == 10
    assert [record.step for record in await store.experiments()] == [10]


async def test_a_change_whose_caller_is_cancelled_is_stored_and_memory_follows(store: Store) -> None:
    memory: list[str] = []

    async def change_it() -> None:
        async with store.transaction() as change:
            change.write(PutRecord(a_record("a")))
            change.then(lambda: memory.append("a"))
            asyncio.get_running_loop().call_soon(caller.cancel)

    caller = asyncio.create_task(change_it())
    await asyncio.gather(caller, return_exceptions=True)

    async with store.transaction():
        assert memory == ["a"]
    assert [record.id for record in await store.experiments()] == ["a"]


async def test_it_answers(store: Store) -> None:
    await store.ping()


async def test_migrations_make_exactly_the_tables_that_the_code_uses(database_url: str) -> None:
    engine = open_engine(database_url)
    upgrade(engine)
    upgrade(engine)

    with engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), tables.metadata)
        names = set(sa.inspect(connection).get_table_names())
    engine.dispose()

    assert differences == []
    assert names == set(tables.metadata.tables) | {"alembic_version"}


async def test_a_service_of_an_earlier_gateways_database_is_read(database_url: str) -> None:
    engine = open_engine(database_url)
    upgrade(engine, "0001")
    row = {name: value for name, value in asdict(SERVICE).items() if name not in LATER}
    with engine.begin() as connection:
        columns = [tables.services.c[name] for name in row]
        earlier = sa.table("services", *(sa.column(column.name, column.type) for column in columns))
        connection.execute(sa.insert(earlier).values(**row | {"is_draining": True}))
    engine.dispose()

    store = await SqlStore.open(database_url)
    found = await store.services()
    await store.close()

    assert found == [replace(SERVICE, is_draining=True, notice_ends_at=None)]


async def test_the_values_of_an_earlier_gateways_database_keep_their_cursors(database_url: str) -> None:
    engine = open_engine(database_url)
    upgrade(engine, "0015")
    table = tables.metrics
    row = {"experiment_id": "a", "version": 1, "value": 0.5, "at": "2026-01-01T00:00:00.000Z"}
    with engine.begin() as connection:
        for step, name in ((1, "loss"), (1, "reward"), (2, "loss"), (2, "reward")):
            connection.execute(sa.insert(table).values(**row, step=step, name=name))
        before = connection.execute(sa.select(table).order_by(table.c.sequence)).all()
        # The last numbers were given out: who has read to there must not miss what comes.
        connection.execute(sa.delete(table).where(table.c.step == 2))
        # An upgrade that was cut short.
        connection.execute(sa.text("CREATE TABLE metrics_by_step (sequence INTEGER)"))
    engine.dispose()

    store = await SqlStore.open(database_url)
    kept = await store.metrics("a", names=[], after=0, limit=9)
    await store.apply([PutMetrics("a", [PointRecord("loss", 1, 2, 0.25), PointRecord("loss", 3, 3, 0.125)])])
    found = await store.metrics("a", names=[], after=before[-1].sequence, limit=9)
    await store.close()

    assert [(each, point.name, point.step, point.value) for each, point in kept] == [
        (row.sequence, row.name, row.step, row.value) for row in before[:2]
    ]
    assert [(point.name, point.step, point.value) for _, point in found] == [("loss", 1, 0.25), ("loss", 3, 0.125)]


async def test_a_database_is_opened_again_with_all_that_it_held(database_url: str) -> None:
    first = await SqlStore.open(database_url)
    await first.apply([PutRecord(a_record("a"))])
    await first.close()

    second = await SqlStore.open(database_url)
    found = await second.experiments()
    await second.close()

    assert [record.id for record in found] == ["a"]


async def test_a_database_that_a_gateway_works_on_is_refused_to_another_until_the_first_has_ended(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "TAKE_OVER_SECONDS", 0.1)
    first = await SqlStore.open(database_url)

    with pytest.raises(Unavailable, match="another gateway works on this database") as refused:
        await SqlStore.open(database_url)
    await first.apply([PutRecord(a_record("a"))])
    await first.close()

    second = await SqlStore.open(database_url)
    found = await second.experiments()
    await second.close()
    assert [record.id for record in found] == ["a"]
    assert "\n" not in refused.value.detail


async def test_who_has_lost_the_lock_of_a_postgresql_database_writes_nothing(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    monkeypatch.setattr(locks, "TAKE_OVER_SECONDS", 0.1)
    url = new_database(postgres_url)
    deposed: list[str] = []
    first = await SqlStore.open(url, on_deposed=lambda: deposed.append("first"))
    with psycopg.connect(url, autocommit=True) as connection:
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        connection.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}".encode())
    second = await opened_soon(url)

    with pytest.raises(Unavailable, match="another gateway works on this database"):
        await first.apply([PutRecord(a_record("a"))])

    assert await second.experiments() == []
    await second.close()
    with pytest.raises(NotLeading):
        await first.apply([PutRecord(a_record("b"))])
    await first.close()
    assert len(deposed) >= 2, "what it knows is older than the database, whoever has the lock"


async def opened_soon(url: str) -> SqlStore:
    """Open a database whose server may not have ended the session before yet."""
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(Unavailable):
                return await SqlStore.open(url)
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("url", ["sqlite:///{0}/no/such/folder/x.sqlite", "postgresql://127.0.0.1:1/x", "nonsense"])
async def test_a_database_that_does_not_answer_is_said_not_to(tmp_path: Path, url: str) -> None:
    with pytest.raises(Unavailable, match="database") as error:
        await SqlStore.open(url.format(tmp_path))

    assert "\n" not in error.value.detail


async def test_a_standby_ends_the_session_of_a_silent_leader_and_of_no_other(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = new_database(postgres_url)
    engine = open_engine(url)
    unopened = locks.look(engine)
    deposed: list[str] = []
    first = await SqlStore.open(url, "http://first", lambda: deposed.append("first"))

    seen = locks.look(engine)
    await first.confirm()
    assert (unopened, seen) == (locks.Sighting(True, None), locks.Sighting(False, "http://first"))
    monkeypatch.setattr(locks, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(locks, "TAKE_OVER_SECONDS", 0.1)
    async with asyncio.timeout(60):
        while not locks.look(engine).is_free:
            await asyncio.sleep(0.05)
    second = await SqlStore.open(url, "http://second")
    with pytest.raises(NotLeading):
        await first.confirm()
    with pytest.raises(NotLeading):
        await first.apply([PutRecord(a_record("a"))])

    assert await second.experiments() == [] and "first" in deposed
    assert locks.look(engine).leader == "http://second"
    engine.dispose()
    for each in (first, second):
        await each.close()


async def test_a_gateway_that_starts_reads_few_of_many_publications(store: Store) -> None:
    ended = [replace(PUBLICATION, version=n, epoch=1 + n // 50, phase="committed", ended_at=1.0) for n in range(1, 100)]
    # The clock and the versions may go back: the last epoch counts, and within it the last version.
    lower = replace(PUBLICATION, version=120, epoch=1, phase="aborted", ended_at=9.0)
    open_one = replace(PUBLICATION, version=7, epoch=3)
    await store.apply([PutRecord(a_record("a")), *map(PutRecord, [*ended, lower, open_one])])

    assert [each.version for each in await store.publications("a", live_at=60)] == [7, 60]
    assert [each.version for each in await store.publications("a", live_at=0)] == [7]
    assert [each.version for each in await store.publications("nobody", live_at=0)] == []
    await store.apply([PutRecord(replace(open_one, epoch=1, ended_at=3.0))])
    assert [each.version for each in await store.publications("a", live_at=60)] == [60, 99]


def measured(step: int) -> PutMetrics:
    return PutMetrics("a", [a_point("reward/mean", step, 0.5)])


async def steps_of(store: Store) -> list[int]:
    return [point.step for _, point in await store.metrics("a", names=[], after=0, limit=9)]


async def test_what_was_measured_is_stored_with_the_next_change_and_before_anybody_reads(store: Store) -> None:
    store.write_soon(PutWindow("a", "w", {"at": 1}), measured(1))
    store.write_soon(PutWindow("a", "w", {"at": 2}))
    assert await store.window("a", "w") == {"at": 2}

    store.write_soon(measured(2))
    async with store.transaction() as change:
        change.write(measured(3))
    assert await steps_of(store) == [1, 2, 3]

    store.write_soon(measured(4))
    async with store.transaction() as change:
        change.write(DeleteExperiment("a"))
    assert await steps_of(store) == [], "the measurements of an experiment go with it"


async def test_a_part_that_goes_along_and_fails_takes_no_other_change_with_it(store: Store) -> None:
    def fails(change: Transaction) -> None:
        change.write(measured(1))
        raise KeyError("gone")

    store.stage_soon(fails)
    store.stage_soon(lambda change: change.write(measured(2)))
    async with store.transaction() as change:
        change.write(measured(3))

    assert await steps_of(store) == [2, 3]


async def test_what_was_measured_is_stored_soon_without_another_change(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = asyncio.Event()
    original = store.apply

    async def apply(writes: Sequence[Write]) -> list[Event]:
        found = await original(writes)
        stored.set()
        return found

    monkeypatch.setattr(store, "apply", apply)
    store.write_soon(measured(1))

    await asyncio.wait_for(stored.wait(), 10)


async def test_what_is_measured_after_a_change_waits_half_a_second_of_its_own(store: Store) -> None:
    def stored_alone_at() -> float | None:
        timer = store._timer  # type: ignore[attr-defined]
        return None if timer is None else timer.when()

    store.write_soon(measured(1))
    first = stored_alone_at()
    async with store.transaction() as change:
        change.write(measured(2))
    assert stored_alone_at() is None, "nothing waits"

    await asyncio.sleep(0.01)
    store.write_soon(measured(3))
    second = stored_alone_at()
    assert first is not None and second is not None and second > first
    store.write_soon(measured(4))
    assert stored_alone_at() == second, "the first of those that wait says when"


async def test_what_a_database_refused_to_take_for_a_while_is_stored_without_another_change(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "SOON_SECONDS", 0.05)
    original, answers = store.apply, False

    async def apply(writes: Sequence[Write]) -> list[Event]:
        if not answers:
            raise Unavailable("the disk is full")
        return await original(writes)

    monkeypatch.setattr(store, "apply", apply)
    store.write_soon(measured(1))
    with pytest.raises(Unavailable):
        async with store.transaction() as change:
            change.write(measured(2))
    answers = True

    async with asyncio.timeout(10):
        while store._soon:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
    assert await steps_of(store) == [1]


async def test_what_was_measured_waits_for_a_database_and_is_stored_when_it_closes(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'gateway.sqlite'}"
    store = await SqlStore.open(url)
    original, answers = store._apply, False

    def apply(writes: Sequence[Write]) -> list[Event]:
        if not answers:
            raise Unavailable("the disk is full")
        return original(writes)

    store._apply = apply  # type: ignore[method-assign]
    store.write_soon(measured(1))
    with pytest.raises(Unavailable):
        await store.store_waiting()
    answers = True
    store.write_soon(measured(2))
    await store.close()

    again = await SqlStore.open(url)
    assert await steps_of(again) == [1, 2]
    await again.close()


async def test_neither_a_change_nor_what_was_measured_keeps_the_other_from_being_stored(tmp_path: Path) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path / 'gateway.sqlite'}")
    refused = measured(2**70)
    store.write_soon(measured(1))
    with pytest.raises(InvalidRequest):
        async with store.transaction() as change:
            change.write(refused)
    assert await steps_of(store) == [1]

    store.write_soon(refused)
    async with store.transaction() as change:
        change.write(measured(2))
    assert await steps_of(store) == [1, 2]
    await store.close()
