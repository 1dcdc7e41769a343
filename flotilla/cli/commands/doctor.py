"""``flotilla doctor``: whether a fleet can run on this machine, and what to do where it cannot."""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import secrets
import shutil
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import psutil
from pydantic import SecretStr

from flotilla.cli import machine
from flotilla.cli.commands.fleet_examination import examine
from flotilla.cli.fleet import check_port
from flotilla.cli.machine import Finding, Gpu, TorchFacts, Verdict
from flotilla.cli.output import new_console, table_of, telling, write_json
from flotilla.cli.redis_server import find_server, server_version
from flotilla.connection import FleetInfo
from flotilla.defaults import DEFAULT_PORT
from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.services.sandbox.state import open_state
from flotilla.shared.children.processes import reap
from flotilla.shared.environment.settings import allows_volatile_redis, secret_from
from flotilla.shared.errors import FlotillaError
from flotilla.shared.host.control_groups import available_bytes
from flotilla.shared.streams.redis.connection import check_server

TORCH_SECONDS = 120.0
SANDBOX_SECONDS = 60.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
DRIVER = Path("/proc/driver/nvidia")
EXTRAS = {
    "matplotlib": "plots",
    "pyarrow": "parquet data",
    "fsspec": "data at URLs",
    "huggingface_hub": "names of the hub",
    "math_verify": "the math grader",
    "jsonschema": "the JSON schema grader",
    "psycopg": "PostgreSQL",
    "bitsandbytes": "4-bit weights beside adapters",
}
ASK_TORCH = """
import json, torch, transformers
devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
seen = [torch.cuda.get_device_properties(number) for number in devices]
print(json.dumps([
    torch.__version__, torch.version.cuda, transformers.__version__,
    [[each.name, each.total_memory] for each in seen],
]))
"""


async def doctor(arguments: argparse.Namespace) -> int:
    """Check this machine, or a whole fleet; 1 if something required is missing."""
    if arguments.fleet:
        return await examine(arguments)
    async with telling("importing torch and trying the sandbox"):
        findings = await look(Path(arguments.data))
    is_ready = all(each.verdict is not Verdict.MISSING for each in findings)
    if arguments.json:
        write_json({"is_ready": is_ready, "checks": [asdict(each) for each in findings]})
    else:
        _show(findings, is_ready=is_ready)
    return 0 if is_ready else 1


async def look(data: Path) -> list[Finding]:
    """Check everything that a fleet with this data directory needs."""
    torch, sandbox, redis = await asyncio.gather(_ask_torch(), _sandbox(), _redis())
    return [
        machine.judge_python(tuple(sys.version_info[:3]), sys.executable),
        *_software(torch),
        redis,
        sandbox,
        *_resources(data),
    ]


def _software(torch: TorchFacts | str) -> list[Finding]:
    extras = {name: what for name, what in EXTRAS.items() if find_spec(name) is None}
    return [
        machine.judge_torch(torch),
        machine.judge_gpu(torch, has_driver=DRIVER.exists()),
        machine.judge_extras(extras),
    ]


def _resources(data: Path) -> list[Finding]:
    memory = psutil.virtual_memory()
    place = _existing(data)
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    return [
        _port(data),
        machine.judge_memory(available_bytes(), memory.total, len(os.sched_getaffinity(0))),
        machine.judge_disk(shutil.disk_usage(place).free, place),
        machine.judge_shared_memory(shared),
        machine.judge_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
    ]


def _show(findings: list[Finding], *, is_ready: bool) -> None:
    console = new_console()
    console.print(table_of(("", "verdict", "found"), [(each.name, each.verdict, each.found) for each in findings]))
    for each in findings:
        if each.advice:
            console.print(f"{each.name}: {each.advice}", markup=False)
    console.print("a fleet can run here" if is_ready else "a fleet cannot run here until what is missing is there")


async def _ask_torch() -> TorchFacts | str:
    """Ask torch about itself in a process of its own: its import takes seconds, and may end the process."""
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            return f"{name} is not installed"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", ASK_TORCH), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(TORCH_SECONDS):
            output, complaint = await process.communicate()
    except TimeoutError:
        return f"torch was not imported within {TORCH_SECONDS:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            await reap(process)
    if process.returncode != 0:
        lines = complaint.decode("utf-8", "replace").strip().splitlines()
        return f"torch cannot be imported: {lines[-1] if lines else f'exit code {process.returncode}'}"
    version, cuda, transformers, devices = json.loads(output)
    return TorchFacts(version, cuda, transformers, [Gpu(*each) for each in devices])


async def _sandbox() -> Finding:
    """Try the levels of isolation, as a sandbox service does at its start."""
    settings = SandboxSettings(token=SecretStr(secrets.token_hex()), concurrency=1)
    try:
        async with asyncio.timeout(SANDBOX_SECONDS), open_state(settings) as state:
            why_not = {level.value: reason for level, reason in state.unavailable.items()}
            return machine.judge_sandbox(state.executor.isolation.level.value, why_not, "")
    except (FlotillaError, TimeoutError, OSError) as error:
        return machine.judge_sandbox(None, {}, str(error) or "its self-test did not end in time")


async def _redis() -> Finding:
    url: str | None = None
    try:
        url = secret_from(os.environ, "FLOTILLA_REDIS_URL") or None
        if url is not None:
            found = await check_server(url, may_be_volatile=allows_volatile_redis(os.environ))
            return machine.judge_redis(found, "", url)
        binary = find_server()
        version = server_version(binary) or ()
        return machine.judge_redis(f"{binary.name} {'.'.join(map(str, version))}", "", None)
    except FlotillaError as error:
        return machine.judge_redis(None, error.detail, url)


def _port(data: Path) -> Finding:
    own, problem = None, None
    with contextlib.suppress(FlotillaError):
        own = FleetInfo.read(data).gateway_url
    try:
        check_port("127.0.0.1", DEFAULT_PORT)
    except FlotillaError as error:
        problem = error.detail
    return machine.judge_port(DEFAULT_PORT, problem, own)


def _existing(directory: Path) -> Path:
    """The directory itself, or its nearest existing parent."""
    path = directory.resolve()
    return next(each for each in (path, *path.parents) if each.is_dir())
