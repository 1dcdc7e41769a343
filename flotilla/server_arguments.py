"""Whether the server of an engine knows the options that a spec gives it, asked before anything starts."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from flotilla.services.rollout.engines.servers import arguments_reader
from flotilla.services.rollout.engines.servers.settings import clean_environment, flags, plain_names
from flotilla.shared.config.sections.engine import ServerEngineConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.environment.settings import engine_pythons_from
from flotilla.shared.errors import InvalidSpec

READER = Path(arguments_reader.__file__)
ASK_SECONDS = 90.0
ASKING_THE_ENGINE = "asking the engine's own parser whether it knows rollout.engine.options"
"""What is waited for meanwhile."""
USAGE_EXIT_CODE = 2
"""Of a parser that refuses its arguments."""


async def check_options(spec: ExperimentSpec, environment: Mapping[str, str] = os.environ) -> None:
    """Let the server's own parser read the options, where an interpreter with it is known here.

    A parser that cannot be asked, or not in time, is no verdict: the server itself reads them when it starts.

    Raises:
        InvalidSpec: it refuses them; the detail has its words.
    """
    engine = spec.rollout.engine
    if not isinstance(engine, ServerEngineConfig) or not engine.options:
        return
    python = engine_pythons_from(environment).get(engine.kind)
    if python is None:
        return
    words = flags(plain_names(engine.options), negates=engine.kind == "vllm")
    code, output = await _ask([str(python), str(READER), engine.kind, *words], clean_environment(environment))
    if code == USAGE_EXIT_CODE:
        lines = output.strip().splitlines() or ["no words of its own"]
        why = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])
        raise InvalidSpec(f"rollout.engine.options: the {engine.kind} server refuses them: {why.strip()}")


async def _ask(command: list[str], environment: Mapping[str, str]) -> tuple[int | None, str]:
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # Without a GPU: the server may hold all of its memory, and nothing is computed.
            env={**environment, "CUDA_VISIBLE_DEVICES": "", "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"},
        )
    except OSError:
        return None, ""
    try:
        async with asyncio.timeout(ASK_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        return None, ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode(errors="replace")
