"""ROLL, reward side: normalisation, masks, filters, length and repetition rewards."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flotilla.services.reward.filtering import sample_mask
from flotilla.services.reward.normalisation import StatisticsConfig, normalise
from flotilla.services.reward.shaping import Graded, length_reward, repetition_penalty, shape
from flotilla.shared.config.sections.shaping import (
    LengthRewardConfig,
    MeanInRangeConfig,
    RepetitionConfig,
    SampleMaskConfig,
    ShapingConfig,
    SpreadAboveConfig,
)
from flotilla.shared.statistics.moments import RunningMoments
from tests.goldens.adapters import verl
from tests.goldens.adapters.rows import Rows, finite, numbered
from tests.goldens.case import Case, NotOffered


def reward_norm(case: Case) -> dict[str, Any]:
    options, scores = case.config, case.inputs["scores"]
    groups = _consecutive(scores, options)
    mean, std = options["norm_mean_type"], options["norm_std_type"]
    if mean is None and std is None:
        return {"scores_out": scores}
    history = case.inputs.get("running_history")
    # Moments contain the current batch before they are used.
    running = RunningMoments().updated([] if history is None else history).updated(scores)
    config = StatisticsConfig(mean=mean, std=std, epsilon=options["eps"])
    return {"scores_out": torch.from_numpy(normalise(scores, groups, config, running))}


def _consecutive(scores: Tensor, options: dict[str, Any]) -> Tensor:
    return torch.arange(len(scores)) // options["n_samples_per_prompt"]


def running_moments(case: Case) -> dict[str, Any]:
    moments, states = RunningMoments(), []
    for batch in case.inputs["batches"]:
        moments = moments.updated(batch)
        states.append((moments.mean, moments.std, moments.variance, moments.count))
    expected = case.expected["state_after_each"]
    for state, wanted in zip(states, expected, strict=True):
        for value, name in zip(state, ("mean", "std", "var", "count"), strict=True):
            if not np.isclose(value, wanted[name], rtol=1e-4, atol=1e-5):
                return {"state_after_each": f"{name} {value} is not {wanted[name]}"}
    return {"state_after_each": expected}


def group_reward_norm(case: Case) -> dict[str, Any]:
    options, scores = case.config, case.inputs["scores"]
    std, std_of = None, "rewards"
    if options["divide_std"]:
        std, std_of = ("batch", "centred") if options["std_over_batch_of_centered"] else ("group", "rewards")
    config = StatisticsConfig(mean="group", std=std, std_of=std_of, epsilon=1e-6)  # type: ignore[arg-type]
    return {"scores_out": torch.from_numpy(normalise(scores, _consecutive(scores, options), config))}


def postprocess(case: Case) -> dict[str, Any]:
    options, scores = case.config, case.inputs["scores"]
    mean, std = options["norm_mean_type"], options["norm_std_type"]
    if options["estimator"] == "grpo":
        mean = std = "group"
    normalisation = None if mean is None and std is None else StatisticsConfig(mean=mean, std=std, epsilon=1e-6)
    groups = _consecutive(scores, options).tolist()
    answers = [Graded(score, 0, group=group) for score, group in zip(scores.tolist(), groups, strict=True)]
    shaped = shape(answers, ShapingConfig(normalisation=normalisation, clip=options["reward_clip"]))
    return {"scores_out": torch.from_numpy(shaped.rewards), "clip_fraction": shaped.clip_fraction}


def agentic_scores(scores: Tensor, groups: Tensor, over: Any, divide: bool) -> Tensor:
    """Centre scores over groups or the batch, and divide them."""
    config = StatisticsConfig(
        mean=over, std=over if divide else None, degenerate="zero" if divide else "epsilon", epsilon=1e-6
    )
    return torch.from_numpy(normalise(scores, groups, config))


def agentic_reward_norm(case: Case) -> dict[str, Any]:
    options, scores, index = case.config, case.inputs["scores"], case.inputs["group_index"]
    over = "batch" if options["grouping"] == "batch" else "group"
    mean, std = {
        "identity": (None, None),
        "mean": (over, None),
        "mean_std": (over, over),
        # The bounds of the original are lost in this version: clip stays unset.
        "asym_clip": (over, over),
    }.get(options.get("method", "identity"), (None, None))
    mean, std = options.get("norm_mean_type", mean), options.get("norm_std_type", std)
    if mean is None and std is None:
        return {"scores_out": scores}
    degenerate = "zero" if std is not None else "epsilon"
    config = StatisticsConfig(mean=mean, std=std, degenerate=degenerate, epsilon=options["eps"])  # type: ignore[arg-type]
    groups = torch.zeros(len(scores), dtype=torch.long) if index is None else numbered(index)
    return {"scores_out": torch.from_numpy(normalise(scores, groups, config))}


def sample_masks(case: Case) -> dict[str, Any]:
    rows, options, scores = Rows.of(case), case.config, case.inputs["scores"]
    length_rule = options["error_max_len_clip"]
    threshold = options["error_max_len_threshold"] if length_rule else None
    kept = torch.ones(len(scores), dtype=torch.bool)
    if options["max_len_mask"] or options["difficulty_mask"] or length_rule:
        config = SampleMaskConfig(
            truncated=options["max_len_mask"],
            max_length=rows.shape[1] if options["max_len_mask"] else None,
            difficulty=(options["difficulty_low"], options["difficulty_high"]) if options["difficulty_mask"] else None,
            wrong_up_to_length=threshold,
        )
        groups = _consecutive(scores, options)
        kept = torch.from_numpy(sample_mask(scores, rows.sequences.lengths, groups, config))
    masked = rows.sequences.response_mask & rows.sequences.spread(kept)
    return {
        "mask_out": rows.back(masked).long(),
        "metrics": {
            "samples_used": int(kept.sum()),
            "samples_total": len(kept),
            "final_mask_ratio": kept.float().mean(),
        },
    }


def query_filter(case: Case) -> dict[str, Any]:
    options = case.config
    match options["type"]:
        case "no_filter":
            config: Any = None
        case "mean_filter":
            low, high = finite(options.get("threshold_down", -1.0)), finite(options.get("threshold_up"))
            config = None
            if low is not None or high is not None:
                config = MeanInRangeConfig(low=low, high=high, keep_single=True)
        case "std_filter":
            threshold = options.get("std_threshold", -1.0)
            # A negative threshold drops nothing.
            config = None if threshold < 0 else SpreadAboveConfig(statistic="std", threshold=threshold)
        case other:
            raise NotOffered(f"query filter {other}")
    return verl.split_groups(case, config)


def length_rewards(case: Case) -> dict[str, Any]:
    config = LengthRewardConfig(min_length=case.config["min_len"], max_length=case.config["max_len"], penalty=0.5)
    return {"rewards": [length_reward(length, config) for length in case.inputs["response_lengths"].tolist()]}


def repetition(case: Case) -> dict[str, Any]:
    config = RepetitionConfig(ngram=case.config["ngram_size"], penalty=-case.config["max_penalty"])
    return {"rewards": [repetition_penalty(text, config) for text in case.inputs["texts"]]}


ADAPTERS = {
    "reward_norm": reward_norm,
    "RunningMoments.update": running_moments,
    "group_reward_norm": group_reward_norm,
    "reward_postprocess": postprocess,
    "agentic_reward_norm": agentic_reward_norm,
    "get_sample_level_mask": sample_masks,
    "query_filter": query_filter,
    "get_response_length_reward": length_rewards,
    "get_repetition_penalty_reward": repetition,
}
