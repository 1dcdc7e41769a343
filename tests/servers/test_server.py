"""Real SGLang and vLLM servers on the CPU: what is only true if it is true of the real one."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from flotilla.services.rollout.engines.base import Completion, GroupBroken
from flotilla.services.rollout.engines.servers import leftovers
from flotilla.services.rollout.engines.servers.engine import ServerEngine
from flotilla.services.rollout.engines.sglang import engine as sglang
from flotilla.services.rollout.engines.sglang.buckets import BucketProcess
from flotilla.services.rollout.engines.sglang.engine import SglangDialect, SglangEngine
from flotilla.services.rollout.engines.sglang.group_engine import GroupSglangEngine
from flotilla.services.rollout.engines.vllm.engine import VllmDialect, VllmEngine
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import InvalidSpec, WeightTransferFailed, WorkerDied
from flotilla.shared.schemas.engine import EngineCapability
from flotilla.shared.schemas.publication import Manifest, PublicationOrder, PublicationPhase, Rendezvous, Transport
from flotilla.shared.schemas.trajectory import FinishReason
from flotilla.shared.weights.group.endpoint_client import EndpointClient
from flotilla.shared.weights.group.engine_group import buckets_of
from flotilla.shared.weights.image.layout import read_layout
from tests.contract.engine.conftest import needs, python_of, server_settings, until_running
from tests.contract.engine.fake_server import unknown_fields
from tests.contract.engine.models import all_scores, make_model, save_image, save_long_model, scores
from tests.contract.engine.requests import a_request
from tests.fleet import until
from tests.marked_processes import MARK, marked
from tests.servers.recording import files_asked_for, recording, requests_of

pytestmark = pytest.mark.timeout(900)

KINDS = [pytest.param("sglang", marks=pytest.mark.sglang), pytest.param("vllm", marks=pytest.mark.vllm)]
DIALECTS = {"sglang": SglangDialect, "vllm": lambda: VllmDialect(raw=False)}

OWNER = """
import asyncio, sys
from pathlib import Path
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.services.rollout.engines.sglang.engine import SglangEngine
from flotilla.services.rollout.engines.vllm.engine import VllmEngine

async def main(model, python, kind):
    make = {"sglang": SglangEngine, "vllm": VllmEngine}[kind]
    engines = [make(ServerSettings(Path(model), python=Path(python))) for _ in range(2)]
    await asyncio.gather(*(engine.start() for engine in engines))
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""

NUM_UPDATES = 200
BUCKET_BYTES = 30_000
PROMPT = (5, 6, 7, 8)
ENDLESS = 30_000
"""Tokens that take a server a minute at least: no such answer has ended by itself before a test acts, however late it
hears of it on a busy machine."""
CONTEXT = 32_768


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_long_model(tmp_path_factory.mktemp("model"), positions=CONTEXT)


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module]:
    """Those of odd versions and of even ones; the server starts with the odd."""
    return make_model("qwen3-32", seed=1), make_model("qwen3-32", seed=0)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def records(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All traffic of this module, or of all tests where the environment asks for it."""
    if (kept := files_asked_for().get(kind)) is not None:
        yield kept
        return
    file = tmp_path_factory.mktemp("records") / "traffic.jsonl"
    with recording({kind: file}):
        yield file


def an_engine(kind: str, model_path: Path, **changes: Any) -> ServerEngine:
    settings = server_settings(model_path, kind, **{"context_tokens": CONTEXT, **changes})
    return ServerEngine(settings, DIALECTS[kind]())


@pytest.fixture(scope="module")
async def engine(kind: str, model_path: Path, records: Path) -> AsyncIterator[ServerEngine]:
    made = an_engine(kind, model_path, version=2)
    await made.start()
    yield made
    await made.close()


@pytest.fixture(scope="module")
def images(models: tuple[nn.Module, nn.Module], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("images")
    return [save_image(model, folder / f"{index}.safetensors") for index, model in enumerate(models[::-1])]


def farthest(models: Sequence[nn.Module], completions: Sequence[Completion]) -> float:
    """Rescore every token under its own version; the largest difference in nats."""
    worst = 0.0
    for completion in completions:
        under = [scores(model, PROMPT, completion.token_ids) for model in (models[1], models[0])]
        ends = [start for start, _ in completion.versions[1:]] + [completion.token_ids.size]
        for (start, version), end in zip(completion.versions, ends, strict=True):
            difference = np.abs(completion.log_probs[start:end] - under[version % 2][start:end])
            worst = max(worst, float(difference.max()))
    return worst


Publish = Callable[[int], Awaitable[None]]


def loading(engine: ServerEngine, images: Sequence[Path]) -> Publish:
    """Publish versions by having the engine load images, those of odd versions and of even ones."""
    return lambda version: engine.load_weights(images[version % 2], version, OnWeightUpdate.INTERRUPT)


class Group:
    """Publishes versions by broadcasts to the engine's ranks; the sender is the trainer's."""

    def __init__(
        self, engine: GroupSglangEngine, sender: EndpointClient, images: Sequence[Path], num_ranks: int
    ) -> None:
        self._engine, self._sender, self._images, self._num_ranks = engine, sender, images, num_ranks
        self._rendezvous: Rendezvous | None = None
        self._epoch = 0

    async def publish(self, version: int) -> None:
        """Send a version to the open group, or to a new one."""
        order = await self._joined(version)
        await asyncio.gather(self._send(order), self._engine.receive(order))
        await self._engine.serve()

    async def break_off_and_send_again(self) -> None:
        """Lose the sender before the second broadcast, then have the whole version in the next group."""
        version = (await self._engine.load()).version + 1
        await self._break_off(version)
        await self.publish(version)

    async def break_off_and_load(self) -> None:
        """Lose the sender before the second broadcast, then load an image."""
        version = (await self._engine.load()).version + 1
        await self._break_off(version)
        assert not await self._engine.give_up()
        await self._engine.load_weights(self._images[version % 2], version, OnWeightUpdate.INTERRUPT)

    async def _break_off(self, version: int) -> None:
        order = await self._joined(version)
        receiving = asyncio.create_task(self._engine.receive(order))
        # Of what it waits for the second part never comes: the image that is sent ends before.
        first = next(buckets_of(order.manifest.tensors, BUCKET_BYTES))
        part = self._images[version % 2].with_name("part.safetensors")
        tensors = load_file(self._images[version % 2])
        save_file({each.name: tensors[each.name] for each in first}, part)
        await self._sender.send(self._epoch, part, part.stat().st_size, BUCKET_BYTES, 60)
        await self._sender.close_epoch(self._epoch)
        self._rendezvous = None
        with pytest.raises(GroupBroken):
            await receiving

    async def _joined(self, version: int) -> PublicationOrder:
        if self._rendezvous is None:
            self._epoch += 1
            self._rendezvous = await self._sender.open_sender(self._epoch, 1 + self._num_ranks, 60)
        tensors = read_layout(self._images[version % 2]).tensors
        manifest = Manifest(
            version=version, image_bytes=tensors[-1].end, slice_bytes=BUCKET_BYTES, checksum="0" * 16, tensors=tensors
        )
        order = PublicationOrder(
            version=version,
            epoch=self._epoch,
            transport=Transport.ENGINE,
            rank=1,
            num_ranks=self._num_ranks,
            phase=PublicationPhase.TRANSFERRING,
            rendezvous=self._rendezvous,
            manifest=manifest,
            deadline_seconds=60,
        )
        await self._engine.join(order, OnWeightUpdate.INTERRUPT)
        await self._sender.joined(self._epoch, 60)
        return order

    async def _send(self, order: PublicationOrder) -> None:
        manifest = order.manifest
        image = self._images[order.version % 2]
        await self._sender.send(order.epoch, image, manifest.image_bytes, manifest.slice_bytes, 60)


def ranks_of(number: int) -> dict[str, Any]:
    return {} if number == 1 else {"tp_size": number}


async def update_in_flight(engine: ServerEngine, publish: Publish, num_updates: int) -> list[Completion]:
    """Publish one version after the other while completions of 120 tokens are sampled; return these."""
    version = (await engine.load()).version
    running: set[asyncio.Task[Sequence[Completion]]] = set()
    done: list[Completion] = []
    last = version + num_updates
    while version < last:
        while len(running) < 3:
            running.add(asyncio.create_task(engine.generate(a_request(PROMPT, seeds=(1, 2), max_new_tokens=120))))
        version += 1
        await publish(version)
        finished = {task for task in running if task.done()}
        done += [completion for task in finished for completion in task.result()]
        running -= finished
    done += [completion for completions in await asyncio.gather(*running) for completion in completions]
    assert (await engine.load()).version == last
    assert all(completion.token_ids.size == 120 for completion in done)
    return done


async def test_updates_in_flight_leave_every_token_its_own_version(
    engine: ServerEngine, images: list[Path], models: tuple[nn.Module, nn.Module]
) -> None:
    done = await update_in_flight(engine, loading(engine, images), NUM_UPDATES)

    assert sum(len(completion.versions) - 1 for completion in done) > NUM_UPDATES
    assert farthest(models, done) < 1e-4


async def test_an_update_in_place_keeps_the_cache_and_its_spans_begin_within_a_token(
    engine: ServerEngine, images: list[Path], models: tuple[nn.Module, nn.Module]
) -> None:
    version = (await engine.load()).version
    request = a_request(PROMPT, seeds=(1, 2), request_id="endless", max_new_tokens=ENDLESS)
    running = asyncio.create_task(engine.generate(request))
    await until_running(engine, running=2, new_tokens=80)

    await engine.load_weights(images[(version + 1) % 2], version + 1, OnWeightUpdate.CONTINUE)

    await until_running(engine, running=2, new_tokens=80)
    await engine.abort("endless")
    blurred = EngineCapability.EXACT_SPANS not in engine.capabilities
    for completion in await running:
        (_, old), (start, new) = completion.versions
        start -= blurred
        assert (old, new) == (version, version + 1)
        before = Completion(
            completion.token_ids[:start], completion.log_probs[:start], ((0, old),), FinishReason.LENGTH
        )
        assert farthest(models, [before]) < 1e-4
    fresh = await engine.generate(a_request(PROMPT, seeds=(3,), max_new_tokens=50))
    assert farthest(models, fresh) < 1e-4, "a new request shares no cache with the old weights"


async def test_an_abort_gives_what_there_is(engine: ServerEngine, models: tuple[nn.Module, nn.Module]) -> None:
    request = a_request(PROMPT, seeds=(1, 2), request_id="endless", max_new_tokens=ENDLESS)
    running = asyncio.create_task(engine.generate(request))
    await until_running(engine, running=2, new_tokens=60)

    await engine.abort("endless")

    completions = await running
    assert {completion.finish_reason for completion in completions} == {FinishReason.ABORTED}
    assert all(20 <= completion.token_ids.size < ENDLESS for completion in completions)
    assert farthest(models, completions) < 1e-4


def check_log_probs(model: nn.Module, completion: Completion, temperature: float) -> None:
    """Compare with the softmax of logits / temperature over the whole vocabulary."""
    logits = all_scores(model, PROMPT, completion.token_ids) / temperature
    expected = torch.from_numpy(logits).log_softmax(dim=-1).numpy()
    tokens = completion.token_ids
    np.testing.assert_allclose(completion.log_probs, expected[np.arange(tokens.size), tokens], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("how", "temperature"),
    [({"temperature": 0.6}, 0.6), ({"temperature": 0.6, "top_k": 5, "top_p": 0.8}, 0.6), ({"greedy": True}, 1.0)],
    ids=["temperature", "cut", "greedy"],
)
async def test_log_probs_are_those_after_temperature_and_before_all_cuts(
    engine: ServerEngine, models: tuple[nn.Module, nn.Module], how: dict[str, Any], temperature: float
) -> None:
    if "top_k" in how:
        needs(engine, EngineCapability.UNCUT_LOG_PROBS)
    model = models[((await engine.load()).version + 1) % 2]

    for completion in await engine.generate(a_request(PROMPT, seeds=(1, 2, 3), max_new_tokens=40, **how)):
        check_log_probs(model, completion, temperature)


def log_probs_of_the_cut(logits: np.ndarray, *, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Log-softmax of one position's logits after temperature, top-k and top-p, token by token in float64."""
    scaled = logits.astype(np.float64) / temperature
    kept = np.argsort(-scaled, kind="stable")[:top_k]
    probs = np.exp(scaled[kept] - scaled[kept[0]])
    probs /= probs.sum()
    num_kept = int(np.searchsorted(np.cumsum(probs), top_p)) + 1
    found = np.full(logits.size, -np.inf)
    found[kept[:num_kept]] = np.log(probs[:num_kept] / probs[:num_kept].sum())
    return found


@pytest.mark.vllm
async def test_log_probs_of_vllm_for_samples_cut_at_a_temperature_are_of_what_it_samples_from(
    model_path: Path, models: tuple[nn.Module, nn.Module]
) -> None:
    cut: dict[str, Any] = {"temperature": 0.6, "top_k": 5, "top_p": 0.8}
    engine = VllmEngine(server_settings(model_path, "vllm"))
    await engine.start()
    try:
        for completion in await engine.generate(a_request(PROMPT, seeds=(1, 2, 3), max_new_tokens=40, **cut)):
            tokens = completion.token_ids
            scores = all_scores(models[1], PROMPT, tokens)
            expected = [log_probs_of_the_cut(each, **cut)[token] for each, token in zip(scores, tokens, strict=True)]
            np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4, rtol=0)
    finally:
        await engine.close()


@pytest.mark.vllm
async def test_log_probs_of_a_server_for_cut_samples_are_those_before_all_cuts(
    model_path: Path, models: tuple[nn.Module, nn.Module]
) -> None:
    engine = VllmEngine(server_settings(model_path, "vllm"), raw=True)
    await engine.start()
    try:
        for completion in await engine.generate(a_request(PROMPT, seeds=(1, 2), max_new_tokens=40, top_k=5, top_p=0.8)):
            check_log_probs(models[1], completion, 1.0)
    finally:
        await engine.close()


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"])
async def test_a_wrong_image_is_refused_and_the_server_lives(engine: ServerEngine, tmp_path: Path, name: str) -> None:
    model = make_model("qwen3-32")
    version = (await engine.load()).version
    wrong = save_image(model, tmp_path / "wrong.safetensors", **{name: torch.zeros(7)})

    with pytest.raises(WeightTransferFailed, match=rf"{name} has shape \[7\]"):
        await engine.load_weights(wrong, version + 1, OnWeightUpdate.INTERRUPT)

    [completion] = await engine.generate(a_request(PROMPT))
    assert completion.versions == ((0, version),)


async def test_a_killed_server_is_a_death_with_its_cause(kind: str, model_path: Path) -> None:
    engine = an_engine(kind, model_path)
    await engine.start()
    running = asyncio.create_task(engine.generate(a_request(PROMPT, max_new_tokens=ENDLESS)))
    async with asyncio.timeout(60):
        while not (await engine.load()).running:
            await asyncio.sleep(0.01)
    [server, *_] = psutil.Process(engine.process_id).children()
    assert engine.process_id is not None
    left = {
        name
        for name in leftovers._mapped(engine.process_id, leftovers.SHARED_MEMORY)
        if name.startswith(sglang.SHARED_MEMORY)
    }
    assert left or kind != "sglang"

    server.kill()

    with pytest.raises(WorkerDied, match="ended by signal SIGKILL"):
        await running
    await engine.close()
    assert not left & set(os.listdir(leftovers.SHARED_MEMORY))
    assert not engine._place.exists()


@pytest.mark.sglang
async def test_weights_by_handles_leave_every_token_its_own_version(
    model_path: Path, images: list[Path], models: tuple[nn.Module, nn.Module], tmp_path: Path
) -> None:
    # So small that the weights are several pieces.
    buckets, sent = BucketProcess("cpu", 120.0, bucket_bytes=30_000), tmp_path / "traffic.jsonl"
    engine = SglangEngine(server_settings(model_path, "sglang", version=2), buckets=buckets)
    try:
        with recording({"sglang": sent}):
            await engine.start()

            done = await update_in_flight(engine, loading(engine, images), 20)

            assert sum(len(completion.versions) - 1 for completion in done) > 20
            assert farthest(models, done) < 1e-4
            version = (await engine.load()).version
            await engine.load_weights(images[(version + 1) % 2], version + 1, OnWeightUpdate.CONTINUE)
            fresh = await engine.generate(a_request(PROMPT, seeds=(3,), max_new_tokens=50))
            assert farthest(models, fresh) < 1e-4
    finally:
        await engine.close()
    calls = [record["endpoint"] for record in requests_of(sent)]
    assert calls.count("/update_weights_from_tensor") > 2 * 21
    assert "/update_weights_from_disk" not in calls


@pytest.mark.sglang
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_weights_by_a_group_leave_every_token_its_own_version(
    model_path: Path,
    images: list[Path],
    models: tuple[nn.Module, nn.Module],
    num_ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if num_ranks > 1:
        # On a CPU it wants to hear which cores each rank has.
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, range(num_ranks))))
    settings = server_settings(model_path, "sglang", version=2, group_host="127.0.0.1", options=ranks_of(num_ranks))
    engine = GroupSglangEngine(settings, backend="gloo")
    async with EndpointClient(sends_to_engines=True) as sender:
        try:
            await engine.start()
            group = Group(engine, sender, images, num_ranks)

            done = await update_in_flight(engine, group.publish, 20 if num_ranks == 1 else 3)

            assert sum(len(completion.versions) - 1 for completion in done) > (20 if num_ranks == 1 else 3)
            assert farthest(models, done) < 1e-4
            await group.break_off_and_send_again()
            fresh = await engine.generate(a_request(PROMPT, seeds=(3,), max_new_tokens=50))
            assert farthest(models, fresh) < 1e-4
            await group.break_off_and_load()
            fresh = await engine.generate(a_request(PROMPT, seeds=(4,), max_new_tokens=50))
            assert farthest(models, fresh) < 1e-4
        finally:
            await engine.close()


@pytest.mark.parametrize("phase", ["its first processes run", "one has a child"])
def test_an_owner_that_is_killed_while_two_servers_start_leaves_nothing(
    kind: str, model_path: Path, tmp_path: Path, phase: str
) -> None:
    words = [sys.executable, "-P", "-c", OWNER, str(model_path), str(python_of(kind)), kind]
    owner = subprocess.Popen(words, env={**os.environ, MARK: str(tmp_path)})
    servers = until(lambda: servers_of(owner.pid), 60, "two servers")
    if phase == "one has a child":
        until(lambda: any(len(server.children()) > 1 for server in servers), 300, "a server that has children")
    shared = {name for pid in marked(tmp_path) for name in shared_memory_of(pid)}

    owner.kill()
    owner.wait()

    until(lambda: not marked(tmp_path), 30, "everything of its servers to end")
    assert not [name for name in shared if Path(name).exists()]


def servers_of(owner: int) -> list[psutil.Process]:
    """Find the first processes of two servers; none while there are not two."""
    with suppress(psutil.Error):
        found = [each for keeper in psutil.Process(owner).children() for each in keeper.children()]
        return found if len(found) == 2 else []
    return []


def shared_memory_of(pid: int) -> set[str]:
    """Name the shared memory of Python's that a process has mapped."""
    with suppress(OSError):
        return set(re.findall(r"/dev/shm/psm_\w+", Path(f"/proc/{pid}/maps").read_text()))
    return set()


async def test_an_argument_that_the_server_does_not_know_is_refused_in_its_words(kind: str, model_path: Path) -> None:
    engine = an_engine(kind, model_path, options={"unheard_of": 3})

    with pytest.raises(InvalidSpec, match=r"refuses rollout\.engine\.options.*--unheard-of"):
        await engine.start()


def test_the_fields_that_requests_may_have_are_the_servers(kind: str, records: Path) -> None:
    tests = Path(__file__).parents[1]
    known = json.loads((tests / "goldens" / kind / "requests.json").read_text())
    listing = subprocess.run(
        [str(python_of(kind)), str(tests / kind / "list_fields.py")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
    )
    assert json.loads(listing.stdout.splitlines()[-1]) == known

    sent = requests_of(records)
    assert len(sent) > NUM_UPDATES
    for record in sent:
        path, _, query = record["endpoint"].partition("?")
        fields = known[f"{record['method']} {path}"]
        assert not unknown_fields(record["body"], fields)
        if kind == "vllm":
            assert set(parse_qs(query)) <= set(fields.get("query", ()))
