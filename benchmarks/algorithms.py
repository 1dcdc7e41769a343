"""What advantages, correction and loss cost beside the model: their time over that of one forward pass.

The model is the arithmetic example's (random weights), the batch 64 sequences of 2048 tokens; the forward pass has no
gradient and no output layer, so the baseline is as cheap as it can be. The algorithms' side is everything else of a
step: advantages, denominators, correction, loss, its gradient to the log-probabilities, metrics.

``python -m benchmarks.algorithms [--sequences 64] [--tokens 2048] [--rounds 5] [--json FILE]``
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3Model

from examples.arithmetic.settings import ModelSettings
from flotilla.services.trainer.algorithms.advantages import AdvantageInputs, compute_advantages
from flotilla.services.trainer.algorithms.objective import denominators_of, policy_objective, selected_tokens
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.shared.config.sections.algorithm import AlgorithmConfig

CONFIGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo, truncated weights": {"old_log_probs": "recompute"},
    "gae": {"advantage": {"kind": "gae"}},
    "reinforce++, skipping masked tokens": {"advantage": {"kind": "reinforce_plus_plus", "gamma": 0.99}},
    "gspo": {"policy_loss": {"kind": "gspo"}, "aggregation": {"mode": "seq-mean-token-mean"}},
    "kl_cov": {"policy_loss": {"kind": "kl_cov"}},
    "everything": {
        "old_log_probs": "recompute",
        "kl": {"placement": "loss"},
        "entropy_coefficient": 0.01,
        "supervised": {"coefficient": 0.1},
        "correction": {
            "weight": {"level": "sequence", "batch_normalise": True},
            "rejections": [
                {"scope": "segment", "lower": 0.5, "upper": 2.0},
                {"scope": "sequence", "statistic": "k3", "upper": 1.0},
            ],
            "veto": {},
        },
    },
}
GROUP_SIZE = 8
ROWS_PER_FORWARD = 8


def seconds(run: Callable[[], object], rounds: int) -> float:
    """Median time of a call, after one that is not counted."""
    run()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def forward_of(num_sequences: int, num_tokens: int) -> Callable[[], object]:
    """Make the model and a call of its forward pass over the whole batch."""
    shape = ModelSettings()
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        intermediate_size=shape.mlp_size,
        max_position_embeddings=num_tokens,
    )
    model = Qwen3Model(config).eval()
    token_ids = torch.randint(0, shape.vocab_size, (num_sequences, num_tokens))

    @torch.no_grad()
    def run() -> None:
        for rows in torch.split(token_ids, ROWS_PER_FORWARD):
            model(input_ids=rows, use_cache=False)

    return run


def step_of(config: AlgorithmConfig, num_sequences: int, num_tokens: int) -> Callable[[], object]:
    """Make a batch and a call of everything but the model."""
    random = torch.Generator().manual_seed(0)
    total = num_sequences * num_tokens
    index = torch.arange(num_sequences).repeat_interleave(num_tokens)
    mask = torch.rand(total, generator=random) < 0.9
    old = -torch.rand(total, generator=random) - 0.01
    near = [(old + 0.1 * torch.randn(total, generator=random)).clamp(max=-1e-3) for _ in range(3)]
    log_probs = near[0].requires_grad_(True)
    scores = torch.randint(0, 2, (num_sequences,), generator=random).float()
    values, entropy = torch.rand(total, generator=random), torch.rand(total, generator=random)
    group_index = torch.arange(num_sequences) // GROUP_SIZE
    rollout = near[1]

    def run() -> None:
        log_probs.grad = None
        sequences = PackedSequences.of(index, mask, num_sequences)
        inputs = AdvantageInputs(sequences, scores, group_index, values=values, old_log_probs=old)
        advantages = compute_advantages(config.advantage, inputs).advantages
        denominators = denominators_of(
            config,
            old_log_probs=old,
            rollout_log_probs=rollout,
            response_mask=mask,
            sequence_index=index,
            num_sequences=num_sequences,
        )
        selected = selected_tokens(config, old_log_probs=old, advantages=advantages, response_mask=mask)
        objective = policy_objective(
            config,
            log_probs=log_probs,
            advantages=advantages,
            denominators=denominators,
            ref_log_probs=near[2],
            entropy=entropy,
            scores=scores,
            selected=selected,
            num_sequences=num_sequences,
            old_log_probs=old,
            rollout_log_probs=rollout,
            response_mask=mask,
            sequence_index=index,
        )
        torch.autograd.backward(objective.loss)

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=__doc__)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    forward = seconds(forward_of(options.sequences, options.tokens), max(1, options.rounds // 3))
    print(f"{options.sequences} x {options.tokens} tokens, forward pass {forward:.2f} s")
    found = {}
    for name, section in CONFIGS.items():
        config = AlgorithmConfig.model_validate(section)
        taken = seconds(step_of(config, options.sequences, options.tokens), options.rounds)
        found[name] = {"seconds": taken, "share_of_forward": taken / forward}
        print(f"{name:38} {taken * 1e3:8.1f} ms  {taken / forward:7.2%} of the forward pass")
    if options.json is not None:
        options.json.write_text(json.dumps({"forward_seconds": forward, "algorithms": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
