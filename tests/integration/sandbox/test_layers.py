"""Each layer alone: what two layers stop must be stopped by either, or the loss of one would go unnoticed."""

import asyncio
import dataclasses
import tempfile
from pathlib import Path

import pytest

from flotilla.services.sandbox.guard.job import Confinement
from flotilla.services.sandbox.isolation import Isolation, Slot
from flotilla.shared.schemas.sandbox import RunStatus
from tests.integration.sandbox import attacks
from tests.integration.sandbox.running import a_sandbox, run

SECRET = "secret-of-the-service-55aa"
namespaces = pytest.mark.parametrize("level", ["A", "B"])


@pytest.fixture
def without_landlock_and_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Isolation.confinement

    def reduced(self: Isolation, slot: Slot) -> Confinement:
        return dataclasses.replace(whole(self, slot), readable=None, has_seccomp=False)

    monkeypatch.setattr(Isolation, "confinement", reduced)


@namespaces
@pytest.mark.usefixtures("without_landlock_and_filter")
async def test_the_namespaces_alone_hide_the_services_environment(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOTILLA_TOKEN", SECRET)

    async with a_sandbox(level) as state:
        answer = await run(state, attacks.ENVIRONMENT)

    assert answer.run_result is not None
    assert "\nself b" in (answer.run_result.stdout or "")
    assert "\n1 b" not in (answer.run_result.stdout or "")
    assert SECRET not in answer.model_dump_json()


@namespaces
@pytest.mark.usefixtures("without_landlock_and_filter")
async def test_the_private_root_alone_can_be_written_nowhere(level: str) -> None:
    async with a_sandbox(level) as state:
        answer = await run(state, attacks.WRITE_SYSTEM)

    assert answer.run_result is not None
    assert "BREACH" not in (answer.run_result.stdout or "")
    assert (answer.run_result.stdout or "").count("stopped") == 10


@namespaces
@pytest.mark.usefixtures("without_landlock_and_filter")
async def test_the_guard_alone_cannot_be_forged(level: str) -> None:
    async with a_sandbox(level) as state:
        answer = await run(state, attacks.FORGE)

    assert answer.status is RunStatus.FAILED
    assert answer.run_result is not None
    assert answer.run_result.return_code == -9
    assert "BREACH" not in (answer.run_result.stdout or "")


@namespaces
@pytest.mark.usefixtures("without_landlock_and_filter")
async def test_the_network_namespace_alone_reaches_nobody(level: str) -> None:
    connections = 0

    def count(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.close()

    server = await asyncio.start_server(count, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, a_sandbox(level) as state:
        answer = await run(state, attacks.NETWORK, stdin=f"{host} {port} none")

    assert answer.run_result is not None
    assert "stopped tcp" in (answer.run_result.stdout or "")
    assert "stopped outside" in (answer.run_result.stdout or "")
    assert connections == 0


@namespaces
@pytest.mark.usefixtures("without_landlock_and_filter")
async def test_the_private_root_alone_hides_the_hosts_files(level: str) -> None:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).chmod(0o644)
        file.write(b"of the host")
        file.flush()
        async with a_sandbox(level) as state:
            answer = await run(state, attacks.FILES, stdin=f"/etc/shadow /etc/passwd {file.name}")

    assert answer.run_result is not None
    assert (answer.run_result.stdout or "").count("stopped") == 3


@pytest.mark.parametrize("level", ["A", "B", "C"])
async def test_the_filter_alone_closes_the_network(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Isolation.confinement
    monkeypatch.setattr(
        Isolation, "confinement", lambda self, slot: dataclasses.replace(whole(self, slot), readable=None)
    )
    # The self-test would refuse a level that reads the host's files, which C does without Landlock.
    monkeypatch.setattr("flotilla.services.sandbox.install.SELF_TEST", "print('contained')")

    async with a_sandbox(level) as state:
        answer = await run(state, attacks.NETWORK, stdin="127.0.0.1 1 none")

    assert answer.run_result is not None
    assert (answer.run_result.stdout or "").count("Operation not permitted") == 5
