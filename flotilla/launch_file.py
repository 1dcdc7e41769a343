"""A launch file: an experiment spec, and what must be made before it can start.

``prepare`` is a command that this command line runs, never the gateway: it makes the model and the data that the spec
then names. ``{seed}`` anywhere in the file is replaced by the experiment's seed.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import Field, ValidationError

from flotilla.shared.children.processes import tie_to_parent
from flotilla.shared.config.base.model import Config
from flotilla.shared.config.load.overrides import Override, apply, in_environment, on_command_line, with_origins
from flotilla.shared.config.load.paths import resolve_paths
from flotilla.shared.config.load.spec_text import invalid_spec, parse_document, validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.environment.secret_variables import without_secrets
from flotilla.shared.errors import InvalidSpec, WorkerDied
from flotilla.shared.models.hub import fetched

SAY_SECONDS = 2.0


class PrepareConfig(Config):
    """A command that makes what the experiment needs."""

    command: tuple[str, ...] = Field(min_length=1)
    """Program and arguments, run in the launch file's folder; ``python`` is the interpreter that runs flotilla."""
    output: str
    """What the command makes; two runs never make it at the same time."""


@dataclass(frozen=True, slots=True)
class LaunchFile:
    """A validated launch file.

    Attributes:
        path: where it was read from.
        spec: the experiment, with absolute paths.
        prepare: what to run first, if anything.
        written: the file's own content.
        overrides: what replaced some of it, weakest first.
    """

    path: Path
    spec: ExperimentSpec
    prepare: PrepareConfig | None
    written: Mapping[str, Any]
    overrides: Sequence[Override]

    @property
    def document(self) -> dict[str, Any]:
        """The spec as it is sent to the gateway."""
        return self.spec.model_dump(mode="json")


def read_launch_file(
    path: Path, overrides: Sequence[str] = (), environment: Mapping[str, str] = MappingProxyType({})
) -> LaunchFile:
    """Read a launch file, or a plain spec.

    Args:
        overrides: ``KEY=VALUE``, strongest.
        environment: variables, of which those that begin with ``FLOTILLA_SPEC__`` override the file.

    Raises:
        InvalidSpec: it cannot be read or does not validate.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidSpec(f"cannot read {path}: it is no text (UTF-8)") from None
    except OSError as error:
        raise InvalidSpec(f"cannot read {path}: {error.strerror or error}") from None
    written = parse_document(text, source=str(path))
    layers = [*in_environment(environment), *on_command_line(overrides)]
    document = apply(written, layers)
    document = _fill_seed(document, document.get("seed", 0))
    wanted = document.pop("prepare", None)
    try:
        spec = validate_spec(resolve_paths(document, path.resolve().parent, made=_made_by(wanted)))
    except InvalidSpec as error:
        raise with_origins(error, layers) from None
    try:
        prepare = PrepareConfig.model_validate(wanted) if wanted is not None else None
    except ValidationError as error:
        raise invalid_spec(error, PrepareConfig, below="prepare") from None
    return LaunchFile(path.resolve(), spec, prepare, written, layers)


def _made_by(prepare: Any) -> str:
    output = prepare.get("output") if isinstance(prepare, Mapping) else None
    return output if isinstance(output, str) else ""


def _fill_seed(node: Any, seed: object) -> Any:
    if isinstance(node, str):
        return node.replace("{seed}", str(seed))
    if isinstance(node, Mapping):
        return {key: _fill_seed(value, seed) for key, value in node.items()}
    if isinstance(node, list):
        return [_fill_seed(value, seed) for value in node]
    return node


async def run_prepare(launch: LaunchFile, say: Callable[[str], None]) -> None:
    """Run the ``prepare`` command, passing its output on; ends with this process.

    Raises:
        WorkerDied: it failed; the detail has its last line.
    """
    if launch.prepare is None:
        return
    folder = launch.path.parent
    output = folder / launch.prepare.output
    output.parent.mkdir(parents=True, exist_ok=True)
    lock_path = output.parent / f".{output.name}.lock"
    with lock_path.open("w") as lock:
        await _lock(lock.fileno(), say)
        await _run(launch.prepare, folder, say)


async def fetch_model(spec: ExperimentSpec, say: Callable[[str], None]) -> None:
    """Download the model of a hub name into this machine's cache, saying how far it is; a directory needs nothing.

    Raises:
        ModelError, Unavailable: it cannot be had.
    """
    last = 0.0

    def tell(done_bytes: int, total_bytes: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SAY_SECONDS or done_bytes == total_bytes:
            last = time.monotonic()
            say(f"{spec.model.path}: {done_bytes / 1e6:.1f} of {total_bytes / 1e6:.1f} MB")

    if spec.model.is_hub_name:
        directory = await fetched(spec.model, tell)
        say(f"{spec.model.path} is in {directory}")


async def _lock(descriptor: int, say: Callable[[str], None]) -> None:
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not told:
                say("another run prepares the same model, waiting for it")
                told = True
            await asyncio.sleep(0.5)


async def _run(prepare: PrepareConfig, folder: Path, say: Callable[[str], None]) -> None:
    program, *arguments = prepare.command
    program = sys.executable if program == "python" else program
    environment = {
        **without_secrets(os.environ),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            *arguments,
            cwd=folder,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=tie_to_parent(),
        )
    except OSError as error:
        raise WorkerDied(f"prepare: {program} cannot be started: {error.strerror}") from None
    assert process.stdout is not None
    last = ""
    try:
        async for line in process.stdout:
            last = line.decode("utf-8", "replace").rstrip()
            say(last)
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if code != 0:
        raise WorkerDied(f"prepare ended with exit code {code}: {last}")
