"""What the embedded engine gains by keeping what it computed of earlier turns: conversations with and without it.

Conversations are had at the same time. Each begins with 64 tokens; in each turn 32 are sampled, and 32 more are shown.
Rounds are interleaved and begin with other tokens each, so no conversation is known from an earlier round; medians.

``python -m benchmarks.turns [--model 29M] [--conversations 16] [--turns 8] [--json FILE]``
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.engine import SIZES
from flotilla.services.rollout.engines.base import GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.embedded.engine import TorchEngine, use_threads
from flotilla.services.rollout.engines.embedded.outcomes import Generated
from flotilla.services.rollout.engines.settings import EngineSettings

OPENING_TOKENS = 64
NEW_TOKENS = 32
SHOWN_TOKENS = 32


@dataclass(frozen=True)
class Row:
    """One model: sampled tokens per second, and prompt tokens computed in a round, with and without what was kept."""

    model: str
    conversations: int
    turns: int
    keeping: float
    forgetting: float
    prefilled_keeping: int
    prefilled_forgetting: int


def talk(engine: TorchEngine, conversations: int, turns: int, seed: int) -> float:
    """Have conversations, all next turns at once; returns sampled tokens per second."""
    generator = np.random.default_rng(seed)
    vocab_size = 400
    prompts = generator.integers(2, vocab_size, (conversations, OPENING_TOKENS)).tolist()
    sampling = SamplingParameters(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    started = time.perf_counter()
    for turn in range(turns):
        for number, prompt in enumerate(prompts):
            engine.submit(GenerationRequest(f"{number}", tuple(prompt), (turn,), sampling, is_turn=True))
        while not engine.is_idle:
            for outcome in engine.step():
                assert isinstance(outcome, Generated)
                shown = generator.integers(2, vocab_size, SHOWN_TOKENS).tolist()
                prompts[int(outcome.request_id)] += [*outcome.completions[0].token_ids.tolist(), *shown]
    return conversations * turns * NEW_TOKENS / (time.perf_counter() - started)


def measure(name: str, conversations: int, turns: int, rounds: int) -> Row:
    """Measure one model."""
    torch.manual_seed(0)
    context = OPENING_TOKENS + turns * (NEW_TOKENS + SHOWN_TOKENS)
    config = Qwen3Config(**SIZES[name], max_position_embeddings=context, tie_word_embeddings=True)
    with tempfile.TemporaryDirectory() as directory:
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        settings = EngineSettings(directory, slots=conversations, context_tokens=context)
        keeping = TorchEngine(settings)
        forgetting = TorchEngine(EngineSettings(**settings.to_wire() | {"prefix_cache_mb": 0}))
    rates: dict[TorchEngine, list[float]] = {keeping: [], forgetting: []}
    for seed in range(rounds + 1):
        for engine, taken in rates.items():
            taken.append(talk(engine, conversations, turns, seed))
    # The first round warms up.
    speeds = [statistics.median(taken[1:]) for taken in rates.values()]
    prefilled = [engine.load().prefilled_tokens // (rounds + 1) for engine in rates]
    return Row(name, conversations, turns, speeds[0], speeds[1], *prefilled)


def main() -> None:
    """Read the arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="tiny", help="which one (default: tiny)")
    parser.add_argument("--conversations", type=int, default=16, help="had at the same time (default: 16)")
    parser.add_argument("--turns", type=int, default=8, help="of each (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default: 3)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    use_threads(1)
    row = measure(arguments.model, arguments.conversations, arguments.turns, arguments.rounds)
    gain = row.keeping / row.forgetting
    print(f"{row.model}, {row.conversations} conversations of {row.turns} turns, 1 thread")
    print(f"tokens per second: {row.keeping:.0f} keeping turns, {row.forgetting:.0f} without ({gain:.2f}x)")
    print(f"prompt tokens computed in a round: {row.prefilled_keeping}, {row.prefilled_forgetting} without")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(asdict(row), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
