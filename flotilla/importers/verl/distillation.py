"""verl's on-policy distillation: a teacher's log-probabilities of the sampled tokens as a reward of each."""

from typing import Any

from flotilla.importers.parameter import Parameter, Verdict, ignored, refused, translated, unsupported
from flotilla.importers.source import Source
from flotilla.importers.values import flag, number, text

Fields = dict[str, Any]

SECTION = "distillation"
LOSS = f"{SECTION}.distillation_loss"
TEACHER = f"{SECTION}.teacher_model"
ONLY = f"{SECTION}.teacher_models.teacher_model"
"""How newer releases name the teacher where there is one."""
MODELS = f"{SECTION}.teacher_models"
SERVING = ("inference", "num_replicas")
"""What of one of several teachers says how it is served."""
REWARDED = {f"{SECTION}.enabled": True, f"{LOSS}.loss_mode": "k1", f"{LOSS}.use_policy_gradient": True,
            f"{TEACHER}.model_path": "a-teacher"}  # fmt: skip
"""What verl is to be told for the teacher to be a reward of each token, which is what there is here."""
SERVED = (
    "the trainer loads the teacher beside the policy; one that is served elsewhere is named in "
    "algorithm.distillation.servers"
)

ROWS: tuple[Parameter, ...] = (
    translated(f"{SECTION}.enabled", "algorithm.distillation", flag, "a teacher's part in the advantage of each token; "
               "needs loss_mode k1 and use_policy_gradient", example=True, default=False,
               context={name: value for name, value in REWARDED.items() if not name.endswith("enabled")}),
    translated(f"{TEACHER}.model_path", "algorithm.distillation.path", text, "the teacher, in the trainer",
               example="another-teacher", default=None, context=REWARDED,
               aliases=(f"{SECTION}.teacher_model.path", f"{ONLY}.model_path")),
    translated(f"{LOSS}.distillation_loss_coef", "algorithm.distillation.coefficient", number,
               "advantage per nat; 1 without task rewards, as in verl", example=0.5, default=1.0, context=REWARDED),
    translated(f"{LOSS}.use_task_rewards", "algorithm.distillation.pure", flag, "false: the teacher alone",
               example=False, default=True, context=REWARDED),
    refused(f"{LOSS}.loss_mode", "the teacher is a reward of each token, log p student - log p teacher: k1",
            default="k3", harmless=("k1",), is_judged=True),
    refused(f"{LOSS}.use_policy_gradient", "a distance that is differentiated is no reward: set it to true, with k1",
            default=False, harmless=(True,), is_judged=True),
    translated(f"{LOSS}.loss_max_clamp", "algorithm.distillation.value_clamp", number, "bound of a token's "
               "difference in nats, either way; by itself none", example=5.0, default=None, context=REWARDED),
    *ignored("read by other distances than k1", f"{LOSS}.topk", f"{LOSS}.jsd_beta"),
    Parameter(name=f"{LOSS}.log_prob_min_clamp", verdict=Verdict.IGNORED, reason="read by other distances than k1",
              default=None),
    refused(f"{LOSS}.policy_loss_mode", "the policy's own loss is taken: actor.policy_loss", default="vanilla"),
    *(refused(f"{LOSS}.{name}", "the policy's own clip is taken: actor.clip_ratio", default=0.2)
      for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")),
    *unsupported(SERVED, f"{SECTION}.num_workers", f"{SECTION}.nnodes", f"{SECTION}.n_gpus_per_node",
                 f"{SECTION}.enable_resource_pool", f"{TEACHER}.nnodes", f"{TEACHER}.n_gpus_per_node",
                 f"{TEACHER}.enable_resource_pool"),
    *unsupported(SERVED, f"{TEACHER}.inference", f"{ONLY}.inference", is_tree=True, harmless=(1,)),
    *unsupported(SERVED, f"{ONLY}.num_replicas", default=1),
    Parameter(name=MODELS, verdict=Verdict.TRANSLATED, targets=("algorithm.distillation.teachers",), is_tree=True,
              reason="teachers by the data source of a row (key), all of them in the trainer"),
)  # fmt: skip


def is_pure(source: Source) -> bool:
    """Whether the teacher alone teaches."""
    return bool(source.value(f"{SECTION}.enabled")) and not source.value(f"{LOSS}.use_task_rewards")


def distillation(source: Source) -> Fields:
    """Make the teacher, where there is one and it is a reward of each token."""
    if not source.value(f"{SECTION}.enabled"):
        return {}
    if source.value(f"{LOSS}.loss_mode") != "k1":
        source.refuse(f"{LOSS}.loss_mode", "the teacher is a reward of each token: use k1, with use_policy_gradient")
    if not source.value(f"{LOSS}.use_policy_gradient"):
        source.refuse(
            f"{LOSS}.use_policy_gradient", "a distance that is differentiated is no reward: set it to true, with k1"
        )
    rewards = source.value(f"{LOSS}.use_task_rewards")
    coefficient = source.required(f"{LOSS}.distillation_loss_coef") if rewards else 1.0
    bound = source.value(f"{LOSS}.loss_max_clamp")
    section: Fields = {"coefficient": coefficient, "pure": not rewards, "value_clamp": bound}
    if several := _several(source):
        return {"algorithm.distillation": {**section, "teachers": several}}
    path = source.value(f"{TEACHER}.model_path")
    if path is None:
        source.refuse(f"{TEACHER}.model_path", "must not be null where distillation is enabled")
        return {}
    return {"algorithm.distillation": {**section, "path": path}}


def _several(source: Source) -> list[Fields]:
    """Make the teachers that have names of their own."""
    found: dict[str, Fields] = {}
    for name, value in source.trees.get(MODELS, {}).items():
        teacher, _, field = name.removeprefix(f"{MODELS}.").partition(".")
        made = found.setdefault(teacher, {})
        if field == "model_path":
            made["path"] = value
        elif field == "key":
            made["data_sources"] = [value]
        elif field.partition(".")[0] in SERVING:
            source.put_aside(name, SERVED)
        elif value is not None:
            source.refuse(MODELS, f"{teacher}.{field} is not offered: use key, model_path, inference and num_replicas")
    for teacher, made in found.items():
        if set(made) != {"path", "data_sources"}:
            source.refuse(MODELS, f"{teacher} must have key, the data source that it teaches, and model_path")
    if len(found) and source.value(f"{TEACHER}.model_path") is not None:
        source.refuse(MODELS, "there is a teacher of all rows besides: leave one of them out")
    return list(found.values())
