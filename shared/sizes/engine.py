"""The memory of the embedded engine's process at its peak, from a spec and a model's sizes. Pure.

base + weights (served, and spare ones for the next version) + KV cache + logits + kept turns
"""

from typing import Final

from flotilla.shared.config.sections.engine import TorchEngineConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.sizes.batches import sampled_lengths
from flotilla.shared.sizes.model import ModelSizes
from flotilla.shared.sizes.parts import Footprint, Part, counted, in_words
from flotilla.shared.sizes.trainer import weight_size

BASE_BYTES: Final = 165 << 20
"""What the process has before it loads anything: the interpreter and torch, measured."""
AT_ONCE: Final = 256
"""Tokens of a prompt that the native kernels compute together; as in ``decoders/fused.py``."""
BLOCK: Final = 16
"""Tokens that the cache grows by."""


def engine_footprint(spec: ExperimentSpec, sizes: ModelSizes) -> Footprint | None:
    """Predict the memory of one rollout's embedded engine; None where another engine samples, or none.

    Each slot is taken to hold a sample of the largest length: prompt and answer, or the whole context.
    """
    engine = spec.rollout.engine
    if not isinstance(engine, TorchEngineConfig) or not spec.needs_rollouts:
        return None
    device = "cuda" if engine.device.startswith("cuda") else "cpu"
    size = weight_size(spec)
    is_native = device == "cpu" and sizes.is_gated
    # Native kernels compute in float32, whatever weights are.
    computed = 4 if is_native else size
    # The native kernels and oneDNN pack a head of its own, tied or not.
    stored = sizes.parameters + (sizes.head if sizes.is_tied and is_native else 0)
    copies = 2 if spec.trains else 1
    tokens = -(-longest_sample(spec) // BLOCK) * BLOCK
    of_token = 2 * sizes.layers * sizes.keys * computed
    slots = used_slots(spec, engine)
    logits = slots * sizes.vocabulary * computed * 4
    inner = 2 * sizes.hidden + 2 * sizes.queries + 2 * sizes.keys + sizes.inner
    working = (max(AT_ONCE, slots) if is_native else spec_prefill(engine)) * inner * computed
    parts = [
        Part("process", BASE_BYTES, "interpreter and torch", is_on_host=True),
        Part("weights", stored * size, counted(stored, size)),
        Part("spare weights", (copies - 1) * stored * size, counted(stored, size)),
        Part("KV cache", slots * tokens * of_token, f"{slots} slots x {tokens} tokens x {in_words(of_token)}", least=0),
        Part("logits", logits, f"{slots} slots x {sizes.vocabulary} x {4 * computed} bytes", least=logits // slots),
        Part("working memory", working, "of a pass over prompts"),
    ]
    if _has_turns(spec):
        parts.append(Part("kept turns", engine.prefix_cache_mb * 10**6, "rollout.engine.prefix_cache_mb", least=0))
    remedies = [
        (f"rollout.engine.slots: {slots // 2}", slots // 2 * (tokens * of_token + sizes.vocabulary * computed * 4)),
        (
            f"rollout.engine.context_tokens: {engine.context_tokens // 2}",
            slots * engine.context_tokens // 2 * of_token,
        ),
    ]
    if size == 4:
        remedies.append(
            ("model.dtype: bfloat16", copies * stored * 2 + (0 if is_native else slots * tokens * of_token // 2))
        )
    found = sorted((each for each in remedies if each[1] > 0 and slots > 1), key=lambda each: -each[1])
    return Footprint("rollout's engine", device, [each for each in parts if each.num_bytes], found)


def longest_sample(spec: ExperimentSpec) -> int:
    """Count the tokens that a row of the cache may hold: a prompt and its answer, or the whole context."""
    context, (prompt, sampled) = spec.rollout.engine.context_tokens, sampled_lengths(spec)
    if _has_turns(spec):
        return context
    evaluated = (spec.evaluation and spec.evaluation.max_new_tokens) or 0
    return min(context, prompt + max(sampled, evaluated))


def used_slots(spec: ExperimentSpec, engine: TorchEngineConfig) -> int:
    """Count the slots that are ever used: those that there are, or all samples that may be under way at a time."""
    if spec.evaluation is not None or not spec.trains or spec.rollout.agents is not None:
        return engine.slots
    outstanding = spec.admission_budget + spec.asynchrony.redundant_groups
    return max(1, min(engine.slots, outstanding * spec.rollout.group_size))


def spec_prefill(engine: TorchEngineConfig) -> int:
    """Tokens of prompts that torch's operators compute together; as in ``engines/settings.py``."""
    return min(4096, max(engine.context_tokens, 256))


def _has_turns(spec: ExperimentSpec) -> bool:
    return spec.rollout.agents is not None or spec.rollout.episodes.kind != "single_turn"
