"""A server that somebody else starts: whatever he does to it, no token gets a version that it was not sampled by."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from flotilla.services.rollout.engines.base import Completion
from flotilla.services.rollout.engines.servers import connection
from flotilla.services.rollout.engines.servers import engine as server_engine
from flotilla.services.rollout.engines.servers.engine import ServerEngine
from flotilla.services.rollout.engines.servers.model import stage_directory
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.services.rollout.engines.sglang.engine import SglangEngine
from flotilla.services.rollout.engines.vllm.engine import VllmEngine
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import FlotillaError, ModelError, ServerUnreachable, Unavailable, WorkerDied
from tests.contract.engine.fake_server import FakeServer, token_of, weights_in
from tests.contract.engine.fake_sglang import FakeSglang
from tests.contract.engine.fake_vllm import FakeVllm
from tests.contract.engine.models import make_model, save_image, save_model
from tests.contract.engine.requests import a_request
from tests.contract.engine.served import Port, served

LONG = 100
PROMPT = (5, 6, 7)


@dataclass(frozen=True)
class Kind:
    """One kind of server: how it is asked, and what stands in for it."""

    engine: Callable[..., ServerEngine]
    fake: Callable[..., FakeServer]
    generate: str


KINDS = {
    "sglang": Kind(SglangEngine, FakeSglang, "/generate"),
    "vllm": Kind(VllmEngine, FakeVllm, "/inference/v1/generate"),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model("qwen3", path)
    return path


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image(make_model("qwen3", seed=1), tmp_path_factory.mktemp("image") / "model.safetensors")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "POLL_SECONDS", 0.01)


def a_server(kind: Kind, model: Path, label: str = "default") -> FakeServer:
    """Start a server as its owner does: with the model's weights, whatever he calls them."""
    made = kind.fake(model, context_length=136, token_seconds=0.001)
    made.label = label
    return made


def settings_of(model: Path, url: str) -> ServerSettings:
    return ServerSettings(model, url=url, context_tokens=128, probe_seconds=60, close_seconds=1)


@asynccontextmanager
async def attached(kind: Kind, model: Path, port: Port, probe_seconds: float = 60) -> AsyncIterator[ServerEngine]:
    engine = kind.engine(replace(settings_of(model, port.url), probe_seconds=probe_seconds))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def check_versions(completion: Completion, weights: dict[int, int]) -> None:
    """Check that each token is of the weights that its version names."""
    ends = [start for start, _ in completion.versions[1:]] + [completion.token_ids.size]
    for (start, version), end in zip(completion.versions, ends, strict=True):
        expected = [token_of(PROMPT, 0, position, weights[version]) for position in range(start, end)]
        assert completion.token_ids[start:end].tolist() == expected, f"tokens that are not of version {version}"


async def sample(engine: ServerEngine, max_new_tokens: int = 8) -> Completion:
    [completion] = await engine.generate(a_request(PROMPT, greedy=True, max_new_tokens=max_new_tokens))
    return completion


@pytest.fixture
def weights(model: Path, image: Path) -> dict[int, int]:
    """What version 0 and version 1 are."""
    found = {0: weights_in(model), 1: weights_in(image.parent)}
    assert token_of(PROMPT, 0, 0, found[0]) != token_of(PROMPT, 0, 0, found[1])
    return found


@pytest.mark.parametrize("label", ["default", "1", "0"])
async def test_a_restarted_server_is_given_its_weights_again_before_it_samples_for_anybody(
    kind: Kind, model: Path, image: Path, weights: dict[int, int], label: str
) -> None:
    async with served(a_server(kind, model)) as port:
        async with attached(kind, model, port) as engine:
            await engine.load_weights(image, 1, OnWeightUpdate.DRAIN)
            check_versions(await sample(engine), weights)

            await port.kill()
            await port.start(a_server(kind, model, label))

            with pytest.raises(WorkerDied, match="restarted"):
                # A connection that was kept is found closed by the first call, or a new one is made.
                await sample(engine)
            with pytest.raises(WorkerDied):
                await engine.load()
        async with attached(kind, model, port) as engine:
            check_versions(await sample(engine), weights)
            await engine.load_weights(image, 1, OnWeightUpdate.DRAIN)

            completion = await sample(engine)

            assert completion.versions == ((0, 1),)
            check_versions(completion, weights)


async def test_a_server_that_is_away_for_a_while_is_no_failure_of_the_fleet(
    kind: Kind, model: Path, image: Path, weights: dict[int, int]
) -> None:
    async with served(a_server(kind, model)) as port:
        async with attached(kind, model, port) as engine:
            await engine.load_weights(image, 1, OnWeightUpdate.DRAIN)
            running = [asyncio.create_task(sample(engine, LONG)) for _ in range(3)]
            await until_sampling(port, kind, 3)

            await port.kill()

            ended = await asyncio.gather(*running, return_exceptions=True)
            assert {type(each) for each in ended} == {ServerUnreachable}
        with pytest.raises(Unavailable, match=rf"{port.url} cannot be reached now: start it"):
            await kind.engine(settings_of(model, port.url)).start()

        await port.start(a_server(kind, model))

        async with attached(kind, model, port) as engine:
            check_versions(await sample(engine), weights)


async def until_sampling(port: Port, kind: Kind, count: int) -> None:
    server = port.server
    assert isinstance(server, FakeServer)
    async with asyncio.timeout(10):
        while len(server._samples) < count:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("mode", OnWeightUpdate)
@pytest.mark.parametrize("call", range(5))
async def test_a_restart_between_any_two_calls_of_an_update_gives_no_token_a_wrong_version(
    kind: Kind, model: Path, image: Path, weights: dict[int, int], call: int, mode: OnWeightUpdate
) -> None:
    async with served(a_server(kind, model)) as port, attached(kind, model, port) as engine:
        calls = iter(range(100))

        def restart(path: str) -> None:
            if next(calls) == call:
                port.server = a_server(kind, model, "1")

        port.before = restart
        try:
            await engine.load_weights(image, 1, mode)
            completion = await sample(engine)
        except FlotillaError:
            return
        check_versions(completion, weights)


async def test_a_server_that_was_restarted_with_less_room_fails_no_task(kind: Kind, model: Path) -> None:
    async with served(a_server(kind, model)) as port, attached(kind, model, port) as engine:
        port.server = kind.fake(model, context_length=16)

        with pytest.raises(WorkerDied, match="restarted"):
            await sample(engine, LONG)


async def test_an_update_that_was_given_up_does_not_reach_what_the_next_one_loads(
    kind: Kind, model: Path, image: Path, weights: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, has_gone_on, calls = threading.Event(), threading.Event(), []

    def stage(place: Path, *of: Path) -> Path:
        calls.append(of)
        if len(calls) == 1:
            assert may_go_on.wait(10)
            made = stage_directory(place, *of)
            has_gone_on.set()
            return made
        made = stage_directory(place, *of)
        may_go_on.set()
        assert has_gone_on.wait(10)
        return made

    async with served(a_server(kind, model)) as port, attached(kind, model, port) as engine:
        monkeypatch.setattr(server_engine, "stage_directory", stage)
        given_up = asyncio.create_task(engine.load_weights(model / "model.safetensors", 1, OnWeightUpdate.DRAIN))
        async with asyncio.timeout(10):
            while not calls:
                await asyncio.sleep(0.001)
        given_up.cancel()

        await engine.load_weights(image, 1, OnWeightUpdate.DRAIN)

        check_versions(await sample(engine), weights)


async def test_a_restart_while_nobody_samples_is_found(kind: Kind, model: Path) -> None:
    async with served(a_server(kind, model)) as port, attached(kind, model, port, probe_seconds=0.01) as engine:
        port.server = a_server(kind, model)

        async with asyncio.timeout(10):
            with pytest.raises(WorkerDied, match=r"does not serve the version that it was given.*'default'"):
                while True:
                    await engine.load()
                    await asyncio.sleep(0.01)


async def test_a_server_that_another_rollout_takes_is_told_from_ours(kind: Kind, model: Path, image: Path) -> None:
    async with served(a_server(kind, model)) as port, attached(kind, model, port) as first:
        await first.load_weights(image, 1, OnWeightUpdate.DRAIN)
        async with attached(kind, model, port) as second:
            await second.load_weights(model / "model.safetensors", 1, OnWeightUpdate.DRAIN)

            with pytest.raises(WorkerDied, match="another client uses it"):
                await sample(first)

            assert (await sample(second)).versions == ((0, 1),)


async def test_an_answer_that_breaks_off_is_no_death(kind: Kind, model: Path, weights: dict[int, int]) -> None:
    async with served(a_server(kind, model)) as port, attached(kind, model, port) as engine:
        port.breaks = [kind.generate]

        with pytest.raises(Unavailable, match="dropped a connection"):
            await sample(engine)

        check_versions(await sample(engine), weights)


class Answers(httpx.AsyncBaseTransport):
    """Something else that listens: it answers whatever it is asked alike."""

    def __init__(self, status: int, text: str) -> None:
        self._reply = (status, text)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        status, text = self._reply
        return httpx.Response(status, text=text)


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (200, "<html>a page of somebody's</html>", ModelError),
        (200, "null", ModelError),
        (200, "[]", ModelError),
        (200, "{}", ModelError),
        (302, "elsewhere", ModelError),
        (404, "not found", ModelError),
        (503, "no healthy upstream", Unavailable),
        (429, "slowly", Unavailable),
    ],
)
async def test_what_is_no_such_server_is_told_from_one_that_is_not_ready(
    kind: Kind, model: Path, status: int, text: str, error: type[FlotillaError]
) -> None:
    async with served(Answers(status, text)) as port:
        with pytest.raises(error, match=port.url):
            await kind.engine(settings_of(model, port.url)).start()


async def test_a_first_load_that_takes_long_is_not_taken_for_a_death(kind: Kind, model: Path) -> None:
    server = a_server(kind, model)
    loads = [route for route in server._routes if route.split("/")[1] in {"collective_rpc", "update_weights_from_disk"}]
    [route] = loads
    load, is_loaded = server._routes[route], asyncio.Event()

    async def load_slowly(body: object) -> object:
        server._routes[health] = lambda _: httpx.Response(503)
        await asyncio.sleep(0.2)
        server._routes[health] = healthy
        is_loaded.set()
        return load(body)  # type: ignore[arg-type]

    async with served(server) as port:
        engine = kind.engine(replace(settings_of(model, port.url), probe_seconds=0.01))
        health = f"GET {engine._dialect.health_path}"
        healthy = server._routes[health]
        server._routes[route] = load_slowly

        await engine.start()

        assert is_loaded.is_set()
        assert (await engine.load()).version == 0
        await engine.close()
