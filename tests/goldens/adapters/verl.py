"""verl: its functions and option names to ours."""

from typing import Any

import torch
from torch import Tensor

from flotilla.services.reward.filtering import keeps
from flotilla.services.reward.shaping import overlong_penalty
from flotilla.services.trainer.algorithms.advantages import AdvantageInputs, compute_advantages
from flotilla.services.trainer.algorithms.aggregation import aggregate
from flotilla.services.trainer.algorithms.balancing import (
    balanced_partition,
    grouped_partition,
    loads,
    token_budget_micro_batches,
)
from flotilla.services.trainer.algorithms.kl import kl_loss, subtract_kl_from_rewards, updated_coefficient
from flotilla.services.trainer.algorithms.log_probs import log_probs_and_entropy, statistics_from_logits
from flotilla.services.trainer.algorithms.sample_weights import filtration_weights
from flotilla.services.trainer.algorithms.value import value_loss
from flotilla.shared.config.sections import advantage as adv
from flotilla.shared.config.sections.algorithm import KlLossConfig, KlRewardConfig
from flotilla.shared.config.sections.shaping import OverlongConfig, SpreadAboveConfig
from tests.goldens.adapters import verl_losses
from tests.goldens.adapters.rows import Rows, aggregation, counted, fraction, gradient, numbered
from tests.goldens.case import Case, NotOffered
from tests.goldens.compare import AtMost

WHITENED = adv.WhitenConfig(variance="unbiased", floor="add", epsilon=1e-8)


def estimator(config: adv.AdvantageConfig) -> Any:
    """An estimator without options of its own."""
    return lambda case: _advantages(case, config)


def gae(case: Case) -> dict[str, Any]:
    options = case.config
    whiten = WHITENED if options.get("whiten", True) else None
    return _advantages(
        case, adv.GaeConfig(gamma=options["gamma"], lam=options["lam"], masked_tokens="skip", whiten=whiten)
    )


def grpo(alone: adv.GroupOfOne) -> Any:
    def run(case: Case) -> dict[str, Any]:
        if not case.config["norm_by_std"]:
            return _advantages(case, adv.DrGrpoConfig(group_of_one=alone))
        return _advantages(case, adv.GrpoConfig(epsilon=case.config["epsilon"], group_of_one=alone))

    return run


def passk(case: Case) -> dict[str, Any]:
    if not case.config["norm_by_std"]:
        return _advantages(case, adv.PassAtKConfig(normalise_by_std=False))
    return _advantages(case, adv.PassAtKConfig(epsilon=case.config["epsilon"]))


def reinforce_plus_plus(case: Case) -> dict[str, Any]:
    return _advantages(
        case, adv.ReinforcePlusPlusConfig(gamma=case.config["gamma"], masked_tokens="skip", whiten=WHITENED)
    )


def gpg(case: Case) -> dict[str, Any]:
    config = adv.GpgConfig(divisor=case.config["f_norm"], group_of_one="raw", scale_over="nonzero_rewards")
    return _advantages(case, config)


def token_baseline(positions: Any) -> Any:
    def run(case: Case) -> dict[str, Any]:
        tail, epsilon = case.config["handle_zero_tail"], case.config["epsilon"]
        return _advantages(case, adv.TokenBaselineConfig(positions=positions, drop_tail=tail, epsilon=epsilon))

    return run


def gdpo(case: Case) -> dict[str, Any]:
    if not case.config["norm_by_std"]:
        raise NotOffered("gdpo without division by the group's deviation: the method is that division")
    components, weights = case.inputs["component_scores"], case.config["reward_weights"]
    config = adv.GdpoConfig(
        components=tuple(components),
        weights=None if weights is None else tuple(weights),
        epsilon=case.config["epsilon"],
        group_of_one="raw",
        whiten=WHITENED,
    )
    return _advantages(case, config)


def _advantages(case: Case, config: adv.AdvantageConfig) -> dict[str, Any]:
    rows, given = Rows.of(case), case.inputs
    components = given.get("component_scores")
    stacked = None if components is None else torch.stack(list(components.values()), 1)
    rewards = rows["token_rewards"] if "token_rewards" in given else None
    result = compute_advantages(
        config,
        AdvantageInputs(
            sequences=rows.sequences,
            scores=torch.zeros(rows.shape[0]) if rewards is None else rows.ones.sum(rewards),
            group_index=numbered(given["group_index"]) if "group_index" in given else None,
            token_rewards=rewards,
            values=rows["values"] if "values" in given else None,
            old_log_probs=rows["old_log_probs"] if "old_log_probs" in given else None,
            sum_pi_squared=rows["sum_pi_squared"] if "sum_pi_squared" in given else None,
            importance_weights=rows["rollout_is_weights"] if "rollout_is_weights" in given else None,
            component_scores=stacked,
            baselines=given.get("reward_baselines"),
        ),
    )
    outputs = {"advantages": rows.back(result.advantages)}
    if result.returns is not None:
        outputs["returns"] = rows.back(result.returns)
    return outputs


def aggregated(case: Case) -> dict[str, Any]:
    rows, options = Rows.of(case), case.config
    token_loss = rows.leaf("token_loss")
    section = aggregation(options["loss_agg_mode"], options.get("loss_scale_factor") or rows.shape[1])
    denominators = counted(
        rows.sequences, num_tokens=options.get("batch_num_tokens"), num_sequences=options.get("global_batch_size")
    )
    loss = aggregate(token_loss, rows.sequences, denominators, section) * options.get("dp_size", 1)
    return {"loss": loss.detach(), "grad_token_loss": rows.back(gradient(loss, token_loss))}


ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def kl_penalty(case: Case) -> dict[str, Any]:
    name = case.config["kl_penalty"]
    if name.removesuffix("+") == "full":
        KlLossConfig.model_validate({"estimator": name})  # refused: of the taken token alone there is no exact KL
    base = ESTIMATORS[name.removesuffix("+")]
    # An unclamped k1 of the loss is refused in a config unless its gradient is k2's; as a figure it is offered.
    config = KlLossConfig.model_construct(
        estimator=base,
        gradient="k2" if name.endswith("+") else "estimator",
        value_clamp=10.0 if base == "k3" else None,
        log_ratio_bounds=(-20.0, 20.0),
    )
    log_probs = case.inputs["log_probs"].clone().requires_grad_(True)
    kl = kl_loss(log_probs, case.inputs["ref_log_probs"], config)
    return {"kl": kl.detach(), "grad_log_probs_of_sum": gradient(kl.sum(), log_probs)}


def controller(case: Case) -> dict[str, Any]:
    return {"coef_sequence": coefficients(case)}


def coefficients(case: Case) -> Tensor:
    """Run the controller over a case's updates."""
    options, given = case.config, case.inputs
    target = options.get("target_kl")
    adaptive = {} if target is None else {"target": target, "horizon": options["horizon"]}
    config, sequence = KlRewardConfig(**adaptive), [options["init_kl_coef"]]
    for observed, steps in zip(given["updates_current_kl"].tolist(), given["updates_n_steps"].tolist(), strict=True):
        sequence.append(updated_coefficient(sequence[-1], config, observed_kl=observed, num_sequences=steps))
    return torch.tensor(sequence, dtype=torch.float64)


def kl_in_reward(case: Case) -> dict[str, Any]:
    rows, options = Rows.of(case), case.config
    base = ESTIMATORS[options["kl_penalty"]]
    adaptive = options.get("controller", "adaptive") == "adaptive"
    extra = {"target": options["target_kl"], "horizon": options["horizon"]} if adaptive else {}
    config = KlRewardConfig(estimator=base, value_clamp=10.0 if base == "k3" else None, **extra)
    coefficient = options["init_kl_coef"]
    section = KlLossConfig.model_construct(
        estimator=base, gradient="estimator", value_clamp=config.value_clamp, log_ratio_bounds=config.log_ratio_bounds
    )
    kl = kl_loss(rows["old_log_probs"], rows["ref_log_probs"], section)
    rewards, observed = subtract_kl_from_rewards(rows["token_scores"], kl, rows.sequences, coefficient)
    after = updated_coefficient(coefficient, config, observed_kl=float(observed), num_sequences=rows.sequences.count)
    return {
        "token_rewards": rows.back(rewards),
        "mean_kl": observed,
        "coef_used": coefficient,
        "coef_after": after,
    }


def value(case: Case) -> dict[str, Any]:
    rows, options = Rows.of(case), case.config
    preds = rows.leaf("value_preds")
    per_token = value_loss(preds, rows["values"], rows["returns"], clip=options["value_clip"])
    section = aggregation(options["loss_agg_mode"], rows.shape[1])
    loss = aggregate(per_token.values, rows.sequences, counted(rows.sequences), section)
    return {
        "loss": loss.detach(),
        "clip_fraction": fraction(per_token.clipped, rows.sequences.response_mask),
        "grad_value_preds": rows.back(gradient(loss, preds)),
    }


def log_probs_of_logits(case: Case) -> dict[str, Any]:
    """Run the chunked head with the logits as hidden states under an identity matrix, which is exact."""
    logits, labels = case.inputs["logits"].clone().requires_grad_(True), case.inputs["labels"]
    mask, flat = case.inputs.get("response_mask"), logits.flatten(0, -2)
    head = torch.eye(flat.shape[-1])
    chunked = log_probs_and_entropy(flat, head, labels.flatten(), case.config["temperature"], chunk=5)
    log_probs = chunked.log_probs.reshape(labels.shape)
    total = log_probs.sum() if mask is None else (log_probs * mask).sum()
    name = "grad_logits_of_sum" if mask is None else "grad_logits_of_masked_sum"
    return {"log_probs": log_probs.detach(), name: gradient(total, logits)}


def entropy_of_logits(case: Case) -> dict[str, Any]:
    logits = case.inputs["logits"].clone().requires_grad_(True)
    mask, flat = case.inputs.get("response_mask"), logits.flatten(0, -2)
    labels = torch.zeros(flat.shape[0], dtype=torch.long)
    temperature = case.config["temperature"]
    chunked = log_probs_and_entropy(flat, torch.eye(flat.shape[-1]), labels, temperature, 5, with_sum_pi_squared=True)
    assert chunked.entropy is not None
    assert chunked.sum_pi_squared is not None
    shape = logits.shape[:-1]
    whole = statistics_from_logits(logits.detach(), labels.reshape(shape), temperature)
    entropy = chunked.entropy.reshape(shape)
    name = "grad_logits_of_sum" if mask is None else "grad_logits_of_masked_sum"
    total = entropy.sum() if mask is None else (entropy * mask).sum()
    return {
        "entropy": whole.entropy,
        "entropy_chunked": entropy.detach(),
        "sum_pi_squared": chunked.sum_pi_squared.reshape(shape),
        name: gradient(total, logits),
    }


def entropy_loss(case: Case) -> dict[str, Any]:
    rows = Rows.of(case)
    labels = torch.zeros(rows.shape, dtype=torch.long)
    entropy = statistics_from_logits(case.inputs["logits"], labels, case.config["temperature"]).entropy
    assert entropy is not None
    section = aggregation(case.config["loss_agg_mode"], rows.shape[1])
    return {"loss": aggregate(entropy.flatten(), rows.sequences, counted(rows.sequences), section)}


def pf_ppo(case: Case) -> dict[str, Any]:
    options = case.config
    weights = filtration_weights(case.inputs["scores"], method=options["reweight_method"], power=options["weight_pow"])
    return {"weights": weights, "probabilities": weights / weights.sum()}


def overlong(case: Case) -> dict[str, Any]:
    options = case.config
    config = OverlongConfig(
        max_length=options["max_response_length"],
        buffer=options["overlong_buffer_len"],
        factor=options["penalty_factor"],
        capped=False,
    )
    penalty = torch.tensor([overlong_penalty(length, config) for length in case.inputs["response_lengths"].tolist()])
    return {"penalty": penalty, "scores_out": case.inputs["scores"] + penalty}


def dynamic_filter(case: Case) -> dict[str, Any]:
    config = SpreadAboveConfig(statistic="population_std", threshold=0.0, keep_single=True)
    return split_groups(case, config)


def split_groups(case: Case, config: Any) -> dict[str, Any]:
    """Return which groups a filter keeps."""
    kept = [
        name for name, rewards in case.inputs["groups"].items() if config is None or keeps(rewards.tolist(), config)
    ]
    return {"kept": kept, "dropped": [name for name in case.inputs["groups"] if name not in kept]}


def partition(case: Case) -> dict[str, Any]:
    lengths, options = case.inputs["lengths"].tolist(), case.config
    parts = balanced_partition(lengths, options["k"], equal_size=options["equal_size"])
    outputs: dict[str, Any] = {"max_load": AtMost(max(loads(lengths, parts)))}
    if options["equal_size"]:
        outputs["partition_sizes_sorted"] = torch.tensor(sorted(len(part) for part in parts))
    return outputs


def micro_batches(case: Case) -> dict[str, Any]:
    lengths, budget = case.inputs["lengths"].tolist(), case.config["max_token_len"]
    parts = token_budget_micro_batches(lengths, budget)
    assert max(loads(lengths, parts)) <= budget
    outputs: dict[str, Any] = {"num_micro_batches": AtMost(len(parts)), "lower_bound": -(-sum(lengths) // budget)}
    if len(parts) == case.expected["num_micro_batches"]:
        # With fewer micro-batches than upstream a larger load is no worse.
        outputs["max_load"] = AtMost(max(loads(lengths, parts)))
    return outputs


def group_partition(case: Case) -> dict[str, Any]:
    lengths = case.inputs["lengths"].tolist()
    parts = grouped_partition(lengths, numbered(case.inputs["group_index"]).tolist(), case.config["k"])
    return {"max_load": AtMost(max(loads(lengths, parts)))}


ADAPTERS = {
    "compute_gae_advantage_return": gae,
    "compute_grpo_outcome_advantage": grpo("raw"),
    "compute_grpo_vectorized_outcome_advantage": grpo("raw"),
    "compute_grpo_passk_outcome_advantage": passk,
    "compute_rloo_outcome_advantage": estimator(adv.RlooConfig(group_of_one="raw")),
    "compute_rloo_vectorized_outcome_advantage": estimator(adv.RlooConfig(group_of_one="zero")),
    "compute_opo_outcome_advantage": estimator(adv.OpoConfig(group_of_one="raw")),
    "compute_gpg_outcome_advantage": gpg,
    "compute_reinforce_plus_plus_baseline_outcome_advantage": estimator(
        adv.ReinforceBaselineConfig(group_of_one="raw", whiten=WHITENED)
    ),
    "compute_reinforce_plus_plus_outcome_advantage": reinforce_plus_plus,
    "compute_remax_outcome_advantage": estimator(adv.RemaxConfig()),
    "compute_optimal_token_baseline_advantage": token_baseline("all"),
    "compute_multi_turn_optimal_token_baseline_advantage": token_baseline("sampled"),
    "compute_gdpo_outcome_advantage": gdpo,
    **verl_losses.ADAPTERS,
    "agg_loss": aggregated,
    "kl_penalty": kl_penalty,
    "apply_kl_penalty": kl_in_reward,
    "AdaptiveKLController.update": controller,
    "FixedKLController.update": controller,
    "compute_value_loss": value,
    "logprobs_from_logits_v2": log_probs_of_logits,
    "logprobs_from_logits_naive": log_probs_of_logits,
    "entropy_from_logits": entropy_of_logits,
    "compute_entropy_loss": entropy_loss,
    "compute_pf_ppo_reweight_data": pf_ppo,
    "DAPORewardManager.run_single": overlong,
    "ReplayBuffer._dapo_filtered_keys": dynamic_filter,
    "get_seqlen_balanced_partitions": partition,
    "greedy_partition": partition,
    "rearrange_micro_batches": micro_batches,
    "get_group_balanced_partitions": group_partition,
}
