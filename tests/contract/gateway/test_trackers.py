"""Every tracker keeps its cursor with its records; the two file formats are read back by rules of their own."""

import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from flotilla.services.gateway.tracking import swanlab
from flotilla.services.gateway.tracking.base import Record, TrackedRun, Tracker
from flotilla.services.gateway.tracking.exporter import TrackerThread
from flotilla.services.gateway.tracking.opening import PACKAGES, open_tracker
from flotilla.services.gateway.tracking.tensorboard import crc32c
from flotilla.shared.config.sections.tracking import TrackerConfig
from flotilla.shared.errors import DeadlineExceeded, FlotillaError, Unavailable

CONFIGS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "jsonl": lambda folder: {},
    "tensorboard": lambda folder: {},
    "wandb": lambda folder: {"mode": "offline"},
    "trackio": lambda folder: {"project": "flotilla"},
    "swanlab": lambda folder: {"mode": "offline"},
    "mlflow": lambda folder: {"tracking_uri": f"sqlite:///{folder}/mlflow.db"},
}


def a_run(folder: Path) -> TrackedRun:
    return TrackedRun("tiny-1", "tiny", folder, {"name": "tiny", "optimisation": {"steps": 3}})


def opened(kind: str, folder: Path, **more: Any) -> Any:
    config = TypeAdapter[Any](TrackerConfig).validate_python({"kind": kind, **CONFIGS[kind](folder), **more})
    return open_tracker(config, a_run(folder))


def a_record(cursor: int, step: int, **values: float) -> Record:
    return Record(cursor, step, step, 1_700_000_000.5 + step, values or {"loss": 1 / step, "reward/mean": 0.5})


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.filterwarnings("ignore")
async def test_a_tracker_that_is_opened_again_stands_where_it_was(tmp_path: Path, kind: str) -> None:
    if kind in PACKAGES:
        pytest.importorskip(kind)
    thread = TrackerThread(kind)
    try:
        first: Tracker = await thread.run(lambda: opened(kind, tmp_path))
        assert await thread.run(first.cursor) == 0
        await thread.run(lambda: first.write([a_record(2, 1), a_record(4, 2)]))
        assert await thread.run(first.cursor) == 4
        await thread.run(first.close)

        second: Tracker = await thread.run(lambda: opened(kind, tmp_path))

        assert await thread.run(second.cursor) == 4
        await thread.run(lambda: second.write([a_record(6, 3)]))
        assert await thread.run(second.cursor) == 6
        await thread.run(second.close)
    finally:
        thread.end()


class Service:
    """What of Weights & Biases counts here: a run's rows by their step, of which older ones are ignored."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def init(self, **given: Any) -> "Service":
        self.resumed = bool(self.rows) and given["resume"] == "allow"
        self.starting_step = self.step = max(self.rows) + 1 if self.resumed else 0
        return self

    def log(self, values: dict[str, float], *, step: int, commit: bool) -> None:
        if step >= self.step and commit:
            self.rows[step], self.step = values, step + 1

    def define_metric(self, *_given: Any, **_named: Any) -> None: ...

    def finish(self) -> None: ...

    Settings = dict


def test_an_online_run_goes_on_after_what_the_service_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    records = [a_record(2, 1), a_record(4, 2), a_record(6, 2, loss=0.4), a_record(8, 3)]
    opened("wandb", tmp_path, mode="online").write(records[:3])
    # The gateway died before it had noted the last two, and the service has never got the last one.
    (tmp_path / "wandb" / "cursor").write_text("2")
    del service.rows[6]

    again = opened("wandb", tmp_path, mode="online")

    assert again.cursor() == 4
    again.write(records[1:])
    assert [service.rows[step]["step"] for step in sorted(service.rows)] == [1, 2, 2, 3]
    assert service.rows[6]["loss"] == 0.4


class Trackio:
    """What of Trackio counts here: rows by their step, of which the last is known where a run is resumed."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.is_away = False

    def init(self, **given: Any) -> "Trackio":
        assert given["resume"] == "allow" and given["name"] == "tiny-1"
        self._initial_last_step = max((step for step, _ in self.rows), default=None) if not self.is_away else None
        return self

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None: ...


@pytest.mark.parametrize(("is_away", "cursor"), [(False, 2), (True, 4)])
def test_a_run_of_trackio_goes_on_after_what_is_stored_or_after_what_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_away: bool, cursor: int
) -> None:
    service = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", service)
    opened("trackio", tmp_path).write([a_record(2, 1), a_record(4, 2)])
    # The gateway was killed before the last one was stored.
    service.rows.pop()
    service.is_away = is_away

    again = opened("trackio", tmp_path)

    assert again.cursor() == cursor
    again.write([a_record(6, 3)])
    assert [(step, values["train_step"]) for step, values in service.rows] == [(2, 1), (6, 3)]


@pytest.mark.parametrize("laid", ["link", "dangling", "folder", "pipe"])
def test_the_cursor_of_trackio_is_read_and_written_through_nothing_that_a_trainer_laid_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, laid: str
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", Trackio())
    other, run = tmp_path / "other", tmp_path / "run"
    (other / "trackio").mkdir(parents=True)
    (other / "trackio" / "cursor").write_text("7")
    run.mkdir()
    if laid == "folder":
        (run / "trackio").symlink_to(other / "trackio")
    else:
        (run / "trackio").mkdir()
        place = run / "trackio" / "cursor"
        if laid == "pipe":
            os.mkfifo(place)
        else:
            place.symlink_to(other / "trackio" / ("cursor" if laid == "link" else "missing"))

    with pytest.raises(OSError, match="without links"):
        opened("trackio", run)

    assert [(each.name, each.read_text()) for each in (other / "trackio").iterdir()] == [("cursor", "7")]


SWANLAB = """
import json, os, sys, threading

FILE = os.environ["SWANLAB_FILE"]


class Callback: ...


def Settings(**given):
    return given


class Record:
    def __init__(self, key):
        self.key = key


class Store:
    def ensure_flushed(self):
        told("flush")


class Run:
    def __init__(self, callback):
        self._callback, self._ctx, self.core, self._store = callback, self, self, Store()

    def log(self, values, step):
        told("log", step, values)
        if "lost" not in values:
            threading.Timer(0.05, self._callback.on_scalar_flush, [[Record(key) for key in values]]).start()

    def finish(self):
        told("finish")


def told(*what):
    with open(FILE, "a") as file:
        file.write(json.dumps(what) + chr(10))


def init(*, callbacks, settings, config, **given):
    if given["project"] == "refused":
        raise RuntimeError("no API key was provided")
    assert not settings["interactive"] and config["name"] == "tiny" and given["resume"] == "allow"
    told("init", given["id"], given["mode"])
    return Run(callbacks[0])
"""
"""What of SwanLab counts here: its thread takes what is logged a little later, and tells who asked to be told."""


def killed(tracker: Any) -> None:
    tracker._process.child.process.kill()
    tracker._loop.run(tracker._process.aclose())
    tracker._loop.close()


@pytest.fixture
def swanlab_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[Any]]]:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "swanlab.py").write_text(SWANLAB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "package"), prepend=os.pathsep)
    monkeypatch.setenv("SWANLAB_FILE", str(tmp_path / "told.jsonl"))
    return lambda: [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("mode", "cursor"), [("offline", 4), ("online", 0)])
def test_a_run_of_swanlab_goes_on_after_its_file_or_sends_again_what_was_not_closed(
    tmp_path: Path, swanlab_told: Callable[[], list[list[Any]]], mode: str, cursor: int
) -> None:
    first = opened("swanlab", tmp_path, mode=mode)
    first.write([a_record(2, 1, loss=1.0), a_record(4, 2, loss=0.5)])
    assert first.cursor() == 4
    killed(first)  # as its gateway's end would have it

    again = opened("swanlab", tmp_path, mode=mode)
    assert again.cursor() == cursor
    again.write([a_record(6, 3, loss=0.2)])
    again.close()
    closed = opened("swanlab", tmp_path, mode=mode)
    assert closed.cursor() == 6
    closed.close()

    assert swanlab_told()[:4] == [
        ["init", "tiny-1", mode],
        ["log", 1, {"loss": 1.0, "version": 1}],
        ["log", 2, {"loss": 0.5, "version": 2}],
        ["flush"],
    ]


@pytest.mark.usefixtures("swanlab_told")
def test_what_swanlab_does_not_take_is_an_error_and_no_cursor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swanlab, "WRITE_SECONDS", 0.5)
    tracker = opened("swanlab", tmp_path)
    with pytest.raises(DeadlineExceeded):
        tracker.write([a_record(2, 1, lost=1.0)])
    assert tracker.cursor() == 0
    with pytest.raises(FlotillaError):
        tracker.close()
    with pytest.raises(Unavailable, match="no API key was provided"):
        opened("swanlab", tmp_path, project="refused")


def test_swanlab_s_folder_is_no_link_that_a_trainer_laid_out(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "own" / "swanlab").symlink_to(tmp_path / "other")

    with pytest.raises(OSError, match="is a link"):
        opened("swanlab", tmp_path / "own")

    assert list((tmp_path / "other").iterdir()) == []


def test_the_file_of_swanlab_s_own_client_has_what_was_written_though_its_process_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record as Stored
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    tracker = opened("swanlab", tmp_path)
    tracker.write([a_record(2, 1, loss=1.0), a_record(4, 2, loss=0.5, **{"pass@4": 0.25}), a_record(6, 2, loss=9.0)])
    killed(tracker)

    (path,) = tmp_path.glob("swanlab/*/run-*.swanlab")
    reader = DataStoreReader()
    reader.open(path)
    stored = [Stored.FromString(each) for each in reader]
    reader.close()
    scalars = [(each.scalar.key, each.scalar.step, each.scalar.value.number) for each in stored if each.scalar.key]
    assert [each for each in scalars if each[0] != "version"] == [
        ("loss", 1, 1.0),
        ("loss", 2, 0.5),
        ("pass@4", 2, 0.25),
    ]


@pytest.mark.filterwarnings("ignore")
def test_an_offline_run_ignores_what_comes_again(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    tracker = opened("wandb", tmp_path)
    tracker.write([a_record(2, 1), a_record(4, 2, loss=0.5)])
    tracker.write([a_record(4, 2, loss=9.0)])

    assert tracker._run.step == 5
    assert tracker._run.summary["loss"] == 0.5
    tracker.close()


@pytest.mark.parametrize("rest", [b'{"step":3,"curs', b"{", b""])
def test_a_jsonl_file_loses_the_half_line_of_a_crash_and_nothing_else(tmp_path: Path, rest: bytes) -> None:
    tracker = opened("jsonl", tmp_path, directory=str(tmp_path / "shared"))
    tracker.write([a_record(2, 1), a_record(4, 2)])
    tracker.close()
    whole = tracker.path.read_bytes()
    tracker.path.write_bytes(whole + rest)

    again = opened("jsonl", tmp_path, directory=str(tmp_path / "shared"))

    assert again.path == tmp_path / "shared" / "tiny-1" / "metrics.jsonl"
    assert again.cursor() == 4 and again.path.read_bytes() == whole
    again.close()
    assert json.loads(whole.splitlines()[0]) == {
        "step": 1, "version": 1, "at": "2023-11-14T22:13:21.500Z", "cursor": 2,
        "values": {"loss": 1.0, "reward/mean": 0.5},
    }  # fmt: skip


def test_an_event_file_loses_what_no_mark_follows(tmp_path: Path) -> None:
    tracker = opened("tensorboard", tmp_path)
    tracker.write([a_record(2, 1), a_record(4, 200)])
    tracker.close()
    whole = tracker.path.read_bytes()
    more = opened("tensorboard", tmp_path)
    more.write([a_record(6, 3)])
    more.close()
    longer = tracker.path.read_bytes()

    for end in range(len(whole), len(longer)):
        tracker.path.write_bytes(longer[:end])
        again = opened("tensorboard", tmp_path)
        assert again.cursor() == 4 and again.path.read_bytes() == whole, end
        again.close()


def test_an_event_file_holds_what_tensorboard_reads(tmp_path: Path) -> None:
    tracker = opened("tensorboard", tmp_path)
    tracker.write([a_record(7, 300, loss=0.25, huge=1e300)])
    tracker.close()

    versions, scalars = read_events(tracker.path.read_bytes())

    assert ".tfevents." in tracker.path.name
    assert versions == ["brain.Event:2"]
    assert scalars[:1] == [(1_700_000_300.5, 300, "loss", 0.25)]
    assert scalars[1][2:] == ("huge", pytest.approx(3.4028235e38))


def test_the_checksum_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


def read_events(data: bytes) -> tuple[list[str], list[tuple[float, int, str, float]]]:
    """Read a file as the format says, with none of the writer's code."""
    versions, scalars = [], []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event, data = data[12 : 12 + length], data[16 + length :]
        fields = dict(fields_of(event))
        if 3 in fields:
            versions.append(fields[3].decode())
        if 5 in fields:
            value = dict(fields_of(dict(fields_of(fields[5]))[1]))
            (at,), (scalar,) = struct.unpack("<d", fields[1]), struct.unpack("<f", value[2])
            scalars.append((at, fields.get(2, 0), value[1].decode(), scalar))
    return versions, scalars


def fields_of(message: bytes) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        key = varint()
        if key & 7 == 0:
            found.append((key >> 3, varint()))
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        found.append((key >> 3, message[place : place + size]))
        place += size
    return found


@pytest.mark.parametrize(("kind", "name"), [("jsonl", "metrics.jsonl"), ("tensorboard", "tensorboard")])
def test_no_tracker_follows_a_link_that_a_trainer_made(tmp_path: Path, kind: str, name: str) -> None:
    kept = tmp_path / "kept"
    if kind == "jsonl":
        kept.write_text("not a record\n")
    else:
        kept.mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / name).symlink_to(kept)

    with pytest.raises(OSError, match="is a link"):
        opened(kind, tmp_path / "own")

    assert kept.read_text() == "not a record\n" if kind == "jsonl" else list(kept.iterdir()) == []
