"""The decoder for GPUs on a CPU, with plain attention and pages of four tokens; and what it asks of CUDA."""

import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flotilla.services.rollout.engines.decoders import paged
from flotilla.services.rollout.engines.decoders.architecture import architecture_of
from flotilla.services.rollout.engines.decoders.checkpoint import read_config
from flotilla.services.rollout.engines.decoders.flash_attention import Bounds, FlashAttention
from flotilla.services.rollout.engines.decoders.fused import FusedDecoder
from flotilla.services.rollout.engines.decoders.host_arrays import on_device
from flotilla.services.rollout.engines.decoders.paged import WARM_UPS, Graphs, PagedDecoder, works
from flotilla.services.rollout.engines.embedded import loading
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.errors import ModelError
from flotilla.shared.models.weight_files import safetensors_files
from tests.contract.engine.models import VOCAB, make_model, save_image, save_model

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "num_rows": 6, "context_tokens": 32}


class PlainAttention:
    """What FlashAttention computes, sequence by sequence."""

    def packed(self, queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, longest: int) -> Tensor:
        parts = []
        for first, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
            assert end - first <= longest
            query, key, value = (each[first:end].transpose(0, 1) for each in (queries, keys, values))
            parts.append(functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))
        return torch.cat(parts, dim=1).transpose(0, 1)

    def bounds(self, table: Tensor, lengths: Tensor, page_tokens: int) -> Bounds:
        return lengths, table

    def paged(
        self, queries: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, bounds: Bounds
    ) -> Tensor:
        assert bounds[0] is lengths and bounds[1] is table
        parts = []
        for query, pages, length in zip(queries, table, lengths.tolist(), strict=True):
            assert length <= pages.numel() * keys.shape[1]
            key, value = (pool[pages.long()].flatten(0, 1)[:length].transpose(0, 1) for pool in (keys, values))
            parts.append(functional.scaled_dot_product_attention(query[:, None], key, value, enable_gqa=True)[:, 0])
        return torch.stack(parts)


@pytest.fixture(scope="module", params=["llama-gqa-tied", "qwen2", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_model(family, made)
    return made


def both(directory: Path) -> tuple[PagedDecoder, FusedDecoder]:
    architecture, files = architecture_of(read_config(directory)), safetensors_files(directory)
    paged = PagedDecoder(architecture, files, **SIZES, attention=PlainAttention(), page_tokens=4)
    return paged, FusedDecoder(architecture, files, **SIZES)


def same(pair: Iterable[Tensor], rows: list[int] | slice = slice(None)) -> None:
    one, other = pair
    torch.testing.assert_close(one[rows].log_softmax(-1), other[rows].log_softmax(-1), atol=2e-5, rtol=1e-5)


def tokens(generator: np.random.Generator, num: int) -> Any:
    return generator.integers(0, VOCAB, num)


def test_rows_that_join_leave_and_move_get_the_logits_of_the_fused_forward(directory: Path) -> None:
    generator = np.random.default_rng(0)
    decoders = both(directory)
    lengths = np.zeros(6, dtype=np.int64)

    def prefill(num_tokens: list[int], rows: list[list[int]]) -> None:
        sequences = [tokens(generator, num) for num in num_tokens]
        same(decoder.prefill(sequences, rows) for decoder in decoders)
        for num, group in zip(num_tokens, rows, strict=True):
            lengths[group] = num

    def decode(steps: int) -> None:
        for _ in range(steps):
            num = int(np.flatnonzero(lengths)[-1]) + 1
            token_ids, held = torch.from_numpy(tokens(generator, num)), torch.from_numpy(lengths[:num].copy())
            alive = np.flatnonzero(lengths[:num]).tolist()
            same((decoder.decode(token_ids, held, int(lengths.max())).clone() for decoder in decoders), alive)
            lengths[:num] += lengths[:num] > 0

    prefill([5, 8], [[0, 1, 2], [3]])
    decode(6)
    lengths[1] = 0
    decode(3)
    prefill([3], [[1, 4]])
    decode(5)
    for decoder in decoders:
        decoder.move_rows([4], [2], int(lengths.max()))
    lengths[2], lengths[4] = lengths[4], 0
    decode(2)


def test_new_weights_serve_at_the_addresses_that_graphs_know(directory: Path, family: str, tmp_path: Path) -> None:
    paged, fused = both(directory)
    image = save_image(make_model(family, seed=5), tmp_path / "new.safetensors")
    prompt = [tokens(np.random.default_rng(1), 9)]
    before = paged.prefill(prompt, [[0]])
    assert paged._weights is not None
    addresses = [each.data_ptr() for each in paged._weights.tensors()]

    for decoder in (paged, fused):
        decoder.stage(image)
        decoder.switch()

    after = paged.prefill(prompt, [[0]])
    same((after, fused.prefill(prompt, [[0]])))
    assert not torch.allclose(before, after)
    assert [each.data_ptr() for each in paged._weights.tensors()] == addresses


def test_new_weights_are_read_to_the_addresses_of_discarded_ones(directory: Path, family: str, tmp_path: Path) -> None:
    paged, fused = both(directory)
    image = save_image(make_model(family, seed=5), tmp_path / "new.safetensors")
    prompt = [tokens(np.random.default_rng(1), 9)]
    before, weights = paged.prefill(prompt, [[0]]), paged._weights
    assert weights is not None
    addresses = [each.data_ptr() for each in weights.tensors()]

    for decoder in (paged, fused):
        decoder.discard()
        decoder.stage(image)
    assert paged._spare is weights  # there is no second set
    for decoder in (paged, fused):
        decoder.switch()

    same((paged.prefill(prompt, [[0]]), fused.prefill(prompt, [[0]])))
    assert [each.data_ptr() for each in weights.tensors()] == addresses
    paged.discard()
    paged.restore()
    torch.testing.assert_close(paged.prefill(prompt, [[0]]), before)
    paged.stage(image)
    assert paged._spare is not weights


def test_what_was_released_comes_back(directory: Path) -> None:
    paged, _ = both(directory)
    prompt = [tokens(np.random.default_rng(2), 9)]
    before = paged.prefill(prompt, [[0]])
    paged.release()
    assert (paged._weights, paged._keys.shape[1]) == (None, 1)
    paged.restore()
    torch.testing.assert_close(paged.prefill(prompt, [[0]]), before)


def test_a_pool_that_grows_keeps_what_it_holds_and_forgets_its_graphs(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged, fused = both(directory)
    cleared: list[int] = []
    monkeypatch.setattr(paged._graphs, "clear", lambda: cleared.append(paged._table.num_pages))
    generator = np.random.default_rng(3)
    for row in range(6):
        sequence = [tokens(generator, 31)]
        same(decoder.prefill(sequence, [[row]]) for decoder in (paged, fused))
    held = torch.full((6,), 31)
    same(decoder.decode(torch.arange(6), held, 31) for decoder in (paged, fused))
    assert len(cleared) > 1
    assert paged._table.num_pages <= 1 + 6 * 8


def test_rows_that_are_computed_again_take_no_more_memory(directory: Path) -> None:
    decoder, fused = both(directory)
    generator = np.random.default_rng(5)
    for _ in range(2):
        sequences = [tokens(generator, 31) for _ in range(6)]
        same(each.prefill(sequences, [[row] for row in range(6)]) for each in (decoder, fused))

        assert decoder._table.num_pages <= 1 + 6 * 8


class Forgetful(PlainAttention):
    """Reads one page too few."""

    def bounds(self, table: Tensor, lengths: Tensor, page_tokens: int) -> Bounds:
        return lengths.clamp(max=4), table

    def paged(
        self, queries: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, bounds: Bounds
    ) -> Tensor:
        return super().paged(queries, keys, values, table, bounds[0], bounds)


@pytest.mark.parametrize(("attention", "expected"), [(PlainAttention, True), (Forgetful, False)])
@pytest.mark.parametrize("num_rows", [1, 6])
def test_a_device_that_reads_pages_wrongly_is_found_out(
    directory: Path, attention: type[PlainAttention], expected: bool, num_rows: int
) -> None:
    architecture, files = architecture_of(read_config(directory)), safetensors_files(directory)
    decoder = PagedDecoder(architecture, files, **{**SIZES, "num_rows": num_rows}, attention=attention(), page_tokens=4)
    assert works(decoder) is expected
    assert decoder._table.num_free == decoder._table.num_pages - 1


class Rounded(PlainAttention):
    """Reads the right pages, and rounds what it computes."""

    def paged(
        self, queries: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, bounds: Bounds
    ) -> Tensor:
        return super().paged(queries, keys, values, table, lengths, bounds).bfloat16().float()


def test_a_model_that_is_sure_of_its_tokens_is_not_refused_for_rounding(directory: Path) -> None:
    architecture, files = architecture_of(read_config(directory)), safetensors_files(directory)
    decoder = PagedDecoder(architecture, files, **SIZES, attention=Rounded(), page_tokens=4)
    assert decoder._weights is not None
    decoder._weights.final_norm.mul_(200)

    assert works(decoder)


@pytest.mark.parametrize("outcome", [True, False, RuntimeError("no kernel image is available")])
def test_the_paged_forward_serves_where_it_works(
    directory: Path, monkeypatch: pytest.MonkeyPatch, outcome: bool | Exception
) -> None:
    def found(_: PagedDecoder) -> bool:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(loading, "works", found)
    architecture, files = architecture_of(read_config(directory)), safetensors_files(directory)
    settings = EngineSettings(str(directory), version=0, slots=4, context_tokens=32, dtype="bfloat16")
    made = loading._paged(architecture, files, settings, CPU)
    assert (made is not None) is (outcome is True)
    assert loading._paged(architecture, files, replace(settings, dtype="float32"), CPU) is None


def test_flash_attention_is_asked_for_pages_as_it_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def varlen_attn(*arguments: Any, **options: Any) -> Tensor:
        asked.append((arguments, options))
        return torch.empty_like(arguments[0])

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    queries, pool = torch.zeros(3, 8, 16), torch.zeros(7, 256, 2, 16)
    table, lengths = torch.zeros((3, 4), dtype=torch.int32), torch.tensor([1, 300, 5], dtype=torch.int32)
    flash = FlashAttention()
    flash.paged(queries, pool, pool, table, lengths, flash.bounds(table, lengths, 256))
    packed, keys = torch.zeros(9, 8, 16), torch.zeros(9, 2, 16)
    flash.packed(packed, keys, keys, torch.tensor([0, 4, 9], dtype=torch.int32), 5)

    (paged, options), (whole, causal) = asked
    assert [each.tolist() for each in paged[3:5]] == [[0, 1, 2, 3], [0, 1, 301, 306]]
    assert all(each.dtype == torch.int32 for each in paged[3:5])
    assert paged[5:] == (1, 1024)
    assert options["block_table"] is table
    assert options["seqused_k"] is lengths
    assert (options["enable_gqa"], options["num_splits"]) == (True, 1)
    assert whole[5:] == (5, 5)
    assert causal == {"window_size": (-1, 0), "enable_gqa": True, "num_splits": 1}


def test_a_shape_is_captured_once_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        calls.append(f"begin {name}")
        yield
        calls.append(f"end {name}")

    class Stream:
        def __init__(self, *_: object) -> None:
            pass

        def wait_stream(self, _: object) -> None:
            calls.append("wait")

    fake = types.SimpleNamespace(
        graph_pool_handle=lambda: "pool",
        Stream=Stream,
        current_stream=Stream,
        stream=lambda _: noted("warm-up"),
        CUDAGraph=Graph,
        graph=lambda _, pool, capture_error_mode: noted(f"capture in {pool}, {capture_error_mode}"),
        synchronize=lambda _: calls.append("finish"),
    )
    monkeypatch.setattr(torch, "cuda", fake)
    graphs, made = Graphs(torch.device("cuda")), torch.ones(1)

    def compute() -> Tensor:
        calls.append("compute")
        return made

    assert graphs.run((8, 1), compute) is made
    capture = ["wait", "begin warm-up", *["compute"] * WARM_UPS, "end warm-up", "wait"]
    # Threads that read new weights allocate meanwhile, which would end a capture that is everybody's.
    capture += ["begin capture in pool, thread_local", "compute", "end capture in pool, thread_local"]
    assert calls == [*capture, "replay"]
    graphs.run((8, 1), compute)
    assert calls == [*capture, "replay", "replay"]
    graphs.run((16, 1), compute)
    graphs.clear()
    assert calls[-1] == "finish"
    graphs.run((8, 1), compute)
    assert calls.count("end capture in pool, thread_local") == 3


@pytest.mark.parametrize("fails", [False, True])
def test_weights_are_read_beside_the_steps_of_a_gpu(
    directory: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    calls: list[str] = []

    class Stream:
        def __init__(self, *_: object) -> None:
            calls.append("stream")

        def wait_stream(self, other: object) -> None:
            calls.append(f"wait for {other}")

        def synchronize(self) -> None:
            calls.append("finish")

    @contextmanager
    def entered(_: object) -> Iterator[None]:
        calls.append("begin")
        yield

    class Weights:
        def __init__(self, *_: object) -> None:
            calls.append("allocate")

        def fill(self, _: object) -> None:
            calls.append("fill")
            if fails:
                raise RuntimeError("no room")

    decoder, _ = both(directory)
    decoder.device = torch.device("cuda:0")
    monkeypatch.setattr(paged, "FusedWeights", Weights)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the steps")

    with pytest.raises(RuntimeError) if fails else nullcontext():
        decoder.stage(directory / "model.safetensors")

    assert calls == ["allocate", "stream", "wait for the steps", "begin", "fill", "finish"]


def test_graphs_of_all_numbers_of_rows_write_their_logits_to_one_place(directory: Path) -> None:
    decoder, _ = both(directory)
    decoder.prefill([tokens(np.random.default_rng(4), 5)], [list(range(6))])

    found = [decoder.decode(torch.arange(num), torch.full((num,), 5), 5).data_ptr() for num in (1, 3, 6)]

    assert len(set(found)) == 1
    decoder.release()
    assert decoder._logits is None


def test_an_array_goes_to_a_gpu_by_pinned_memory_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Host:
        def pin_memory(self) -> "Host":
            calls.append("pin")
            return self

        def to(self, device: torch.device, **options: Any) -> str:
            calls.append((device, options))
            return "there"

    array = np.arange(3)
    copied = on_device(array, CPU)
    array[0] = 7
    assert copied.tolist() == [0, 1, 2]
    monkeypatch.setattr(torch, "from_numpy", lambda _: Host())
    assert on_device(array, torch.device("cuda:1")) == "there"
    assert calls == ["pin", (torch.device("cuda:1"), {"non_blocking": True})]


def test_the_engines_device_is_the_current_one_and_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    assert [loading._device(name) for name in ("cuda", "cuda:1")] == [torch.device("cuda"), torch.device("cuda:1")]
    assert chosen == [0, 1]
    with pytest.raises(ModelError, match=r"'cuda:2' is not available: torch sees 2 here, cuda:0 to cuda:1"):
        loading._device("cuda:2")
