"""Weights that SGLang is given by handles: in which pieces and calls, and what a handle is."""

from pathlib import Path

import pytest

from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.services.rollout.engines.sglang.engine import SglangEngine
from flotilla.services.rollout.engines.sglang.handles import spans_of
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import WeightTransferFailed, WorkerDied
from flotilla.shared.schemas.publication import TensorSpec
from tests.contract.engine.fake_sglang import FakeSglang
from tests.contract.engine.models import save_model
from tests.contract.engine.requests import a_request

CALLS = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]


class MemoryBuckets:
    """Names what it would hold."""

    def __init__(self, bucket_bytes: int = 1 << 30, fails_at: int | None = None) -> None:
        self.bucket_bytes = bucket_bytes
        self.fails_at = fails_at
        self.held: list[range] = []
        self.is_holding = False

    async def hold(self, image: Path, span: range, *, num_ranks: int) -> list[str]:
        if len(self.held) == self.fails_at:
            raise WeightTransferFailed("no room")
        self.held.append(span)
        self.is_holding = True
        return [f"{span} {rank}" for rank in range(num_ranks)]

    async def release(self) -> None:
        self.is_holding = False

    async def close(self) -> None:
        self.is_holding = False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model("qwen3", path)
    return path


@pytest.fixture
def server(model: Path) -> FakeSglang:
    return FakeSglang(model, context_length=136)


async def an_engine(model: Path, server: FakeSglang, buckets: MemoryBuckets) -> SglangEngine:
    settings = ServerSettings(model, url="http://recorded", context_tokens=128, version=3, probe_seconds=60)
    engine = SglangEngine(settings, transport=server, buckets=buckets)
    await engine.start()
    server.calls.clear()
    buckets.held.clear()
    return engine


def a_tensor(start: int, end: int) -> TensorSpec:
    return TensorSpec(name=str(start), shape=(end - start,), dtype="U8", start=start, end=end)


def test_pieces_are_runs_of_tensors_and_a_large_one_goes_alone() -> None:
    tensors = [a_tensor(8, 12), a_tensor(12, 18), a_tensor(18, 19), a_tensor(19, 60), a_tensor(60, 61)]

    assert list(spans_of(tensors, 10)) == [range(2), range(2, 3), range(3, 4), range(4, 5)]
    assert list(spans_of(tensors, 1000)) == [range(5)]


@pytest.mark.parametrize(
    ("mode", "flushes"),
    [(OnWeightUpdate.INTERRUPT, True), (OnWeightUpdate.DRAIN, True), (OnWeightUpdate.CONTINUE, False)],
)
async def test_each_rank_gets_a_handle_of_each_piece_and_the_last_says_the_version(
    model: Path, server: FakeSglang, mode: OnWeightUpdate, flushes: bool
) -> None:
    server.tp_size = 2
    buckets = MemoryBuckets(bucket_bytes=20_000)
    engine = await an_engine(model, server, buckets)

    await engine.load_weights(model / "model.safetensors", 4, mode)

    begin, load, end = CALLS
    paths = [path for path, _ in server.calls]
    assert len(buckets.held) > 2
    assert paths == ["/pause_generation", begin, *len(buckets.held) * [load], end, "/continue_generation"]
    bodies = [body for path, body in server.calls if path == load and body is not None]
    assert [body["serialized_named_tensors"] for body in bodies] == [
        [f"{span} 0", f"{span} 1"] for span in buckets.held
    ]
    assert [body["flush_cache"] for body in bodies] == [*(len(bodies) - 1) * [False], flushes]
    *others, last = [body.get("weight_version") for body in bodies]
    assert others == (len(bodies) - 1) * [None] and last.startswith("4-")
    assert not buckets.is_holding
    [completion] = await engine.generate(a_request(max_new_tokens=2))
    assert completion.versions == ((0, 4),)
    await engine.close()


async def test_weights_that_cannot_be_held_are_loaded_from_their_file(model: Path, server: FakeSglang) -> None:
    engine = await an_engine(model, server, MemoryBuckets(fails_at=0))

    await engine.load_weights(model / "model.safetensors", 4, OnWeightUpdate.INTERRUPT)

    assert [path for path, _ in server.calls] == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/continue_generation",
    ]
    await engine.close()


async def test_a_piece_that_cannot_be_held_half_way_is_the_engines_death(model: Path, server: FakeSglang) -> None:
    buckets = MemoryBuckets(bucket_bytes=20_000)
    engine = await an_engine(model, server, buckets)
    buckets.fails_at = 1

    with pytest.raises(WorkerDied, match="version 4 could not be loaded: no room"):
        await engine.load_weights(model / "model.safetensors", 4, OnWeightUpdate.INTERRUPT)
    await engine.close()
