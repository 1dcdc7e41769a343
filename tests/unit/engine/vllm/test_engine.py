"""What the vLLM engine adds to the contract: what its server sees and in which order, and which servers it takes."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from flotilla.services.gateway.scheduler.demands import engine_to_start
from flotilla.services.rollout.engines.opening import make_engine, offers, server_settings
from flotilla.services.rollout.engines.servers.settings import AdapterSettings, ServerSettings
from flotilla.services.rollout.engines.vllm.engine import VllmEngine
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.sections.engine import VllmEngineConfig
from flotilla.shared.errors import InvalidSpec, ModelError, WorkerDied
from flotilla.shared.schemas.engine import EngineCapability
from tests.contract.engine.fake_vllm import FakeVllm
from tests.contract.engine.models import save_model
from tests.contract.engine.requests import a_request
from tests.unit.gateway.builders import a_spec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model("qwen3", path)
    return path


@pytest.fixture
def server(model: Path) -> FakeVllm:
    return FakeVllm(model, context_length=128)


@pytest.fixture
def settings(model: Path) -> ServerSettings:
    return ServerSettings(model, url="http://recorded", context_tokens=128, version=3, probe_seconds=60)


@pytest.fixture
async def engine(server: FakeVllm, settings: ServerSettings) -> AsyncIterator[VllmEngine]:
    made = VllmEngine(settings, transport=server)
    await made.start()
    server.calls.clear()
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("mode", "clears"),
    [(OnWeightUpdate.INTERRUPT, "true"), (OnWeightUpdate.DRAIN, "true"), (OnWeightUpdate.CONTINUE, "false")],
)
async def test_an_update_is_pause_label_load_look_resume(
    engine: VllmEngine, server: FakeVllm, model: Path, mode: OnWeightUpdate, clears: str
) -> None:
    await engine.load_weights(model / "model.safetensors", 4, mode)

    asked = [path for path, _ in server.calls]
    assert asked == ["/pause", "/update_weight_version", "/collective_rpc", "/weight_info", "/resume"]
    assert server.paused_with == {"mode": "keep", "clear_cache": clears}
    assert server.label.startswith("4-")
    [completion] = await engine.generate(a_request(max_new_tokens=1))
    assert completion.versions == ((0, 4),)
    assert server.calls[-1][1] is not None
    assert server.calls[-1][1]["cache_salt"] == "4"


def test_a_server_is_told_of_adapters_that_are_published_alone_and_only_then() -> None:
    for lora, expected in (("adapters", AdapterSettings("tiny", 6)), ("merged", None)):
        spec = a_spec(
            model={"path": "/nowhere/model", "lora": {"rank": 6}},
            rollout={"engine": {"kind": "vllm"}},
            asynchrony={"publication": {"lora": lora}},
        )
        assert isinstance(spec.rollout.engine, VllmEngineConfig)
        assert server_settings(spec, spec.rollout.engine, Path("python"), ()).adapters == expected
        assert engine_to_start(spec) == ("vllm with adapters" if expected else "vllm")
    assert {offer.kind for offer in offers({}, has_gpus=False) if offer.takes_adapters} == {"torch", "vllm"}


async def test_an_update_that_the_server_cannot_load_is_the_engines_death(
    engine: VllmEngine, server: FakeVllm, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_shapes", {})  # As if the server were of another model than the directory.

    with pytest.raises(WorkerDied, match=r"version 4 could not be loaded: .*shape mismatch"):
        await engine.load_weights(model / "model.safetensors", 4, OnWeightUpdate.INTERRUPT)

    with pytest.raises(WorkerDied):
        await engine.generate(a_request())


async def test_it_sleeps_without_weights_and_wakes_with_those_it_is_given(
    engine: VllmEngine, server: FakeVllm, model: Path
) -> None:
    await engine.sleep()
    assert server.asleep == {"weights", "kv_cache"}

    await engine.load_weights(model / "model.safetensors", 4, OnWeightUpdate.INTERRUPT)

    asked = [path for path, _ in server.calls]
    loads = ["/update_weight_version", "/collective_rpc", "/weight_info"]
    assert asked == ["/sleep", "/wake_up", *loads, "/wake_up"]
    assert (server.asleep, server.label.partition("-")[0]) == (set(), "4")


async def test_a_server_that_was_left_asleep_is_woken(
    engine: VllmEngine, server: FakeVllm, settings: ServerSettings
) -> None:
    await engine.sleep()
    await engine.close()

    again = VllmEngine(settings, transport=server)
    await again.start()

    assert server.asleep == set()
    [completion] = await again.generate(a_request(max_new_tokens=1))
    assert completion.versions == ((0, 3),)
    await again.close()


async def test_a_server_that_does_not_go_to_sleep_is_the_engines_death(
    engine: VllmEngine, server: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(server._routes, "POST /sleep", lambda _: httpx.Response(500, json={"error": "no memory"}))

    with pytest.raises(WorkerDied, match=r"did not go to sleep: .*no memory"):
        await engine.sleep()

    with pytest.raises(WorkerDied):
        await engine.wake()


async def test_a_sleeping_server_is_not_asked_for_its_health(
    server: FakeVllm, settings: ServerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = VllmEngine(replace(settings, probe_seconds=0.001), transport=server)
    await engine.start()
    await engine.sleep()
    server.calls.clear()

    await asyncio.sleep(0.05)

    assert server.calls == []
    await engine.close()


async def test_a_running_server_gets_the_initial_weights_and_their_label(engine: VllmEngine, server: FakeVllm) -> None:
    assert server.label.startswith("3-")


async def test_tokens_that_others_had_are_not_counted(server: FakeVllm, settings: ServerSettings) -> None:
    server._num_generated = 1000
    engine = VllmEngine(settings, transport=server)
    await engine.start()

    await engine.generate(a_request(max_new_tokens=5))

    assert (await engine.load()).generated_tokens == 5
    await engine.close()


async def test_a_server_that_was_started_otherwise_is_refused_with_what_it_lacks(
    model: Path, settings: ServerSettings
) -> None:
    async def start(server: FakeVllm, *, raw: bool = False) -> None:
        await VllmEngine(settings, transport=server, raw=raw).start()

    async def share(server: FakeVllm) -> None:
        await VllmEngine(replace(settings, sleeps=True), transport=server).start()

    small, closed, wrong = FakeVllm(model, context_length=127), FakeVllm(model), FakeVllm(model)
    sleepless = FakeVllm(model)
    sleepless.enable_sleep_mode = False
    closed.has_scale_out = False
    wrong.logprobs_mode = "raw_logprobs"

    with pytest.raises(ModelError, match="start it with --max-model-len 128"):
        await start(small)
    with pytest.raises(ModelError, match="--enable-scale-out"):
        await start(closed)
    with pytest.raises(ModelError, match="--logprobs-mode processed_logprobs"):
        await start(wrong)
    with pytest.raises(ModelError, match="--logprobs-mode raw_logprobs"):
        await start(FakeVllm(model), raw=True)
    await start(sleepless)
    with pytest.raises(ModelError, match=r"resources\.sharing time asks: start it on a GPU with --enable-sleep-mode"):
        await share(sleepless)


def test_the_spec_decides_which_log_probs_the_server_gives(tmp_path: Path) -> None:
    def mode_of(**sampling: float) -> str:
        rollout = {"engine": {"kind": "vllm"}, "sampling": sampling}
        algorithm = {"old_log_probs": "recompute"}
        engine = make_engine(a_spec(rollout=rollout, algorithm=algorithm), {"vllm": tmp_path / "python"})
        assert isinstance(engine, VllmEngine)
        arguments = engine._dialect.launch(engine._settings, Path("/place"), 100, "3-mark").arguments
        return arguments[arguments.index("--logprobs-mode") + 1]

    assert mode_of(temperature=0.7) == "processed_logprobs"
    cuts = ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1})
    assert {mode_of(**cut) for cut in cuts} == {"raw_logprobs"}
    assert {mode_of(**cut, temperature=0.7) for cut in cuts} == {"processed_logprobs"}


@pytest.mark.parametrize("has_gpus", [False, True])
def test_servers_lend_memory_where_there_is_a_gpu_alone(has_gpus: bool) -> None:
    pythons = {kind: Path("/python") for kind in ("sglang", "vllm")}

    offered = {offer.kind: EngineCapability.SLEEP in offer.capabilities for offer in offers(pythons, has_gpus=has_gpus)}

    assert offered == {"torch": True, "sglang": has_gpus, "vllm": has_gpus}


def test_a_service_says_which_engines_it_can_start() -> None:
    offered = {offer.kind: offer.can_start for offer in offers({"vllm": Path("/python")}, has_gpus=True)}

    assert offered == {"torch": True, "sglang": False, "vllm": True}
    with pytest.raises(InvalidSpec, match="needs FLOTILLA_SGLANG_PYTHON"):
        make_engine(a_spec(rollout={"engine": {"kind": "sglang"}}), {"vllm": Path("/python")})


def test_a_busy_machine_gives_a_server_more_time_to_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VllmEngineConfig(kind="vllm", url="http://127.0.0.1:30000", start_seconds=40.0)
    spec = a_spec(model={"path": str(model), "dtype": "float32"}, rollout={"engine": engine.model_dump()})
    assert server_settings(spec, engine, None, ()).start_seconds == 40.0

    monkeypatch.setenv("FLOTILLA_START_PATIENCE", "3")

    assert server_settings(spec, engine, None, ()).start_seconds == 120.0
