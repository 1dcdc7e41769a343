"""What a publication costs those who do not wait for it: how long sampling pauses, and how long training stands still.

A real engine in its own process samples without a break while it receives one version after the other through gloo, as
a rollout does it (``on_weight_update: continue``). The pause is the longest time without a new token around an update,
and is shown beside the longest one without updates. A version is committed as soon as its checksum is known, and
``update`` is the time from then until it samples. The trainer's stall is its copy of all weights into an image: it goes
on as soon as that is made. Part of ``python -m benchmarks.weights``.
"""

import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from flotilla.services.rollout.engines.base import GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.process.engine import ProcessEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.trainer.models.lora import Adapters
from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.services.trainer.worker.images import ImagePool
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.sections.model import LoraConfig, ModelConfig
from flotilla.shared.weights.group.endpoint_client import EndpointClient
from flotilla.shared.weights.image.image import DEFAULT_SLICE_BYTES, WeightImage

CONTEXT_TOKENS = 4096
NUM_SAMPLES = 4
POLL_SECONDS = 0.0005
QUIET_SECONDS = 2.0
BETWEEN_SECONDS = 1.0
DEADLINE_SECONDS = 60.0
SIZES = {100 << 20: (512, 7, 8192), 1 << 30: (1536, 9, 8192)}
"""Hidden size, layers and vocabulary of a model of about so many bytes in float32."""


@dataclass(frozen=True)
class Pause:
    """Medians over the updates, in milliseconds."""

    image_bytes: int
    overlap_load: bool
    holds: str
    """Whole weights, or adapters of rank 16 alone."""
    step: float
    """Longest time between two tokens where no weights change."""
    pause: float
    """Longest time between two tokens around an update."""
    update: float
    """From the last byte, which is the order to switch, until the new version samples."""
    trainer_stall: float


class Progress:
    """Watches how many tokens an engine has sampled."""

    def __init__(self, engine: ProcessEngine) -> None:
        self._engine = engine
        self._last = time.perf_counter()
        self._tokens = 0
        self.longest = 0.0

    async def watch(self) -> None:
        """Note the longest time without a token, until cancelled."""
        while True:
            tokens = (await self._engine.load()).generated_tokens
            now = time.perf_counter()
            if tokens != self._tokens:
                self.longest = max(self.longest, now - self._last)
                self._last, self._tokens = now, tokens
            await asyncio.sleep(POLL_SECONDS)

    def begin(self) -> None:
        """Forget the longest so far."""
        self.longest = 0.0


def save_model(directory: Path, image_bytes: int, rank: int | None) -> FlatParameters:
    """Write a Qwen3 of about this size with random weights, and give what is published of it as a trainer holds it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, vocabulary = SIZES[image_bytes]
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=hidden // 8,
        vocab_size=vocabulary,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    if rank is None:
        return FlatParameters(model)
    adapters = Adapters(model, LoraConfig(rank=rank), seed=0)
    label = adapters.label(ModelConfig(path=str(directory)))
    assert label is not None
    return FlatParameters(model, names=adapters.names, label=label)


async def measure_pause(image_bytes: int, num_updates: int, *, overlap_load: bool, rank: int | None = None) -> Pause:
    """Publish some versions to an engine that samples: whole, or with a rank the adapters alone."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flat = await asyncio.to_thread(save_model, folder, image_bytes, rank)
        images = ImagePool(flat)
        stack.callback(images.close)
        settings = EngineSettings(
            model_path=str(folder), context_tokens=CONTEXT_TOKENS, slots=NUM_SAMPLES, overlap_load=overlap_load
        )
        engine = ProcessEngine(settings)
        await engine.start()
        stack.push_async_callback(engine.close)
        receiver = await _a_receiver(stack, flat.layout.image_bytes)
        sampling = SamplingParameters(max_new_tokens=CONTEXT_TOKENS - 8, ignore_eos=True)
        request = GenerationRequest("endless", (1, 2, 3), tuple(range(NUM_SAMPLES)), sampling)
        generating = asyncio.create_task(engine.generate(request))
        progress = Progress(engine)
        watching = asyncio.create_task(progress.watch())
        await asyncio.sleep(QUIET_SECONDS)
        progress.begin()
        await asyncio.sleep(QUIET_SECONDS)
        step = progress.longest
        rows = [await _update(engine, images, receiver, progress, number) for number in range(1, num_updates + 2)][1:]
        assert not generating.done(), "the samples ended before the updates"
        for task in (watching, generating):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        pause, update, stall = (1e3 * statistics.median(column) for column in zip(*rows, strict=True))
        holds = "weights" if rank is None else f"rank {rank}"
        return Pause(flat.layout.image_bytes, overlap_load, holds, 1e3 * step, pause, update, stall)


@dataclass(frozen=True)
class Receiver:
    """Both ends of a weight group of two, and where the image goes."""

    sender: EndpointClient
    client: EndpointClient
    image: WeightImage


async def _a_receiver(stack: AsyncExitStack, image_bytes: int) -> Receiver:
    sender, client = [await stack.enter_async_context(EndpointClient()) for _ in range(2)]
    image = stack.enter_context(WeightImage.create(image_bytes))
    rendezvous = await sender.open_sender(1, 2, DEADLINE_SECONDS)
    await client.open_receiver(rendezvous, 1, DEADLINE_SECONDS)
    await asyncio.gather(sender.joined(1, DEADLINE_SECONDS), client.joined(1, DEADLINE_SECONDS))
    return Receiver(sender, client, image)


async def _update(
    engine: ProcessEngine, images: ImagePool, receiver: Receiver, progress: Progress, version: int
) -> tuple[float, float, float]:
    started = time.perf_counter()
    source = await asyncio.to_thread(images.snapshot)
    snapped = time.perf_counter()
    progress.begin()
    image = receiver.image
    facts = (image.image_bytes, DEFAULT_SLICE_BYTES, DEADLINE_SECONDS)
    transfer = engine.begin_transfer(image.path, version)
    await asyncio.gather(
        receiver.sender.send(1, source, *facts),
        receiver.client.receive(1, image.path, *facts, transfer.advance),
    )
    arrived = time.perf_counter()
    transfer.complete()
    await engine.load_weights(image.path, version, OnWeightUpdate.CONTINUE)
    updated = time.perf_counter()
    await asyncio.sleep(BETWEEN_SECONDS)
    return progress.longest, updated - arrived, snapped - started
