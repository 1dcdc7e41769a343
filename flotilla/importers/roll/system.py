"""ROLL as a system to import from: how its YAML is read, and what its parameters mean together."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flotilla.importers.composition import Beside, Composition
from flotilla.importers.datasets import FILES, held_out, training
from flotilla.importers.hydra import apply_hydra_overrides, as_given
from flotilla.importers.parameter import UNSET, Inherit
from flotilla.importers.roll import distillation, environments, graders, images, launch, learning, rows
from flotilla.importers.roll.placement import placement, shares_of_the_batch
from flotilla.importers.roll.rows import TRAIN, VALIDATION
from flotilla.importers.source import Given, Source, System, make_system
from flotilla.importers.spelling import attention_of, chosen, dtype_of, named_layers, swanlab_project
from flotilla.importers.values import number
from flotilla.shared.config.sections.data import PLACE, is_data_file

Fields = dict[str, Any]

BACKENDS = tuple(f"deepspeed_{kind}" for kind in ("zero", "zero2", "zero2_cpuoffload", "zero3", "zero3_cpuoffload"))
GEM = frozenset({"traj_envs_gem_math", "traj_envs_gem_qa", "traj_envs_gem_games"})
OWN = frozenset({*BACKENDS, *GEM, "traj_envs", "step_envs", "vl_traj_envs"})
"""ROLL's own files: of how trainers shard, which does not matter here, and of environments, whose keys are refused."""
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
STRATEGY = f"{TRAIN}.strategy_args.strategy_name"
DECAY = f"{TRAIN}.training_args.weight_decay"
WITHOUT_WARMUP = re.compile(r"(?:fsdp2|deepspeed)_train")
"""Trainers whose schedule `constant` is that of transformers, which has no warm-up."""


def _groups_per_update(source: Source) -> int:
    samples = (
        source.required(f"{TRAIN}.training_args.per_device_train_batch_size")
        * source.required(f"{TRAIN}.training_args.gradient_accumulation_steps")
        * shares_of_the_batch(source)
    )
    size = environments.group_size(source)
    if samples % size:
        source.refuse(
            f"{TRAIN}.training_args.gradient_accumulation_steps",
            f"{samples} samples of an update are no whole number of groups of {size}: make it one",
        )
    return max(int(samples) // int(size), 1)


def batches(source: Source) -> Fields:
    """Make the sizes of mini-batch and step, and the asynchrony."""
    groups, prompts = _groups_per_update(source), source.required("rollout_batch_size")
    if environments.is_agentic(source):  # it counts trajectories there
        prompts = max(prompts // environments.group_size(source), 1)
        groups = min(groups, prompts)  # a step that is smaller than an update is filled with copies there
    number = max(prompts // groups, 1)
    if groups * number != prompts:
        source.refuse(
            "rollout_batch_size",
            f"{prompts} prompts are no whole number of updates of {groups} groups (per_device_train_batch_size, "
            "gradient_accumulation_steps and device_mapping over the group size): make it one",
        )
    fields: Fields = {"optimisation.groups_per_mini_batch": groups, "asynchrony.require_batches": number}
    ratio = source.required("async_generation_ratio")
    fields["asynchrony.staleness_threshold"] = ratio
    if ratio:
        fields |= {
            "asynchrony.max_lag": math.ceil(ratio),
            "asynchrony.on_max_lag": "drop",
            "asynchrony.on_weight_update": "interrupt",
        }
    if source.required("is_use_additional_prompts"):
        redundant = source.required("max_additional_running_prompts")
        fields |= {"asynchrony.redundant_groups": redundant, "asynchrony.on_max_lag": "drop"}
    return fields


def kernels(source: Source) -> Fields:
    """Make attention by name."""
    name, placed = f"{TRAIN}.model_args.attn_implementation", placement(source)
    if name not in source.given:
        return {}
    found = attention_of(
        source.given[name].value,
        on_gpus="resources.trainer.devices" in placed,
        dtype=dtype_of(source, f"{TRAIN}.model_args.dtype"),
        divides_sequences="parallelism.sequence_parallel" in placed,
    )
    return {} if found is None or source.value(name) is None else {"model.attention": found}


def adapters(source: Source) -> Fields:
    """Make the adapters, where their layers are named, else what is frozen."""
    prefix = f"{TRAIN}.model_args.lora"
    targets = named_layers(source, f"{prefix}_target")
    if not targets:
        frozen = images.weights_frozen(source)
        return {"optimisation.freeze": [f"{name}*" for name in frozen]} if frozen else {}
    rank = source.required(f"{prefix}_rank")
    return {
        "model.lora.targets": targets,
        "model.lora.rank": rank,
        "model.lora.alpha": source.value(f"{prefix}_alpha") or 2.0 * rank,
        "model.lora.dropout": source.required(f"{prefix}_dropout"),
    }


def run_of(source: Source, steps: int, planned: int) -> Fields:
    """Make steps, schedule and checkpoints.

    Args:
        source: the launch file.
        steps: that are taken.
        planned: steps that the schedule counts.
    """
    save = source.required("save_steps")
    fields: Fields = {
        "optimisation.steps": steps,
        **schedule(source, planned),
        "optimisation.betas": [0.9, 0.999],
        "checkpoint.every_steps": steps if save < 1 else min(save, steps),
        "model.dtype": dtype_of(source, f"{TRAIN}.model_args.dtype"),
    }
    if decays_all(source):
        fields["optimisation.decay_all"] = True
    if isinstance(path := source.value("resume_from_checkpoint"), str):
        fields["checkpoint.resume_from"] = path
    return fields


def run(source: Source) -> Fields:
    """Make steps, schedule, checkpoints and evaluation."""
    total = source.required("max_steps")
    if total < 1:
        source.refuse("max_steps", "a run has a number of steps: give one")
        total = 1
    updates = total * batches(source)["asynchrony.require_batches"] * source.required("ppo_epochs")
    fields = run_of(source, total, updates)
    files = source.value("validation.data_args.file_name")
    if files:
        _check_files(source, "validation.data_args.file_name", files)
        every, period = source.required("eval_steps"), source.required("model_update_frequency")
        if every > 0 and every % period:
            source.refuse("eval_steps", f"must be a multiple of model_update_frequency {period}")
        versions = max(every // period, 1) if every > 0 else None
        fields |= held_out([{"path": file} for file in files]) | _evaluation_sampling(source)
        fields["evaluation.every_versions"] = versions
    return fields


def decays_all(source: Source) -> bool:
    """Whether weight decay reaches biases and norms, as with ROLL's FSDP2; its other trainers leave them out."""
    strategy = source.given.get(STRATEGY)
    return strategy is not None and strategy.value == "fsdp2_train" and bool(source.value(DECAY))


def schedule(source: Source, total: int) -> Fields:
    """Make the schedule and its warm-up, of this many updates."""
    name = f"{TRAIN}.training_args.lr_scheduler_type"
    found = source.choose(name, SCHEDULES) or "linear"
    strategy = source.given.get(STRATEGY)
    is_cut = strategy is not None and WITHOUT_WARMUP.fullmatch(str(strategy.value)) is not None
    if is_cut and source.value(name) == "constant":
        return {"optimisation.schedule": found}
    updates = source.required(f"{TRAIN}.training_args.warmup_steps")
    if updates <= 0:
        updates = math.ceil(total * source.required(f"{TRAIN}.training_args.warmup_ratio"))
    return {"optimisation.schedule": found, "optimisation.warmup_updates": updates}


def memory(source: Source) -> Fields:
    """Make the token budget of a forward pass, where one is written."""
    if not source.value(f"{TRAIN}.use_dynamic_batching_in_train"):
        return {}
    most = source.required(f"{TRAIN}.max_tokens_per_microbatch_in_train")
    return {"optimisation.micro_batch_tokens": most} if most > 0 else {}


def template(source: Source) -> Fields:
    """Make the variables of the chat template; environments' turns are rendered without thinking."""
    if environments.is_agentic(source):
        return {"data.chat_template_options": {"enable_thinking": False}}
    if images.has_images(source):
        return {}
    if source.value(f"{TRAIN}.data_args.messages") is None and source.value(f"{TRAIN}.data_args.prompt") is not None:
        return {}
    name = "global_template" if source.value("global_template") is not None else f"{TRAIN}.data_args.template"
    options = source.choose(name, graders.TEMPLATES)
    return {"data.chat_template_options": options} if options else {}


def _evaluation_sampling(source: Source) -> Fields:
    """Make how held-out rows are answered, where that is written; what is silent is as ROLL has it."""
    names = [f"{VALIDATION}.{name}" for name in ("temperature", "top_p", "top_k", "num_return_sequences")]
    if all(name not in source.given for name in names):
        return {}
    temperature, top_p, top_k, answers = (source.required(name) for name in names)
    fields: Fields = {"evaluation.greedy": not temperature}
    if temperature:
        fields |= {
            "evaluation.group_size": answers,
            "evaluation.temperature": temperature,
            "evaluation.top_p": top_p,
            "evaluation.top_k": max(top_k, 0),
        }
    return fields


def lengths(source: Source) -> Fields:
    """Make the longest prompt, the longest answer and the engine's context."""
    if environments.is_agentic(source):
        return {}
    answer = learning.response_length(source)
    context = source.required("prompt_length") + answer
    workers = source.value(f"{TRAIN}.data_args.preprocessing_num_workers")
    return {
        "data.max_prompt_tokens": context - answer,
        "data.overlong": {"kind": "filter", **({} if workers in {None, 1} else {"workers": workers})},
        "rollout.sampling.max_new_tokens": answer,
        "rollout.engine.context_tokens": context,
    }


def data(source: Source) -> Fields:
    """Make model and dataset."""
    is_pictured = images.has_images(source)
    columns: Fields = {"data.label_column": "ground_truth", "data.data_source_column": "tag"}
    fields: Fields = {"data.format": "verl"} if is_pictured else columns
    model = source.value("pretrain")
    if model is None:
        source.lack("model.path: give pretrain, or actor_train.model_args.model_name_or_path")
    else:
        fields["model.path"] = model
    if environments.is_agentic(source):
        return fields
    name = f"{TRAIN}.data_args.file_name"
    files = source.value(name)
    if not files:
        source.lack(f"data.path: give {name}")
    else:
        _check_files(source, name, files)
        fields |= training(_domains(source, files) or [{"path": file} for file in files])
    if is_pictured:
        return fields
    column, prompt = source.value(f"{TRAIN}.data_args.messages"), f"{TRAIN}.data_args.prompt"
    if column is not None:
        return fields | {"data.prompt_column": column}
    if source.value(prompt) is not None:
        fields |= {"data.prompt_column": source.value(prompt), "data.input_template": PLACE}
    return fields


def _check_files(source: Source, name: str, files: Sequence[str]) -> None:
    if not all(is_data_file(file) for file in files):
        source.refuse(name, f"must be {FILES}")


def _domains(source: Source, files: Sequence[str]) -> list[Fields]:
    """Make a source of each domain, where they are mixed by probabilities."""
    made: list[Fields] = []
    for spelling, share in _below(source, rows.INTERLEAVE).items():
        domain = spelling.rpartition(".")[2]
        weight = number(spelling, share)
        tags = source.trees.get("rewards", {}).get(f"rewards.{domain}.tag_included")
        if not isinstance(tags, list) or not tags:
            source.refuse_written(spelling, f"rewards.{domain}.tag_included must list the tags of this domain's rows")
        elif weight:
            place = {"path": files[0], **({"more_paths": list(files[1:])} if len(files) > 1 else {})}
            made.append({**place, "only_data_sources": [str(tag) for tag in tags], "weight": weight})
    if len(made) == 1:
        del made[0]["weight"]
    return made


def _below(source: Source, tree: str) -> dict[str, Any]:
    """Return what was written below the name of a tree, be it as one mapping."""
    found: dict[str, Any] = {}
    for spelling, value in source.trees.get(tree, {}).items():
        found |= {f"{spelling}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {}
        found |= {} if isinstance(value, dict) or value is None else {spelling: value}
    return found


def tracking(source: Source) -> Fields:
    """Make the trackers, where they are written."""
    if not source.has("track_with"):
        return {}
    written = source.value("track_with") or []
    options: dict[str, dict[str, Any]] = {}
    if "tensorboard" in written:
        options["tensorboard"] = {"directory": source.value("tracker_kwargs.log_dir")}
    if {"wandb", "swanlab"} & set(written):
        project = source.required("tracker_kwargs.project")
        options |= {"wandb": {"project": project}, "swanlab": {"project": swanlab_project(project)}}
    return chosen(source, "track_with", written, **options)


TABLES = (
    rows.RUN, rows.BATCHES, rows.WORKERS, rows.BACKENDS, rows.AGENTIC, environments.ROWS, rows.EVALUATION,
    learning.ROWS, learning.LOSS_ROWS, learning.REWARD_ROWS, graders.ROWS, distillation.ROWS, images.ROWS,
)  # fmt: skip
STUDENT = {
    f"student_{name.removeprefix('actor_')}": row.name
    for table in TABLES
    for row in table
    for name in (row.name, *row.aliases)
    if name.startswith(("actor_train.", "actor_infer."))
}
"""How a file of on-policy distillation calls the policy's workers."""

ROLL: System = make_system(
    "roll",
    TABLES,
    rules=(
        data, images.images, template, batches, placement, kernels, memory, run, adapters, lengths,
        learning.advantage, learning.policy_loss, learning.kl, learning.normalisation, learning.masks,
        distillation.distillation, graders.rewards, tracking, environments.environments,
    ),
    spellings=rows.GENERIC | STUDENT,
)  # fmt: skip


def read_roll(
    text: str,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    *,
    source: str,
    is_script: bool,
    beside: Beside,
    program: int | None = None,
) -> list[Given]:
    """Read ROLL's YAML, or that which a launch script names, with ``KEY=VALUE`` from the command line.

    Args:
        program: number of the pipeline that is meant, where a script starts several.

    Raises:
        InvalidSpec: something cannot be read; ``errors`` has its place.
    """
    folder = ""
    refusals: list[Given] = []
    if is_script:
        text, folder, refusals = launch.find_file(text, environment, source=source, beside=beside, program=program)
    composition = Composition(beside, OWN, libraries=OWN)
    flat, touched = apply_hydra_overrides(composition.read(text, source=source, folder=folder), overrides)
    given = as_given(flat, touched, default_of, environment)
    return [*refusals, *(replace(each, is_variable=True) if each.spelling in composition.defined else each
                         for each in given)]  # fmt: skip


def default_of(name: str) -> object:
    """Return ROLL's default of a parameter, for interpolations; UNSET if it has none."""
    if name in BACKENDS:
        return {}
    row = ROLL.parameters.get(name)
    if row is None:
        return UNSET
    return default_of(row.default.name) if isinstance(row.default, Inherit) else row.default
