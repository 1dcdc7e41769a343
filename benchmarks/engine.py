"""Generated tokens per second of the embedded engine, beside what others generate with the same weights.

Baselines: ``model.generate`` with its dynamic cache, one batch padded to its longest prompt and run until its last
sample ends; and transformers' continuous batching (``generate_batch``, its manager kept between rounds). Prompts have
32 tokens and come in groups of 8; 32 tokens are sampled at temperature 1 (``uniform``), or 4 to 60 (``mixed``, where
only the wanted tokens count). Prefill is included everywhere. Rounds are interleaved; figures are medians.
Where FLOTILLA_SGLANG_PYTHON names an interpreter that has it, an SGLang server on this CPU answers the same requests as
well, as a rollout asks it: a request per completion over HTTP, tokens and log-probabilities by torch's operators in a
process of its own with one compute thread, while another encodes and decodes; a group's prompt comes from its cache.

The roofline is the time of the linear layers alone, at the shapes of a decode step, measured in the same rounds.

``python -m benchmarks.engine [--quick | --concurrency 8 [--model 29M]] [--json FILE]``
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging as transformers_logging

from benchmarks.models import SIZES
from flotilla.services.rollout.engines.base import GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.decoders.architecture import Architecture, architecture_of
from flotilla.services.rollout.engines.embedded.engine import TorchEngine, use_threads
from flotilla.services.rollout.engines.embedded.outcomes import Generated
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.rollout.engines.sglang.engine import SglangEngine
from flotilla.shared.environment.settings import ENGINE_PYTHONS

PROMPT_TOKENS = 32
NEW_TOKENS = 32
GROUP_SIZE = 8
FEW_ROUNDS = {"continuous": 3, "sglang": 3}
"""Of those that take long."""


@dataclass(frozen=True)
class Load:
    """What is generated at a time: groups of prompts, and how many tokens each sample gets."""

    name: str
    prompts: list[list[int]]
    group_size: int
    new_tokens: list[int]

    @property
    def concurrency(self) -> int:
        """Count the samples."""
        return len(self.prompts) * self.group_size

    @property
    def wanted_tokens(self) -> int:
        """Count the tokens that somebody asked for."""
        return sum(self.new_tokens) * self.group_size


@dataclass(frozen=True)
class Row:
    """Tokens per second of one model under one load."""

    model: str
    load: str
    concurrency: int
    engine: float
    generate: float
    continuous_batching: float | None
    sglang: float | None
    roofline: float

    def line(self) -> str:
        """Format it for people."""
        others = (f"{rate:10.0f}" if rate else f"{'-':>10}" for rate in (self.continuous_batching, self.sglang))
        rates = f"{self.engine:10.0f} {self.generate:10.0f} {' '.join(others)} {self.engine / self.generate:8.2f}x"
        shares = f"{self.engine / self.roofline:9.1%} {self.generate / self.roofline:9.1%}"
        return f"{self.model:5} {self.load:8} {self.concurrency:4} {rates} {shares}"


HEADER = "model load        n     engine   generate  cont.bat.     SGLang   vs gen.  of roofl. (generate)"


def make_load(concurrency: int, vocab_size: int, *, is_mixed: bool = False) -> Load:
    """Make prompts in groups of 8, or fewer where there are not so many samples."""
    generator = np.random.default_rng(0)
    group_size = min(GROUP_SIZE, concurrency)
    num = concurrency // group_size
    prompts = generator.integers(2, vocab_size, (num, PROMPT_TOKENS)).tolist()
    new_tokens = generator.integers(4, 61, num).tolist() if is_mixed else [NEW_TOKENS] * num
    return Load("mixed" if is_mixed else "uniform", prompts, group_size, new_tokens)


def requests_of(load: Load) -> Iterator[GenerationRequest]:
    """Make a request for each group."""
    for number, (prompt, new_tokens) in enumerate(zip(load.prompts, load.new_tokens, strict=True)):
        seeds = tuple(range(number * load.group_size, (number + 1) * load.group_size))
        sampling = SamplingParameters(max_new_tokens=new_tokens, ignore_eos=True)
        yield GenerationRequest(str(number), tuple(prompt), seeds, sampling)


def run_engine(engine: TorchEngine, load: Load) -> None:
    """Answer the load, and check that all of it was answered."""
    for request in requests_of(load):
        engine.submit(request)
    tokens = 0
    while not engine.is_idle:
        ended = [outcome for outcome in engine.step() if isinstance(outcome, Generated)]
        tokens += sum(completion.token_ids.size for outcome in ended for completion in outcome.completions)
    assert tokens == load.wanted_tokens


class SglangServer:
    """An SGLang server, started here; it cannot run where the caller has an event loop."""

    def __init__(self, directory: str, python: Path) -> None:
        self._runner = asyncio.Runner()
        settings = ServerSettings(Path(directory), python=python, slots=128, context_tokens=256, probe_seconds=3600)
        self._engine = SglangEngine(settings)
        self._runner.run(self._engine.start())

    def answer(self, load: Load) -> None:
        """Answer the load, and check that all of it was answered."""
        assert self._runner.run(self._answer(load)) == load.wanted_tokens

    async def _answer(self, load: Load) -> int:
        answers = await asyncio.gather(*(self._engine.generate(request) for request in requests_of(load)))
        return sum(completion.token_ids.size for completions in answers for completion in completions)

    def close(self) -> None:
        """End the server."""
        self._runner.run(self._engine.close())
        self._runner.close()


def run_generate(model: Any, load: Load) -> None:
    """Answer the load by one call; a batch ends with its longest sample."""
    prompts = torch.tensor(load.prompts).repeat_interleave(load.group_size, dim=0)
    config = sampled(max(load.new_tokens))
    generated = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
    assert generated.shape[1] == PROMPT_TOKENS + max(load.new_tokens)


def run_continuous(model: Any, load: Load) -> None:
    """Answer a uniform load by continuous batching."""
    outputs = model.generate_batch(
        [prompt for prompt in load.prompts for _ in range(load.group_size)],
        generation_config=sampled(NEW_TOKENS),
        continuous_batching_config=ContinuousBatchingConfig(page_size=32, num_blocks=512, max_batch_tokens=1024),
        persistent_manager=True,
        warmup=False,
    )
    assert sum(len(output.generated_tokens) for output in outputs.values()) == load.wanted_tokens


def sampled(new_tokens: int) -> GenerationConfig:
    """Sample from the whole distribution; no token ends a sample."""
    return GenerationConfig(max_new_tokens=new_tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)


def linear_layers(sizes: Architecture, num_rows: int) -> Callable[[], None]:
    """Make a call that does the linear layers of one decode step, with weights as large as the model's."""
    heads = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
    shapes = [
        (heads, sizes.hidden_size),
        (sizes.hidden_size, sizes.num_heads * sizes.head_dim),
        (2 * sizes.intermediate_size, sizes.hidden_size),
        (sizes.hidden_size, sizes.intermediate_size),
    ] * sizes.num_layers + [(sizes.vocab_size, sizes.hidden_size)]
    layers = [(torch.randn(num_rows, shape[1]), torch.randn(shape)) for shape in shapes]

    def run() -> None:
        with torch.inference_mode():
            for inputs, weights in layers:
                functional.linear(inputs, weights)

    return run


def seconds(run: Callable[[], None], clock: Callable[[], float], repeats: int = 1) -> float:
    """Time one call, as the mean over some."""
    started = clock()
    for _ in range(repeats):
        run()
    return (clock() - started) / repeats


def measure(
    name: str, loads: list[tuple[int, bool]], rounds: int, clock: Callable[[], float], sglang_python: Path | None
) -> list[Row]:
    """Measure one model under several loads."""
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES[name], max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.08)
    with tempfile.TemporaryDirectory() as directory:
        model: Any = AutoModelForCausalLM.from_config(config).eval()
        model.save_pretrained(directory)
        engine = TorchEngine(EngineSettings(directory, slots=128, context_tokens=512))
        server = SglangServer(directory, sglang_python) if sglang_python is not None else None
    architecture = architecture_of(config.to_dict())
    rows = []
    try:
        for concurrency, is_mixed in loads:
            load = make_load(concurrency, config.vocab_size, is_mixed=is_mixed)
            linear = linear_layers(architecture, concurrency)
            runs: dict[str, Callable[[], None]] = {
                "engine": partial(run_engine, engine, load),
                "generate": partial(run_generate, model, load),
                **({"continuous": partial(run_continuous, model, load)} if not is_mixed else {}),
                **({"sglang": partial(server.answer, load)} if server is not None else {}),
            }
            rows.append(measure_load(name, load, runs, linear, rounds, clock))
            print(rows[-1].line(), flush=True)
    finally:
        if server is not None:
            server.close()
    model.destroy_cached_continuous_batching_manager()
    return rows


def measure_load(
    name: str,
    load: Load,
    runs: dict[str, Callable[[], None]],
    linear: Callable[[], None],
    rounds: int,
    clock: Callable[[], float],
) -> Row:
    """Run each in turns, the first time without looking at the clock."""
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for key, run in runs.items():
            if key not in FEW_ROUNDS or number < FEW_ROUNDS[key]:
                times[key].append(seconds(run, clock))
        times["linear"].append(seconds(linear, clock, repeats=10))
    rates = {key: load.wanted_tokens / statistics.median(taken[1:]) for key, taken in times.items()}
    roofline = load.concurrency * rates["linear"] / load.wanted_tokens
    others = (rates.get("continuous"), rates.get("sglang"))
    return Row(name, load.name, load.concurrency, rates["engine"], rates["generate"], *others, roofline)


def main() -> None:
    """Read the arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model at 8 and 128 samples, three rounds")
    parser.add_argument("--concurrency", type=int, help="only one model, at this number of samples")
    parser.add_argument("--model", choices=SIZES, default="tiny", help="which one (default: tiny)")
    parser.add_argument("--rounds", type=int, help="measured rounds (default: 5, and 3 when quick or 29M)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time instead of wall time: for a busy machine"
    )
    arguments = parser.parse_args()
    found = os.environ.get(ENGINE_PYTHONS["sglang"])
    python = Path(found) if found else None
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    use_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    unit = "processor second" if arguments.cpu_time else "second"
    print(f"tokens per {unit}, 1 thread, float32, torch {torch.__version__}\n{HEADER}")
    if arguments.concurrency is not None:
        rows = measure(arguments.model, [(arguments.concurrency, False)], arguments.rounds or 3, clock, python)
    elif arguments.quick:
        rows = measure("tiny", [(8, False), (128, False)], arguments.rounds or 3, clock, python)
    else:
        every = [(1, False), (8, False), (32, False), (128, False), (128, True)]
        rows = measure("tiny", every, arguments.rounds or 5, clock, python)
        rows += measure("29M", every, arguments.rounds or 3, clock, python)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
