"""The parts of ``benchmarks.gpu`` that train in this process: how fast, in too little memory, and for Tinker."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_fleets import write_experiment
from benchmarks.gpu_place import Figures, Found, Place, Shape, attempted
from benchmarks.trainer import make_batch
from benchmarks.trainer_updates import GROUP_SIZE, Batch, groups_of, our_learner, plain_update
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.learning.pass_sizes import HALVED
from flotilla.services.trainer.tinker.slots import Base, Slot
from flotilla.shared.tinker.records import AdamStep, Lora

PEAK_SIZE = 8192
PLAIN_MICRO_TOKENS = 4096
"""Of a pass of the plain loop, which computes the logits of all positions at once."""
LARGE = 2_000_000_000
"""Parameters: of larger models the plain loop is timed on answers of one length alone."""
BALLAST_SHARE = 0.6
"""Of what a pass took at its peak, that is left free."""
SAME_NORM = 0.02
TINKER_STEPS = 4
TINKER_LAYERS = 4
TINKER_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.02}
"""Of a loss, relatively."""
AUTO: Mapping[str, Any] = {"optimisation": {"micro_batch_tokens": "auto"}}
OFFLOADED: Mapping[str, Any] = {**AUTO, "parallelism": {"offload": {"optimiser": True}}}


def step_batch(place: Place, shape: Shape, lengths: str) -> Batch:
    """Draw the samples of a step."""
    samples, tokens = (64, 512) if place.is_gpu else (2 * GROUP_SIZE, 8)
    return make_batch(lengths, samples, shape.vocabulary, tokens=tokens, micro_tokens=PLAIN_MICRO_TOKENS)


def part_throughput(place: Place) -> Found:
    """Measure steps of the learner and of a plain loop, and their share of what a matrix product reaches."""
    size = PEAK_SIZE if place.is_gpu else 256
    pair = torch.randn(2, size, size, device=place.device, dtype=place.torch_dtype)
    peak = 2 * size**3 / place.seconds(lambda: torch.mm(pair[0], pair[1]))
    yield "matrix_product_teraflops", peak / 1e12
    for name, shape in place.shapes.items():
        for lengths in ("uniform", "long_tailed"):
            batch = step_batch(place, shape, lengths)
            ours = attempted(partial(stepped, place, shape, batch, peak, ours=True))
            yield f"{name}, {lengths}, learner", ours
            place.free()
            if place.is_gpu and "OutOfMemory" in str(ours.get("failed")):
                ours = attempted(partial(stepped, place, shape, batch, peak, ours=True, sections=OFFLOADED))
                yield f"{name}, {lengths}, learner with moments on the host", ours
                place.free()
            if lengths != "uniform" and ours.get("parameters", LARGE) >= LARGE:
                continue
            plain = attempted(partial(stepped, place, shape, batch, peak, ours=False))
            yield f"{name}, {lengths}, plain loop", plain
            place.free()
            if "failed" not in ours and "failed" not in plain:
                yield f"{name}, {lengths}, times as fast", plain["step_seconds"] / ours["step_seconds"]


def stepped(
    place: Place, shape: Shape, batch: Batch, peak: float, *, ours: bool, sections: Mapping[str, Any] = AUTO
) -> Figures:
    """Time whole steps of one way to train."""
    with tempfile.TemporaryDirectory() as directory:
        model = place.model(shape)
        model.config.save_pretrained(directory)
        parameters = sum(each.numel() for each in model.parameters())
        if place.is_gpu:
            torch.cuda.reset_peak_memory_stats()
        bounds: list[str] = []
        if ours:
            learner = our_learner(Path(directory), batch, model, sections)
            groups = groups_of(batch)
            numbers = iter(range(1, 100))
            seconds = place.seconds(lambda: learner.train(groups, next(numbers)), rounds=2)
            bounds = [f"{each.why} at step {each.step}: {each.tokens}" for each in learner.sizes.bounds]
        else:
            seconds = place.seconds(plain_update(Path(directory), batch, model), rounds=2)
    flops = 6 * parameters * batch.num_computed
    figures: Figures = {
        "parameters": parameters,
        "step_seconds": seconds,
        "sampled_tokens_per_second": batch.num_sampled / seconds,
        "tokens_per_second": batch.num_computed / seconds,
        "teraflops": flops / seconds / 1e12,
        "share_of_the_matrix_product": flops / seconds / peak,
        "bounds": bounds,
    }
    return figures | ({"peak_gigabytes": torch.cuda.max_memory_allocated() / 1e9} if place.is_gpu else {})


def part_halving(place: Place) -> Found:
    """Train where passes do not fit into the device's memory, which others have taken; GPUs only."""
    if not place.is_gpu:
        yield "halving", "left out: a process that has too little of the host's memory is ended"
        return
    shape = next(iter(place.shapes.values()))
    yield "halved", attempted(partial(halved, place, shape))
    place.free()
    yield "refused estimate", attempted(partial(halved_from_the_first, place, shape))


def halved(place: Place, shape: Shape) -> Figures:
    """Take the memory from under a learner that has measured what its passes need; gradients have to stay."""
    batch = step_batch(place, shape, "uniform")
    with tempfile.TemporaryDirectory() as directory:
        expected = norms_of_steps(learner_of(place, shape, batch, directory), batch, lambda step: None)
        place.free()
        learner = learner_of(place, shape, batch, directory)
        ballast: list[torch.Tensor] = []

        def before(step: int) -> None:
            if step == 3:
                ballast.append(all_but(int(BALLAST_SHARE * peaks[-1])))
            torch.cuda.reset_peak_memory_stats()
            peaks.append(-torch.cuda.memory_allocated())

        def after(step: int) -> None:
            peaks[-1] += torch.cuda.max_memory_allocated()

        peaks: list[int] = []
        found = norms_of_steps(learner, batch, before, after)
    bounds = [f"{each.why} at step {each.step}: {each.tokens}" for each in learner.sizes.bounds]
    figures = {
        "gradient_norms": found,
        "gradient_norms_with_room": expected,
        "bounds": bounds,
        "peak_gigabytes_of_steps": [each / 1e9 for each in peaks],
        "ballast_gigabytes": [each.numel() / 1e9 for each in ballast],
    }
    assert any(each.why == HALVED for each in learner.sizes.bounds), figures
    assert np.allclose(found, expected, rtol=SAME_NORM, atol=SAME_NORM), figures
    return figures


def halved_from_the_first(place: Place, shape: Shape) -> Figures:
    """Begin with a bound that the spec sets, and that no memory holds."""
    batch = step_batch(place, shape, "uniform")
    with tempfile.TemporaryDirectory() as directory:
        learner = learner_of(place, shape, batch, directory, {"optimisation": {"micro_batch_tokens": 131_072}})
        ballast = all_but(12 << 30)
        found = norms_of_steps(learner, batch, lambda step: None)
    bounds = [f"{each.why} at step {each.step}: {each.tokens}" for each in learner.sizes.bounds]
    figures = {"gradient_norms": found, "bounds": bounds, "ballast_gigabytes": ballast.numel() / 1e9}
    assert any(each.why == HALVED for each in learner.sizes.bounds), figures
    return figures


def learner_of(place: Place, shape: Shape, batch: Batch, directory: str, sections: Mapping[str, Any] = AUTO) -> Learner:
    """Make a learner whose model is on the device already."""
    model = place.model(shape)
    model.config.save_pretrained(directory)
    return our_learner(Path(directory), batch, model, sections)


def norms_of_steps(
    learner: Learner,
    batch: Batch,
    before: Callable[[int], None],
    after: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train three steps; gives the norm of each one's gradient, which a loss near 0 says less than."""
    groups, found = groups_of(batch), []
    for step in (1, 2, 3):
        before(step)
        result = learner.train(groups, step)
        after(step)
        found.append(result.updates[-1].grad_norm)
    return found


def all_but(num_bytes: int) -> torch.Tensor:
    """Take the device's memory but for so many bytes."""
    torch.cuda.empty_cache()
    return torch.empty(max(torch.cuda.mem_get_info()[0] - num_bytes, 0), dtype=torch.uint8, device="cuda")


def part_tinker(place: Place) -> Found:
    """Update two models of Tinker's service in turn, adapters and whole weights, beside the same on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        # Few layers: the reference in float32 on the CPU is most of the time.
        few = replace(place.fleet.shape, layers=min(place.fleet.shape.layers, TINKER_LAYERS))
        write_experiment(replace(place, fleet=replace(place.fleet, shape=few)), Path(folder))
        path = Path(folder) / "model"
        vocabulary = json.loads((path / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        random = np.random.default_rng(0)
        rows = [random.integers(2, vocabulary, place.prompt_tokens + 1) for _ in range(4)]
        started = time.perf_counter()
        found = tinker_losses(path, rows, device=place.device, dtype=place.dtype)
        yield "losses", found
        yield "seconds", time.perf_counter() - started
        place.free()
        expected = tinker_losses(path, rows, device="cpu", dtype="float32")
        worst = {
            name: max(abs(one - other) / abs(other) for one, other in zip(found[name], expected[name], strict=True))
            for name in expected
        }
        yield "float32_on_cpu", expected
        yield "largest_relative_difference", worst
        assert max(worst.values()) <= TINKER_TOLERANCES[place.dtype], worst
        assert all(each[-1] < each[0] for each in found.values()), f"losses do not fall: {found}"


def tinker_losses(path: Path, rows: list[Any], *, device: str, dtype: str) -> dict[str, list[float]]:
    """Train both models on the same rows, each step of one after one of the other; losses before each update."""
    base = Base(path, device=device, dtype=dtype)
    slots = {"adapters": base.make(Lora(rank=16, seed=1)), "whole weights": base.make(None)}
    losses: dict[str, list[float]] = {name: [] for name in slots}
    for _ in range(TINKER_STEPS):
        for name, slot in slots.items():
            losses[name].append(tinker_step(base, slot, rows, 1e-3 if slot.lora is not None else 1e-5))
    return losses


def tinker_step(base: Base, slot: Slot, rows: list[Any], learning_rate: float) -> float:
    """Take one step of cross entropy."""
    with base.live(slot):
        found = torch.cat(base.log_probs([(row[:-1], row[1:]) for row in rows]))
        loss = -found.mean()
        torch.autograd.backward(loss)
    slot.update(AdamStep(learning_rate=learning_rate))
    return float(loss.detach())
