"""What a machine with one NVIDIA GPU shows of this project, in parts that each end within ten minutes.

``engine``: generated tokens per second of the embedded engine in bfloat16, at the shapes of Qwen3 with 0.6 and 4
billion parameters and random weights, beside ``generate`` of transformers and the bound that reading weights and cache
sets. ``training``: steps in FSDP2 with one rank, in bfloat16, beside the same steps in float32 on the CPU. ``update``:
how long sampling pauses while new weights are served, from shared memory and from the disk, with a spare copy and
without. ``fleet``: a whole fleet for twenty steps on one GPU, engine and trainer beside each other, and its ledger. A
part that fails says so and the next one runs; the exit code counts the failures.

``python -m benchmarks.gpu [--part NAME] [--cpu-rehearsal] [--json FILE]``; the rehearsal runs every part in small on
the CPU, so that the script itself is tried before a GPU is lent.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

from services.rollout.engines.base import GenerationRequest, SamplingParameters
from services.rollout.engines.embedded.engine import TorchEngine, use_threads
from services.rollout.engines.embedded.outcomes import Generated, Updated
from services.rollout.engines.settings import EngineSettings
from services.trainer.parallel.fsdp import shard
from services.trainer.parallel.ranks import MeshShape, joined
from shared.config.asynchrony import OnWeightUpdate
from shared.weights.image import default_directories

Figures = dict[str, Any]
SPEC = Path(__file__).parents[1] / "examples" / "arithmetic" / "experiment.yaml"
FLEET_STEPS = 20
FLEET_SECONDS = 480.0
STEP_SECONDS = 120.0


@dataclass(frozen=True)
class Place:
    """Where the parts run, and how large they are.

    Attributes:
        device: of engine and trainer.
        dtype: of their weights.
        shapes: of the models: hidden size, layers, heads, key/value heads, head size, intermediate size, vocabulary.
        batches: samples at a time.
        prompt_tokens, new_tokens: of each sample.
    """

    device: str
    dtype: Literal["float32", "bfloat16"]
    shapes: dict[str, tuple[int, int, int, int, int, int, int]]
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int


GPU = Place(
    "cuda:0",
    "bfloat16",
    {"0.6B": (1024, 28, 16, 8, 128, 3072, 151_936), "4B": (2560, 36, 32, 8, 128, 9728, 151_936)},
    batches=(1, 32, 256),
    prompt_tokens=128,
    new_tokens=128,
)
REHEARSAL = Place("cpu", "float32", {"tiny": (64, 2, 4, 2, 16, 256, 428)}, (1, 8), prompt_tokens=8, new_tokens=8)


def config_of(place: Place, shape: str) -> Qwen3Config:
    """Describe a model of this shape."""
    hidden, layers, heads, kv_heads, head_dim, intermediate, vocabulary = place.shapes[shape]
    return Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def made_model(place: Place, shape: str) -> Any:
    """Make a model with random weights on the device."""
    torch.manual_seed(0)
    with torch.device(place.device):
        return AutoModelForCausalLM.from_config(config_of(place, shape), dtype=getattr(torch, place.dtype)).eval()


def finish(place: Place) -> None:
    """Wait until the device has done what it was given."""
    if place.device != "cpu":
        torch.cuda.synchronize()


def seconds(place: Place, run: Callable[[], object], rounds: int = 3) -> float:
    """Time a call: the median of some, after one that warms up."""
    times = []
    for _ in range(rounds + 1):
        finish(place)
        started = time.perf_counter()
        run()
        finish(place)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def bytes_per_second(place: Place) -> float:
    """Measure what the device's memory gives: a copy reads and writes each byte."""
    num_bytes = (1 << 32) if place.device != "cpu" else 1 << 26
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(place, lambda: target.copy_(source))


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
        model = made_model(place, shape)
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
    ours = tokens / seconds(place, partial(answer, engine, place, batch, config.vocab_size))
    prompts = torch.randint(2, config.vocab_size, (1, place.prompt_tokens), device=place.device).expand(batch, -1)
    sampled = GenerationConfig(
        max_new_tokens=place.new_tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    generate = partial(model.generate, prompts, attention_mask=torch.ones_like(prompts), generation_config=sampled)
    theirs = tokens / seconds(place, generate, rounds=1)
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
    """Train some steps in FSDP2 with one rank, and compare the losses with float32 on the CPU."""
    shape = next(iter(place.shapes))
    model = made_model(place, shape)
    # The CPU takes seconds per step at 0.6 B: few tokens are enough to compare losses.
    tokens = torch.randint(2, model.config.vocab_size, (2, place.prompt_tokens), device=place.device)
    reference = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    reference.load_state_dict({name: each.float().cpu() for name, each in model.state_dict().items()})
    expected = train(reference, tokens.cpu(), steps=3)
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    with joined(MeshShape(shard=1), 0, torch.device(place.device), store, timeout_seconds=STEP_SECONDS) as ranks:
        shard(model, ranks)
        started = time.perf_counter()
        losses = train(model, tokens, steps=3)
        taken = time.perf_counter() - started
    # In bfloat16 a weight is known to 3 digits: so are losses, and updates of single steps drift apart slowly.
    tolerance = 1e-5 if place.dtype == "float32" else 3e-2
    worst = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, expected, strict=True))
    assert worst <= tolerance, f"losses {losses} are not {expected} to {tolerance}"
    return {"losses": losses, "float32_on_cpu": expected, "largest_relative_difference": worst, "seconds": taken}


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
    shape = next(iter(place.shapes))
    memory, disk = default_directories()[0], Path(tempfile.gettempdir())
    for name, home in (("shared memory", memory), ("disk", disk)):
        for overlap in (True, False):
            with tempfile.TemporaryDirectory(dir=home) as directory:
                made_model(place, shape).save_pretrained(directory)
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
    finish(place)
    return time.perf_counter() - started, ended


def part_fleet(place: Place) -> Figures:
    """Run a whole fleet on the device, and hold its ledger against what was issued."""
    steps = FLEET_STEPS if place.device != "cpu" else 2
    settings = {
        "optimisation.steps": steps,
        "rollout.engine.device": place.device,
        "parallelism.device": place.device,
        "model.dtype": place.dtype,
        "evaluation": "null",
    }
    with tempfile.TemporaryDirectory() as data:
        options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "flotilla", "run", str(SPEC), "--runs", data, "--plain", *options]
        started = time.perf_counter()
        ended = subprocess.run(command, capture_output=True, text=True, timeout=FLEET_SECONDS, check=False)
        taken = time.perf_counter() - started
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-2000:]
        (report,) = Path(data).glob("*/summary.json")
        summary = json.loads(report.read_text(encoding="utf-8"))
    ledger = summary["ledger"]
    resolved = sum(sum(ledger[kind].values()) for kind in ("filtered", "dropped", "failed"))
    found = ledger["outstanding"] + ledger["planned"] + ledger["trained"] + resolved
    assert summary["steps"] == steps, summary["steps"]
    assert ledger["issued"] == found, f"the ledger does not balance: {ledger}"
    return {"seconds": taken, "steps": steps, "tokens_trained": summary["tokens_trained"], "ledger": ledger}


PARTS: dict[str, Callable[[Place], Figures]] = {
    "engine": part_engine,
    "training": part_training,
    "update": part_update,
    "fleet": part_fleet,
}


def main() -> int:
    """Run the parts that were asked for; returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; may be repeated")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="every part in small, on the CPU")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    place = REHEARSAL if arguments.cpu_rehearsal else GPU
    if place.device != "cpu" and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use here; --cpu-rehearsal tries the script without one")
    name = "cpu" if place.device == "cpu" else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {place.dtype}", flush=True)
    if place.device == "cpu":
        use_threads(1)
    results: dict[str, Figures] = {}
    for part in arguments.part or PARTS:
        started = time.perf_counter()
        try:
            results[part] = PARTS[part](place)
        except Exception:  # a part that fails must not keep the machine from the others
            results[part] = {"failed": traceback.format_exc()}
        print(f"{part} ({time.perf_counter() - started:.0f} s): {json.dumps(results[part], indent=1)}", flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({"device": name, "parts": results}, indent=1) + "\n", encoding="utf-8")
    return sum("failed" in each for each in results.values())


if __name__ == "__main__":
    sys.exit(main())
