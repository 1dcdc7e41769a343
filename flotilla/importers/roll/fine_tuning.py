"""ROLL's pipeline of supervised fine-tuning as a system to import from."""

import math
from typing import Any, Final

from flotilla.importers.parameter import ignored, refused, translated, unsupported
from flotilla.importers.roll import finished
from flotilla.importers.roll.launch import MODULE
from flotilla.importers.roll.placement import shares_of_the_batch
from flotilla.importers.roll.rows import CUTTING, KERNELS, PLACEMENT, TRAIN
from flotilla.importers.roll.system import ROLL, adapters, run_of, tracking
from flotilla.importers.source import Source, System, make_system
from flotilla.importers.values import integer, number, text, texts, unchanged

Fields = dict[str, Any]

WORKER: Final = "sft_train"
"""How a file of this pipeline calls the worker that trains."""
OF_ANSWERS: Final = frozenset({"prompt_key", "query_key", "response_key", "system_key"})
"""Names that a file of this pipeline alone has."""
SFT_WORKER: Final = "roll.pipeline.sft.sft_worker.SFTWorker"
EPOCHS: Final = f"{TRAIN}.training_args.num_train_epochs"
ROWS = (
    *(ROLL.parameters[name] for name in finished.SHARED if name != "max_steps"),
    *(ROLL.parameters[f"{TRAIN}.{name}"] for name in (*finished.OF_WORKER, "model_args.lora_dropout")),
    *(finished.sized(name) for name in finished.SIZES),
    *ignored("the program is the job: job.kind", MODULE),
    *ignored("the steps are those of num_train_epochs", "max_steps"),
    translated(f"{TRAIN}.device_mapping", "optimisation.groups_per_mini_batch", unchanged, "the number of devices "
               "multiplies the batch; which the trainer has is said by resources.trainer and parallelism",
               example="list(range(0,4))", default=None),
    *unsupported(PLACEMENT, "num_gpus_per_node", f"{TRAIN}.world_size", harmless=(1,)),
    *unsupported(KERNELS, f"{TRAIN}.model_args.attn_implementation"),
    *unsupported(CUTTING, f"{TRAIN}.use_sequence_packing"),
    refused(f"{TRAIN}.worker_cls", "the loss is the answers' likelihood: leave it out", default=SFT_WORKER),
    *unsupported("rows are read by one process", f"{TRAIN}.data_args.preprocessing_num_workers", harmless=(1,)),
    translated(EPOCHS, "optimisation.steps", number, "passes over the rows: with their number (--rows), the steps",
               example=2, default=1),
    translated("sequence_length", "job.max_tokens", integer, "tokens of prompt and answer; a longer one is cut",
               example=640, default=None),
    translated("validation.data_args.file_name", "job.held_out", texts, "rows whose loss is measured: one file",
               example="heldout.jsonl", default=None),
    translated("eval_steps", "job.held_out.every_steps", integer, "steps", example=5, default=10,
               context=finished.MEASURED),
    translated("prompt_key", "data.prompt_column", text, "column with the prompt", example="problem",
               default="instruction"),
    translated("query_key", "data.input_column", text, "column with what follows it on a new line", example="input",
               default=None),
    translated("response_key", "job.response_column", text, "column with the answer", example="solution",
               default="output"),
    refused("system_key", "one system message for all rows: set data.system_prompt", default=None),
)  # fmt: skip


def answers(source: Source) -> Fields:
    """Make the rows, those held out, and their columns."""
    fields: Fields = {
        "job.kind": "sft",
        "job.overlong": "truncate",
        "job.response_column": source.required("response_key"),
        "data.prompt_column": source.required("prompt_key"),
        "data.label_column": None,
        "data.shuffle": False,
    }
    if source.value("query_key") is not None:
        fields["data.input_column"] = source.value("query_key")
    return fields | finished.trained_on(source, f"{WORKER}.data_args.file_name")


def sizes(source: Source) -> Fields:
    """Make lengths, batch, steps, schedule and checkpoints; the schedule counts the rows that make no whole batch."""
    return sizes_by(source, shares_of_the_batch(source))


def sizes_by(source: Source, devices: int, *, scheduled_devices: int | None = None) -> Fields:
    """Make what ``num_train_epochs`` passes over the rows mean.

    Args:
        source: the file.
        devices: among which a batch is divided.
        scheduled_devices: of which the schedule counts the rows, if not of all of them.
    """
    longest = source.value("sequence_length")
    if longest is None:
        source.lack("job.max_tokens: give sequence_length")
    of_a_device = math.prod(source.required(f"{TRAIN}.{name}") for name in finished.SIZES[:2])
    size, epochs = of_a_device * devices, int(source.required(EPOCHS))
    steps = 0 if source.rows is None else epochs * (source.rows // size)
    if steps < 1:
        source.lack("optimisation.steps: num_train_epochs counts passes over the data: give --rows N, the number of "
                    "training rows, which make one batch at least")  # fmt: skip
        return {}
    planned = epochs * (source.rows or 0) // (of_a_device * (scheduled_devices or devices))
    fields: Fields = {"job.max_tokens": longest, "optimisation.groups_per_mini_batch": size}
    fields |= run_of(source, steps, planned)
    if planned > steps and fields["optimisation.schedule"] != "constant":
        fields["optimisation.decay_updates"] = planned
    return fields


ROLL_SFT: System = make_system(
    "roll sft",
    (ROWS,),
    rules=(answers, sizes, adapters, tracking),
    spellings={
        f"{WORKER}.{row.name.removeprefix(TRAIN + '.')}": row.name for row in ROWS if row.name.startswith(f"{TRAIN}.")
    },
)
