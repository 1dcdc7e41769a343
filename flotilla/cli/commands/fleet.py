"""``flotilla up`` and ``down``: a fleet that stays."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from flotilla.cli.device_division import Wish, Wishes
from flotilla.cli.fleet import FleetOptions, LocalFleet, log_bounds_of, tinker_key
from flotilla.cli.output import new_console, telling
from flotilla.connection import FleetInfo, typed
from flotilla.packages import check_packages
from flotilla.shared.children.processes import python_module
from flotilla.shared.errors import Conflict, Forbidden, InvalidRequest, Unavailable
from flotilla.shared.models.hub import check_directory

DOWN_SECONDS = 40.0
DETACH_SECONDS = 100.0


async def up(arguments: argparse.Namespace) -> int:
    """Start a fleet and stay, or leave it running with ``--detach``."""
    check_packages()
    _tinker_model(arguments)
    console = new_console(to_stderr=arguments.json)
    data = Path(arguments.data)
    if arguments.detach:
        return await _detach(arguments, data)
    tinker_model = _tinker_model(arguments)
    # With --tinker only the services that it needs, and for experiments as many as are asked for.
    usual = 1 if tinker_model is None else 0
    options = FleetOptions(
        data=data,
        num_rollouts=arguments.rollouts or usual,
        num_trainers=arguments.trainers or usual,
        num_rewards=arguments.rewards or usual,
        num_sandboxes=0 if arguments.no_sandbox else arguments.sandboxes or usual,
        num_experiments=arguments.experiments,
        tinker_model=tinker_model,
        tinker_models=arguments.tinker_models,
        tinker_disk_gb=arguments.tinker_disk_gb,
        host=arguments.host,
        port=arguments.port,
        redis_url=arguments.redis_url,
        log_level=arguments.log_level,
        log_bounds=log_bounds_of(arguments),
        devices=Wishes(
            Wish(arguments.trainer_devices), Wish(arguments.rollout_devices), are_shared=arguments.share_devices
        ),
    )
    async with LocalFleet(options, lambda line: console.print(line, markup=False)) as fleet:
        console.print(f"gateway    {fleet.gateway_url}   token in {data / 'token'}   logs in {data / 'logs'}")
        if arguments.json:
            _print_json(fleet.info, is_tinker=tinker_model is not None)
        elif tinker_model is not None:
            console.print(f"tinker     base_url {fleet.gateway_url}   api_key in the answer of --json", markup=False)
        console.print("the fleet is up; Ctrl-C ends it")
        while True:
            fleet.check()
            await asyncio.sleep(0.5)


def _tinker_model(arguments: argparse.Namespace) -> Path | None:
    """Return the directory of the Tinker API's base model.

    Raises:
        InvalidRequest: one of --tinker and --model is missing.
        ModelError: there is no model.
    """
    if arguments.tinker is (arguments.model is None):
        raise InvalidRequest("--tinker and --model PATH go together")
    if not arguments.tinker and not (arguments.tinker_models is arguments.tinker_disk_gb is None):
        raise InvalidRequest("--tinker-models and --tinker-disk-gb go with --tinker")
    if arguments.model is None:
        return None
    model = Path(arguments.model).resolve()
    check_directory(model)
    return model


def _print_json(info: FleetInfo, *, is_tinker: bool) -> None:
    found = {"url": info.gateway_url} | ({"tinker_key": tinker_key(info.token)} if is_tinker else {})
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


async def _detach(arguments: argparse.Namespace, data: Path) -> int:
    console = new_console(to_stderr=arguments.json)
    running: FleetInfo | None = None
    with contextlib.suppress(Unavailable):
        running = FleetInfo.read(data)
    if running is not None:
        raise Conflict(f"a fleet runs already with the data directory {data} (pid {running.pid})")
    log_path = _make_log(data)
    rest = [argument for argument in sys.argv[1:] if argument not in {"--detach", "-d", "--json"}]
    console.print(f"a fleet starts; its log is {log_path}", markup=False)
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *python_module("flotilla", *rest),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "NO_COLOR": "1"},
        )
    try:
        info = await _until_up(process, data, log_path)
    except BaseException:
        # Ctrl-C too: what was started here is not left behind half started.
        try:
            await asyncio.shield(_end(process))
        except asyncio.CancelledError:
            # A second Ctrl-C: the fleet's own second one ends it at once.
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            raise
        raise
    console.print(
        f"the fleet is up: {info.gateway_url} (pid {info.pid}); `{typed('down', data)}` ends it", markup=False
    )
    if arguments.json:
        _print_json(info, is_tinker=arguments.tinker)
    return 0


async def _until_up(process: asyncio.subprocess.Process, data: Path, log_path: Path) -> FleetInfo:
    end = time.monotonic() + DETACH_SECONDS
    while time.monotonic() < end:
        if process.returncode is not None:
            raise Unavailable(f"the fleet did not start: {_last_line(log_path)}")
        with contextlib.suppress(Unavailable):
            info = FleetInfo.read(data)
            if info.pid == process.pid:
                return info
        await asyncio.sleep(0.2)
    raise Unavailable(f"the fleet did not come up within {DETACH_SECONDS:.0f} s; see {log_path}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a fleet in order; its own children end with it."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(DOWN_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _make_log(data: Path) -> Path:
    # As the fleet itself makes it: readable by its owner only.
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_path = data / "logs" / "fleet.log"
    log_path.parent.mkdir(exist_ok=True)
    return log_path


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("flotilla: ") if lines else "it said nothing"


async def down(arguments: argparse.Namespace) -> int:
    """End the fleet of a data directory."""
    console = new_console()
    info = FleetInfo.read(Path(arguments.data))
    try:
        with contextlib.suppress(ProcessLookupError):
            os.kill(info.pid, signal.SIGTERM)
    except PermissionError:
        raise Forbidden(f"the fleet of {info.data} (pid {info.pid}) belongs to another user, who may end it") from None
    end = time.monotonic() + DOWN_SECONDS
    async with telling(f"waiting for the end of the fleet (pid {info.pid}), at most {DOWN_SECONDS:.0f} s"):
        while info.is_running:
            if time.monotonic() > end:
                raise Unavailable(f"the fleet (pid {info.pid}) did not end within {DOWN_SECONDS:.0f} s")
            await asyncio.sleep(0.1)
    console.print(f"the fleet of {info.data} is down", markup=False)
    return 0
