"""The parts of ``benchmarks.gpu`` that publish to the embedded engine: adapters alone, and weights that are proved."""

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_engine import CHECKED_SAMPLES, TOLERANCES, answer, differences, engine_settings, pause
from benchmarks.gpu_place import Figures, Found, Place, attempted
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.embedded.outcomes import Updated
from flotilla.services.trainer.models.lora import Adapters
from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.services.trainer.worker.images import ImagePool
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.sections.model import LoraConfig, ModelConfig
from flotilla.shared.errors import FlotillaError, WeightsDiverged
from flotilla.shared.faults.armed import arm, disarm
from flotilla.shared.faults.plan import parse_plan
from flotilla.shared.weights.image.files import default_directories

RANK = 16
ADAPTED_SPREAD = 0.1
"""Of B, which begins at 0: large enough for log-probabilities to be others."""
MOST_BYTES = 0.03
"""Of a whole publication, at this rank."""
WANTED_PAUSE = 5.0
"""Milliseconds."""
CHANGED = 1.25
"""Times the weights that the engine began with: so that those can be told from the published ones."""
FAULTS = ("engine.switch keep", "engine.read flip", "engine.read half")
VERSIONS = 3


@dataclass(frozen=True)
class Published:
    """A model's files, and an image of what is published of it.

    Attributes:
        directory: of the files.
        image: that engines read.
        model: that it is an image of, on the device.
        adapters: of the model; None where whole weights are published.
        digest: by which the image is proved; None for adapters.
        digest_seconds: for checksum and digest.
        whole_bytes, image_bytes: of the model's files, and of the image.
    """

    directory: Path
    image: Path
    model: Any
    adapters: Adapters | None
    digest: str | None
    digest_seconds: float
    whole_bytes: int
    image_bytes: int


@contextmanager
def published(place: Place, *, adapted: bool) -> Iterator[Published]:
    """Write a model's files, train it in one stroke, and publish what has changed of it."""
    with tempfile.TemporaryDirectory(dir=default_directories()[0]) as folder:
        directory = Path(folder)
        model = place.model(next(iter(place.shapes.values())))
        model.save_pretrained(directory)
        adapters, flat = None, None
        if adapted:
            adapters = Adapters(model, LoraConfig(rank=RANK), seed=0)
            with torch.no_grad():
                for layer in adapters.layers.values():
                    layer.lora_b.normal_(std=ADAPTED_SPREAD)
            label = adapters.label(ModelConfig(path=folder))
            assert label is not None
            flat = FlatParameters(model, names=adapters.names, label=label)
        else:
            with torch.no_grad():
                for each in model.parameters():
                    each.mul_(CHANGED)
            flat = FlatParameters(model)
        images = ImagePool(flat, served_as=place.torch_dtype)
        try:
            image = images.snapshot()
            started = time.perf_counter()
            digest = images.manifest(image, 1).digest
            taken = time.perf_counter() - started
            whole = sum(each.stat().st_size for each in directory.glob("*.safetensors"))
            size = flat.layout.image_bytes
            yield Published(directory, image, model, adapters, digest, taken, whole, size)
        finally:
            images.close()


def part_adapters(place: Place) -> Found:
    """Publish adapters alone: their bytes, what serves, and how long sampling pauses for them."""
    with published(place, adapted=True) as found:
        share = found.image_bytes / found.whole_bytes
        sizes = {"adapters_bytes": found.image_bytes, "whole_bytes": found.whole_bytes, "share": share}
        yield "bytes", sizes
        # Of the smallest models adapters are no small part.
        assert not place.is_gpu or share <= MOST_BYTES, sizes
        yield "served", attempted(partial(served, place, found))
        place.free()
        for overlap in (True, False):
            name = "spare copy" if overlap else "in place"
            yield name, attempted(partial(adapters_pause, place, found, overlap=overlap))
            place.free()


def served(place: Place, found: Published) -> Figures:
    """Hold what an engine samples with adapters against the model with them, and without."""
    assert found.adapters is not None
    engine = TorchEngine(engine_settings(place, str(found.directory)))
    seconds = [update(engine, found.image, version, None) for version in (1, 2)][-1]
    prompt = torch.randint(2, found.model.config.vocab_size, (place.prompt_tokens,)).tolist()
    ours = answer(engine, place, prompt, CHECKED_SAMPLES)
    difference = differences(place, found.model, prompt, ours)
    with found.adapters.disabled():
        of_base = differences(place, found.model, prompt, ours)
    figures = {
        "mean_difference": float(difference.mean()),
        "mean_difference_from_the_base": float(of_base.mean()),
        "seconds_to_serve_an_idle_engine": seconds,
    }
    assert figures["mean_difference"] <= TOLERANCES[place.dtype], figures
    assert figures["mean_difference"] < figures["mean_difference_from_the_base"] / 4, figures
    return figures


def adapters_pause(place: Place, found: Published, *, overlap: bool) -> Figures:
    """Measure the pause, and say whether it is the one that is wanted."""
    figures = pause(place, found.directory, found.image, overlap=overlap)
    more = figures["longest_step_milliseconds"] - figures["step_milliseconds"]
    return {**figures, "pause_milliseconds": more, "is_below_5_ms": more < WANTED_PAUSE}


def update(engine: TorchEngine, image: Path, version: int, digest: str | None) -> float:
    """Serve an image, and give the seconds it took an engine that has nothing else to do.

    Raises:
        FlotillaError: it is not served.
    """
    started = time.perf_counter()
    engine.request_update(version, image, version, OnWeightUpdate.DRAIN, digest)
    error: FlotillaError | None = None
    while not engine.is_idle:
        for each in engine.step():
            assert isinstance(each, Updated), each
            error = each.error
    if error is not None:
        raise error
    return time.perf_counter() - started


def part_proof(place: Place) -> Found:
    """Read served weights back: that faults are found, and what it costs beside a version's generation."""
    with published(place, adapted=False) as found:
        yield "publisher", {"seconds": found.digest_seconds, "digest": found.digest, "bytes": found.image_bytes}
        engine = TorchEngine(engine_settings(place, str(found.directory)))
        yield "decoder", engine.description
        for number, fault in enumerate(FAULTS):
            yield fault, attempted(partial(refused, engine, found, fault, 2 * number + 1))
        yield "cost", attempted(partial(cost, place, engine, found, 2 * len(FAULTS) + 1))


def refused(engine: TorchEngine, found: Published, fault: str, version: int) -> Figures:
    """Let a load go wrong, which has to be found, and load the same image again."""
    arm(parse_plan(f"{fault} times=1"), "engine")
    try:
        update(engine, found.image, version, found.digest)
    except WeightsDiverged as error:
        detail = error.detail
    else:
        raise AssertionError(f"{fault} was not found")
    finally:
        disarm()
    assert "the first is " in detail, detail
    update(engine, found.image, version + 1, found.digest)
    return {"found": detail, "served_after": engine.version}


def cost(place: Place, engine: TorchEngine, found: Published, version: int) -> Figures:
    """Load with a proof and without, and generate between: a version's worth of answers is the largest batch."""
    plain, proved, sampled = [], [], []
    prompt = torch.randint(2, found.model.config.vocab_size, (place.prompt_tokens,)).tolist()
    for number in range(VERSIONS):
        plain.append(update(engine, found.image, version + 2 * number, None))
        proved.append(update(engine, found.image, version + 2 * number + 1, found.digest))
        started = time.perf_counter()
        answer(engine, place, prompt, max(place.batches))
        sampled.append(time.perf_counter() - started)
    medians = [statistics.median(each) for each in (plain, proved, sampled)]
    costs = medians[1] - medians[0]
    return {
        "load_seconds": medians[0],
        "load_with_proof_seconds": medians[1],
        "proof_seconds": costs,
        "generation_seconds": medians[2],
        "generated_tokens": max(place.batches) * place.new_tokens,
        "share_of_generation": costs / (medians[0] + medians[2]),
    }
