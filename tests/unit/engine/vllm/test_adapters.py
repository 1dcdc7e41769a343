"""Versions of adapters alone at a vLLM server: a model of its own for each, and what happens at the switch."""

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from flotilla.services.rollout.engines.servers.adapters import MAX_HELD, WEIGHTS_FILE, ServedAdapters, stage_adapters
from flotilla.services.rollout.engines.servers.proof import ServerProof, parts_of
from flotilla.services.rollout.engines.servers.settings import AdapterSettings, ServerSettings
from flotilla.services.rollout.engines.vllm.engine import (
    ADAPTER_HASHES,
    HASHES,
    VllmAdapters,
    VllmEngine,
    VllmProver,
    command_line,
    environment,
)
from flotilla.services.rollout.engines.vllm.held_weights import HeldWeights
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import Unavailable, WeightsDiverged, WeightTransferFailed, WorkerDied
from flotilla.shared.models.weight_files import shapes_in
from flotilla.shared.schemas.trajectory import FinishReason
from flotilla.shared.weights.image.adapters import AdaptersHeader, names_of
from tests.contract.engine.conftest import until_running
from tests.contract.engine.fake_server import token_of
from tests.contract.engine.fake_vllm import FakeVllm
from tests.contract.engine.models import make_model, save_adapters, save_image, save_long_model
from tests.contract.engine.requests import a_request

PROMPT = (5, 6, 7)
LONG = 400
INTERRUPT, DRAIN = OnWeightUpdate.INTERRUPT, OnWeightUpdate.DRAIN


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_long_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def images(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    folder = tmp_path_factory.mktemp("images")
    made = {number: save_adapters(model, folder / f"{number}.safetensors", seed=number) for number in range(4, 8)}
    return made.__getitem__


@pytest.fixture
def server(model: Path) -> FakeVllm:
    made = FakeVllm(model, token_seconds=0.0005)
    made.takes_adapters = True
    return made


@pytest.fixture
def settings(model: Path) -> ServerSettings:
    adapters = AdapterSettings("tiny", 4)
    return ServerSettings(model, url="http://recorded", version=3, probe_seconds=60, adapters=adapters, load_seconds=20)


@pytest.fixture
async def engine(server: FakeVllm, settings: ServerSettings) -> AsyncIterator[VllmEngine]:
    made = VllmEngine(settings, transport=server)
    await made.start()
    server.calls.clear()
    yield made
    await made.close()


def paths(server: FakeVllm) -> list[str]:
    return [path for path, _ in server.calls]


def asked(server: FakeVllm) -> list[Any]:
    return [(body or {}).get("model") for path, body in server.calls if path == "/inference/v1/generate"]


def folders(engine: VllmEngine) -> list[Path]:
    return sorted(engine._place.glob("adapters-*"))


async def test_a_version_is_loaded_beside_the_one_before_which_is_forgotten_and_the_base_is_left_alone(
    engine: VllmEngine, server: FakeVllm, images: Callable[[int], Path]
) -> None:
    assert (await engine.generate(a_request(PROMPT, max_new_tokens=1)))[0].versions == ((0, 3),)
    await engine.load_weights(images(4), 4, INTERRUPT)
    [first] = server.adapters
    assert (await engine.generate(a_request(PROMPT, max_new_tokens=1)))[0].versions == ((0, 4),)
    server.calls.clear()
    await engine.load_weights(images(5), 5, INTERRUPT)

    assert paths(server) == [
        "/v1/load_lora_adapter",
        "/update_weight_version",
        "/weight_info",
        "/v1/unload_lora_adapter",
    ]
    [second] = server.adapters
    assert first.startswith("tiny-4-") and second.startswith("tiny-5-"), "the name has experiment and version"
    assert server.max_held == MAX_HELD
    [completion] = await engine.generate(a_request(PROMPT, max_new_tokens=1))
    assert completion.versions == ((0, 5),)
    body = server.calls[-1][1]
    assert body is not None and (body["model"], body["cache_salt"]) == (second, "5")
    [folder] = folders(engine)
    assert (folder / WEIGHTS_FILE).read_bytes() == images(5).read_bytes()
    assert folder.stat().st_mode & 0o077 == 0 and engine._place.stat().st_mode & 0o077 == 0, "others read nothing"


async def test_what_is_in_flight_keeps_its_tokens_and_goes_on_under_the_next_version(
    engine: VllmEngine, server: FakeVllm, images: Callable[[int], Path]
) -> None:
    await engine.load_weights(images(4), 4, INTERRUPT)
    numbers = dict(server.adapters)
    request = a_request(PROMPT, seeds=(1, 2, 3), max_new_tokens=LONG, greedy=True)
    sampling = asyncio.create_task(engine.generate(request))
    await until_running(engine, running=3, new_tokens=9)
    await engine.load_weights(images(5), 5, INTERRUPT)
    numbers |= server.adapters

    of = {name.split("-")[1]: number for name, number in numbers.items()}
    for completion in await sampling:
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.token_ids.size == completion.log_probs.size == LONG and completion.num_resumed == 0
        (start, before), (cut, after) = completion.versions
        assert (start, before, after) == (0, 4, 5) and 0 < cut < LONG
        tokens = completion.token_ids.tolist()
        assert tokens[:cut] == [token_of(PROMPT, 0, place, of["4"]) for place in range(cut)]
        seen = (*PROMPT, *tokens[:cut])
        assert tokens[cut:] == [token_of(seen, 0, place, of["5"]) for place in range(LONG - cut)]
    load = await engine.load()
    assert load.generated_tokens == 3 * LONG, "no token counts twice"


async def test_every_token_has_the_version_of_its_adapter_whatever_is_sent_around_the_switch(
    engine: VllmEngine, server: FakeVllm, images: Callable[[int], Path]
) -> None:
    server.relabel_seconds = 0.01

    # The server asserts of each token that its label is that of the adapter that samples it.
    async def ask() -> None:
        for _ in range(6):
            for completion in await engine.generate(a_request(PROMPT, seeds=(1, 2), max_new_tokens=30)):
                assert completion.token_ids.size == 30

    async def publish() -> None:
        for version in range(4, 16):
            await engine.load_weights(images(4 + version % 4), version, DRAIN if version % 3 == 0 else INTERRUPT)
            await asyncio.sleep(0.003)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(ask())
        tasks.create_task(publish())
    assert len(folders(engine)) == 1


async def test_a_drain_ends_what_is_in_flight_under_its_version_and_an_evaluation_is_waited_for(
    engine: VllmEngine, server: FakeVllm, images: Callable[[int], Path]
) -> None:
    await engine.load_weights(images(4), 4, DRAIN)
    for mode, holds in ((DRAIN, False), (INTERRUPT, True)):
        before = (await engine.load()).version
        sampling = asyncio.create_task(
            engine.generate(replace(a_request(PROMPT, max_new_tokens=60), holds_weights=holds))
        )
        await until_running(engine, running=1, new_tokens=2)
        await engine.load_weights(images(before + 1), before + 1, mode)

        assert sampling.done()
        assert (await sampling)[0].versions == ((0, before),)
    assert "/inference/v1/abort_requests" not in paths(server)


async def test_an_abort_ends_what_was_interrupted_too(engine: VllmEngine, images: Callable[[int], Path]) -> None:
    request = a_request(PROMPT, max_new_tokens=1500)
    sampling = asyncio.create_task(engine.generate(request))
    await until_running(engine, running=1, new_tokens=2)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.load_weights(images(4), 4, INTERRUPT))
        tasks.create_task(engine.abort(request.request_id))

    [completion] = await sampling
    assert completion.finish_reason is FinishReason.ABORTED and 0 < completion.token_ids.size < 1500


async def test_a_server_that_refuses_adapters_goes_on_with_those_before(
    engine: VllmEngine, server: FakeVllm, images: Callable[[int], Path]
) -> None:
    await engine.load_weights(images(4), 4, INTERRUPT)
    server.refuses_adapters = "expected target modules in {'qkv_proj'}"

    with pytest.raises(WeightTransferFailed, match=r"the server does not take the adapters tiny-5-.*expected target"):
        await engine.load_weights(images(5), 5, INTERRUPT)

    assert (await engine.generate(a_request(PROMPT, max_new_tokens=1)))[0].versions == ((0, 4),)
    assert len(folders(engine)) == 1
    server.refuses_adapters = None
    await engine.load_weights(images(5), 5, INTERRUPT)
    assert (await engine.generate(a_request(PROMPT, max_new_tokens=1)))[0].versions == ((0, 5),)


async def test_an_update_that_is_given_up_while_it_waits_leaves_nothing_at_the_server(
    engine: VllmEngine, server: FakeVllm, images: Callable[[int], Path]
) -> None:
    await engine.load_weights(images(4), 4, INTERRUPT)
    sampling = asyncio.create_task(engine.generate(a_request(PROMPT, max_new_tokens=LONG)))
    await until_running(engine, running=1)
    loading = asyncio.create_task(engine.load_weights(images(5), 5, DRAIN))
    while len(server.adapters) < 2:
        await asyncio.sleep(0)
    loading.cancel()

    with pytest.raises(asyncio.CancelledError):
        await loading
    assert [name.split("-")[1] for name in server.adapters] == ["4"] and len(folders(engine)) == 1
    assert (await sampling)[0].versions == ((0, 4),)


async def test_a_server_that_does_not_load_in_time_or_says_another_adapter_is_given_up(
    server: FakeVllm, settings: ServerSettings, images: Callable[[int], Path]
) -> None:
    server.hangs = True
    late = VllmEngine(settings, transport=server)
    await late.start()
    with pytest.raises(WorkerDied, match=r"version 4 could not be loaded: .* answer /v1/load_lora_adapter within 20"):
        await late.load_weights(images(4), 4, INTERRUPT)
    await late.close()

    server.hangs = False
    wrong = VllmEngine(settings, transport=server)
    await wrong.start()
    await wrong.load_weights(images(4), 4, INTERRUPT)
    server.answers_as = "tiny-3"
    with pytest.raises(WorkerDied, match="it sampled with 'tiny-3' what was asked of 'tiny-4-"):
        await wrong.generate(a_request(PROMPT, max_new_tokens=1))
    await wrong.close()


async def test_a_server_that_has_other_adapters_than_it_was_given_is_given_up_before_it_samples_with_them(
    engine: VllmEngine, server: FakeVllm, images: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Proof:
        can_tell_adapters = True

        async def learn(self, *_: object) -> None: ...

        async def check_adapters(self, *_: object) -> None:
            raise WeightsDiverged("version 4 as the server has it is not what was published")

    monkeypatch.setattr(engine, "_proof", Proof())
    with pytest.raises(WeightsDiverged):
        await engine.load_proved(images(4), 4, INTERRUPT, "digest")

    with pytest.raises(WorkerDied, match="version 4 could not be loaded: version 4 as the server has it is not"):
        await engine.generate(a_request(PROMPT, max_new_tokens=1))
    assert asked(server) == []


async def test_what_does_not_fit_is_refused_before_the_server_is_asked(
    engine: VllmEngine, server: FakeVllm, model: Path, images: Callable[[int], Path], tmp_path: Path
) -> None:
    def image(**changes: Any) -> Path:
        return save_adapters(model, tmp_path / "image.safetensors", **{"seed": 1, **changes})

    whole = save_image(make_model("qwen3-32"), tmp_path / "whole.safetensors")
    tensors = load_file(images(4))
    other = tmp_path / "other.safetensors"
    save_file(tensors, other, AdaptersHeader("0" * 16, 2.0).metadata)
    turned = tmp_path / "turned.safetensors"
    save_file(tensors, turned, AdaptersHeader("0" * 16, 2.0, is_transposed=True).metadata)
    cases = {
        whole: "holds whole weights.*set asynchrony.publication.lora to merged",
        other: "are for a base with checksum 0000000000000000",
        turned: "transposed weights",
        image(rank=8): r"have ranks \[8\], the server was started for 4",
    }
    for path, words in cases.items():
        with pytest.raises(WeightTransferFailed, match=words):
            await engine.load_weights(path, 4, INTERRUPT)
    with pytest.raises(WeightTransferFailed, match=r"set asynchrony[.]on_weight_update to interrupt or drain"):
        await engine.load_weights(images(4), 4, OnWeightUpdate.CONTINUE)

    assert paths(server) == []
    assert (await engine.generate(a_request(PROMPT, max_new_tokens=1)))[0].versions == ((0, 3),)


def test_a_server_is_started_with_room_for_two_adapters_of_the_rank(settings: ServerSettings) -> None:
    for rank, room in ((4, 8), (8, 8), (20, 32), (512, 512)):
        words = command_line(
            replace(settings, adapters=AdapterSettings("tiny", rank)), context_tokens=64, logprobs_mode="raw_logprobs"
        )
        line = " ".join(words)
        assert f"--enable-lora --max-loras 2 --max-cpu-loras 2 --max-lora-rank {room}" in line
    assert environment(settings, {})["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    whole = replace(settings, adapters=None)
    assert "--enable-lora" not in command_line(whole, context_tokens=64, logprobs_mode="raw_logprobs")
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment(whole, {})


def test_the_folder_is_one_that_peft_reads(
    model: Path, settings: ServerSettings, images: Callable[[int], Path], tmp_path: Path
) -> None:
    folder = stage_adapters(tmp_path, settings, shapes_in([model / "model.safetensors"]), images(4))

    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 8.0, False)
    assert config["target_modules"][0] == "model.layers.0.mlp.down_proj"
    assert sorted(load_file(folder / WEIGHTS_FILE)) == sorted(load_file(images(4)))


def test_a_full_disk_keeps_nothing_of_a_folder_that_could_not_be_made(
    model: Path,
    settings: ServerSettings,
    images: Callable[[int], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path / "place"
    place.mkdir()

    def full(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(Unavailable, match="No space left on device"):
        stage_adapters(place, settings, shapes_in([model / "model.safetensors"]), images(4))

    assert list(place.iterdir()) == []


class Stacked(torch.nn.Module):
    """A layer as vLLM has it with adapters: the plain one inside, and room for two of each part."""

    def __init__(self, weights: list[torch.Tensor], room: int) -> None:
        super().__init__()
        self.base_layer = torch.nn.Linear(1, 1, bias=False)
        self.base_layer.weight = torch.nn.Parameter(torch.cat(weights), requires_grad=False)
        self.lora_a_stacked = tuple(torch.zeros(2, 1, room, each.shape[1]) for each in weights)
        self.lora_b_stacked = tuple(torch.zeros(2, 1, each.shape[0], room) for each in weights)


class Worker:
    """A vLLM worker that has loaded a folder of adapters, with the calls that reach it."""

    def __init__(self, model: Path, image: Path, *, room: int = 8, scale: float = 2.0) -> None:
        weights, adapters = load_file(model / "model.safetensors"), load_file(image)
        fused = {"qkv_proj": "qkv", "gate_up_proj": "gate up", "o_proj": "o", "down_proj": "down"}
        layers: dict[str, Stacked] = {}
        for name in weights:
            layer = name.removesuffix(".weight")
            last = layer.rpartition(".")[2]
            whole = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}.get(last, last)
            if whole not in fused or (whole == last and last not in ("o_proj", "down_proj")):
                continue
            key = f"{layer.rpartition('.')[0]}.{whole}"
            parts = parts_of(f"{key}.weight", weights)
            made = layers[key] = Stacked([weights[each] for each in parts], room)
            for number, part in enumerate(parts):
                low, high = (adapters[each] for each in names_of(part))
                rank = low.shape[0]
                made.lora_a_stacked[number][1, 0, :rank] = low
                made.lora_b_stacked[number][1, 0, :, :rank] = high * scale
        self.layers = layers
        tree = torch.nn.Module()
        for key, each in layers.items():
            place = tree
            *folders, last = key.split(".")
            for folder in folders:
                if not hasattr(place, folder):
                    place.add_module(folder, torch.nn.Module())
                place = cast(torch.nn.Module, getattr(place, folder))
            place.add_module(last, each)
        manager = SimpleNamespace(modules=layers, lora_index_to_id=[6, 7], list_adapters=lambda: {6: None, 7: None})
        self.worker = HeldWeights()
        self.worker.model_runner = SimpleNamespace(
            get_model=lambda: tree, lora_manager=SimpleNamespace(_adapter_manager=manager)
        )

    async def post(self, path: str, body: Mapping[str, Any] | None, *, seconds: float | None = None) -> Any:
        assert path == "/collective_rpc" and body is not None
        calls = {HASHES: self.worker.flotilla_hashes, ADAPTER_HASHES: self.worker.flotilla_adapter_hashes}
        return {"results": [calls[body["method"]](*body.get("args", ()))]}

    async def get(self, path: str, *, seconds: float | None = None) -> Any:
        raise AssertionError(path)


@pytest.mark.parametrize("damage", ["none", "flip", "half", "keep", "padding", "base"])
async def test_adapters_that_are_flipped_half_there_or_the_former_ones_are_named(
    damage: str, model: Path, settings: ServerSettings, images: Callable[[int], Path], tmp_path: Path
) -> None:
    proof = ServerProof(VllmProver(), "float32", 1.0)
    await proof.learn(Worker(model, images(4)), model)
    assert proof.can_tell_adapters and len(proof._provable or ()) == 8
    adapters = ServedAdapters(VllmAdapters(), settings, tmp_path)
    name = await adapters.stage(shapes_in([model / "model.safetensors"]), images(5), "5-mark")
    server = Worker(model, images(4 if damage == "keep" else 5))
    layer = server.layers["model.layers.1.self_attn.qkv_proj"]
    if damage == "flip":
        bits = layer.lora_b_stacked[2][1, 0].view(torch.int32)
        bits[3, 1] ^= 1
    elif damage == "half":
        for number in (0, 1):
            layer.lora_a_stacked[number][1] = layer.lora_b_stacked[number][1] = 0
    elif damage == "padding":
        layer.lora_a_stacked[0][1, 0, 5] = 1
    elif damage == "base":
        layer.base_layer.weight[0, 0] += 1

    if damage == "none":
        await proof.check_adapters(server, adapters, name, 5)
        return
    with pytest.raises(WeightsDiverged, match="version 5 as the server has it is not what was published") as raised:
        await proof.check_adapters(server, adapters, name, 5)
    first = {"flip": "qkv_proj.2", "half": "qkv_proj.0", "padding": "qkv_proj.0", "base": "qkv_proj.weight"}
    where = f"model.layers.1.self_attn.{first[damage]}" if damage in first else "model.layers.0.mlp.down_proj.0"
    assert raised.value.detail.endswith(f"the first that differs is {where}")
