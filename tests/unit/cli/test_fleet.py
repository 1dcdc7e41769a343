"""A fleet that cannot have its directory leaves it as it is; one that does not come up says who is missing."""

import fcntl
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla.cli import fleet as module
from flotilla.cli.commands import fleet as commands
from flotilla.cli.fleet import FleetOptions, LocalFleet
from flotilla.cli.processes import OwnedProcess, ProcessSpec
from flotilla.connection import FLEET_FILE
from flotilla.shared.errors import Conflict, InvalidRequest, Unavailable
from flotilla.shared.net.client.client import GatewayClient
from tests.unit.cli.test_progress import a_rollout


async def begin(data: Path) -> None:
    async with LocalFleet(FleetOptions(data, port=0), lambda line: None):
        raise AssertionError("nothing should have started")


async def test_a_second_fleet_leaves_the_note_of_the_first(tmp_path: Path) -> None:
    """Else nobody finds the first one any more, and `flotilla down` cannot end it."""
    (tmp_path / FLEET_FILE).write_text("of the first")
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        with pytest.raises(Conflict, match=r"another fleet runs with .*: end it with `flotilla down"):
            await begin(tmp_path)

    assert (tmp_path / FLEET_FILE).read_text() == "of the first"


@pytest.mark.parametrize("name", ["file", "file/below"])
async def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")

    with pytest.raises(InvalidRequest, match=f"{name} cannot become a directory: a file is in its place"):
        await begin(tmp_path / name)

    assert (tmp_path / "file").read_text() == "mine"


def test_a_detached_fleets_directory_is_for_its_user_alone(tmp_path: Path) -> None:
    """It holds tokens, specs with passwords, and what the model wrote."""
    log = commands._make_log(tmp_path / "data")

    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    assert log.parent.is_dir()


class Waiting(LocalFleet):
    """A fleet of two processes that do nothing, of which the gateway knows as many as it is told."""

    async def _start(self) -> None:
        self.gateway_url, self._token = "http://gateway", "token"
        for name in ("gateway", "trainer", "rollout-0"):
            spec = ProcessSpec(name, (sys.executable, "-c", "import time; time.sleep(60)"), {})
            self._processes.append(OwnedProcess(spec, self.options.data / f"{name}.log", self._say))
            await self._processes[-1].start()
        await self._wait_until_ready()

    def pid_of(self, name: str) -> int | None:
        return next(each.pid for each in self._processes if each.spec.name == name)


def serve_services(monkeypatch: pytest.MonkeyPatch, pids: Callable[[], list[int | None]]) -> None:
    async def call(client: GatewayClient, method: str, path: str, **_: Any) -> Any:
        if path == "/readyz":
            return {"status": "ready"}
        rollouts = [a_rollout("r1").model_copy(update={"pid": pid}) for pid in pids()]
        return {"items": [each.model_dump(mode="json") for each in rollouts]}

    monkeypatch.setattr(GatewayClient, "call", call)


@pytest.mark.parametrize(("registered", "missing"), [(("trainer",), "rollout-0"), ((), "trainer, rollout-0")])
async def test_who_has_not_registered_is_named_while_it_is_waited_for_and_at_the_end(
    registered: tuple[str, ...], missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    fleet = Waiting(FleetOptions(tmp_path), said.append)

    # Another one is of an earlier fleet on the same directory, and so are as many as are wanted.
    serve_services(monkeypatch, lambda: [1, 1, *map(fleet.pid_of, registered)])
    monkeypatch.setattr(module, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(module, "START_SECONDS", 0.5)

    with pytest.raises(Unavailable, match=f"did not come up within \\d+ s: {missing} did not register; see "):
        async with fleet:
            pass

    assert f"waiting    for {missing} (0 s)" in said


async def test_a_fleet_is_up_once_all_have_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Waiting(FleetOptions(tmp_path), lambda line: None)

    serve_services(monkeypatch, lambda: [fleet.pid_of("trainer"), fleet.pid_of("rollout-0")])

    async with fleet:
        assert fleet.pid_of("trainer") is not None


def test_a_fleet_that_lends_has_one_more_rollout_on_the_devices_of_its_trainer(tmp_path: Path) -> None:
    fleet = LocalFleet(FleetOptions(tmp_path, lends=True), lambda _: None)

    fleet._add_services(
        {"PATH": "/bin"}, {"trainer": [{"FLOTILLA_DEVICES": "1"}], "rollout": [{"FLOTILLA_DEVICES": "0"}]}
    )

    started = {each.spec.name: each.spec.environment for each in fleet._processes}
    assert list(started) == ["trainer", "rollout-0", "rollout-lent", "reward", "sandbox"]
    assert [started[name].get("FLOTILLA_POOL") for name in ("rollout-0", "rollout-lent")] == [None, "lent"]
    assert [started[name]["FLOTILLA_DEVICES"] for name in ("rollout-0", "rollout-lent")] == ["0", "1"]
