"""How a server's process is watched and ended; a shell script takes the server's place."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from flotilla.services.rollout.engines.servers.connection import ServerProcess
from flotilla.services.rollout.engines.servers.dialect import Launch
from flotilla.shared.errors import InvalidSpec, WorkerDied


def a_server(directory: Path, script: str) -> ServerProcess:
    program = directory / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    return made(program, directory)


def made(python: Path, directory: Path, **files: str) -> ServerProcess:
    launch = Launch((), {"PATH": os.defpath}, "http://127.0.0.1:1", files=files)
    return ServerProcess(python, launch, directory, name="SGLang", variable="FLOTILLA_SGLANG_PYTHON")


async def child_of(process_id: int | None) -> psutil.Process:
    async with asyncio.timeout(10):
        while True:
            children = psutil.Process(process_id).children()
            if children:
                return children[0]
            await asyncio.sleep(0.01)


async def family_of(server: ServerProcess) -> tuple[psutil.Process, psutil.Process]:
    """Find its first process and that one's child, once there are both."""
    first = await child_of(server.process_id)
    return first, await child_of(first.pid)


async def test_arguments_that_are_refused_are_told_in_the_servers_words(tmp_path: Path) -> None:
    server = a_server(tmp_path, "echo usage: many lines; echo 'x.py: error: unrecognized arguments: --foo' >&2; exit 2")
    await server.start()

    error = await server.ended()

    assert isinstance(error, InvalidSpec)
    assert "rollout.engine.options: x.py: error: unrecognized arguments: --foo" in error.detail
    await server.close(1.0)


async def test_a_death_is_known_at_once_with_its_last_lines_though_a_child_lives(tmp_path: Path) -> None:
    server = a_server(tmp_path, "echo loaded; sleep 1000 & wait")
    await server.start()
    first, child = await family_of(server)

    first.kill()

    async with asyncio.timeout(10):
        error = await server.ended()
    assert isinstance(error, WorkerDied)
    assert error.detail == "the SGLang server ended by signal SIGKILL; last lines: loaded"
    await server.close(1.0)
    await asyncio.to_thread(child.wait, 10)


async def test_a_server_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    server = a_server(tmp_path, "trap '' TERM; sleep 1000 & while :; do wait; done")
    await server.start()
    _, child = await family_of(server)

    await server.close(0.1)

    assert server.process_id is None
    await asyncio.to_thread(child.wait, 10)


async def test_a_server_whose_keeper_is_killed_is_dead_and_its_children_end_with_it(tmp_path: Path) -> None:
    server = a_server(tmp_path, "trap '' TERM; sleep 1000 & while :; do wait; done")
    await server.start()
    first, child = await family_of(server)
    assert server.process_id is not None

    os.kill(server.process_id, signal.SIGKILL)

    assert isinstance(await server.ended(), WorkerDied)
    await server.close(1.0)
    for each in (first, child):
        await asyncio.to_thread(each.wait, 10)


async def test_children_may_tidy_up_after_the_first_process_has_ended(tmp_path: Path) -> None:
    tidies = "trap 'sleep 0.3; touch tidy; exit' TERM; touch ready; while :; do sleep 0.05; done"
    server = a_server(tmp_path, f'sh -c "{tidies}" & trap "exit 0" TERM; while :; do wait; done')
    await server.start()
    async with asyncio.timeout(10):
        while not (tmp_path / "ready").exists():
            await asyncio.sleep(0.01)

    await server.close(10.0)

    assert (tmp_path / "tidy").exists()


async def test_lines_without_an_end_do_not_block_the_server(tmp_path: Path) -> None:
    server = a_server(tmp_path, "head -c 3000000 /dev/zero | tr '\\0' 'x'; echo; echo last; exit 3")
    await server.start()

    error = await server.ended()

    assert isinstance(error, WorkerDied)
    assert error.detail.endswith("| last")
    assert len(error.detail) < 1000
    await server.close(1.0)


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            [
                "(EngineCore pid=7) ERROR [core.py:9] ValueError: Head size 24 is not supported",
                "(APIServer pid=5) ERROR EngineDeadError: an issue. See stack trace (above) for the root cause.",
                "(APIServer pid=5) WARNING [base.py:380] ValueError: Tokenizer not available",
                "(APIServer pid=5)   File api_server.py",
                "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.",
            ],
            "ValueError: Head size 24 is not supported",
        ),
        (
            [
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
                "  Value error, Model architectures [Foo] are not supported for now.",
                "    For further information visit https://errors.pydantic.dev",
            ],
            "Value error, Model architectures [Foo] are not supported for now.",
        ),
    ],
)
async def test_the_error_that_ended_it_is_told_not_the_lines_after_it(
    tmp_path: Path, lines: list[str], cause: str
) -> None:
    said = "\n".join([*lines, *("  frame" for _ in range(30))])
    server = a_server(tmp_path, f"cat <<END\n{said}\nEND\nexit 1")
    await server.start()

    error = await server.ended()

    assert isinstance(error, WorkerDied)
    assert error.detail == f"the SGLang server ended by exit code 1: {cause} (more is in the rollout's log)"
    await server.close(1.0)


async def test_an_interpreter_that_is_none_is_named(tmp_path: Path) -> None:
    server = made(tmp_path / "nothing", tmp_path)
    await server.start()

    error = await server.ended()

    assert isinstance(error, WorkerDied)
    assert error.detail == (f"FLOTILLA_SGLANG_PYTHON {tmp_path}/nothing cannot be started: No such file or directory")
    await server.close(1.0)


async def test_what_it_keeps_secret_is_for_its_user_alone(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o700)
    server = made(program, tmp_path, key="secret")
    await server.start()
    await server.close(1.0)

    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "key").read_text() == "secret"
