"""ROLL's pipeline on a teacher's distributions of written answers, as a system to import from.

Meanings and defaults: roll/pipeline/distill/{distill_config,distill_pipeline,distill_worker,various_divergence}.py.
"""

from dataclasses import replace
from typing import Any, Final

from flotilla.importers.parameter import applied, ignored, refused, translated, unsupported
from flotilla.importers.roll import distillation, finished
from flotilla.importers.roll.fine_tuning import ROLL_SFT, sizes_by
from flotilla.importers.roll.placement import shares_of_the_batch
from flotilla.importers.roll.rows import CUTTING, TRAIN
from flotilla.importers.roll.system import ROLL, adapters, tracking
from flotilla.importers.source import Source, System, make_system
from flotilla.importers.spelling import dtype_of
from flotilla.importers.values import flag, integer, number, text

Fields = dict[str, Any]

STUDENT: Final = "student"
"""How a file of this pipeline calls the worker that trains."""
TEACHER: Final = distillation.TEACHER
OF_TEACHING: Final = frozenset(
    {"student_pretrain", "teacher_pretrain", "logits_topk", "distill_loss_weight", "kd_objective", "distill_on_prompt"}
)
"""Names that a file of this pipeline alone has."""
WORKERS: Final = "roll.pipeline.distill.distill_worker"
OF_ROWS: Final = frozenset({"prompt_key", "query_key", "response_key", "system_key"})
ELSEWHERE: Final = frozenset({"pretrain", "max_grad_norm", f"{TRAIN}.worker_cls", f"{TEACHER}.tag_included"})
"""Names that mean something else here, or nothing."""
DIVERGENCE: Final = "job.distillation.divergence"
OBJECTIVES: Final = (
    "forward_kl", "reverse_kl", "skewed_forward_kl", "skewed_reverse_kl", "js_divergence", "adaptive_kl",
)  # fmt: skip

SHARED = tuple(row for name, row in ROLL_SFT.parameters.items() if name not in OF_ROWS | ELSEWHERE)
OF_TEACHER = tuple(
    row
    for row in distillation.ROWS
    if row.name.startswith(f"{TEACHER}.") and row.name not in ELSEWHERE and not row.targets
)

ROWS = (
    *SHARED,
    *OF_TEACHER,
    replace(ROLL.parameters["pretrain"], aliases=("student_pretrain", f"{STUDENT}.model_args.model_name_or_path")),
    translated("teacher_pretrain", "job.distillation.path", text, "the teacher, in the trainer",
               example="another-teacher", default=None, aliases=(distillation.PATH,)),
    translated(f"{TEACHER}.model_args.dtype", "job.distillation.dtype", text, "bf16 is bfloat16, fp32 is float32, and "
               "so is fp16", example="fp32", default="bf16"),
    applied("distill_loss_weight", "job.distillation.coefficient", number, "weight of the teacher; the answers' own "
            "likelihood has what is left of 1, and 0 is fine-tuning", example=0.85, default=0.5, context={}),
    translated("distill_on_prompt", "job.train_on", flag, "whole conversations are learned", example=True,
               default=False),
    translated("logits_topk", f"{DIVERGENCE}.top_k", integer, "the teacher's so many likeliest tokens are compared; 0: "
               "all", example=32, default=64),
    translated("kd_objective", f"{DIVERGENCE}.kind", text, f"one of {', '.join(OBJECTIVES)}", example="reverse_kl",
               default="forward_kl"),
    translated("kd_temperature", f"{DIVERGENCE}.temperature", number, "divides the logits of both", example=2.0,
               default=1),
    translated("teacher_temperature", f"{DIVERGENCE}.teacher_temperature", number, "divides the teacher's besides",
               example=1.5, default=1),
    translated("adaptive_kl_alpha", f"{DIVERGENCE}.tail", number, "read by adaptive_kl alone", example=0.4,
               default=0.5, context={"kd_objective": "adaptive_kl"}),
    translated("skew_lambda", f"{DIVERGENCE}.skew", number, "read by the skewed objectives alone", example=0.3,
               default=0.1, context={"kd_objective": "skewed_forward_kl"}),
    *ignored("the teacher is in the trainer: nothing is transferred", "logits_transfer_backend"),
    *ignored("the pipeline has no such option, and its rows are read without", "prompt_key", "system_key"),
    translated("question_key", "data.prompt_column", text, "column with the prompt; ROLL begins it with a line break, "
               "which is left out", example="problem", default="question"),
    translated("answer_key", "job.response_column", text, "column with the answer", example="solution",
               default="answer"),
    translated("max_grad_norm", "optimisation.max_grad_norm", number, "bound of the gradient's norm; 0, by itself, is "
               "none", example=0.5, default=0),
    *(refused(name, "the loss is the pipeline's own: leave it out", default=f"{WORKERS}.{worker}")
      for name, worker in ((f"{TRAIN}.worker_cls", "StudentWorker"), (f"{TEACHER}.worker_cls", "TeacherWorker"))),
    *unsupported(CUTTING, f"{TEACHER}.training_args.per_device_train_batch_size"),
)  # fmt: skip


def answers(source: Source) -> Fields:
    """Make the models, the rows, those held out, and what is learned of them."""
    fields: Fields = {
        "job.kind": "sft",
        "job.overlong": "truncate",
        "job.response_column": source.required("answer_key"),
        "job.train_on": "every_token" if source.value("distill_on_prompt") else "all",
        "data.prompt_column": source.required("question_key"),
        "data.label_column": None,
        "optimisation.max_grad_norm": source.required("max_grad_norm") or None,
    }
    return fields | teacher(source) | finished.trained_on(source, f"{STUDENT}.data_args.file_name", "student_pretrain")


def teacher(source: Source) -> Fields:
    """Make the teacher, where it has a weight."""
    path, weight = source.value("teacher_pretrain"), source.required("distill_loss_weight")
    dtype = dtype_of(source, f"{TEACHER}.model_args.dtype")
    if not weight:
        return {}
    if path is None:
        source.lack("job.distillation.path: give teacher_pretrain")
        return {}
    if (measure := divergence(source)) is None:
        return {}
    return {"job.distillation": {"path": path, "coefficient": weight, "dtype": dtype, "divergence": measure}}


def divergence(source: Source) -> Fields | None:
    """Make how teacher and student are compared; what it is to be that it cannot be is refused."""
    kind, top_k = source.required("kd_objective"), source.required("logits_topk")
    temperatures = {
        name: source.required(key)
        for key, name in (("kd_temperature", "temperature"), ("teacher_temperature", "teacher_temperature"))
    }
    if kind not in OBJECTIVES:
        source.refuse("kd_objective", f"must be one of {', '.join(OBJECTIVES)}")
        return None
    if top_k < 0 or top_k == 1:
        source.refuse("logits_topk", "must be 0, for all tokens, or at least 2: one token alone has nothing to learn")
        return None
    measure: Fields = {"kind": kind} | temperatures | ({"top_k": top_k} if top_k else {})
    if kind == "adaptive_kl":
        measure["tail"] = source.required("adaptive_kl_alpha")
    elif kind.startswith("skewed"):
        measure["skew"] = source.required("skew_lambda")
    return measure


def sizes(source: Source) -> Fields:
    """Make lengths, batch, steps, schedule and checkpoints; ROLL's schedule takes one device's share for the batch."""
    return sizes_by(source, shares_of_the_batch(source), scheduled_devices=1)


ROLL_DISTILL: System = make_system(
    "roll distill",
    (ROWS,),
    rules=(answers, sizes, adapters, tracking),
    spellings={
        f"{STUDENT}.{row.name.removeprefix(TRAIN + '.')}": row.name for row in ROWS if row.name.startswith(f"{TRAIN}.")
    },
)
