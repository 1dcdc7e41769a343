"""Which options touch the same state, as data: rows in which every two of them meet are made of it (``covering``).

An option is a choice in a spec, or an event. Its first value goes with every value of every other option.
"""

from collections.abc import Mapping
from typing import Any

from tests.pairs.covering import Case

Changes = Mapping[str, Any]
"""Dotted keys of a spec, and what they are set to."""
Options = Mapping[str, Mapping[str, Changes]]

MODEL = "<model>"
"""Stands for the directory of the unit tests' model."""
OLD = "<checkpoints of another experiment>"
"""Stands for a run that an experiment goes on from."""

TRAINER: Options = {
    "job": {
        "rl": {"reward.components": [{"kind": "exact"}]},
        "sft": {"job.kind": "sft", "job.response_column": "answer", "job.held_out.path": "held.jsonl"},
        "preference": {"job.kind": "preference", "job.held_out.path": "held.jsonl"},
        "preference, parked reference": {
            "job.kind": "preference",
            "job.held_out.path": "held.jsonl",
            "parallelism.offload.reference": True,
        },
        "kto": {"job.kind": "kto", "job.response_column": "answer", "job.held_out.path": "held.jsonl"},
        "reward model": {"job.kind": "reward_model"},
    },
    "adapters": {
        "none": {},
        "some": {"model.lora.rank": 4},
        "with dropout": {"model.lora.rank": 4, "model.lora.dropout": 0.2},
    },
    "freeze": {"nothing": {}, "a layer": {"optimisation.freeze": ["*.layers.0.*"]}},
    "dtype": {"float32": {"model.dtype": "float32"}, "bfloat16": {"model.dtype": "bfloat16"}},
    "critic": {
        "none": {},
        "none, rewards compared with the run's": {
            "algorithm.advantage.kind": "reinforce",
            "algorithm.advantage.baseline": "batch_mean",
            "algorithm.advantage.divide_by_std": True,
            "algorithm.advantage.compared_with": "run",
        },
        "the policy's body": {"algorithm.advantage.kind": "gae"},
        "warmed up": {"algorithm.advantage.kind": "gae", "algorithm.value_loss.warmup_steps": 2},
        "of its own, whitened": {
            "algorithm.advantage.kind": "gae",
            "algorithm.value_loss.path": MODEL,
            "algorithm.value_loss.whiten_returns": True,
        },
    },
    "kl": {
        "none": {},
        "in the loss": {"algorithm.kl.placement": "loss", "algorithm.kl.target": 0.01, "algorithm.kl.horizon": 10},
        "in the reward": {"algorithm.kl.placement": "reward", "algorithm.kl.target": 0.01, "algorithm.kl.horizon": 10},
        "to a parked reference": {"algorithm.kl.placement": "loss", "parallelism.offload.reference": True},
    },
    "old": {
        "the sampler's": {},
        "recomputed": {"algorithm.old_log_probs": "recompute"},
        "at each version": {"algorithm.old_log_probs": "recompute_at_version"},
    },
    "teacher": {"none": {}, "a model": {"algorithm.distillation.path": MODEL}},
    "resampling": {"none": {}, "by reward": {"algorithm.resampling.kind": "pow"}},
    "average": {"none": {}, "kept": {"optimisation.average_decay": 0.9}},
    "schedule": {"constant": {}, "warmed up": {"optimisation.schedule": "cosine", "optimisation.warmup_updates": 2}},
    "passes": {
        "one": {},
        "twice": {"optimisation.epochs_per_step": 2},
        "shuffled": {"optimisation.shuffle": True, "asynchrony.require_batches": 2},
    },
    "activations": {"kept": {}, "computed again": {"optimisation.activation_checkpointing": True}},
    "packing": {
        "auto": {},
        "padded": {"optimisation.packing": "padded", "optimisation.micro_batch_tokens": 64},
        "packed": {"optimisation.packing": "packed", "optimisation.micro_batch_tokens": 96},
    },
    "offload": {
        "none": {},
        "optimiser": {"parallelism.offload.optimiser": True},
        "activations": {"parallelism.offload.activations": True},
    },
    "turns": {"none": {}, "taken": {"resources.sharing": "time"}},
    "contents": {
        "all": {},
        "weights": {"checkpoint.contents": ["model"]},
        "no optimiser": {"checkpoint.contents": ["model", "extra"]},
        "weights at the end": {"checkpoint.final_contents": ["model"]},
    },
    "writing": {"beside training": {}, "at once": {"checkpoint.asynchronous": False}},
    "wire": {
        "as it is": {},
        "rounded": {"asynchrony.publication.wire_dtype": "bfloat16"},
        "changed blocks": {"asynchrony.publication.delta.block_kilobytes": 4},
        "adapters alone": {"model.lora.rank": 4, "asynchrony.publication.lora": "adapters"},
        "eight bits": {"asynchrony.publication.quantisation": "int8"},
    },
    "steps per version": {"one": {}, "two": {"asynchrony.trigger_parameter_sync_step": 2}},
    "staleness": {"none": {}, "a version": {"asynchrony.staleness_threshold": 1.0}},
    "traces": {"kept": {}, "none": {"samples": None}},
    "seed": {"0": {}, "7": {"seed": 7}},
    "event": {
        "killed": {},
        "extended": {},
        "forked": {"checkpoint.resume_from": OLD},
        "forked without moments": {
            "checkpoint.resume_from": OLD,
            "checkpoint.load_contents": ["model", "extra"],
        },
    },
}
"""What a trainer has and does, and what happens to it."""

TRAINER_STATES: Mapping[str, tuple[str, ...]] = {
    "weights and adapters": (
        "job", "adapters", "freeze", "dtype", "average", "old", "critic", "offload", "turns", "contents", "writing",
        "wire", "event",
    ),
    "optimiser moments": (
        "job", "adapters", "freeze", "dtype", "critic", "schedule", "passes", "average", "offload", "turns",
        "contents", "writing", "event",
    ),
    "kept versions and average": (
        "old", "average", "adapters", "dtype", "freeze", "turns", "contents", "writing", "wire", "steps per version",
        "staleness", "event",
    ),
    "critic": (
        "critic", "adapters", "dtype", "kl", "old", "teacher", "resampling", "passes", "activations", "packing",
        "offload", "turns", "contents", "writing", "traces", "event",
    ),
    "reference and teacher": (
        "job", "kl", "teacher", "adapters", "dtype", "old", "activations", "packing", "offload", "turns", "event",
    ),
    "checkpoint contents": (
        "contents", "writing", "event", "average", "old", "critic", "kl", "adapters", "dtype", "steps per version",
        "schedule", "seed", "job",
    ),
    "device memory in turns": (
        "turns", "offload", "adapters", "critic", "kl", "teacher", "average", "old", "dtype", "activations", "packing",
        "wire", "job", "writing",
    ),
    "random state and seeds": ("seed", "resampling", "passes", "adapters", "job", "packing", "traces", "event"),
    "publications": (
        "wire", "adapters", "dtype", "freeze", "steps per version", "staleness", "turns", "old", "average", "event",
    ),
}  # fmt: skip
"""Each piece of a trainer's state, and the options that touch it."""

_OF_FINISHED = {
    ("critic", "none, rewards compared with the run's"): "algorithm.advantage",
    ("critic", "the policy's body"): "algorithm.advantage",
    ("critic", "warmed up"): "algorithm.advantage",
    ("critic", "of its own, whitened"): "algorithm.advantage",
    ("kl", "in the loss"): "algorithm.kl",
    ("kl", "in the reward"): "algorithm.kl",
    ("kl", "to a parked reference"): "algorithm.kl",
    ("old", "recomputed"): "algorithm.old_log_probs",
    ("old", "at each version"): "algorithm.old_log_probs",
    ("teacher", "a model"): "algorithm.distillation",
    ("resampling", "by reward"): "algorithm.resampling",
    ("passes", "shuffled"): "asynchrony.require_batches",
    ("wire", "rounded"): "asynchrony.publication",
    ("wire", "changed blocks"): "asynchrony.publication",
    ("wire", "adapters alone"): "asynchrony.publication",
    ("wire", "eight bits"): "asynchrony.publication",
    ("steps per version", "two"): "asynchrony.trigger_parameter_sync_step",
    ("staleness", "a version"): "asynchrony.staleness_threshold",
    ("turns", "taken"): "resources.sharing",
}
FINISHED_JOBS = ("sft", "preference", "preference, parked reference", "kto", "reward model")
PARKED = (("job", "preference, parked reference"), ("kl", "to a parked reference"))

TRAINER_REFUSED: Mapping[frozenset[Case], tuple[str, str]] = {
    **{
        frozenset({("job", job), case}): (name, "job.kind")
        for job in FINISHED_JOBS
        for case, name in _OF_FINISHED.items()
    },
    **{
        frozenset({("job", job), ("adapters", "with dropout")}): ("model.lora.dropout", "job.kind")
        for job in FINISHED_JOBS[1:]
    },
    **{
        frozenset({("freeze", "a layer"), ("adapters", adapters)}): ("optimisation.freeze", "model.lora")
        for adapters in ("some", "with dropout")
    },
    frozenset({("freeze", "a layer"), ("wire", "adapters alone")}): ("optimisation.freeze", "model.lora"),
    frozenset({("dtype", "bfloat16"), ("wire", "rounded")}): ("asynchrony.publication.wire_dtype", "model.dtype"),
    frozenset({("wire", "eight bits"), ("old", "at each version")}): (
        "asynchrony.publication.quantisation",
        "algorithm.old_log_probs",
    ),
    frozenset({("turns", "taken"), ("offload", "optimiser")}): ("parallelism.offload.optimiser", "resources.sharing"),
    **{
        frozenset({("turns", "taken"), case}): ("parallelism.offload.reference", "resources.sharing")
        for case in PARKED[1:]
    },
    **{
        frozenset({case, ("adapters", adapters)}): ("parallelism.offload.reference", "model.lora")
        for case in PARKED
        for adapters in ("some", "with dropout")
        if (case[0], adapters) != ("job", "with dropout")
    },
    frozenset({PARKED[1], ("wire", "adapters alone")}): ("parallelism.offload.reference", "model.lora"),
    **{
        frozenset({("old", "at each version"), ("contents", contents)}): (key, "algorithm.old_log_probs")
        for contents, key in (("weights", "checkpoint.contents"), ("weights at the end", "checkpoint.final_contents"))
    },
    frozenset({("average", "kept"), ("contents", "weights")}): ("optimisation.average_decay", "checkpoint.contents"),
}
"""What a spec refuses, each with the two names that the refusal has."""

FORK_REFUSED: Mapping[frozenset[Case], tuple[str, str]] = {
    frozenset({("event", "forked"), ("contents", contents)}): ("checkpoint.load_contents", "checkpoint.contents")
    for contents in ("weights", "no optimiser")
}
"""What is refused when an experiment goes on from the checkpoint of another."""

HELD = "<held-out rows>"
"""Stands for a file of rows that are never trained on."""

FLEET: Options = {
    "evaluation": {
        "none": {},
        "of each version": {"evaluation.path": HELD, "evaluation.every_versions": 1},
        "of sets, sampled": {
            "evaluation.sets": [{"name": "one", "path": HELD}, {"name": "other", "path": HELD, "max_rows": 2}],
            "evaluation.every_versions": 2,
            "evaluation.greedy": False,
            "evaluation.group_size": 2,
        },
    },
    "staleness": {
        "none": {},
        "interrupting": {"asynchrony.staleness_threshold": 1.0, "asynchrony.on_weight_update": "interrupt"},
        "continuing": {"asynchrony.staleness_threshold": 1.0, "asynchrony.on_weight_update": "continue"},
    },
    "too old": {
        "waited for": {},
        "dropped, others sampled": {"asynchrony.on_max_lag": "drop", "asynchrony.redundant_groups": 2},
    },
    "transport": {
        "auto": {},
        "pull": {"asynchrony.publication.transport": "pull"},
        "changed blocks": {"asynchrony.publication.transport": "group", "asynchrony.publication.delta.max_share": 0.4},
    },
    "overlap": {"auto": {}, "none": {"asynchrony.publication.overlap_load": False}},
    "durability": {"checkpoint": {}, "step": {"checkpoint.durability": "step"}},
    "rollouts": {"one": {}, "two": {"resources.rollouts.min": 2}},
    "streams": {"wide": {}, "narrow": {"resources.stream_bytes": 1024**2}},
    "samples": {"kept": {}, "none": {"samples": None}},
    "turns": {
        "none": {},
        "taken": {"resources.sharing": "time"},
        "lent": {"resources.lending.when_waiting": 0.01, "rollout.engine.threads": 1},
    },
    "subscriber": {"none": {}, "one": {}},
    "event": {
        "none": {},
        "paused": {},
        "a rollout joins": {},
        "a rollout dies": {},
        "a reward dies": {},
        "the trainer dies": {},
        "redis dies": {},
        "the log loses its tail": {},
    },
}
"""What gateway, rollouts and data plane have and do, and what happens to them."""

FLEET_STATES: Mapping[str, tuple[str, ...]] = {
    "ledger and lanes": (
        "evaluation", "staleness", "too old", "durability", "rollouts", "streams", "samples", "turns", "subscriber",
        "event",
    ),
    "publications": ("evaluation", "staleness", "transport", "overlap", "rollouts", "turns", "event"),
}  # fmt: skip
"""Each piece of a fleet's state, and the options that touch it."""

ENGINE: Options = {
    "model": {
        "fused": {"model": "qwen3"},
        "tied": {"model": "qwen3-tied"},
        "cached": {"model": "gpt2"},
        "with a window": {"model": "mistral-window"},
    },
    "dtype": {"float32": {}, "bfloat16": {"engine.dtype": "bfloat16"}},
    "kernels": {"native": {}, "torch's": {"kernels": None}},
    "bits": {"any": {}, "of no batch": {"engine.batch_invariant": True}},
    "slots": {"wide": {}, "narrow": {"engine.slots": 3}},
    "prefill": {"at once": {}, "in parts": {"engine.prefill_tokens": 8}},
    "kept turns": {"some": {}, "none": {"engine.prefix_cache_mb": 0}},
    "launching": {"in turn": {}, "ahead": {"goes_ahead": True}},
    "update": {
        "none": {},
        "drain": {"update": "drain"},
        "interrupt": {"update": "interrupt"},
        "continue": {"update": "continue"},
    },
    "images": {"at the update": {}, "as they arrive": {"engine.overlap_load": True}},
    "weights": {"given up": {}, "held": {"request.holds_weights": True}},
    "beginning": {
        "afresh": {},
        "with tokens": {"max_lag": 9},
        "with tokens that are too old": {"max_lag": 0},
    },
    "choice": {
        "by chance": {},
        "at a low temperature": {"sampling.temperature": 0.6},
        "greedy": {"sampling.greedy": True},
    },
    "cut": {
        "none": {},
        "top-k and top-p": {"sampling.top_k": 9, "sampling.top_p": 0.8},
        "min-p": {"sampling.min_p": 0.1},
        "all": {"sampling.top_k": 20, "sampling.top_p": 0.95, "sampling.min_p": 0.05},
    },
    "penalties": {
        "none": {},
        "of repetition": {"sampling.repetition_penalty": 1.4},
        "of the completion": {"sampling.presence_penalty": 0.5, "sampling.frequency_penalty": 0.7},
        "rewards": {"sampling.repetition_penalty": 0.8, "sampling.frequency_penalty": -0.3},
    },
    "end": {
        "length": {},
        "tokens": {"sampling.stop_token_ids": tuple(range(10, 17))},
        "text": {"sampling.stop": ("7 w", "w9 w")},
        "the model's": {"sampling.ignore_eos": False},
    },
}
"""What the embedded engine is asked, and what happens to it; a key is a field of settings, request or sampling."""

ENGINE_STATES: Mapping[str, tuple[str, ...]] = {
    "keys and values": (
        "model", "dtype", "bits", "prefill", "kept turns", "launching", "update", "images", "weights", "beginning",
    ),
    "rows of the batch": (
        "slots", "launching", "update", "weights", "beginning", "choice", "cut", "penalties", "end",
    ),
    "logits": ("model", "dtype", "kernels", "choice", "cut", "penalties"),
}  # fmt: skip
"""Each piece of an engine's state, and the options that touch it."""

ENGINE_REFUSED: tuple[frozenset[Case], ...] = tuple(
    frozenset({("model", model), ("bits", "of no batch")}) for model in ("cached", "with a window")
)
"""Models that the fused forward does not run: ``tests/integration/engine/test_agreement.py`` shows the refusal."""

AGENTS: Options = {
    "update": {
        "none": {},
        "drain": {"update": "drain"},
        "interrupt": {"update": "interrupt"},
        "continue": {"update": "continue"},
    },
    "calls": {"one after another": {}, "at once": {"calls": 3}},
    "filter": {
        "none": {},
        "equal rewards": {"reward.filter_zero_spread": True},
        "little spread": {"reward.group_filter": {"kind": "spread_above", "threshold": 0.4}},
    },
    "rewards": {"differ": {}, "are equal": {"rewards": "equal"}},
    "group": {"two": {}, "four": {"rollout.group_size": 4}},
    "agents": {"stay": {}, "one vanishes": {"rollout.agents.lease_seconds": 1.0}},
    "rollouts": {"one": {}, "two": {"rollouts": 2}},
    "replies": {"end": {}, "are cut": {"rollout.sampling.max_new_tokens": 9}},
}
"""What agents from outside do, and what happens to the rollouts that answer them; undotted keys are the test's own."""

RANKS: Options = {
    "mesh": {
        "shards": {"parallelism.ranks": 2},
        "sequences": {"parallelism.ranks": 2, "parallelism.sequence_parallel": 2},
        "tensors": {"parallelism.ranks": 2, "parallelism.tensor_parallel": 2},
    },
    "hosts": {"one": {}, "two": {}},
    "pictures": {
        "none": {},
        "some": {"data.images.column": "images"},
        "some, tower trained": {"data.images.column": "images", "model.vision_tower": "trained"},
    },
    **{
        name: {value: TRAINER[name][value] for value in values}
        for name, values in {
            "adapters": ("none", "some"),
            "critic": ("none", "the policy's body"),
            "kl": ("none", "in the loss"),
            "old": ("the sampler's", "recomputed", "at each version"),
            "average": ("none", "kept"),
            "passes": ("one", "twice", "shuffled"),
            "activations": ("kept", "computed again"),
            "packing": ("auto", "packed"),
            "seed": ("0", "7"),
        }.items()
    },
}
"""Options of the trainer whose state ranks divide among them, and how: over ranks of one host or of two."""

RANKS_REFUSED: tuple[frozenset[Case], ...] = (frozenset({("mesh", "tensors"), ("adapters", "some")}),)
"""What a spec refuses beside a mesh: adapters take the place of the layers that are divided."""
