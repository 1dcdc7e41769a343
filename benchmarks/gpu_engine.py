"""The parts of ``benchmarks.gpu`` that measure the embedded engine by itself, in this process."""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig

from benchmarks.gpu_place import Figures, Found, Place, Shape, attempted, roomy_directory
from flotilla.services.rollout.engines.base import Completion, GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.embedded.outcomes import Generated, Updated
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.weights.image.files import default_directories

CHECKED_SAMPLES = 8
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""Of the mean difference of a log-probability from transformers'."""
UPDATE_CONTEXT = 4096
STEP_MODULE = "flotilla.services.rollout.engines.decoders.step_layers"
SAMPLING_MODULE = "flotilla.services.rollout.engines.embedded.sampling"


def part_engine(place: Place) -> Found:
    """Check log-probabilities, and compare tokens per second with ``generate`` and with the bound of the memory."""
    bandwidth = bytes_per_second(place)
    yield "memory_gigabytes_per_second", bandwidth / 1e9
    for name, shape in place.shapes.items():
        model = place.model(shape)
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            settings = engine_settings(place, directory)
            started = time.perf_counter()
            engine, careful = TorchEngine(settings), TorchEngine(settings, goes_ahead=False)
            yield f"{name}, decoder", engine.description
            yield f"{name}, seconds_to_load_two", time.perf_counter() - started
        yield f"{name}, log-probabilities", attempted(partial(checked, place, engine, careful, model))
        del careful
        for batch in place.batches:
            yield f"{name}, {batch} samples", attempted(partial(compared, place, engine, model, batch, bandwidth))
        del engine, model
        place.free()


def part_decoding(place: Place) -> Found:
    """Measure tokens per second with Triton's kernels and without, of the largest model first."""
    bandwidth = bytes_per_second(place)
    yield "memory_gigabytes_per_second", bandwidth / 1e9
    for name, shape in reversed(place.shapes.items()):
        model = place.model(shape)
        num_bytes = 4 * sum(each.numel() for each in model.parameters())
        with tempfile.TemporaryDirectory(dir=roomy_directory(num_bytes)) as directory:
            model.save_pretrained(directory)
            bounds = {batch: memory_bound(place, model, batch, bandwidth) for batch in place.batches}
            del model
            for has_triton in (True, False):
                place.free()
                with ExitStack() as stack:
                    if not has_triton:
                        stack.enter_context(without_triton())
                    engine = TorchEngine(engine_settings(place, directory))
                    way = "Triton" if has_triton else "torch's operators"
                    yield f"{name}, {way}, decoder", engine.description
                    for batch, bound in bounds.items():
                        measure = partial(decoded, place, engine, shape.vocabulary, batch, bound)
                        yield f"{name}, {way}, {batch} samples", attempted(measure)
                del engine


def decoded(place: Place, engine: TorchEngine, vocabulary: int, batch: int, bound: float) -> Figures:
    """Measure the engine alone at one batch size."""
    prompt = torch.randint(2, vocabulary, (place.prompt_tokens,)).tolist()
    rate = batch * place.new_tokens / place.seconds(partial(answer, engine, place, prompt, batch), rounds=2)
    return {"tokens_per_second": rate, "memory_bound_tokens_per_second": bound, "share_of_the_bound": rate / bound}


@contextmanager
def without_triton() -> Iterator[None]:
    """Have engines that are loaded in the block, and what they sample there, do with torch's operators."""
    with (
        mock.patch(f"{STEP_MODULE}.find_spec", lambda name: None),
        mock.patch(f"{SAMPLING_MODULE}._triton_sample", lambda device, dtype: None),
    ):
        yield


def engine_settings(place: Place, directory: str) -> EngineSettings:
    """Make room for the largest batch, and for one answer of each."""
    return EngineSettings(
        directory,
        dtype=place.dtype,
        device=place.device,
        slots=max(place.batches),
        context_tokens=place.prompt_tokens + place.new_tokens,
    )


def bytes_per_second(place: Place) -> float:
    """Measure what the device's memory gives: a copy reads and writes each byte."""
    num_bytes = (1 << 32) if place.is_gpu else 1 << 26
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / place.seconds(lambda: target.copy_(source))


def answer(engine: TorchEngine, place: Place, prompt: Sequence[int], batch: int) -> list[Completion]:
    """Sample one batch to its end."""
    sampling = SamplingParameters(max_new_tokens=place.new_tokens, ignore_eos=True)
    engine.submit(GenerationRequest("batch", tuple(prompt), tuple(range(batch)), sampling))
    found: list[Completion] = []
    while not engine.is_idle:
        for each in engine.step():
            assert isinstance(each, Generated), each
            found += each.completions
    sampled = sum(completion.token_ids.size for completion in found)
    assert sampled == batch * place.new_tokens, f"{sampled} tokens of {batch * place.new_tokens}"
    return found


def checked(place: Place, engine: TorchEngine, careful: TorchEngine, model: Any) -> Figures:
    """Hold what the engine says of its tokens against transformers, and against itself one step at a time."""
    prompt = torch.randint(2, model.config.vocab_size, (place.prompt_tokens,)).tolist()
    ours = answer(engine, place, prompt, CHECKED_SAMPLES)
    again = answer(careful, place, prompt, CHECKED_SAMPLES)
    difference = differences(place, model, prompt, ours)
    figures = {
        "mean_difference": float(difference.mean()),
        "largest_difference": float(difference.max()),
        "same_tokens_one_step_at_a_time": all(
            np.array_equal(one.token_ids, other.token_ids) for one, other in zip(ours, again, strict=True)
        ),
    }
    assert figures["mean_difference"] <= TOLERANCES[place.dtype], figures
    assert figures["same_tokens_one_step_at_a_time"], figures
    return figures


def differences(place: Place, model: Any, prompt: Sequence[int], ours: Sequence[Completion]) -> npt.NDArray[np.float32]:
    """Compute by how much each token's log-probability is another than transformers'."""
    tokens = torch.tensor(np.stack([each.token_ids for each in ours]).astype(np.int64), device=place.device)
    whole = torch.cat([torch.tensor([prompt], device=place.device).expand(len(ours), -1), tokens], dim=1)
    with torch.inference_mode():
        logits = model(input_ids=whole).logits[:, place.prompt_tokens - 1 : -1].float()
        theirs = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1).cpu().numpy()
    found: npt.NDArray[np.float32] = np.abs(np.stack([each.log_probs for each in ours]) - theirs)
    return found


def memory_bound(place: Place, model: Any, batch: int, bandwidth: float) -> float:
    """Compute the tokens per second that reading weights and cache allows."""
    config = model.config
    width = torch.finfo(place.torch_dtype).bits // 8
    weight_bytes = sum(each.numel() for each in model.parameters()) * width
    per_position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * width
    cached_bytes = per_position * (place.prompt_tokens + place.new_tokens / 2)
    return float(batch * bandwidth / (weight_bytes + batch * cached_bytes))


def compared(place: Place, engine: TorchEngine, model: Any, batch: int, bandwidth: float) -> Figures:
    """Measure one model at one batch size."""
    tokens = batch * place.new_tokens
    prompt = torch.randint(2, model.config.vocab_size, (place.prompt_tokens,)).tolist()
    ours = tokens / place.seconds(partial(answer, engine, place, prompt, batch))
    prompts = torch.tensor([prompt], device=place.device).expand(batch, -1)
    sampled = GenerationConfig(
        max_new_tokens=place.new_tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    generate = partial(model.generate, prompts, attention_mask=torch.ones_like(prompts), generation_config=sampled)
    theirs = tokens / place.seconds(generate, rounds=1)
    bound = memory_bound(place, model, batch, bandwidth)
    return {
        "engine_tokens_per_second": ours,
        "generate_tokens_per_second": theirs,
        "memory_bound_tokens_per_second": bound,
        "share_of_the_bound": ours / bound,
    }


def part_update(place: Place) -> Found:
    """Measure the longest time without a token around an update, by where the image is and how it is read."""
    shape = next(iter(place.shapes.values()))
    memory, disk = default_directories()[0], Path(tempfile.gettempdir())
    for name, home in (("shared memory", memory), ("disk", disk)):
        for overlap in (True, False):
            yield (
                f"{name}, {'spare copy' if overlap else 'in place'}",
                attempted(partial(paused, place, shape, home, overlap=overlap)),
            )
            place.free()


def paused(place: Place, shape: Shape, home: Path, *, overlap: bool) -> Figures:
    """Write an image to somewhere, and serve it."""
    with tempfile.TemporaryDirectory(dir=home) as directory:
        place.model(shape).save_pretrained(directory)
        place.free()
        return pause(place, Path(directory), Path(directory) / "model.safetensors", overlap=overlap)


def pause(place: Place, directory: Path, image: Path, *, overlap: bool) -> Figures:
    """Sample without an end while five versions of an image are served, one after the other."""
    settings = EngineSettings(
        str(directory),
        dtype=place.dtype,
        device=place.device,
        slots=4,
        context_tokens=UPDATE_CONTEXT,
        overlap_load=overlap,
    )
    engine = TorchEngine(settings)
    sampling = SamplingParameters(max_new_tokens=UPDATE_CONTEXT - 8, ignore_eos=True)
    steps: list[float] = []
    pauses: list[float] = []
    updates: list[float] = []
    for version in range(1, 6):
        # Each version has a request of its own, which does not end before the weights are read.
        engine.submit(GenerationRequest(f"endless-{version}", (2, 3), (0, 1, 2, 3), sampling))
        steps += [step_seconds(engine, place)[0] for _ in range(20)][5:]
        engine.request_update(version, image, version, OnWeightUpdate.CONTINUE)
        started, longest, is_updated = time.perf_counter(), 0.0, False
        while not is_updated:
            assert engine.load().running, "sampling ended before the weights were read"
            taken, ended = step_seconds(engine, place)
            longest = max(longest, taken)
            for each in ended:
                if isinstance(each, Updated):
                    assert each.error is None, each.error
                    is_updated = True
        pauses.append(longest)
        updates.append(time.perf_counter() - started)
        engine.abort(f"endless-{version}")
        engine.step()
    in_milliseconds = {"step": steps, "longest_step": pauses, "until_served": updates}
    return {f"{name}_milliseconds": 1e3 * statistics.median(each) for name, each in in_milliseconds.items()}


def step_seconds(engine: TorchEngine, place: Place) -> tuple[float, list[Any]]:
    """Take one step, to its end on the device."""
    started = time.perf_counter()
    ended = engine.step()
    place.finish()
    return time.perf_counter() - started, ended
