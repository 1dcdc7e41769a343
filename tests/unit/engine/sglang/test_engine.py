"""What the SGLang engine adds to the contract: what its server sees and in which order, and when the server is dead."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from ipaddress import IPv4Network, ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.services.rollout.engines.sglang.engine import SglangEngine
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import (
    InvalidSpec,
    ModelError,
    ServerUnreachable,
    Unavailable,
    WeightsDiverged,
    WeightTransferFailed,
    WorkerDied,
)
from tests.contract.engine.fake_sglang import FakeSglang
from tests.contract.engine.models import make_model, save_image, save_model
from tests.contract.engine.requests import a_request

LONG = 100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model("qwen3", path)
    return path


@pytest.fixture
def server(model: Path) -> FakeSglang:
    return FakeSglang(model, context_length=136, token_seconds=0.001)


@pytest.fixture
def settings(model: Path) -> ServerSettings:
    return ServerSettings(model, url="http://recorded", context_tokens=128, version=3, probe_seconds=0.01)


@pytest.fixture
async def engine(server: FakeSglang, settings: ServerSettings) -> AsyncIterator[SglangEngine]:
    made = SglangEngine(replace(settings, probe_seconds=60), transport=server)
    await made.start()
    server.calls.clear()
    yield made
    await made.close()


def image_of(model: Path) -> Path:
    return model / "model.safetensors"


async def until_sampling(server: FakeSglang, count: int = 1) -> None:
    async with asyncio.timeout(10):
        while sum(path == "/generate" for path, _ in server.calls) < count:
            await asyncio.sleep(0)


async def test_a_url_that_the_operator_does_not_allow_is_refused(settings: ServerSettings) -> None:
    engine = SglangEngine(replace(settings, url="http://10.1.2.3:30000"))

    with pytest.raises(InvalidSpec, match=r"rollout\.engine\.url .*FLOTILLA_GRADER_NETWORKS"):
        await engine.start()
    await engine.close()


@pytest.mark.parametrize(
    ("networks", "refused"), [((ip_network("127.0.0.0/8"),), False), ((ip_network("10.0.0.0/8"),), True)]
)
async def test_the_operator_names_the_networks(
    settings: ServerSettings, networks: tuple[IPv4Network, ...], refused: bool
) -> None:
    listener = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    engine = SglangEngine(replace(settings, url=f"http://127.0.0.1:{port}", networks=networks))

    # Whatever listens there is no SGLang: it is asked, or it is not.
    with pytest.raises(InvalidSpec if refused else Unavailable):
        await engine.start()
    await engine.close()
    listener.close()


@pytest.mark.parametrize(
    ("mode", "pause", "flushes"),
    [
        (OnWeightUpdate.INTERRUPT, "retract", True),
        (OnWeightUpdate.DRAIN, "retract", True),
        (OnWeightUpdate.CONTINUE, "in_place", False),
    ],
)
async def test_an_update_is_pause_load_continue(
    engine: SglangEngine, server: FakeSglang, model: Path, mode: OnWeightUpdate, pause: str, flushes: bool
) -> None:
    await engine.load_weights(image_of(model), 4, mode)

    paths = [path for path, _ in server.calls]
    assert paths == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    (_, pausing), (_, loading), _ = server.calls
    assert pausing == {"mode": pause}
    assert loading is not None
    assert (loading["weight_version"].partition("-")[0], loading["flush_cache"]) == ("4", flushes)
    await engine.generate(a_request(max_new_tokens=1))
    assert server.calls[-1][1] is not None
    assert server.calls[-1][1]["cache_salt"] == "4"


async def test_it_sleeps_without_weights_and_wakes_with_those_it_is_given(
    engine: SglangEngine, server: FakeSglang, model: Path
) -> None:
    await engine.sleep()
    assert server.released == {"weights", "kv_cache", "cuda_graph"}

    await engine.load_weights(image_of(model), 4, OnWeightUpdate.INTERRUPT)

    release, resume = "/release_memory_occupation", "/resume_memory_occupation"
    asked = [path for path, _ in server.calls]
    assert asked == [
        *("/pause_generation", release),
        *(resume, "/update_weights_from_disk", resume, "/continue_generation"),
    ]
    assert [body for path, body in server.calls if path == resume] == [
        {"tags": ["weights"]},
        {"tags": ["kv_cache", "cuda_graph"]},
    ]
    assert server.label.startswith("4-")
    [completion] = await engine.generate(a_request(max_new_tokens=1))
    assert completion.versions == ((0, 4),)


async def test_a_server_that_does_not_end_its_requests_does_not_keep_its_memory(
    server: FakeSglang, settings: ServerSettings
) -> None:
    engine = SglangEngine(replace(settings, probe_seconds=60, load_seconds=0.1, close_seconds=0.1), transport=server)
    await engine.start()
    server.token_seconds = 60
    sampling = asyncio.create_task(engine.generate(a_request(max_new_tokens=LONG)))
    await until_sampling(server)

    async with asyncio.timeout(10):
        with pytest.raises(WorkerDied, match=r"did not go to sleep: its requests did not end within 0\.1 s"):
            await engine.sleep()
        with pytest.raises(WorkerDied):
            await sampling
    await engine.close()


async def test_a_server_that_ends_instead_of_going_to_sleep_is_the_engines_death(
    engine: SglangEngine, server: FakeSglang
) -> None:
    # As if its saver of memory had another idea of what is freed already.
    await engine.sleep()
    server.released.clear()

    with pytest.raises(WorkerDied):
        await engine.wake()


@pytest.mark.parametrize(
    "changes",
    [
        {"model.norm.weight": torch.zeros(33)},
        {"model.unheard_of.weight": torch.zeros(3)},
        {"model.norm.weight": torch.zeros(32, dtype=torch.int32)},
    ],
    ids=["shape", "name", "dtype"],
)
async def test_an_image_that_does_not_fit_never_reaches_the_server(
    engine: SglangEngine, server: FakeSglang, tmp_path: Path, changes: dict[str, torch.Tensor]
) -> None:
    wrong = save_image(make_model("qwen3"), tmp_path / "wrong.safetensors", **changes)

    with pytest.raises(WeightTransferFailed):
        await engine.load_weights(wrong, 4, OnWeightUpdate.INTERRUPT)

    assert server.calls == []
    assert [each.versions for each in await engine.generate(a_request())] == [((0, 3),)]


async def test_an_update_that_fails_half_way_is_the_engines_death(
    engine: SglangEngine, server: FakeSglang, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_shapes", {})  # As if the server were of another model than the directory.
    running = asyncio.create_task(engine.generate(a_request(max_new_tokens=LONG)))
    await until_sampling(server)

    with pytest.raises(WorkerDied):
        await engine.load_weights(image_of(model), 4, OnWeightUpdate.INTERRUPT)

    with pytest.raises(WorkerDied):
        await running
    with pytest.raises(WorkerDied):
        await engine.generate(a_request())


async def test_a_dropped_connection_is_no_death(engine: SglangEngine, server: FakeSglang) -> None:
    server.drops_connections = 1

    with pytest.raises(Unavailable, match="dropped a connection"):
        await engine.generate(a_request())

    assert len(await engine.generate(a_request())) == 1


async def test_a_dead_server_ends_every_request_that_runs_or_waits(
    engine: SglangEngine, server: FakeSglang, model: Path
) -> None:
    running = [asyncio.create_task(engine.generate(a_request(max_new_tokens=LONG))) for _ in range(3)]
    await until_sampling(server, 3)
    update = asyncio.create_task(engine.load_weights(image_of(model), 4, OnWeightUpdate.DRAIN))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(engine.generate(a_request()))

    server.die()

    ended = await asyncio.gather(*running, update, waiting, return_exceptions=True)
    assert {type(each) for each in ended} == {ServerUnreachable}


async def test_a_server_that_stops_working_is_found_and_a_paused_one_is_not_asked(
    server: FakeSglang, settings: ServerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SglangEngine(settings, transport=server)
    await engine.start()
    async with engine._gate.switching():
        monkeypatch.setitem(server._routes, "GET /health", lambda _: httpx.Response(503))
        await asyncio.sleep(0.05)
        assert (await engine.load()).version == 3

    async with asyncio.timeout(10):
        while True:
            try:
                await engine.load()
            except WorkerDied as error:
                assert "failed 3 health checks" in error.detail
                break
            await asyncio.sleep(0.01)
    await engine.close()


async def test_aborts_wait_for_the_end_of_a_pause_since_the_server_would_not_hear_them(
    engine: SglangEngine, server: FakeSglang
) -> None:
    running = asyncio.create_task(engine.generate(a_request(request_id="long", max_new_tokens=LONG)))
    await until_sampling(server)
    async with engine._gate.switching():
        aborting = asyncio.create_task(engine.abort("long"))
        await asyncio.sleep(0.03)
        assert "/abort_request" not in [path for path, _ in server.calls]

    await aborting
    assert len(await running) == 1


async def test_a_running_server_gets_the_initial_weights_and_has_to_have_the_room(
    model: Path, settings: ServerSettings, tmp_path: Path
) -> None:
    server = FakeSglang(model, context_length=136)
    engine = SglangEngine(settings, transport=server)
    await engine.start()
    assert server.label.startswith("3-")
    await engine.close()

    small = SglangEngine(settings, transport=FakeSglang(model, context_length=135))
    with pytest.raises(ModelError, match="start it with --context-length 136"):
        await small.start()

    other = tmp_path / "other"
    save_model("llama", other)
    with pytest.raises(ModelError, match="another model"):
        await SglangEngine(settings, transport=FakeSglang(other)).start()


async def test_a_server_that_is_not_there_is_named_and_may_come(settings: ServerSettings, server: FakeSglang) -> None:
    server.die()

    with pytest.raises(Unavailable, match=r"the SGLang server at http://\S+ cannot be reached now: start it"):
        await SglangEngine(replace(settings, probe_seconds=60), transport=server).start()


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    return save_image(make_model("qwen3", seed=1), tmp_path / "newer.safetensors")


async def test_what_the_server_has_is_asked_before_it_goes_on(
    engine: SglangEngine, server: FakeSglang, newer: Path
) -> None:
    assert await engine.load_proved(newer, 4, OnWeightUpdate.INTERRUPT, "digest")

    asked, update, check = [path for path, _ in server.calls], "/update_weights_from_disk", "/weights_checker"
    assert asked == [check, "/pause_generation", update, check, "/continue_generation"]
    server.calls.clear()
    assert await engine.load_proved(newer, 5, OnWeightUpdate.INTERRUPT, "digest")
    assert [path for path, _ in server.calls].count(check) == 1, "how it lays weights out is known by now"


@pytest.mark.parametrize("damage", ["flip", "half", "keep"])
async def test_a_server_with_other_weights_than_it_was_given_samples_nothing_more(
    engine: SglangEngine, server: FakeSglang, newer: Path, damage: str
) -> None:
    server.damage = damage

    with pytest.raises(WeightsDiverged, match="version 4 as the server has it") as raised:
        await engine.load_proved(newer, 4, OnWeightUpdate.INTERRUPT, "digest")

    assert "the first that differs is " in raised.value.detail
    assert "/continue_generation" not in [path for path, _ in server.calls]
    with pytest.raises(WorkerDied):
        await engine.generate(a_request(max_new_tokens=1))


async def test_a_server_that_does_not_tell_is_believed(engine: SglangEngine, server: FakeSglang, newer: Path) -> None:
    del server._requests["POST /weights_checker"]

    assert not await engine.load_proved(newer, 4, OnWeightUpdate.INTERRUPT, "digest")
    assert (await engine.generate(a_request(max_new_tokens=1)))[0].versions == ((0, 4),)


Told = Callable[[Mapping[str, Any]], Any]


def two_ranks(_: object) -> Any:
    return {"ranks": [{"checksums": {"a": "0" * 64}}, {"checksums": {"a": "1" * 64}}]}


@pytest.mark.parametrize("answer", [two_ranks, lambda _: {"ranks": []}, lambda _: {}, lambda _: {"ranks": [[1]]}])
async def test_a_server_whose_tensors_cannot_be_told_serves_unproved_and_the_log_says_why(
    engine: SglangEngine, server: FakeSglang, newer: Path, answer: Told, caplog: pytest.LogCaptureFixture
) -> None:
    server._routes["POST /weights_checker"] = answer

    for version in (4, 5):
        assert not await engine.load_proved(newer, version, OnWeightUpdate.INTERRUPT, "digest")

    assert (await engine.generate(a_request(max_new_tokens=1)))[0].versions == ((0, 5),)
    assert [each.message for each in caplog.records].count("what the server loads is not proved") == 1


async def test_an_answer_that_cannot_be_read_while_the_server_is_paused_gives_it_up(
    engine: SglangEngine, server: FakeSglang, newer: Path
) -> None:
    tells = server._routes["POST /weights_checker"]
    answers: Iterator[Told] = iter([tells, lambda _: {}])
    server._routes["POST /weights_checker"] = lambda body: next(answers)(body)

    with pytest.raises(WorkerDied, match="version 4 could not be loaded: the server's reply cannot be used: KeyError"):
        await engine.load_proved(newer, 4, OnWeightUpdate.INTERRUPT, "digest")
    with pytest.raises(WorkerDied):
        await engine.load()
