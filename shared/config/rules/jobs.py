"""What a job that is not reinforcement learning makes of the other sections: what it fills in, and what it refuses."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from flotilla.shared.config.sections.algorithm import AlgorithmConfig
from flotilla.shared.config.sections.asynchrony import AsynchronyConfig
from flotilla.shared.config.sections.checkpoint import CheckpointConfig
from flotilla.shared.config.sections.data import DataConfig
from flotilla.shared.config.sections.evaluation import EvaluationConfig
from flotilla.shared.config.sections.job import FinishedJob, KtoConfig, RewardModelJobConfig, SftConfig
from flotilla.shared.config.sections.optimisation import OptimisationConfig
from flotilla.shared.config.sections.parallelism import ParallelismConfig
from flotilla.shared.config.sections.publication import PublicationConfig
from flotilla.shared.config.sections.resources import ResourcesConfig
from flotilla.shared.config.sections.reward import RewardConfig
from flotilla.shared.config.sections.rollout import RolloutConfig
from flotilla.shared.config.sections.tracking import ProfilerConfig
from flotilla.shared.config.tree import Sections

FINISHED_KINDS = frozenset({"sft", "preference", "kto", "reward_model"})
EVALUATION = "evaluation"
NO_EVALUATION = "job.kind evaluation answers the rows that evaluation.path or evaluation.sets names: add it"
FOR_PROMPTS = ("max_prompt_tokens", "overlong")
NOTHING_AHEAD = AsynchronyConfig(staleness_threshold=0.0)
"""What the section is where nothing is sampled to be trained on."""


def with_defaults_of_the_job(given: Any) -> Any:
    """Fill in what a document leaves out and its job decides: the ``reward`` section where nothing is graded, that
    nothing runs ahead where no sampled answer is trained, and what corrects for a sampler with rounded weights."""
    if not isinstance(given, Mapping):
        return given
    job = given.get("job")
    kind = job.get("kind") if isinstance(job, Mapping) else None
    is_sampled = kind != EVALUATION and kind not in FINISHED_KINDS
    given = _with_correction_of_quantised(given) if is_sampled else _with_nothing_ahead(given)
    if kind == EVALUATION:
        return _with_defaults_of_an_evaluation(given)
    if given.get("reward") is not None or given.get("evaluation") is not None:
        return given
    if kind in FINISHED_KINDS:
        return {**given, "reward": {}}
    return {**given, "reward": {"components": [{"kind": "constant"}]}} if _learns_from_teacher_alone(given) else given


def _with_correction_of_quantised(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Let old log-probs be the trainer's own where engines sample with weights that are rounded for them."""
    asynchrony, algorithm = given.get("asynchrony"), given.get("algorithm", {})
    publication = asynchrony.get("publication") if isinstance(asynchrony, Mapping) else None
    asked = publication.get("quantisation") if isinstance(publication, Mapping) else None
    if asked is None or not isinstance(algorithm, Mapping) or "old_log_probs" in algorithm:
        return given
    return {**given, "algorithm": {**algorithm, "old_log_probs": "recompute"}}


def _with_nothing_ahead(given: Mapping[str, Any]) -> Mapping[str, Any]:
    section = given.get("asynchrony", {})
    if not isinstance(section, Mapping) or "staleness_threshold" in section:
        return given
    return {**given, "asynchrony": {"staleness_threshold": NOTHING_AHEAD.staleness_threshold, **section}}


def _learns_from_teacher_alone(given: Mapping[str, Any]) -> bool:
    algorithm = given.get("algorithm")
    distillation = algorithm.get("distillation") if isinstance(algorithm, Mapping) else None
    return isinstance(distillation, Mapping) and distillation.get("pure") is True


def _with_defaults_of_an_evaluation(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what training needs, and that the rows of ``data`` are those of ``evaluation``."""
    if given.get("evaluation") is None:
        raise ValueError(NO_EVALUATION)
    filled = {"optimisation": {"steps": 1}, **given}
    data, rows = given.get("data") or {}, given.get("evaluation") or {}
    if isinstance(data, Mapping) and isinstance(rows, Mapping) and not {"path", "sources"} & data.keys():
        place = {key: value for key in ("path", "sets") if (value := rows.get(key)) is not None}
        filled["data"] = {**data, **({"path": place["path"]} if "path" in place else _as_sources(place.get("sets")))}
    return filled


def _as_sources(sets: Any) -> dict[str, Any]:
    if not isinstance(sets, Sequence) or isinstance(sets, str):
        return {}
    unnamed = [
        {key: value for key, value in each.items() if key != "name"} for each in sets if isinstance(each, Mapping)
    ]
    return {"sources": unnamed} if unnamed else {}


def check_profiler(profiler: ProfilerConfig, spec: Sections) -> None:
    """Check that there is what a spec wants to be recorded.

    Raises:
        ValueError: there is not.
    """
    if profiler.engine_versions and not (spec.samples_answers and spec.rollout.engine.kind == "torch"):
        raise ValueError(
            "tracking.profiler.engine_versions has an effect with the embedded engine alone (rollout.engine.kind "
            "torch), where answers are sampled: remove it, and use the server's own profiler"
        )
    if profiler.steps and not spec.trains:
        raise ValueError("tracking.profiler.steps has no effect while job.kind is evaluation: remove it")
    ranks = spec.parallelism.ranks
    if beyond := [rank for rank in profiler.ranks or () if rank >= ranks]:
        raise ValueError(
            f"tracking.profiler.ranks names rank {beyond[0]}, and parallelism.ranks is {ranks}: name some from 0 to "
            f"{ranks - 1}, or null for all"
        )


def check_job(spec: Sections) -> None:
    """Check that nothing is set which the job does not use.

    Raises:
        ValueError: something is.
    """
    _check_held_groups(spec)
    if not spec.trains:
        _check_evaluation(spec)
    job = spec.finished_job
    if job is None:
        return
    kind = job.kind
    _refuse_changed(spec.algorithm, AlgorithmConfig(), "algorithm", kind, f"what {kind} computes is set in job")
    travels = {"publication": NOTHING_AHEAD.publication} if spec.evaluation is not None else {}
    why = "nothing runs ahead, and a version is made with each checkpoint (checkpoint.every_steps)"
    _refuse_changed(spec.asynchrony.model_copy(update=travels), NOTHING_AHEAD, "asynchrony", kind, why)
    if spec.optimisation.shuffle:
        raise ValueError(
            f"optimisation.shuffle has no effect while job.kind is {kind}: remove it (data.shuffle orders the rows)"
        )
    _check_columns(job, spec.data)
    _check_mismatched(job, spec.optimisation)
    if spec.model.lora is not None and spec.model.lora.dropout and not isinstance(job, SftConfig):
        raise ValueError(
            f"model.lora.dropout does not go with job.kind {kind}, whose loss takes two passes, which must compute the "
            "same: remove it"
        )
    if spec.evaluation is not None:
        if isinstance(job, RewardModelJobConfig):
            raise ValueError(
                "evaluation samples answers, which a reward model does not give: remove it, and name held-out pairs in "
                "job.held_out"
            )
        return
    why = "nothing is sampled or graded without an evaluation"
    _refuse_changed(spec.rollout, RolloutConfig(), "rollout", kind, why)
    _refuse_changed(spec.reward, RewardConfig(), "reward", kind, why)
    for name in ("rollouts", "rewards", "sandboxes"):
        if getattr(spec.resources, name) != getattr(ResourcesConfig(), name):
            raise ValueError(f"resources.{name} has no effect while job.kind is {kind}: {why}; remove it")
    for name in FOR_PROMPTS:
        if getattr(spec.data, name) != DataConfig.model_fields[name].default:
            raise ValueError(
                f"data.{name} has no effect while job.kind is {kind}, which reads whole answers: remove it, or use "
                "job.max_tokens and job.overlong"
            )


def _check_held_groups(spec: Sections) -> None:
    """The sections of what sampled groups may stay as they were, but for what cannot hold for them."""
    if not spec.data.holds_groups:
        return
    name, where = _place_of_groups(spec)
    if spec.finished_job is not None or not spec.trains:
        kind = "evaluation" if spec.finished_job is None else spec.finished_job.kind
        raise ValueError(
            f"{name} {where} holds groups with rewards, which job.kind {kind} does not train: leave one of them out"
        )
    if spec.algorithm.old_log_probs == "recompute_at_version":
        raise ValueError(
            f"algorithm.old_log_probs recompute_at_version needs the weights of the versions that sampled, which "
            f"{name} does not hold: use rollout (what the engine recorded) or recompute"
        )
    if spec.data.subscribes_to is not None and spec.asynchrony.redundant_groups:
        raise ValueError(
            f"asynchrony.redundant_groups {spec.asynchrony.redundant_groups} has no effect beside {name} {where}, "
            "which issues the groups: set it there"
        )


def _place_of_groups(spec: Sections) -> tuple[str, str | None]:
    """Name the key of what holds groups, and its value."""
    if spec.data.dump is not None:
        return "data.dump", spec.data.dump
    return "data.from", spec.data.subscribes_to


def _check_mismatched(job: FinishedJob, optimisation: OptimisationConfig) -> None:
    if optimisation.groups_per_mini_batch == 1 and isinstance(job, KtoConfig) and job.reference_point == "mismatched":
        raise ValueError(
            "job.reference_point mismatched pairs a prompt with another's answer, and a mini-batch has one "
            "(optimisation.groups_per_mini_batch 1): raise it, or set job.reference_point to zero"
        )


def _check_evaluation(spec: Sections) -> None:
    if spec.evaluation is None:
        raise ValueError(NO_EVALUATION)
    if spec.written_answers is not None:
        _check_written(spec, spec.evaluation)
    if spec.evaluation.every_versions is not None:
        raise ValueError("evaluation.every_versions has no effect while job.kind is evaluation, which has one version")
    for section, found, default in (
        ("model", spec.model, spec.model.model_copy(update={"lora": None})),
        ("algorithm", spec.algorithm, AlgorithmConfig()),
        ("optimisation", spec.optimisation, OptimisationConfig(steps=1)),
        ("asynchrony", spec.asynchrony, NOTHING_AHEAD),
        ("parallelism", spec.parallelism, ParallelismConfig()),
        ("checkpoint", spec.checkpoint, CheckpointConfig()),
    ):
        _refuse_changed(found, default, section, EVALUATION, "nothing is trained")
    if [each.location() for each in spec.data.all_sources] != [each.location() for each in spec.evaluation.all_sets]:
        name = "path" if spec.data.path is not None else "sources"
        raise ValueError(f"data.{name} has no effect while job.kind is evaluation, which answers those of evaluation")


def _check_written(spec: Sections, evaluation: EvaluationConfig) -> None:
    why = "job.response_column names answers that are graded as they are"
    _refuse_changed(spec.rollout, RolloutConfig(), "rollout", EVALUATION, why)
    if spec.resources.rollouts != ResourcesConfig().rollouts:
        raise ValueError(f"resources.rollouts has no effect while {why}: remove it")
    for name in ("greedy", "temperature", "top_k", "top_p", "group_size", "max_new_tokens"):
        if getattr(evaluation, name) != EvaluationConfig.model_fields[name].default:
            raise ValueError(f"evaluation.{name} has no effect while {why}: remove it")
    for name in FOR_PROMPTS:
        if getattr(spec.data, name) != DataConfig.model_fields[name].default:
            raise ValueError(f"data.{name} has no effect while {why}: remove it")


def _check_columns(job: FinishedJob, data: DataConfig) -> None:
    if isinstance(job, SftConfig | KtoConfig):
        is_whole, answer = job.response_column is None, job.response_column
    else:
        is_whole, answer = job.chosen_column == data.prompt_column, job.chosen_column
        if job.chosen_column == job.rejected_column:
            raise ValueError("job.chosen_column and job.rejected_column are the same: name both columns")
    if data.input_template is not None and is_whole:
        raise ValueError(
            "data.input_template has one place, for a prompt, and rows hold whole conversations: remove it, or name "
            "the answer's column"
        )
    if data.input_column is not None and is_whole:
        raise ValueError(
            "data.input_column follows a prompt's text, and rows hold whole conversations: remove it, or name the "
            "answer's column"
        )
    if isinstance(job, KtoConfig) and job.label_column in {data.prompt_column, job.response_column}:
        raise ValueError(f"job.label_column is the column {job.label_column!r} of a text, too: name the label's")
    if isinstance(job, SftConfig | KtoConfig) and job.response_column == data.prompt_column:
        raise ValueError(f"job.response_column is data.prompt_column too, {answer!r}: name the answer's column")
    if isinstance(job, SftConfig) and job.train_on == "last" and data.input_template is not None:
        raise ValueError("job.train_on last has no effect beside data.input_template, which has one turn: remove it")


def _refuse_changed(found: BaseModel, default: BaseModel, section: str, kind: str, why: str) -> None:
    for name in type(default).model_fields:
        ours, theirs = getattr(found, name), getattr(default, name)
        if ours == theirs:
            continue
        if isinstance(ours, PublicationConfig) and isinstance(theirs, PublicationConfig):
            _refuse_changed(ours, theirs, f"{section}.{name}", kind, why)  # by the key below it that differs
        raise ValueError(f"{section}.{name} has no effect while job.kind is {kind}: {why}; remove it")
