"""ROLL's pipeline on pairs of answers, DPO, as a system to import from."""

from dataclasses import replace
from typing import Any, Final

from flotilla.importers.datasets import FILES, training
from flotilla.importers.parameter import Parameter, applied, ignored, refused, translated, unsupported
from flotilla.importers.roll import graders
from flotilla.importers.roll.launch import MODULE
from flotilla.importers.roll.placement import shares_of_the_batch
from flotilla.importers.roll.rows import CONFIG, KERNELS, PLACEMENT, TRAIN
from flotilla.importers.roll.system import ROLL, adapters, run_of, tracking
from flotilla.importers.source import Source, System, make_system
from flotilla.importers.values import count, flag, integer, number, text, texts, unchanged
from flotilla.shared.config.sections.data import is_data_file

Fields = dict[str, Any]

OF_PAIRS: Final = frozenset({"chosen_key", "rejected_key", "ipo"})
"""Names that a file of this pipeline alone has."""
SHARED: Final = (
    "exp_name", "seed", "save_steps", "resume_from_checkpoint", "system_envs", "system_envs.USE_MODELSCOPE",
    "model_download_type", "rollout_dump_dir", "profiler_timeline", "profiler_memory", "profiler_output_dir",
    "model_update_buffer_size_mb", "is_offload_states", "is_offload_optimizer_states_in_train_step", "track_with",
    "tracker_kwargs.log_dir", "tracker_kwargs.project", "tracker_kwargs.api_key", "tracker_kwargs.notes",
    "tracker_kwargs.tags", "tracker_kwargs.name", "tracker_kwargs", "output_dir", "logging_dir", "checkpoint_config",
    "logging_steps", "rpc_timeout", "local_rank", "num_nodes", "hydra", "defaults", "_target_", "max_grad_norm",
    "pretrain", "global_template", "max_steps", "validation.data_args.template",
)  # fmt: skip
"""Parameters that mean what they mean to the pipelines by reinforcement."""
OF_WORKER: Final = (
    "model_args.dtype", "model_args.lora_target", "model_args.lora_rank", "model_args.lora_alpha",
    "model_args.freeze_module_prefix", "model_args.adapter_name_or_path", "model_args.additional_target",
    "model_args.flash_attn", "model_args.ulysses_size", "model_args.disable_gradient_checkpointing",
    "model_args.model_type", "training_args.learning_rate", "training_args.weight_decay", "training_args.warmup_steps",
    "training_args.warmup_ratio", "training_args.lr_scheduler_type", "training_args.adam_beta1",
    "training_args.adam_beta2", "training_args.dataloader_num_workers", "data_args.template", "data_args.dataset_dir",
    "data_args.file_name", "strategy_args.strategy_name", "strategy_args", f"{CONFIG}.moe_router_dtype",
    "infer_batch_size", "system_envs", "backend_timeout", "name",
)  # fmt: skip
"""The same, of the worker that trains."""
SIZES: Final = (
    "training_args.per_device_train_batch_size", "training_args.gradient_accumulation_steps",
    *(f"{CONFIG}.{kind}_size" for kind in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")),
)  # fmt: skip
REFERENCE: Final = tuple(name for name in ROLL.parameters if name.startswith("reference."))
DPO_WORKER: Final = "roll.pipeline.dpo.actor_worker.ActorWorker"
MEASURED = {"validation.data_args.file_name": "heldout.jsonl"}
UNREAD_LOSS = "ROLL's newest trainer takes its default, whatever is written"


def sized(name: str) -> Parameter:
    """Return the row of a size that multiplies the batch."""
    return replace(ROLL.parameters[f"{TRAIN}.{name}"], targets=("optimisation.groups_per_mini_batch",))


ROWS: tuple[Parameter, ...] = (
    *(ROLL.parameters[name] for name in SHARED),
    *(ROLL.parameters[f"{TRAIN}.{name}"] for name in OF_WORKER),
    *(ROLL.parameters[name] for name in REFERENCE),
    *(sized(name) for name in SIZES),
    *ignored("the program is the job: job.kind", MODULE),
    translated(f"{TRAIN}.device_mapping", "optimisation.groups_per_mini_batch", unchanged, "the number of devices "
               "multiplies the batch; which the trainer has is said by resources.trainer and parallelism",
               example="list(range(0,4))", default=None),
    *unsupported(PLACEMENT, "num_gpus_per_node", f"{TRAIN}.world_size", harmless=(1,)),
    *unsupported(KERNELS, f"{TRAIN}.model_args.attn_implementation"),
    refused(f"{TRAIN}.worker_cls", "the loss is DPO's or IPO's: leave it out", default=DPO_WORKER),
    refused(f"{TRAIN}.use_sequence_packing", "ROLL packs no pairs: leave it out", default=False),
    refused(f"{TRAIN}.model_args.lora_dropout", "a pair's loss takes two passes, which must compute the same: leave it "
            "out", default=0.0),
    translated(f"{TRAIN}.training_args.num_train_epochs", "optimisation.steps", number, "most passes over the rows: "
               "with their number (--rows), most steps; without, max_steps alone says them", example=2, default=1.0,
               context={f"{TRAIN}.training_args.gradient_accumulation_steps": 64, "max_steps": 500}),
    *unsupported("rows are read by one process", f"{TRAIN}.data_args.preprocessing_num_workers", harmless=(1,)),
    translated("sequence_length", "job.max_tokens", count, "tokens of prompt and answer; a pair with a longer one is "
               "left out", example=640, default=None),
    translated("validation.data_args.file_name", "job.held_out", texts, "pairs whose loss is measured: one file",
               example="heldout.jsonl", default=None),
    translated("eval_steps", "job.held_out.every_steps", integer, "steps", example=5, default=10, context=MEASURED),
    applied("chosen_key", "job.chosen_column", text, "column with the preferred answer; the prompt's is instruction",
            example="better", default="chosen"),
    applied("rejected_key", "job.rejected_column", text, "column with the other one", example="worse",
            default="rejected"),
    translated("ipo", "job.loss.kind", flag, f"the squared loss of IPO; {UNREAD_LOSS}", example=True, default=False),
    applied("beta", "job.loss.beta", number, f"how strongly the policy is held to the reference; {UNREAD_LOSS}",
            example=0.3, default=0.1),
    translated("label_smoothing", "job.loss.label_smoothing", number, f"share of labels taken to be wrong, of DPO "
               f"alone; {UNREAD_LOSS}", example=0.1, default=0.0),
)  # fmt: skip


def pairs(source: Source) -> Fields:
    """Make the pairs, those held out, their columns and the loss."""
    fields: Fields = {
        "job.kind": "preference",
        "data.prompt_column": "instruction",
        "data.label_column": None,
        "job.loss.kind": "ipo" if source.value("ipo") else "dpo",
    }
    if not source.value("ipo"):
        fields["job.loss.label_smoothing"] = source.required("label_smoothing")
    return fields | trained_on(source, f"{TRAIN}.data_args.file_name")


def trained_on(source: Source, written: str, model_is: str = "pretrain") -> Fields:
    """Make the model, the rows that it learns from, those held out, and the template.

    Args:
        source: the launch file.
        written: how files of this pipeline write the name of the parameter that lists the rows.
        model_is: the same of the model's.
    """
    fields: Fields = {}
    model, name = source.value("pretrain"), f"{TRAIN}.data_args.file_name"
    if model is None:
        source.lack(f"model.path: give {model_is}")
    else:
        fields["model.path"] = model
    files = source.value(name) or []
    if not files:
        source.lack(f"data.path: give {written}")
    elif not all(is_data_file(file) for file in files):
        source.refuse(name, f"must be {FILES}")
    else:
        fields |= training([{"path": file} for file in files])
    template = "global_template" if source.value("global_template") is not None else f"{TRAIN}.data_args.template"
    options = source.choose(template, graders.TEMPLATES)
    return fields | measured(source) | ({"data.chat_template_options": options} if options else {})


def measured(source: Source) -> Fields:
    """Make the rows that are held out."""
    files = source.value("validation.data_args.file_name") or []
    if len(files) > 1:
        source.refuse("validation.data_args.file_name", "one file: job.held_out has one place")
    if not files:
        return {}
    every = source.required("eval_steps")
    return {"job.held_out": {"path": files[0], "every_steps": every if every > 0 else None}}


def sizes(source: Source) -> Fields:
    """Make lengths, batch, steps, schedule and checkpoints."""
    longest, steps = source.value("sequence_length"), source.required("max_steps")
    if longest is None:
        source.lack("job.max_tokens: give sequence_length")
    names = [f"{TRAIN}.{name}" for name in SIZES[:2]]
    size = source.required(names[0]) * source.required(names[1]) * shares_of_the_batch(source)
    epochs = source.required(f"{TRAIN}.training_args.num_train_epochs")
    if source.rows is not None:  # as ROLL counts: whole passes, and of each the whole batches
        steps = min(steps, int(epochs) * (source.rows // size))
    if steps < 1:
        source.lack("optimisation.steps: max_steps must be 1 at least, and the rows make one batch and one whole pass")
        return {}
    return {"job.max_tokens": longest, "optimisation.groups_per_mini_batch": size} | run_of(source, steps, steps)


ROLL_DPO: System = make_system("roll dpo", (ROWS,), rules=(pairs, sizes, adapters, tracking))
