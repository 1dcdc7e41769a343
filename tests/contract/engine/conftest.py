"""The engines that the contract is asked of: scripted, on a thread, in a process, and servers, recorded and real."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flotilla.pinned_engines import installed_version
from flotilla.services.rollout.engines.base import Engine, EngineLoad, GenerationRequest
from flotilla.services.rollout.engines.process.engine import ProcessEngine
from flotilla.services.rollout.engines.process.in_process import InProcessEngine
from flotilla.services.rollout.engines.scripted import ScriptedEngine
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.rollout.engines.sglang.engine import SglangEngine
from flotilla.services.rollout.engines.vllm.engine import VllmEngine
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.environment.settings import ENGINE_PYTHONS
from flotilla.shared.schemas.engine import EngineCapability
from tests.contract.engine.fake_sglang import FakeSglang
from tests.contract.engine.fake_vllm import FakeVllm
from tests.contract.engine.models import EOS, make_model, save_image, save_long_model

CONTEXT = 2048
SLOTS = 12
LONG = 1500


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_long_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image(make_model("qwen3-32", seed=1), tmp_path_factory.mktemp("image") / "new.safetensors")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One event loop for the module, since starting an engine takes seconds."""
    return "asyncio"


@pytest.fixture(scope="module")
def overlap_load() -> bool:
    """Whether the engines read weights while they sample; a module may say otherwise."""
    return False


HERE = ["scripted", "in-process", "process", "recorded-sglang", "recorded-vllm"]
ENGINES = [
    *HERE,
    pytest.param("sglang", marks=pytest.mark.sglang),
    pytest.param("vllm", marks=pytest.mark.vllm),
]


@pytest.fixture(scope="module", params=ENGINES)
def make_engine(request: pytest.FixtureRequest, model_path: Path, overlap_load: bool) -> Callable[[], Engine]:
    return maker_of(request.param, model_path, overlap_load)


def maker_of(kind: str, model_path: Path, overlap_load: bool) -> Callable[[], Engine]:
    """Return what makes an engine of ``ENGINES``, at version 3."""
    settings = EngineSettings(
        str(model_path), version=3, slots=SLOTS, context_tokens=CONTEXT, overlap_load=overlap_load
    )
    makers: dict[str, Callable[[], Engine]] = {
        "scripted": lambda: ScriptedEngine(version=3, slots=SLOTS, context_tokens=CONTEXT, eos_token_id=EOS),
        "in-process": lambda: InProcessEngine(settings),
        "process": lambda: ProcessEngine(settings),
        "recorded-sglang": lambda: recorded_sglang(model_path),
        "recorded-vllm": lambda: recorded_vllm(model_path),
        "sglang": lambda: SglangEngine(server_settings(model_path, "sglang", sleeps=True)),
        "vllm": lambda: VllmEngine(server_settings(model_path, "vllm", sleeps=True)),
    }
    return makers[kind]


def server_settings(model_path: Path, kind: str, **changes: Any) -> ServerSettings:
    """Say how a server of this model runs on a CPU; without ``python`` it is a real one."""
    facts = {"version": 3, "slots": SLOTS, "context_tokens": CONTEXT, **changes}
    if "python" not in facts:
        facts["python"] = python_of(kind)
    return ServerSettings(model_path, **facts)


def python_of(kind: str) -> Path:
    """Name the interpreter that has a real engine; leave the test out where there is none."""
    variable = ENGINE_PYTHONS[kind]
    if variable not in os.environ:
        pytest.skip(f"{variable} is not set")
    return Path(os.environ[variable])


def python_with_torchvision(kind: str) -> Path:
    """Name the interpreter of a real engine that takes images; leave the test out where there is none."""
    python = python_of(kind)
    if installed_version(python.parents[1], "torchvision") is None:
        pytest.skip(f"the environment of {kind} has no torchvision: make it again with `flotilla engine install`")
    return python


def recorded_sglang(model_path: Path) -> SglangEngine:
    """Make an SGLang engine whose server is in memory."""
    settings = server_settings(model_path, "sglang", python=None, url="http://recorded", sleeps=True)
    return SglangEngine(settings, transport=FakeSglang(model_path, slots=SLOTS, token_seconds=0.0003))


def recorded_vllm(model_path: Path) -> VllmEngine:
    """Make a vLLM engine whose server is in memory."""
    settings = server_settings(model_path, "vllm", python=None, url="http://recorded", sleeps=True)
    return VllmEngine(settings, transport=FakeVllm(model_path, slots=SLOTS, token_seconds=0.0003))


def needs(engine: Engine, capability: EngineCapability) -> None:
    """Leave a test out for an engine that does not promise what it is about."""
    if capability not in engine.capabilities:
        pytest.skip(f"the engine does not promise {capability.value}")


@pytest.fixture(scope="module")
async def started(make_engine: Callable[[], Engine]) -> AsyncIterator[Engine]:
    engine = make_engine()
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
async def engine(started: Engine, model_path: Path) -> Engine:
    """The module's engine, idle and at version 3."""
    assert (await started.load()).running == 0
    if (await started.load()).version != 3:
        await started.load_weights(model_path / "model.safetensors", 3, OnWeightUpdate.DRAIN)
    return started


async def until_running(engine: Engine, *, running: int, new_tokens: int = 0) -> None:
    """Wait until so many samples run and that many tokens were sampled since this call."""
    before = (await engine.load()).generated_tokens
    await _until(engine, lambda load: load.running == running and load.generated_tokens - before >= new_tokens)


async def begin_running(
    engine: Engine, request: GenerationRequest, *, running: int | None = None, new_tokens: int = 0
) -> asyncio.Task[Any]:
    """Begin a request of which so many samples run, or some; what was over before that was seen is begun again."""

    def runs(load: EngineLoad, task: asyncio.Task[Any], before: int) -> bool:
        there = load.running > 0 if running is None else load.running == running
        return task.done() or (there and load.generated_tokens - before >= new_tokens)

    for _ in range(20):
        before = (await engine.load()).generated_tokens
        task = asyncio.create_task(engine.generate(request))
        await _until(engine, partial(runs, task=task, before=before))
        if not task.done():
            return task
        await task
    pytest.fail(f"the engine never said that {'some' if running is None else running} samples run")


async def until_in_flight(engine: Engine) -> None:
    """Wait until a sample runs or waits to: a server that says seldom what runs may say so of no short one."""
    await _until(engine, lambda load: load.running + load.waiting > 0)


async def _until(engine: Engine, is_so: Callable[[EngineLoad], bool]) -> None:
    load = await engine.load()
    try:
        async with asyncio.timeout(120):
            while not is_so(load):
                await asyncio.sleep(0)
                load = await engine.load()
    except TimeoutError:
        pytest.fail(f"what is waited for was not seen; the last load was {load}")
