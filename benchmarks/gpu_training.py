"""The part of ``benchmarks.gpu`` that trains with one rank, in this process."""

import functools
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM

from benchmarks.gpu_place import Figures, Found, Place, Shape, attempted
from flotilla.services.trainer.data.places import places_of
from flotilla.services.trainer.models.attention import attended_by_sequence, takes_all_lengths
from flotilla.services.trainer.parallel.fsdp import shard_layers
from flotilla.services.trainer.parallel.ranks import MeshShape, joined

STEP_SECONDS = 120.0
NUM_STEPS = 3
LEARNING_RATE = 1e-2
TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-3}
"""Of a loss: on a CPU bfloat16 came within 1e-4 of float32 at these shapes."""


def part_training(place: Place) -> Found:
    """Train some steps with one rank, and compare the losses with float32 on the CPU."""
    yield "packed attention", attempted(partial(attended, place))
    shape = next(iter(place.shapes.values()))
    ways: dict[str, tuple[Shape, dict[str, bool]]] = {
        "whole": (shape, {}),
        "fsdp2": (shape, {"shards": True}),
        "mixture of experts": (place.experts, {}),
        "mixture of experts, fsdp2": (place.experts, {"shards": True}),
    }
    if place.is_gpu:
        ways["fsdp2, weights on the host"] = (shape, {"shards": True, "offloads": True})
    for name, (of, how) in ways.items():
        yield name, attempted(partial(trained, place, of, **how))
        place.free()


def attended(place: Place) -> Figures:
    """Attend to packed sequences that share a prompt, forwards and backwards, beside float32 on the CPU."""
    dims, width = 128 if place.is_gpu else 16, 256 if place.is_gpu else 16
    prompt = np.arange(width // 2)
    answers = [(width // 2, width), (width, width + width // 4), (width + width // 4, 2 * width)]
    sequences = [np.concatenate([prompt, np.arange(*each)]) for each in answers]
    places = places_of(sequences, 2 * width)
    torch.manual_seed(0)
    shapes = [(1, heads, 2 * width, dims) for heads in (8, 2, 2)]
    drawn = [torch.randn(shape).to(place.torch_dtype).float() for shape in shapes]
    weights = torch.randn(1, 2 * width, 8, dims)
    found = []
    for device, dtype in ((torch.device("cpu"), torch.float32), (torch.device(place.device), place.torch_dtype)):
        inputs = [each.clone().to(device, dtype).requires_grad_() for each in drawn]
        result = attended_by_sequence(inputs[0], inputs[1], inputs[2], places.to(device), None)
        (result.float() * weights.to(device)).sum().backward()  # type: ignore[no-untyped-call]
        gradients = [each.grad for each in inputs if each.grad is not None]
        found.append([result.detach().float().cpu(), *(each.float().cpu() for each in gradients)])
    names = ("result", "query", "key", "value")
    differences = {
        name: float((one - other).norm() / one.norm())
        for name, one, other in zip(names, found[0], found[1], strict=True)
    }
    figures = {
        "relative_differences": differences,
        "in_one_call": takes_all_lengths(torch.device(place.device), place.torch_dtype, dims),
    }
    assert max(differences.values()) <= (1e-5 if place.dtype == "float32" else 2e-2), figures
    assert figures["in_one_call"] == place.is_gpu, figures
    return figures


def trained(place: Place, shape: Shape, *, shards: bool = False, offloads: bool = False) -> Figures:
    """Train a model, sharded as a job's ranks shard it, of which there is one here."""
    tokens, expected = reference(place, shape)
    model, tokens = place.model(shape), tokens.to(place.device)
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    with joined(
        MeshShape(shard=1),
        0,
        torch.device(place.device),
        store,
        timeout_seconds=STEP_SECONDS,
        offloads_parameters=offloads,
    ) as ranks:
        if shards:
            shard_layers(model, ranks)
        if place.is_gpu:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        losses = train(model, tokens, place.torch_dtype)
        place.finish()
        taken = time.perf_counter() - started
    worst = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, expected, strict=True))
    assert worst <= TOLERANCES[place.dtype], f"losses {losses} are not {expected} to {TOLERANCES[place.dtype]}"
    figures = {"losses": losses, "float32_on_cpu": expected, "largest_relative_difference": worst, "seconds": taken}
    return figures | ({"peak_gigabytes": torch.cuda.max_memory_allocated() / 1e9} if place.is_gpu else {})


@functools.cache
def reference(place: Place, shape: Shape) -> tuple[torch.Tensor, list[float]]:
    """Make tokens, few enough for a CPU, and the losses that the same weights have on them in float32."""
    model = place.model(shape)
    tokens = torch.randint(2, shape.vocabulary, (2, place.prompt_tokens))
    exact = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    exact.load_state_dict({name: each.float().cpu() for name, each in model.state_dict().items()})
    return tokens, train(exact, tokens, place.torch_dtype)


def train(model: Any, tokens: torch.Tensor, dtype: torch.dtype) -> list[float]:
    """Take steps of plain gradient descent on the next token's cross entropy; gives the losses before each.

    Weights are kept in float32 beside those that compute, which are these rounded to ``dtype``: in bfloat16 most of a
    step's update is too small to be seen, so a reference in float32 computes with rounded weights, too.
    """
    parameters = list(model.parameters())
    kept = [each.detach().to(torch.float32, copy=True) for each in parameters]
    losses = []
    for _ in range(NUM_STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        with torch.no_grad():
            for each, exact in zip(parameters, kept, strict=True):
                each.copy_(exact.sub_(each.grad.float(), alpha=LEARNING_RATE).to(dtype))
                each.grad = None
        losses.append(float(loss.detach()))
    return losses
