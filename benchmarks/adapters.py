"""Tokens per second where eight models share one base and one engine, beside one model alone; CPU, one thread.

Prompts have 32 tokens, 32 are sampled; each round samples 32 completions of ``base`` (no adapter), of ``one`` adapter,
of ``eight`` adapters of ranks 2 to 64 in one batch, and of ``turns``: the same eight one after another, each merged
with the base's weights before its four completions are sampled. Rounds are interleaved; figures are medians, of
processor time. What an adapter costs: its bytes, what the
process grows by, and the time to read one, in which nothing is sampled.

``python -m benchmarks.adapters [--model 29M] [--rounds 5]``
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging as transformers_logging

from benchmarks.models import SIZES
from flotilla.services.rollout.engines.base import GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.embedded.engine import TorchEngine, use_threads
from flotilla.services.rollout.engines.embedded.outcomes import Generated
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.models.weight_files import checksum_of, safetensors_files
from flotilla.shared.weights.image.adapters import AdaptersHeader, names_of

RANKS = (2, 4, 8, 8, 16, 16, 32, 64)
SAMPLES, TOKENS = 32, 32
SCALE = 2.0


def save_adapter(model: nn.Module, rank: int, file: Path, base: str) -> Path:
    """Save random adapters of all linear layers, as a file that serves as an image, too."""
    tensors: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            out, wide = layer.weight.shape
            low, high = names_of(f"{name}.weight")
            tensors |= {low: torch.randn(rank, wide) / 50, high: torch.randn(out, rank) / 50}
    save_file(tensors, file, AdaptersHeader(base, SCALE).metadata)
    return file


def requests(vocabulary: int) -> list[GenerationRequest]:
    """Make a request for each model, of as many samples each."""
    prompts = np.random.default_rng(0).integers(2, vocabulary, (len(RANKS), TOKENS)).tolist()
    how = SamplingParameters(max_new_tokens=TOKENS, ignore_eos=True)
    seeds = np.arange(SAMPLES).reshape(len(RANKS), -1).tolist()
    return [
        GenerationRequest(str(number), tuple(prompt), tuple(seeds[number]), how)
        for number, prompt in enumerate(prompts)
    ]


def sample(engine: TorchEngine, requests: Sequence[GenerationRequest]) -> int:
    """Have requests answered; returns the number of tokens."""
    for request in requests:
        engine.submit(request)
    tokens = 0
    while not engine.is_idle:
        ended = [outcome for outcome in engine.step() if isinstance(outcome, Generated)]
        tokens += sum(completion.token_ids.size for outcome in ended for completion in outcome.completions)
    return tokens


def in_turns(engine: TorchEngine, requests: Sequence[GenerationRequest], files: Sequence[Path]) -> int:
    """Load each adapter merged, and sample its request."""
    tokens = 0
    for file, request in zip(files, requests, strict=True):
        engine.request_update(1, file, engine.version + 1, OnWeightUpdate.DRAIN)
        tokens += sample(engine, [request])
    return tokens


def measure(name: str, rounds: int) -> Mapping[str, float]:
    """Measure tokens per second of each way, and what one adapter costs."""
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES[name], max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.08)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        model: Any = AutoModelForCausalLM.from_config(config).eval()
        model.save_pretrained(directory)
        base = checksum_of(safetensors_files(directory))
        files = [save_adapter(model, rank, Path(folder) / f"{n}.safetensors", base) for n, rank in enumerate(RANKS)]
        settings = EngineSettings(str(directory), slots=SAMPLES, context_tokens=128)
        engine, turning = TorchEngine(settings), TorchEngine(settings)
        before = resident_mb()
        loads = [timed(partial(engine.load_adapter, str(n), file, SCALE, n)) for n, file in enumerate(files)]
        asked = requests(config.vocab_size)
        grown = resident_mb() - before
        ways: dict[str, Callable[[], int]] = {
            "base": partial(sample, engine, asked),
            "one": partial(sample, engine, [replace(each, adapter="4") for each in asked]),
            "eight": partial(sample, engine, [replace(each, adapter=str(n)) for n, each in enumerate(asked)]),
            "turns": partial(in_turns, turning, asked, files),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds + 1):
            for way, run in ways.items():
                times[way].append(timed(run))
        found = {way: SAMPLES * TOKENS / statistics.median(each[1:]) for way, each in times.items()}
        sizes = {"base MB": sum(each.stat().st_size for each in safetensors_files(directory)) / 1e6}
        sizes["eight adapters MB"] = sum(each.stat().st_size for each in files) / 1e6
        sizes["memory grown MB"] = grown
        return found | sizes | {"read one ms": 1000 * statistics.median(loads), "read rank 16 ms": 1000 * loads[4]}


def resident_mb() -> float:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def timed(run: Callable[[], object]) -> float:
    """Time a call: seconds of the processor."""
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="29M", help="which one (default: 29M)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: 5)")
    chosen = parser.parse_args()
    transformers_logging.disable_progress_bar()
    use_threads(1)
    for what, figure in measure(chosen.model, chosen.rounds).items():
        sys.stdout.write(f"{what:20} {figure:10.1f}\n")


if __name__ == "__main__":
    main()
