"""What a machine with one NVIDIA GPU shows of this project, in parts that each end within ten minutes.

``engine``: generated tokens per second of the embedded engine in bfloat16, at the shapes of Qwen3 with 0.6 and 4
billion parameters and random weights, beside ``generate`` of transformers and the bound that reading weights and cache
sets. ``training``: steps in bfloat16 with one rank, whole, in FSDP2, and of a mixture of experts, beside the same steps
in float32 on the CPU. ``update``: how long sampling pauses while new weights are served, from shared memory and from
the disk, with a spare copy and without. ``fleet``: a whole fleet for twenty steps on one GPU, engine and trainer beside
each other, and its ledger. ``sharing``: the same in turns, with the memory of both. ``lora``: adapters. ``servers``:
SGLang and vLLM as engines, where their interpreters are named. A part that fails says so and the next one runs; the
exit code counts the failures.

``python -m benchmarks.gpu [--part NAME] [--cpu-rehearsal] [--json FILE]``; the rehearsal runs every part in small on
the CPU, so that the script itself is tried before a GPU is lent. Figures are written after each part.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.gpu_fleets import part_fleet, part_lora, part_servers, part_sharing
from benchmarks.gpu_place import GPU, REHEARSAL, Figures, Place, Shape
from services.rollout.engines.base import GenerationRequest, SamplingParameters
from services.rollout.engines.embedded.engine import TorchEngine, use_threads
from services.rollout.engines.embedded.outcomes import Generated, Updated
from services.rollout.engines.settings import EngineSettings
from services.trainer.parallel.fsdp import shard_layers
from services.trainer.parallel.ranks import MeshShape, joined
from shared.config.asynchrony import OnWeightUpdate
from shared.weights.image_files import default_directories

STEP_SECONDS = 120.0


def bytes_per_second(place: Place) -> float:
    """Measure what the device's memory gives: a copy reads and writes each byte."""
    num_bytes = (1 << 32) if place.is_gpu else 1 << 26
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / place.seconds(lambda: target.copy_(source))


def answer(engine: TorchEngine, place: Place, batch: int, vocabulary: int) -> None:
    """Sample one batch to its end."""
    prompt = torch.randint(2, vocabulary, (place.prompt_tokens,)).tolist()
    sampling = SamplingParameters(max_new_tokens=place.new_tokens, ignore_eos=True)
    engine.submit(GenerationRequest("batch", tuple(prompt), tuple(range(batch)), sampling))
    sampled = 0
    while not engine.is_idle:
        ended = [each for each in engine.step() if isinstance(each, Generated)]
        sampled += sum(completion.token_ids.size for each in ended for completion in each.completions)
    assert sampled == batch * place.new_tokens, f"{sampled} tokens of {batch * place.new_tokens}"


def part_engine(place: Place) -> Figures:
    """Compare tokens per second with ``generate`` and with the bound of the memory."""
    bandwidth = bytes_per_second(place)
    figures: Figures = {"memory_gigabytes_per_second": bandwidth / 1e9}
    for shape in place.shapes:
        model = place.model(place.shapes[shape])
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            engine = TorchEngine(
                EngineSettings(
                    directory,
                    dtype=place.dtype,
                    device=place.device,
                    slots=max(place.batches),
                    context_tokens=place.prompt_tokens + place.new_tokens,
                )
            )
        for batch in place.batches:
            figures[f"{shape}, {batch} samples"] = compared(place, engine, model, batch, bandwidth)
    return figures


def compared(place: Place, engine: TorchEngine, model: Any, batch: int, bandwidth: float) -> Figures:
    """Measure one model at one batch size."""
    config = model.config
    tokens = batch * place.new_tokens
    ours = tokens / place.seconds(partial(answer, engine, place, batch, config.vocab_size))
    prompts = torch.randint(2, config.vocab_size, (1, place.prompt_tokens), device=place.device).expand(batch, -1)
    sampled = GenerationConfig(
        max_new_tokens=place.new_tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    generate = partial(model.generate, prompts, attention_mask=torch.ones_like(prompts), generation_config=sampled)
    theirs = tokens / place.seconds(generate, rounds=1)
    width = torch.finfo(getattr(torch, place.dtype)).bits // 8
    weight_bytes = sum(each.numel() for each in model.parameters()) * width
    per_position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * width
    cached_bytes = per_position * (place.prompt_tokens + place.new_tokens / 2)
    bound = batch * bandwidth / (weight_bytes + batch * cached_bytes)
    return {
        "engine_tokens_per_second": ours,
        "generate_tokens_per_second": theirs,
        "memory_bound_tokens_per_second": bound,
        "share_of_the_bound": ours / bound,
    }


def part_training(place: Place) -> Figures:
    """Train some steps with one rank, and compare the losses with float32 on the CPU."""
    shape = next(iter(place.shapes.values()))
    figures = {
        "whole": trained(place, shape),
        "fsdp2": trained(place, shape, shards=True),
        "mixture of experts": trained(place, place.experts),
        "mixture of experts, fsdp2": trained(place, place.experts, shards=True),
    }
    if place.is_gpu:
        figures["fsdp2, weights on the host"] = trained(place, shape, shards=True, offloads=True)
    return figures


def trained(place: Place, shape: Shape, *, shards: bool = False, offloads: bool = False) -> Figures:
    """Train a model, sharded as a job's ranks shard it, of which there is one here."""
    model = place.model(shape)
    # The CPU takes seconds per step at 0.6 B: few tokens are enough to compare losses.
    tokens = torch.randint(2, shape.vocabulary, (2, place.prompt_tokens), device=place.device)
    reference = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    reference.load_state_dict({name: each.float().cpu() for name, each in model.state_dict().items()})
    expected = train(reference, tokens.cpu(), steps=3)
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    device = torch.device(place.device)
    with joined(
        MeshShape(shard=1), 0, device, store, timeout_seconds=STEP_SECONDS, offloads_parameters=offloads
    ) as ranks:
        if shards:
            shard_layers(model, ranks)
        if place.is_gpu:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        losses = train(model, tokens, steps=3)
        place.finish()
        taken = time.perf_counter() - started
    # In bfloat16 a weight is known to 3 digits: so are losses, and updates of single steps drift apart slowly.
    tolerance = 1e-5 if place.dtype == "float32" else 3e-2
    worst = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, expected, strict=True))
    assert worst <= tolerance, f"losses {losses} are not {expected} to {tolerance}"
    figures = {"losses": losses, "float32_on_cpu": expected, "largest_relative_difference": worst, "seconds": taken}
    return figures | ({"peak_gigabytes": torch.cuda.max_memory_allocated() / 1e9} if place.is_gpu else {})


def train(model: Any, tokens: torch.Tensor, steps: int) -> list[float]:
    """Take steps of plain gradient descent on the next token's cross entropy; gives the losses before each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def part_update(place: Place) -> Figures:
    """Measure the longest time without a token around an update, by where the image is and how it is read."""
    figures: Figures = {}
    shape = next(iter(place.shapes.values()))
    memory, disk = default_directories()[0], Path(tempfile.gettempdir())
    for name, home in (("shared memory", memory), ("disk", disk)):
        for overlap in (True, False):
            with tempfile.TemporaryDirectory(dir=home) as directory:
                place.model(shape).save_pretrained(directory)
                figures[f"{name}, {'spare copy' if overlap else 'in place'}"] = pause(place, Path(directory), overlap)
    return figures


def pause(place: Place, directory: Path, overlap: bool) -> Figures:
    """Sample without an end while five versions are served, one after the other."""
    context = 4096
    settings = EngineSettings(
        str(directory), dtype=place.dtype, device=place.device, slots=4, context_tokens=context, overlap_load=overlap
    )
    engine = TorchEngine(settings)
    sampling = SamplingParameters(max_new_tokens=context - 8, ignore_eos=True)
    engine.submit(GenerationRequest("endless", (2, 3), (0, 1, 2, 3), sampling))
    steps: list[float] = []
    pauses: list[float] = []
    updates: list[float] = []
    for version in range(1, 6):
        steps += [step_seconds(engine, place)[0] for _ in range(20)]
        engine.request_update(version, directory / "model.safetensors", version, OnWeightUpdate.CONTINUE)
        started, longest, is_updated = time.perf_counter(), 0.0, False
        while not is_updated:
            taken, ended = step_seconds(engine, place)
            longest = max(longest, taken)
            for each in ended:
                if isinstance(each, Updated):
                    assert each.error is None, each.error
                    is_updated = True
        pauses.append(longest)
        updates.append(time.perf_counter() - started)
    engine.abort_all()
    in_milliseconds = {"step": steps[5:], "longest_step": pauses, "until_served": updates}
    return {f"{name}_milliseconds": 1e3 * statistics.median(each) for name, each in in_milliseconds.items()}


def step_seconds(engine: TorchEngine, place: Place) -> tuple[float, list[Any]]:
    """Take one step, to its end on the device."""
    started = time.perf_counter()
    ended = engine.step()
    place.finish()
    return time.perf_counter() - started, ended


PARTS: dict[str, Callable[[Place], Figures]] = {
    "engine": part_engine,
    "training": part_training,
    "update": part_update,
    "fleet": part_fleet,
    "sharing": part_sharing,
    "lora": part_lora,
    "servers": part_servers,
}


def main() -> int:
    """Run the parts that were asked for; returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; may be repeated")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="every part in small, on the CPU")
    parser.add_argument(
        "--json", type=Path, help="write the figures there; else to gpu.json in the folder $OUT, if set"
    )
    arguments = parser.parse_args()
    place = REHEARSAL if arguments.cpu_rehearsal else GPU
    if place.is_gpu and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use here; --cpu-rehearsal tries the script without one")
    folder = os.environ.get("OUT")
    report = arguments.json or (Path(folder) / "gpu.json" if folder else None)
    name = torch.cuda.get_device_name() if place.is_gpu else "cpu"
    print(f"{name}, torch {torch.__version__}, {place.dtype}", flush=True)
    if not place.is_gpu:
        use_threads(1)
    results: dict[str, Figures] = {}
    for part in arguments.part or PARTS:
        started = time.perf_counter()
        try:
            results[part] = PARTS[part](place)
        except Exception:  # a part that fails must not keep the machine from the others
            results[part] = {"failed": traceback.format_exc()}
        results[part]["part_seconds"] = time.perf_counter() - started
        print(f"{part}: {json.dumps(results[part], indent=1)}", flush=True)
        if report is not None:
            content = {"device": name, "torch": torch.__version__, "parts": results}
            report.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return sum("failed" in each for each in results.values())


if __name__ == "__main__":
    sys.exit(main())
