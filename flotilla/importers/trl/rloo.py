"""TRL's ``RLOOTrainer`` as a system to import from.

Meanings and defaults: trl/trainer/rloo_config.py and trl/trainer/rloo_trainer.py (``_compute_loss``,
``_generate_and_score_completions``), from the release on that samples groups as ``GRPOTrainer`` does (0.22).
"""

from dataclasses import replace
from typing import Any, Final

from flotilla.importers.engines import EMBEDDED
from flotilla.importers.parameter import Parameter, Verdict, ignored, refused, translated, unsupported
from flotilla.importers.source import Source, System, make_system
from flotilla.importers.trl import arguments, grpo
from flotilla.importers.trl.common import model, naming, optimiser, router, tracking
from flotilla.importers.trl.graders import rewards
from flotilla.importers.values import count, number, numbers

Fields = dict[str, Any]
SHARED: Final = frozenset({
    "reward_funcs", "reward_model_name_or_path", "reward_weights", "num_generations", "max_completion_length",
    "max_prompt_length", "vllm_max_model_length", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "shuffle_dataset", "chat_template_kwargs", "num_generations_eval", "vllm_structured_outputs_regex",
    "vllm_guided_decoding_regex", "generation_kwargs", "sync_ref_model", "reward_processing_classes",
    "ref_model_mixup_alpha", "ref_model_sync_steps",
})  # fmt: skip
"""What it has in common with GRPO, besides what says how an engine runs."""
ONE_UPDATE: Final = (
    "an answer's ratio is the product of its tokens' there, which is 1 in the first update of a generation and is not "
    "offered for others: make one update of each, in one pass"
)


def _shared(row: Parameter) -> Parameter:
    if row.name == "num_generations_eval":
        return replace(row, example=4)
    return replace(row, default=2) if row.name == "num_generations" else row


def _of_one_update(name: str, default: int | None = None) -> Parameter:
    return Parameter(name=name, verdict=Verdict.REFUSED, reason=ONE_UPDATE, default=default, convert=count,
                     is_judged=True)  # fmt: skip


ROWS: tuple[Parameter, ...] = (
    *(_shared(row) for row in grpo.ROWS if row.name in SHARED or row.verdict is Verdict.UNSUPPORTED),
    translated("beta", "algorithm.kl.coefficient", number, "weight of the KL to the reference, taken off an answer's "
               "reward before it is compared; 0 is none", example=0.01, default=0.05, context={}),
    translated("reward_clip_range", "reward.shaping.clip", numbers, "(-c, c) bounds rewards before the KL",
               example=[-5.0, 5.0], default=None),
    _of_one_update("generation_batch_size"),
    _of_one_update("steps_per_generation"),
    _of_one_update("num_iterations", 1),
    *ignored("the ratio of a generation's only update is 1", "epsilon", "epsilon_high"),
    refused("normalize_advantages", "an answer's advantage is not divided by the deviation of all: leave it out",
            default=False),
    refused("mask_truncated_completions", "answers that are left out stay in the loss's mean there: leave it out",
            default=False),
    *unsupported(EMBEDDED, "use_vllm", default=False),
)  # fmt: skip


def learning(source: Source) -> Fields:
    """Make the loss of whole answers, each compared with the others of its group."""
    _, _, batches = grpo.sizes(source)
    if batches > 1:
        name = next((n for n in ("steps_per_generation", "generation_batch_size") if n in source.given), "beta")
        source.refuse(name, ONE_UPDATE)
    if source.required("num_iterations") > 1:
        source.refuse("num_iterations", ONE_UPDATE)
    fields: Fields = {
        "algorithm.advantage": {"kind": "rloo"},
        "algorithm.policy_loss": {"kind": "policy_gradient"},
        "algorithm.aggregation": {"mode": "seq-mean-token-sum"},
        "algorithm.correction": None,
    }
    if beta := source.required("beta"):
        fields["algorithm.old_log_probs"] = "recompute"
        fields["algorithm.kl"] = {
            "placement": "reward", "order": "before_baseline", "coefficient": beta, "estimator": "k1",
            "value_clamp": None,
        }  # fmt: skip
    if (bounds := source.value("reward_clip_range")) is not None:
        if len(bounds) != 2 or bounds[0] != -bounds[1]:
            source.refuse("reward_clip_range", f"rewards are bounded to (-c, c) here, not {bounds}")
        else:
            fields["reward.shaping.clip"] = bounds[1]
    return fields


TRL_RLOO: Final[System] = make_system(
    "trl rloo", (arguments.ROWS, ROWS),
    rules=(naming, model, optimiser, router, grpo.groups, grpo.sampling, grpo.data, rewards, learning, grpo.evaluation,
           tracking),
)  # fmt: skip
