"""An SGLang server as a member of the weight group: what it is told, and what is left when a group breaks."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.services.rollout.engines.base import GroupBroken
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.services.rollout.engines.sglang.engine import environment, interface_of
from flotilla.services.rollout.engines.sglang.group_engine import GroupSglangEngine, is_reached
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import WeightTransferFailed, WorkerDied
from flotilla.shared.schemas.publication import (
    Manifest,
    PublicationOrder,
    PublicationPhase,
    Rendezvous,
    TensorSpec,
    Transport,
)
from flotilla.shared.schemas.trajectory import FinishReason
from flotilla.shared.weights.group.engine_group import buckets_of
from flotilla.shared.weights.image.layout import read_layout
from tests.contract.engine.fake_server import Body
from tests.contract.engine.fake_sglang import FakeSglang
from tests.contract.engine.models import save_model
from tests.contract.engine.requests import a_request

BUCKET_BYTES = 30_000
JOINING = ["/init_weights_update_group", "/begin_weight_update"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model("qwen3", path)
    return path


@pytest.fixture
def server(model: Path) -> FakeSglang:
    return FakeSglang(model, context_length=136, token_seconds=0.001)


@pytest.fixture
async def engine(server: FakeSglang, model: Path) -> AsyncIterator[GroupSglangEngine]:
    settings = ServerSettings(
        model, url="http://recorded", context_tokens=128, version=3, probe_seconds=60, close_seconds=0.1
    )
    made = GroupSglangEngine(settings, transport=server, backend="gloo", reaches=always)
    await made.start()
    server.calls.clear()
    yield made
    await made.close()


def an_order(model: Path, version: int = 4, epoch: int = 1, **changes: Any) -> PublicationOrder:
    tensors = read_layout(model / "model.safetensors").tensors
    facts: dict[str, Any] = {
        "version": version,
        "epoch": epoch,
        "transport": Transport.ENGINE,
        "rank": 3,
        "num_ranks": 1,
        "phase": PublicationPhase.PREPARING,
        "rendezvous": Rendezvous(host="127.0.0.1", port=4000 + epoch, epoch=epoch, world_size=5),
        "manifest": Manifest(
            version=version,
            image_bytes=tensors[-1].end,
            slice_bytes=BUCKET_BYTES,
            checksum="0" * 16,
            tensors=tensors,
        ),
        "deadline_seconds": 5.0,
    }
    return PublicationOrder(**(facts | changes))


async def always(host: str, port: int, seconds: float) -> bool:
    return True


def paths(server: FakeSglang) -> list[str]:
    return [path for path, _ in server.calls]


@pytest.mark.parametrize(
    ("mode", "pause", "flushes"),
    [(OnWeightUpdate.INTERRUPT, "retract", True), (OnWeightUpdate.CONTINUE, "in_place", False)],
)
async def test_a_version_is_taken_by_the_group_and_served_when_it_is_to_be(
    engine: GroupSglangEngine, server: FakeSglang, model: Path, mode: OnWeightUpdate, pause: str, flushes: bool
) -> None:
    order = an_order(model)

    await engine.join(order, mode)
    assert paths(server) == ["/server_info", "/pause_generation", *JOINING]
    (_, pausing), (_, joining), _ = server.calls[1:]
    assert pausing == {"mode": pause}
    assert joining == {
        "master_address": "127.0.0.1",
        "master_port": 4001,
        "rank_offset": 3,
        "world_size": 5,
        "group_name": "flotilla-1-4001",
        "backend": "gloo",
    }
    server.calls.clear()
    await engine.receive(order)

    assert engine.received == 4 and engine.is_paused
    names = [each.name for each in order.manifest.tensors]
    assert server.broadcast == names
    bodies = [body or {} for path, body in server.calls if path == "/update_weights_from_distributed"]
    assert len(bodies) > 1 and paths(server)[-1] == "/end_weight_update"
    assert {body["load_format"] for body in bodies} == {"flattened_bucket"}
    assert [body["flush_cache"] for body in bodies] == [False] * (len(bodies) - 1) + [flushes]
    assert [body.get("weight_version") for body in bodies] == [None] * (len(bodies) - 1) + [server.label]
    assert server.label.startswith("4-")
    assert "/continue_generation" not in paths(server)

    await engine.serve()

    assert not engine.is_paused and (await engine.load()).version == 4
    [completion] = await engine.generate(a_request(max_new_tokens=1))
    assert completion.versions == ((0, 4),)


async def test_the_next_version_uses_the_same_group(engine: GroupSglangEngine, server: FakeSglang, model: Path) -> None:
    for version in (4, 5):
        server.calls.clear()
        await engine.join(an_order(model, version), OnWeightUpdate.INTERRUPT)
        await engine.receive(an_order(model, version))
        await engine.serve()

    assert "/init_weights_update_group" not in paths(server)
    assert server.groups == ["flotilla-1-4001"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "model.other"}, "do not fit the model"),
        ({"shape": (7,)}, r"has shape \[7\]"),
        ({"dtype": "I32"}, "has dtype I32"),
    ],
)
async def test_tensors_that_are_not_the_models_are_refused_before_the_server_hears_of_them(
    engine: GroupSglangEngine, server: FakeSglang, model: Path, changes: dict[str, Any], words: str
) -> None:
    order = an_order(model)
    first, *others = order.manifest.tensors
    wrong = order.manifest.model_copy(update={"tensors": (first.model_copy(update=changes), *others)})

    with pytest.raises(WeightTransferFailed, match=words):
        await engine.join(order.model_copy(update={"manifest": wrong}), OnWeightUpdate.INTERRUPT)

    assert server.calls == []
    assert not engine.is_paused


async def test_a_server_with_other_ranks_than_its_place_has_is_not_let_in(
    engine: GroupSglangEngine, server: FakeSglang, model: Path
) -> None:
    server.tp_size = 2

    with pytest.raises(WeightTransferFailed, match="the server has 2 ranks, its place in the group 1"):
        await engine.join(an_order(model), OnWeightUpdate.INTERRUPT)
    await engine.join(an_order(model, num_ranks=2), OnWeightUpdate.INTERRUPT)

    assert await engine.give_up()


async def test_a_group_that_was_not_formed_leaves_the_weights_as_they_are(
    engine: GroupSglangEngine, server: FakeSglang, model: Path
) -> None:
    server.group_fails = "Connection reset by peer"

    with pytest.raises(GroupBroken, match="reset by peer"):
        await engine.join(an_order(model), OnWeightUpdate.INTERRUPT)
    assert engine.is_paused
    assert await engine.give_up()

    [completion] = await engine.generate(a_request(max_new_tokens=1))
    assert completion.versions == ((0, 3),)


@pytest.mark.parametrize(
    "answer", [httpx.Response(503, json={"error": "busy"}), httpx.Response(200, json={"status": "ok"})]
)
async def test_a_server_that_does_not_say_how_many_ranks_it_has_is_not_let_in(
    engine: GroupSglangEngine, server: FakeSglang, model: Path, answer: httpx.Response
) -> None:
    server._routes["GET /server_info"] = lambda _: answer

    with pytest.raises(WeightTransferFailed, match="does not report its number of ranks"):
        await engine.join(an_order(model), OnWeightUpdate.INTERRUPT)

    assert not engine.is_paused


async def test_a_join_that_is_cancelled_twice_ends_with_the_servers_answer(
    engine: GroupSglangEngine, server: FakeSglang, model: Path
) -> None:
    is_asked, may_answer = asyncio.Event(), asyncio.Event()

    async def join(body: Body) -> Any:
        is_asked.set()
        await may_answer.wait()
        return server._join(body)

    server._routes["POST /init_weights_update_group"] = join
    joining = asyncio.create_task(engine.join(an_order(model), OnWeightUpdate.INTERRUPT))
    await is_asked.wait()

    for _ in range(2):  # the order's deadline, and the next order
        joining.cancel()
        await asyncio.sleep(0.005)

    assert not joining.done(), "what the server does meanwhile would meet the next order"
    may_answer.set()
    with pytest.raises(asyncio.CancelledError):
        await joining
    await engine.join(an_order(model, epoch=2), OnWeightUpdate.INTERRUPT)
    assert server.groups == ["flotilla-2-4002"]


async def test_an_update_that_a_killed_rollout_left_open_keeps_nobody_from_joining(
    server: FakeSglang, model: Path
) -> None:
    settings = ServerSettings(model, url="http://recorded", context_tokens=128, probe_seconds=60, close_seconds=0.1)
    killed, after = (GroupSglangEngine(settings, server, backend="gloo", reaches=always) for _ in range(2))
    await killed.start()
    await killed.join(an_order(model), OnWeightUpdate.INTERRUPT)

    await after.start()
    [completion] = await after.generate(a_request(max_new_tokens=1))
    await after.join(an_order(model, epoch=2), OnWeightUpdate.INTERRUPT)
    await after.receive(an_order(model, epoch=2))
    await after.serve()

    assert completion.versions == ((0, 0),)
    assert (await after.load()).version == 4
    await after.close()
    await killed.close()


async def test_what_was_received_is_not_served_once_the_engine_joins_again(
    engine: GroupSglangEngine, server: FakeSglang, model: Path
) -> None:
    await engine.join(an_order(model), OnWeightUpdate.INTERRUPT)
    await engine.receive(an_order(model))

    await engine.join(an_order(model, epoch=2), OnWeightUpdate.INTERRUPT)

    assert engine.received is None, "the trainer that comes next may make another image of the version"
    assert not await engine.give_up()


async def test_a_server_is_not_sent_to_a_store_that_is_gone(
    engine: GroupSglangEngine, server: FakeSglang, model: Path
) -> None:
    listener = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port: int = listener.sockets[0].getsockname()[1]
    assert await is_reached("127.0.0.1", port, 5)
    listener.close()
    await listener.wait_closed()
    engine._reaches = is_reached
    rendezvous = Rendezvous(host="127.0.0.1", port=port, epoch=1, world_size=5)

    with pytest.raises(GroupBroken, match="cannot be reached"):
        await engine.join(an_order(model, rendezvous=rendezvous), OnWeightUpdate.INTERRUPT)

    assert "/init_weights_update_group" not in paths(server)
    assert await engine.give_up()


async def test_who_was_left_by_another_member_is_whole_again_after_the_next_epoch(
    engine: GroupSglangEngine, server: FakeSglang, model: Path
) -> None:
    await engine.join(an_order(model), OnWeightUpdate.INTERRUPT)
    server.group_fails = "Failed to receive weights: Connection closed by peer"
    with pytest.raises(GroupBroken):
        await engine.receive(an_order(model))
    server.group_fails = None
    server.calls.clear()

    await engine.join(an_order(model, epoch=2), OnWeightUpdate.INTERRUPT)
    await engine.receive(an_order(model, epoch=2))
    await engine.serve()

    assert paths(server)[1] == "/destroy_weights_update_group"
    assert server.groups == ["flotilla-2-4002"]
    assert (await engine.load()).version == 4


@pytest.mark.parametrize("is_whole", [False, True], ids=["half", "whole"])
async def test_weights_that_are_not_to_be_served_are_replaced_before_anything_is_sampled(
    engine: GroupSglangEngine, server: FakeSglang, model: Path, is_whole: bool
) -> None:
    sampling = asyncio.create_task(engine.generate(a_request(max_new_tokens=100)))
    async with asyncio.timeout(5):
        while not (await engine.load()).running:
            await asyncio.sleep(0)
    await engine.join(an_order(model), OnWeightUpdate.INTERRUPT)
    if is_whole:
        await engine.receive(an_order(model))
    else:
        server.group_fails = "Failed to receive weights: Connection closed by peer"
        with pytest.raises(GroupBroken):
            await engine.receive(an_order(model))

    assert not await engine.give_up()
    waiting = asyncio.create_task(engine.generate(a_request(request_id="b", max_new_tokens=1)))
    with pytest.raises(WeightTransferFailed):
        await engine.load_weights(model / "config.json", 3, OnWeightUpdate.DRAIN)
    assert engine.is_paused, "what cannot be loaded changes nothing"
    await engine.load_weights(model / "model.safetensors", 3, OnWeightUpdate.DRAIN)

    assert not engine.is_paused
    assert [each.versions for each in await waiting] == [((0, 3),)]
    [completion] = await sampling
    assert completion.finish_reason is FinishReason.LENGTH and completion.versions == ((0, 3),)


async def test_the_initial_weights_come_from_the_model(
    engine: GroupSglangEngine, server: FakeSglang, model: Path
) -> None:
    await engine.join(an_order(model), OnWeightUpdate.INTERRUPT)
    await engine.receive(an_order(model))
    assert not await engine.give_up()

    await engine.wake()

    assert server.label.startswith("3-") and not engine.is_paused


async def test_a_drain_waits_for_what_is_being_sampled(
    engine: GroupSglangEngine, server: FakeSglang, model: Path
) -> None:
    sampling = asyncio.create_task(engine.generate(a_request(max_new_tokens=60)))
    async with asyncio.timeout(5):
        while not (await engine.load()).running:
            await asyncio.sleep(0)

    await engine.join(an_order(model), OnWeightUpdate.DRAIN)

    assert sampling.done()
    assert await engine.give_up()


async def test_a_drain_that_takes_too_long_lets_requests_in_again(
    engine: GroupSglangEngine, server: FakeSglang, model: Path
) -> None:
    server.token_seconds = 0.05
    sampling = asyncio.create_task(engine.generate(a_request(max_new_tokens=100)))
    async with asyncio.timeout(5):
        while not (await engine.load()).running:
            await asyncio.sleep(0)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await engine.join(an_order(model), OnWeightUpdate.DRAIN)

    assert not engine.is_paused
    sampling.cancel()


async def test_tensors_that_the_server_does_not_take_are_this_members_failure(
    engine: GroupSglangEngine, server: FakeSglang, model: Path
) -> None:
    await engine.join(an_order(model), OnWeightUpdate.INTERRUPT)
    server.group_fails = "Failed to update parameter online: no such tensor"

    with pytest.raises(WeightTransferFailed, match="no such tensor"):
        await engine.receive(an_order(model))

    assert not await engine.give_up()


async def test_a_server_that_does_not_answer_in_its_group_is_given_up(
    engine: GroupSglangEngine, server: FakeSglang, model: Path
) -> None:
    def is_silent(_: Body) -> None:
        raise httpx.ReadTimeout("")

    server._routes["POST /init_weights_update_group"] = is_silent

    with pytest.raises(WorkerDied, match=r"did not follow its weight group: .* did not answer"):
        await engine.join(an_order(model), OnWeightUpdate.INTERRUPT)


def test_a_broadcast_is_of_one_dtype_and_of_whole_tensors() -> None:
    sizes = [("F32", 8), ("F32", 8), ("F32", 40), ("BF16", 6), ("BF16", 6)]
    ends = [sum(size for _, size in sizes[: number + 1]) for number in range(len(sizes))]
    tensors = [
        TensorSpec(name=str(number), shape=(1,), dtype=dtype, start=end - size, end=end)
        for number, ((dtype, size), end) in enumerate(zip(sizes, ends, strict=True))
    ]

    buckets = [[each.name for each in bucket] for bucket in buckets_of(tensors, 20)]

    assert buckets == [["0", "1"], ["2"], ["3", "4"]]


def test_a_server_listens_for_its_group_where_its_rollout_does() -> None:
    settings = ServerSettings(Path("/m"), python=Path("/python"), group_host="127.0.0.1")

    told = environment(settings, {}, Path("/tmp/place"))

    assert (told["GLOO_SOCKET_IFNAME"], told["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    assert interface_of("0.0.0.0") is None
