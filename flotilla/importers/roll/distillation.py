"""ROLL's on-policy distillation: a teacher's log-probabilities of the sampled tokens, by itself or beside rewards."""

from typing import Any, Final

from flotilla.importers.parameter import Parameter, applied, ignored, refused, translated, unsupported
from flotilla.importers.roll.rows import CONFIG, CUTTING, ENVIRONMENT, KERNELS, PLACEMENT, SHARDING
from flotilla.importers.source import Source
from flotilla.importers.spelling import ROUTER_DTYPE, dtype_of
from flotilla.importers.values import flag, number, text

Fields = dict[str, Any]

TEACHER: Final = "teacher"
PATH: Final = f"{TEACHER}.model_args.model_name_or_path"
PURE: Final = "is_pure_opd"
MIXED: Final = "use_opd"
TAUGHT = {PATH: "a-teacher", MIXED: True}

ROWS: tuple[Parameter, ...] = (
    translated(PURE, "algorithm.distillation.pure", flag, "the teacher alone teaches; start_onpolicy_distill_pipeline "
               "sets it", example=True, default=False, context={PATH: "a-teacher"}),
    translated(MIXED, "algorithm.distillation", flag, "the teacher's part is added to the advantages of rewards",
               example=True, default=False, context={PATH: "a-teacher"}),
    translated(PATH, "algorithm.distillation.path", text, "the teacher, in the trainer", example="another-teacher",
               default=None, context=TAUGHT),
    translated(f"{TEACHER}.model_args.dtype", "algorithm.distillation.dtype", text,
               "bf16 is bfloat16, fp32 is float32, and so is fp16", example="fp32", default="bf16", context=TAUGHT),
    applied(f"{TEACHER}.opd_kl_coef", "algorithm.distillation.coefficient", number, "advantage per nat", example=0.5,
            default=1.0, context=TAUGHT),
    refused(f"{TEACHER}.tag_included", "the teacher that the trainer loads teaches all rows: several, by data source, "
            "are algorithm.distillation.servers", default=[]),
    *ignored("which environments or rows there are says it", "pure_opd_pipeline_type"),
    *ignored("the teacher's template is the student's: it reads the same tokens", f"{TEACHER}.data_args", is_tree=True),
    *ignored("a name in ROLL's logs", f"{TEACHER}.name"),
    *unsupported(ROUTER_DTYPE, f"{TEACHER}.{CONFIG}.moe_router_dtype"),
    *unsupported(KERNELS, f"{TEACHER}.model_args.attn_implementation", f"{TEACHER}.model_args.flash_attn",
                 f"{TEACHER}.model_args.disable_gradient_checkpointing"),
    *ignored("read from the teacher's own config.json", f"{TEACHER}.model_args.model_type"),
    *unsupported(PLACEMENT, f"{TEACHER}.device_mapping", f"{TEACHER}.world_size", harmless=(1,)),
    *unsupported(SHARDING, f"{TEACHER}.strategy_args", is_tree=True, harmless=(1,)),
    *unsupported(CUTTING, f"{TEACHER}.infer_batch_size", f"{TEACHER}.use_sequence_packing"),
    *unsupported(CUTTING, f"{TEACHER}.sequence_packing_args", is_tree=True),
    *unsupported(ENVIRONMENT, f"{TEACHER}.system_envs", is_tree=True, default={}),
)  # fmt: skip


def is_pure(source: Source) -> bool:
    """Whether the teacher alone teaches: only that launcher of ROLL's reads what is written of a student."""
    return bool(source.value(PURE)) or any(
        each.spelling.startswith(("student_train.", "student_infer.")) for each in source.given.values()
    )


def distillation(source: Source) -> Fields:
    """Make the teacher, where there is one that ROLL reads."""
    pure, mixed = is_pure(source), bool(source.value(MIXED))
    if not pure and not mixed:
        return {}
    if pure and mixed:
        source.refuse(MIXED, f"excludes {PURE}, as in ROLL: choose one")
    path = source.value(PATH)
    if path is None:
        source.lack(f"algorithm.distillation.path: give {PATH}")
        return {}
    if source.value("kl_penalty") != "kl":
        source.refuse("kl_penalty", "the teacher's part is log p student - log p teacher: use kl")
    for name, off in (("whiten_advantages", False), ("advantage_clip", None)):
        if source.value(name) not in {off, False}:
            source.refuse(name, "the teacher's part comes after it here, and before it in ROLL: leave it out")
    if not pure and (source.value("add_token_level_kl") or source.value("use_kl_loss")):
        source.refuse(MIXED, "the reference of ROLL's KL is then the teacher, and ours the policy: leave the KL out")
    section = {
        "path": path,
        "dtype": dtype_of(source, f"{TEACHER}.model_args.dtype"),
        "coefficient": source.required(f"{TEACHER}.opd_kl_coef"),
        "pure": pure,
    }
    return {"algorithm.distillation": section}
