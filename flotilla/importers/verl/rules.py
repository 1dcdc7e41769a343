"""What verl's parameters mean together: batches, lengths, schedule, evaluation, checkpoints."""

from typing import Any

from flotilla.importers.parameter import UNSET
from flotilla.importers.source import Source
from flotilla.importers.spelling import DTYPES, HALF, chosen, dtype_of, swanlab_project
from flotilla.importers.values import integer, same
from flotilla.importers.verl.actor import ACTOR, COMPUTED_IN, MEGATRON, OPTIM
from flotilla.importers.verl.data import ROLLOUT_NAME
from flotilla.importers.verl.datasets import held_out_rows
from flotilla.importers.verl.launch import ASYNC_ONLY, ENGINES, MODULE, TRAINERS, Kind
from flotilla.importers.verl.ranks import device_of, ranks_of
from flotilla.importers.verl.trainer import ASYNC, ROLLOUT_ENGINE
from flotilla.shared.config.sections.publication import MAX_SLICE_MEGABYTES

Fields = dict[str, Any]

DELTA = "delta_sharded"
"""verl's transfer of what has changed; whole weights arrive as the same."""
ONE_STEP_OFF: Fields = {
    "asynchrony.staleness_threshold": 1.0,
    "asynchrony.max_lag": 1,
    "asynchrony.on_weight_update": "drain",
}
"""The next batch is sampled while this one trains, and finishes before it takes new weights."""
ON_POLICY: Fields = {"asynchrony.staleness_threshold": 0.0}
SCHEDULES = {
    "constant": "constant", "linear": "linear", "cosine": "cosine", "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}  # fmt: skip
WSD_DECAYS = {"exponential": "exponential", "linear": "linear", "cosine": "cosine", "minus_sqrt": "minus_sqrt"}


def kind_of(source: Source) -> Kind:
    """Return which of verl's trainers the file is of: by its name, else by the keys that only one of them has."""
    if source.has(MODULE):
        kind = source.choose(MODULE, TRAINERS)
        return kind if isinstance(kind, Kind) else Kind.SYNCHRONOUS
    batch = source.value("data.train_batch_size")
    signs = [name for name in source.given if name.startswith(f"{ASYNC}.") or name in ASYNC_ONLY | ENGINES]
    return Kind.FULLY_ASYNC if batch == 0 or signs else Kind.SYNCHRONOUS


def is_fully_async(source: Source) -> bool:
    """Whether the file is of verl's fully asynchronous trainer."""
    return kind_of(source) is Kind.FULLY_ASYNC


def mini_batches(source: Source) -> int:
    """Return require_batches, the mini-batches of one step."""
    if is_fully_async(source):
        return int(source.required(f"{ASYNC}.require_batches"))
    return max(batch_of(source) // mini_of(source), 1)


def mini_of(source: Source) -> int:
    """Return the prompts of one update; a batch that does not hold as many is one update, as verl cuts it."""
    mini = int(source.required(f"{ACTOR}.ppo_mini_batch_size"))
    return mini if is_fully_async(source) else min(mini, batch_of(source)) or mini


def batch_of(source: Source) -> int:
    """Return the prompts of a step; without its filter the recipe dapo trains on all that it generates."""
    drawn = "data.gen_batch_size"
    if kind_of(source) is Kind.DAPO and not draws_more(source) and drawn in source.given:
        return int(source.value(drawn) or source.required("data.train_batch_size"))
    return int(source.required("data.train_batch_size"))


def steps(source: Source) -> int | None:
    """Return the number of steps, if it can be known."""
    per_step = mini_of(source) * mini_batches(source)
    if is_fully_async(source):
        limits = [source.value("rollout.total_rollout_steps")]
        if source.rows is not None:
            limits.append(source.rows * source.required("trainer.total_epochs"))
        known = [limit for limit in limits if limit is not None]
        return min(known) // per_step if known else None
    total = source.value("trainer.total_training_steps")
    if total is not None:
        return int(total)
    if source.rows is None:
        return None
    drawn = source.value("data.gen_batch_size") if draws_more(source) else None
    return source.rows // (drawn or per_step) * int(source.required("trainer.total_epochs"))


def batches(source: Source) -> Fields:
    """Make the sizes of mini-batch and step, and the asynchrony."""
    mini, number = mini_of(source), mini_batches(source)
    if mini < source.required(f"{ACTOR}.ppo_mini_batch_size"):
        source.note(f"a step has {mini} prompts, fewer than {ACTOR}.ppo_mini_batch_size: it is one update of them all, "
                    "as releases of verl up to 0.2 make of it; later ones refuse to start")  # fmt: skip
    fields: Fields = {"optimisation.groups_per_mini_batch": mini, "asynchrony.require_batches": number}
    if number > 1 and source.value(f"{ACTOR}.shuffle"):
        fields["optimisation.shuffle"] = True
    _check_generated(source, source.value("data.train_batch_size"))
    if not is_fully_async(source):
        batch = batch_of(source)
        if batch != mini * number:
            source.refuse(
                "data.train_batch_size", f"{batch} is no multiple of {ACTOR}.ppo_mini_batch_size {mini}: make it one"
            )
        return fields | (ONE_STEP_OFF if kind_of(source) is Kind.ONE_STEP_OFF else ON_POLICY)
    if source.has("data.train_batch_size") and source.value("data.train_batch_size"):
        source.refuse("data.train_batch_size", "in fully asynchronous training it must be 0, or left out")
    threshold = source.required(f"{ASYNC}.staleness_threshold")
    fields["asynchrony.trigger_parameter_sync_step"] = source.required(f"{ASYNC}.trigger_parameter_sync_step")
    fields["asynchrony.staleness_threshold"] = threshold
    if threshold > 0:
        fields["asynchrony.on_weight_update"] = "interrupt" if source.value(f"{ASYNC}.partial_rollout") else "drain"
    return fields


def draws_more(source: Source) -> bool:
    """Whether a step draws gen_batch_size prompts, of which the filter leaves train_batch_size: the recipe dapo."""
    return kind_of(source) is Kind.DAPO and bool(source.value("algorithm.filter_groups.enable"))


def _check_generated(source: Source, batch: int) -> None:
    """Refuse prompts that are generated for a step and are not those that it trains on."""
    name = "data.gen_batch_size"
    if name not in source.given or kind_of(source) is Kind.DAPO:
        return
    generated = integer(name, source.given[name].value)
    wanted = 1 if is_fully_async(source) else batch
    if generated not in {None, wanted}:
        source.refuse(name, f"a step would be made of {generated} prompts, and data.train_batch_size says {batch}: "
                      f"make it {wanted}, or leave it out")  # fmt: skip


def schedule(source: Source) -> Fields:
    """Make steps, learning rate, warm-up, decay and clip."""
    total = steps(source)
    rate = source.required(f"{MEGATRON}.lr")
    fields: Fields = {
        "optimisation.learning_rate": rate,
        "optimisation.weight_decay": source.required(f"{MEGATRON}.weight_decay"),
        "optimisation.max_grad_norm": source.value(f"{MEGATRON}.clip_grad"),
        "optimisation.schedule": _shape(source),
    }
    if _decays_all(source):
        fields["optimisation.decay_all"] = True
    updates = mini_batches(source) * source.required(f"{ACTOR}.ppo_epochs")
    cycles = source.value(f"{OPTIM}.num_cycles") if fields["optimisation.schedule"] == "cosine" else 0.5
    if cycles not in {None, 0.5}:
        fields["optimisation.cosine_cycles"] = cycles
    if fields["optimisation.schedule"] != "constant":
        least = source.value(f"{MEGATRON}.min_lr")
        fields["optimisation.min_learning_rate_ratio"] = (
            source.required(f"{OPTIM}.min_lr_ratio") if least is None else least / rate if rate else 0.0
        )
        fields |= _decay(source, str(fields["optimisation.schedule"]), updates)
    if not total:
        source.lack(
            "optimisation.steps: trainer.total_epochs counts passes over the data: give --rows N, the number of "
            "training rows, or trainer.total_training_steps"
            if total is None
            else f"optimisation.steps: the prompts do not make one step: {_way_to_a_step(source)}"
        )
        return fields
    warmup = warmup_of(source, MEGATRON, total)
    if warmup and rate and (first := source.value(f"{MEGATRON}.lr_warmup_init")):
        fields["optimisation.warmup_start_ratio"] = first / rate
    return fields | {"optimisation.steps": total, "optimisation.warmup_updates": warmup * updates}


def warmup_of(source: Source, section: str, total: int) -> int:
    """Return the steps of a warm-up, of the policy's optimiser or the critic's."""
    warmup = source.value(f"{section}.lr_warmup_steps")
    if warmup is None or warmup <= 0:
        warmup = source.required(f"{section}.lr_warmup_steps_ratio") * total
    return int(warmup)


def critics_warmup(source: Source) -> int | None:
    """Return the updates of the critic's warm-up; None where they are the policy's, or the steps are not known."""
    total = steps(source)
    if not total:
        return None
    own, policys = (warmup_of(source, section, total) for section in ("critic.optim", MEGATRON))
    return None if own == policys else own * mini_batches(source) * int(source.required(f"{ACTOR}.ppo_epochs"))


def _decays_all(source: Source) -> bool:
    """Whether weight decay reaches biases and norms, as with FSDP; Megatron leaves them out."""
    engines = [source.value(name) for name in (f"{ACTOR}.strategy", "model_engine") if name in source.given]
    return "megatron" not in engines and bool(source.value(f"{MEGATRON}.weight_decay"))


def _shape(source: Source) -> str:
    name = f"{MEGATRON}.lr_decay_style"
    if source.value(name) is None:
        return "constant"
    return source.choose(name, SCHEDULES) or "constant"


def _decay(source: Source, shape: str, updates: int) -> Fields:
    """Make where the fall ends, and what WSD's is; verl counts in steps."""
    fields: Fields = {}
    if shape != "inverse_sqrt" and (end := source.value(f"{MEGATRON}.lr_decay_steps")) is not None and end > 0:
        fields["optimisation.decay_updates"] = end * updates
    if shape == "wsd":
        length = source.value(f"{MEGATRON}.lr_wsd_decay_steps")
        if not length:
            source.lack(f"optimisation.wsd_decay_updates: lr_decay_style WSD wants {OPTIM}.lr_wsd_decay_steps")
        else:
            fields["optimisation.wsd_decay_updates"] = length * updates
        fields["optimisation.wsd_decay"] = source.choose(f"{MEGATRON}.lr_wsd_decay_style", WSD_DECAYS)
    return fields


def masters(source: Source, name: str) -> bool:
    """Whether weights are kept and trained in bfloat16, without float32 masters."""
    if str(source.value(name)) in HALF:
        source.refuse(name, "weights are kept in float32, or trained in bfloat16: use one of them")
    return str(source.choose(name, DTYPES)) == "bfloat16"


def _way_to_a_step(source: Source) -> str:
    if is_fully_async(source):
        return "raise rollout.total_rollout_steps, or lower ppo_mini_batch_size or require_batches"
    return "lower data.train_batch_size, or give the number of training rows as --rows"


def lengths(source: Source) -> Fields:
    """Make the engine's context, the longest answer, the group and the token budget."""
    answer = _length(source, f"{ROLLOUT_NAME}.response_length", "data.max_response_length")
    prompt = _length(source, f"{ROLLOUT_NAME}.prompt_length", "data.max_prompt_length")
    bound = source.value(f"{ROLLOUT_NAME}.max_model_len")
    dtype = dtype_of(source, f"{ROLLOUT_NAME}.dtype")
    for name in COMPUTED_IN:
        if (
            source.has(name)
            and DTYPES.get(str(source.value(name)), dtype if source.value(name) is None else "") != dtype
        ):
            source.refuse(name, source.system.parameters[name].reason)
    context = min(prompt + answer, bound or prompt + answer)
    fields: Fields = {
        "data.max_prompt_tokens": max(context - answer, 1),
        "rollout.sampling.max_new_tokens": answer,
        "rollout.engine.context_tokens": context,
        "rollout.group_size": source.required(f"{ROLLOUT_NAME}.n"),
        "model.dtype": dtype,
    }
    if masters(source, f"{ACTOR}.fsdp_config.model_dtype") and dtype == "bfloat16":
        fields["optimisation.masters"] = "model"
    if source.value(f"{ACTOR}.use_dynamic_bsz"):
        budget = source.required(f"{ACTOR}.ppo_max_token_len_per_gpu")
        split = source.required(f"{ACTOR}.ulysses_sequence_parallel_size")
        fields["optimisation.micro_batch_tokens"] = budget * split
    elif (rows := source.value(f"{ACTOR}.ppo_micro_batch_size_per_gpu")) is not None:
        fields["optimisation.micro_batch_tokens"] = rows * (prompt + answer)
    return fields


def _length(source: Source, own: str, general: str) -> int:
    """Return the sampler's own length, else the dataset's; where both are the same, both are in force."""
    value, written = source.value(own), source.given.get(general)
    if value in {None, UNSET}:
        return int(source.required(general))
    if written is not None and same(written.value, value):
        source.has(general)
    return int(value)


def evaluation(source: Source) -> Fields:
    """Make the evaluation, where there are held-out rows."""
    fields = held_out_rows(source)
    if not fields:
        return {}
    every = source.value(_period_of_evaluation(source))
    return fields | {
        "evaluation.every_versions": every if every and every > 0 else None,
        **_evaluation_sampling(source),
    }


def _period_of_evaluation(source: Source) -> str:
    """Return the name that is read: releases of the fully asynchronous trainer differ."""
    older, newer = "rollout.test_freq", "trainer.test_freq"
    if not is_fully_async(source):
        return newer
    if source.has(older) and source.has(newer) and source.value(older) != source.value(newer):
        source.refuse(older, f"older releases of verl read it, newer ones {newer}: give the one that yours reads")
    return newer if source.has(newer) else older


def _evaluation_sampling(source: Source) -> Fields:
    options = f"{ROLLOUT_NAME}.val_kwargs"
    if not source.value(f"{options}.do_sample") or not source.value(f"{options}.temperature"):
        return {"evaluation.greedy": True}
    return {
        "evaluation.greedy": False,
        "evaluation.group_size": source.required(f"{options}.n"),
        "evaluation.temperature": source.value(f"{options}.temperature"),
        "evaluation.top_k": max(source.required(f"{options}.top_k"), 0),
        "evaluation.top_p": source.required(f"{options}.top_p"),
    }


def checkpoints(source: Source) -> Fields:
    """Make the period of checkpoints, and how many are kept."""
    total = steps(source)
    if not total:
        return {}
    every = source.value("trainer.save_freq")
    if every is None or every <= 0:
        every = total
    elif is_fully_async(source):
        every *= source.required(f"{ASYNC}.trigger_parameter_sync_step")
    every = min(every, total)
    alone = source.value("trainer.remove_previous_ckpt_in_save")
    keep = 1 if alone else source.value("trainer.max_actor_ckpt_to_keep")
    held = contents(source, f"{ACTOR}.checkpoint.save_contents")
    fields = {} if held is None else {"checkpoint.contents": held}
    return fields | {"checkpoint.every_steps": every, "checkpoint.keep": -(-total // every) if keep is None else keep}


def contents(source: Source, name: str) -> list[str] | None:
    """Make what a checkpoint holds, or what is taken over of one; None where that is not said."""
    given = source.value(name)
    if given is None:
        return None
    known = {"model": "model", "hf_model": "model", "optimizer": "optimizer", "extra": "extra"}
    if strange := [each for each in given if each not in known]:
        source.refuse(name, f"{strange[0]!r} is no part of a checkpoint: they are {', '.join(known)}")
        return None
    found = list(dict.fromkeys(known[each] for each in given))
    if "model" not in found:
        source.refuse(name, "a checkpoint without weights is none: add model")
        return None
    return found


def beginning(source: Source) -> Fields:
    """Make the checkpoint to begin from; verl reads its path under ``resume_path`` alone."""
    mode = source.value("trainer.resume_mode")
    if mode not in {None, "auto", "disable", "resume_path"}:
        source.refuse("trainer.resume_mode", "must be auto, disable or resume_path")
    if mode != "resume_path":
        return {}
    path = source.value("trainer.resume_from_path")
    if path is None:
        source.refuse("trainer.resume_mode", "resume_path wants trainer.resume_from_path")
        return {}
    loaded = contents(source, f"{ACTOR}.checkpoint.load_contents")
    return {"checkpoint.resume_from": path} | ({} if loaded is None else {"checkpoint.load_contents": loaded})


def placement(source: Source) -> Fields:
    """Make the devices, where they are written, and the number of engines."""
    fields: Fields = {}
    device = device_of(source)
    if device is not None:
        fields |= {"parallelism.device": device, "rollout.engine.device": device}
    if device in {None, "cuda:0"}:
        fields |= ranks_of(source)
    has_engines = kind_of(source) in {Kind.FULLY_ASYNC, Kind.ONE_STEP_OFF}
    hybrid = "actor_rollout_ref.hybrid_engine"
    takes_turns = device is None and "resources.trainer.devices" in fields
    if not has_engines and (source.has(hybrid) or takes_turns):
        fields["resources.sharing"] = "time" if source.value(hybrid) else "none"
        if source.value(hybrid) and (nodes := fields.get("parallelism.nodes", 1)) > 1:
            fields["resources.rollouts.min"] = nodes
    if has_engines and (source.has("rollout.nnodes") or source.has("rollout.n_gpus_per_node")):
        gpus = source.required("rollout.nnodes") * source.required("rollout.n_gpus_per_node")
        fields["resources.rollouts.min"] = max(gpus // source.required(f"{ROLLOUT_NAME}.tensor_model_parallel_size"), 1)
    return fields


def publication(source: Source) -> Fields:
    """Make the weights' way, where it is written."""
    fields: Fields = {}
    if source.has(f"{ROLLOUT_ENGINE}.backend"):
        backend = source.choose(
            f"{ROLLOUT_ENGINE}.backend", {"nccl": "auto", "naive": "auto", "gloo": "gloo", DELTA: "auto"}
        )
        if backend is not None:
            fields["asynchrony.publication.transport"] = backend
    names = [f"{ROLLOUT_ENGINE}.update_weights_bucket_megabytes"]
    if is_fully_async(source):
        names.append(f"{ASYNC}.checkpoint_engine.device_buffer_size_M")
        overlap = f"{ASYNC}.checkpoint_engine.overlap_broadcast_and_consume"
        if source.has(overlap):
            fields["asynchrony.publication.overlap_load"] = source.value(overlap)
    for name in names:
        if source.has(name):
            fields["asynchrony.publication.slice_megabytes"] = min(max(source.required(name), 1), MAX_SLICE_MEGABYTES)
    return fields


def tracking(source: Source) -> Fields:
    """Make the trackers, where they are written."""
    if not source.has("trainer.logger"):
        return {}
    written = source.value("trainer.logger") or []
    options: dict[str, dict[str, str]] = {}
    if {"wandb", "mlflow", "trackio", "swanlab"} & set(written):
        project = source.required("trainer.project_name")
        options = {kind: {"project": project} for kind in ("wandb", "trackio")}
        options |= {"mlflow": {"experiment": project}, "swanlab": {"project": swanlab_project(project)}}
    return chosen(source, "trainer.logger", written, **options)
