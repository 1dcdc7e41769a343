"""The native kernels compute what torch's operators compute, and are built once, privately."""

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from services.rollout.engines.decoders.matrices import PACKED_ELEMENTS, Matrix
from services.rollout.engines.decoders.native import building, kernels
from services.rollout.engines.decoders.native.kernels import Kernels, kernels_for, rotation_table
from services.rollout.engines.embedded.sampling import RowSampling, sample

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="no C compiler"
)
CPU = torch.device("cpu")
HEADS, KV_HEADS, CAPACITY = 6, 2, 32


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def native() -> Kernels:
    found = kernels_for(CPU, torch.float32)
    assert found is not None
    return found


def turned(heads: Tensor, norms: Tensor | None, rotations: Tensor) -> Tensor:
    """Normalise [B, H, D] and rotate it by [B, D / 2] complex."""
    if norms is not None:
        heads = functional.rms_norm(heads, heads.shape[-1:], None, 1e-6) * norms
    pairs = torch.view_as_complex(heads.reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations.unsqueeze(1)).flatten(-2)


@needs_compiler
@pytest.mark.parametrize("dims", [4, 12, 16, 24, 64, 128])
@pytest.mark.parametrize("has_norms", [True, False])
def test_attention_reads_what_is_cached_and_nothing_else(native: Kernels, dims: int, has_norms: bool) -> None:
    lengths = torch.tensor([0, 1, 7, 8, 15, 31])
    num = lengths.shape[0]
    qkv = torch.randn(num, (HEADS + 2 * KV_HEADS) * dims)
    norms = torch.rand(HEADS + KV_HEADS, dims) + 0.5 if has_norms else None
    rotations = torch.polar(torch.ones(CAPACITY, dims // 2), torch.rand(CAPACITY, dims // 2) * 6)
    keys, values = torch.randn(2, num + 1, KV_HEADS, CAPACITY, dims)
    before = keys.clone(), values.clone()

    mixed = native.attend(qkv, norms, 1e-6, rotation_table(rotations), lengths, keys, values, HEADS)

    heads = qkv.view(num, -1, dims)
    rotated = turned(heads[:, : HEADS + KV_HEADS], norms, rotations[lengths])
    for row, length in enumerate(lengths.tolist()):
        for cache, old, new in ((keys, before[0], rotated[row, HEADS:]), (values, before[1], heads[row, -KV_HEADS:])):
            torch.testing.assert_close(cache[row, :, length], new, atol=1e-6, rtol=1e-5)
            cache[row, :, length] = old[row, :, length]
        seen_keys = torch.cat([before[0][row, :, :length], rotated[row, HEADS:].unsqueeze(1)], dim=1)
        seen_values = torch.cat([before[1][row, :, :length], heads[row, -KV_HEADS:].unsqueeze(1)], dim=1)
        queries = rotated[row, :HEADS].view(KV_HEADS, -1, dims)
        weights = (queries @ seen_keys.transpose(1, 2) / math.sqrt(dims)).softmax(dim=-1)
        torch.testing.assert_close(mixed[row], (weights @ seen_values).flatten(), atol=2e-6, rtol=1e-5)
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])


@needs_compiler
@pytest.mark.parametrize("dims", [12, 16])
def test_a_prefix_is_split_and_written_to_every_row_that_shares_it(native: Kernels, dims: int) -> None:
    qkv = torch.randn(2, 5, (HEADS + 2 * KV_HEADS) * dims)
    norms = torch.rand(HEADS + KV_HEADS, dims) + 0.5
    rotations = torch.polar(torch.ones(5, dims // 2), torch.rand(5, dims // 2) * 6)
    cache = torch.zeros(4, KV_HEADS, CAPACITY, dims)

    queries, keys, values = native.split_heads(qkv, norms, 1e-6, rotation_table(rotations), KV_HEADS, dims)
    native.write_rows(keys, cache, torch.tensor([3, 0, 2]), torch.tensor([0, 0, 1]))

    for sequence in range(2):
        heads = qkv[sequence].view(5, -1, dims)
        rotated = turned(heads[:, : HEADS + KV_HEADS], norms, rotations)
        torch.testing.assert_close(queries[sequence].transpose(0, 1), rotated[:, :HEADS], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(keys[sequence].transpose(0, 1), rotated[:, HEADS:], atol=1e-6, rtol=1e-5)
        assert torch.equal(values[sequence].transpose(0, 1), heads[:, -KV_HEADS:])
    expected = torch.zeros_like(cache)
    expected[[3, 0, 2], :, :5] = keys[[0, 0, 1]]
    assert torch.equal(cache, expected)


@needs_compiler
def test_norm_activation_and_look_up(native: Kernels) -> None:
    hidden, weight = torch.randn(7, 40) * 3, torch.rand(40)
    gate_up = torch.cat([torch.linspace(-120, 120, 42).view(7, 6), torch.randn(7, 6)], dim=1)
    gate, up = gate_up.chunk(2, dim=1)
    ids = torch.tensor([3, 0, 3])

    normed, active = native.rms_norm(hidden, weight, 1e-5), native.silu_mul(gate_up)

    torch.testing.assert_close(normed, functional.rms_norm(hidden, (40,), weight, 1e-5), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(active, functional.silu(gate) * up, atol=1e-6, rtol=1e-5)
    assert torch.equal(native.embed(ids, hidden), hidden[ids])


@needs_compiler
@pytest.mark.parametrize("size", [1, 3, 64, 65, 428])
@pytest.mark.parametrize("has_temperatures", [True, False])
def test_the_same_draw_samples_the_same_token(
    native: Kernels, size: int, has_temperatures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, draws = torch.randn(300, size) * 4, torch.rand(300, dtype=torch.float64)
    logits[torch.rand(300, size) < 0.2] = -torch.inf
    logits[:, 0], draws[0], draws[1] = 0, 0, 1 - 2.0**-52
    how = RowSampling(temperatures=torch.rand(300) + 0.5 if has_temperatures else None)
    tokens, log_probs = sample(logits, draws, how)
    monkeypatch.setattr(kernels, "_kernels", lambda: None)

    expected_tokens, expected_log_probs = sample(logits, draws, how)

    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probs, expected_log_probs, atol=2e-6, rtol=1e-6)
    assert torch.isfinite(logits.gather(1, tokens.unsqueeze(1))).all()


@needs_compiler
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_of_no_numbers_shows(native: Kernels, bad: float) -> None:
    logits = torch.zeros(2, 70)
    logits[1, 33] = bad

    tokens, log_probs = native.sample(logits, torch.full((2,), 0.5, dtype=torch.float64), None)

    assert log_probs[0].isfinite() and not log_probs[1].isfinite()
    assert tokens[1] < 70


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("width", [8, PACKED_ELEMENTS // 256])
def test_a_packed_matrix_multiplies_as_a_plain_one(width: int, has_bias: bool) -> None:
    weight, bias = torch.randn(256, width), torch.randn(256) if has_bias else None
    matrix, hidden, total = Matrix(weight.clone(), bias), torch.randn(5, width), torch.randn(5, 256)
    expected = functional.linear(hidden, weight, bias)
    expected_total = total + expected

    matrix.pack()
    matrix.add_to(total, hidden)

    assert (matrix.plain is None) == (weight.numel() >= PACKED_ELEMENTS)
    torch.testing.assert_close(matrix(hidden), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(total, expected_total, atol=1e-4, rtol=1e-4)


@needs_compiler
def test_a_library_that_others_may_write_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "FLAGS", ("-shared", "-fPIC"))
    monkeypatch.setattr(building, "SOURCE", tmp_path / "small.c")
    (tmp_path / "small.c").write_text("int answer(void) { return 42; }\n", encoding="ascii")
    library = building.load_library.__wrapped__()
    assert library is not None and library.answer() == 42
    (built,) = (tmp_path / "flotilla").glob("*.so")
    mine = built.stat().st_ino
    building.load_library.__wrapped__()
    assert built.stat().st_ino == mine, "built twice"
    os.chmod(built, 0o777)

    building.load_library.__wrapped__()

    assert built.stat().st_ino != mine
    assert built.stat().st_mode & 0o022 == 0


def test_without_a_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")

    assert building.load_library.__wrapped__() is None


def test_a_source_that_does_not_compile_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "SOURCE", tmp_path / "broken.c")
    (tmp_path / "broken.c").write_text("#error no\n", encoding="ascii")

    assert building.load_library.__wrapped__() is None
