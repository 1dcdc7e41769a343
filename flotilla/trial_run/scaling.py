"""Scales an imported spec down: what costs becomes small, what makes meaning stays.

Estimator, losses, filters, KL, correction, schedules, graders and asynchrony stay as they are; model, rows, lengths,
batches, steps and devices become so small that two steps take seconds on a CPU. Pure but for looking whether named
files exist.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flotilla.services.trainer.tiny_models.recipe import ModelRecipe, Recipe
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.trial_run.edits import Change, Document, Edits
from flotilla.trial_run.families import Family, family_of
from flotilla.trial_run.graders import replace_graders
from flotilla.trial_run.made_rows import answers_of
from flotilla.trial_run.playing import answers_in_episodes, replace_players
from flotilla.trial_run.rows import replace_rows

STEPS: Final = 2
GROUP, GROUPS, BATCHES = 4, 2, 2
ANSWER, TURNS = 24, 3
SHORT_CONTEXT, LONG_CONTEXT = 1024, 4096
RANK: Final = 4
FEW_SIGNALLESS: Final = 200
"""Groups in a row that teach nothing, after which a trial ends and says so."""
MODEL, TEACHER, CRITIC = "model", "teacher", "critic"
CPU: Final = "two small steps take seconds on a CPU"
COSTS: Final = "two steps are enough to see that it trains"
MADE: Final = "a small random model of the same architecture"


@dataclass
class Trial:
    """What is run in place of an imported spec.

    Attributes:
        document: the scaled spec; paths are relative to its folder.
        changes: what is different, and why.
        files: texts of further files, by name.
        family: of the policy.
        models: that are made: policy, critic, teacher, reward models.
        recipe: of all of them.
    """

    document: Document
    changes: list[Change]
    files: dict[str, str]
    family: Family
    models: list[ModelRecipe] = field(default_factory=list)
    recipe: Recipe | None = None


def scale_down(spec: ExperimentSpec, files: Mapping[str, str], base: Path) -> Trial:
    """Make a trial of a spec.

    Args:
        spec: as it was imported.
        files: further files that the import makes, by name.
        base: folder that relative paths of the spec are taken from.
    """
    edits = Edits(spec.model_dump(mode="json"))
    with_images = spec.data.images is not None
    family = family_of(spec.model.path, base, with_images=with_images)
    trial = Trial(edits.document, edits.changes, {}, family)
    trial.models.append(_recipe(MODEL, family, 0))
    _model(edits, trial, spec, base)
    _placement(edits, spec)
    _lengths(edits, spec)
    if spec.needs_rollouts:
        _sampling(edits, spec)
    if spec.trains:
        _batches(edits, spec)
        _checkpoints(edits, spec)
    _keeping(edits, spec)
    replace_rows(edits, spec, files, trial.files)
    replace_graders(edits, spec, files, trial.files, base, trial.models)
    replace_players(edits, spec, files, trial.files, base)
    answers = [*answers_of(spec), *answers_in_episodes(edits, trial.files)]
    texts = [text for text in [*trial.files.values(), *_texts(edits.document)] if len(text) < 50_000]
    distinct = tuple(dict.fromkeys(answers))
    trial.recipe = Recipe(models=tuple(trial.models), texts=tuple(texts), answers=distinct, max_tokens=LONG_CONTEXT)
    return trial


def _recipe(directory: str, family: Family, seed: int) -> ModelRecipe:
    return ModelRecipe(directory=directory, family=family.name, config=family.config, seed=seed)


def _model(edits: Edits, trial: Trial, spec: ExperimentSpec, base: Path) -> None:
    edits.set("model.path", MODEL, f"{MADE} ({trial.family.name}, from {trial.family.origin})")
    edits.set("model.revision", None, MADE)
    edits.set("model.dtype", "float32", CPU)
    edits.set("model.attention", "auto", CPU)
    edits.set("model.kernels", "auto", CPU)
    if spec.model.overrides:
        edits.set("model.overrides", {}, "they are of the model's own config, and the small one has another")
    rank = edits.at("model.lora.rank")
    if isinstance(rank, int) and rank > RANK:
        edits.set("model.lora.rank", RANK, "as the model")
        power = 0.5 if edits.at("model.lora.rank_stabilised") else 1.0
        alpha = edits.at("model.lora.alpha") * (RANK / rank) ** power
        edits.set("model.lora.alpha", alpha, "the adapters' scale stays")
    if edits.at("model.lora.quantisation") is not None:
        edits.set("model.lora.quantisation", None, "weights in 4 bits need bitsandbytes")
    if edits.at("algorithm.distillation.servers"):
        edits.set("algorithm.distillation.servers", [], "no server is asked in a trial")
        edits.set("algorithm.distillation.path", TEACHER, f"{MADE} as the policy's")
        trial.models.append(_recipe(TEACHER, trial.family, 1))
    elif edits.at("algorithm.distillation.teachers"):
        edits.set("algorithm.distillation.teachers", [], "one small teacher has all rows")
        edits.set("algorithm.distillation.path", TEACHER, f"{MADE} as the policy's")
        trial.models.append(_recipe(TEACHER, trial.family, 1))
    elif edits.at("algorithm.distillation.path") is not None:
        own = family_of(edits.at("algorithm.distillation.path"), base, with_images=spec.data.images is not None)
        edits.set("algorithm.distillation.path", TEACHER, f"{MADE} ({own.name})")
        edits.set("algorithm.distillation.dtype", "float32", CPU)
        edits.set("algorithm.distillation.revision", None, MADE)
        trial.models.append(_recipe(TEACHER, own, 1))
    if edits.at("job.distillation") is not None:
        own = family_of(edits.at("job.distillation.path"), base)
        edits.set("job.distillation.path", TEACHER, f"{MADE} ({own.name})")
        edits.set("job.distillation.dtype", "float32", CPU)
        edits.set("job.distillation.revision", None, MADE)
        trial.models.append(_recipe(TEACHER, own, 1))
    if edits.at("algorithm.value_loss.path") is not None:
        edits.set("algorithm.value_loss.path", CRITIC, f"{MADE} as the policy's")
        edits.set("algorithm.value_loss.revision", None, MADE)
        trial.models.append(_recipe(CRITIC, trial.family, 2))


def _placement(edits: Edits, spec: ExperimentSpec) -> None:
    if spec.trains:
        parallelism = type(spec.parallelism)(device="cpu").model_dump(mode="json")
        edits.set("parallelism", parallelism, CPU)
    resources = type(spec.resources)(stream_bytes=spec.resources.stream_bytes).model_dump(mode="json")
    edits.set("resources", resources, "one service of each kind, on this machine")
    if not spec.needs_rollouts:
        return
    if spec.trains:
        publication = type(spec.asynchrony.publication).model_validate({"transport": "shared_memory"})
        edits.set("asynchrony.publication", publication.model_dump(mode="json"), "all services are on this machine")
    engine = {"kind": "torch", "slots": 16, "context_tokens": _context(spec), "device": "cpu"}
    edits.set("rollout.engine", engine, f"the embedded engine: {CPU}")
    edits.set("rollout.requires", [], "the embedded engine promises more")


def _context(spec: ExperimentSpec) -> int:
    """Count the tokens that trial's sequences may have."""
    is_long = spec.rollout.episodes.kind != "single_turn" or spec.data.images is not None
    has_words = len(spec.data.system_prompt or "") + len(spec.data.input_template or "") > SHORT_CONTEXT // 2
    return LONG_CONTEXT if is_long or has_words or spec.rollout.agents is not None else SHORT_CONTEXT


def _lengths(edits: Edits, spec: ExperimentSpec) -> None:
    edits.at_most("job.max_tokens", _context(spec), "rows are short")
    edits.at_most("evaluation.group_size", 2, COSTS)
    if edits.at("data.overlong.kind") == "filter":
        edits.at_most("data.overlong.workers", 1, CPU)


def _sampling(edits: Edits, spec: ExperimentSpec) -> None:
    why = "answers are short"
    before = spec.rollout.sampling.max_new_tokens
    answer = min(before, ANSWER)
    ratio = answer / before
    edits.set("rollout.sampling.max_new_tokens", answer, why)
    if spec.evaluation is not None and spec.evaluation.max_new_tokens is not None:
        edits.at_most("evaluation.max_new_tokens", ANSWER, why)
    room = _context(spec) - ANSWER
    edits.at_most("data.max_prompt_tokens", room, "prompts are short")
    edits.at_most("rollout.episodes.max_turns", TURNS, "episodes are short")
    edits.at_most("rollout.episodes.max_tokens", _context(spec), why)
    edits.at_most("rollout.agents.max_turns", TURNS, "episodes are short")
    overlong = spec.reward.shaping.overlong if spec.reward.shaping is not None else None
    if overlong is not None:
        edits.scale("reward.shaping.overlong.max_length", ratio, why)
        edits.scale("reward.shaping.overlong.buffer", ratio, why)
    if edits.at("reward.shaping.length") is not None:
        low, high = edits.at("reward.shaping.length.min_length"), edits.at("reward.shaping.length.max_length")
        edits.set("reward.shaping.length.min_length", int(low * ratio), why)
        edits.set("reward.shaping.length.max_length", max(round(high * ratio), int(low * ratio) + 1), why)
    edits.scale("reward.sample_mask.max_length", ratio, why)
    edits.scale("reward.sample_mask.wrong_up_to_length", ratio, why)
    edits.scale("algorithm.aggregation.fixed_length", ratio, why)
    edits.scale("algorithm.value_loss.aggregation.fixed_length", ratio, why)
    edits.at_most("rollout.group_size", GROUP, COSTS)


def _batches(edits: Edits, spec: ExperimentSpec) -> None:
    edits.at_most("optimisation.groups_per_mini_batch", GROUPS, COSTS)
    edits.at_most("asynchrony.require_batches", BATCHES, COSTS)
    edits.at_most("asynchrony.redundant_groups", 1, COSTS)
    edits.at_most("asynchrony.trigger_parameter_sync_step", STEPS, COSTS)
    edits.at_most("optimisation.steps", STEPS, COSTS)
    edits.at_most("optimisation.warmup_updates", 1, "the schedule's parts stay, each short")
    edits.at_most("optimisation.decay_updates", STEPS, "the schedule's parts stay, each short")
    edits.at_most("optimisation.wsd_decay_updates", 1, "the schedule's parts stay, each short")
    edits.at_most("optimisation.epochs_per_step", 2, COSTS)
    edits.at_most("optimisation.micro_batch_tokens", _context(spec), "as many as there are")
    edits.set("optimisation.masters", "float32", "the model is float32")
    edits.set("optimisation.compile_layers", False, "compiling takes longer than two steps")
    edits.at_most("algorithm.value_loss.warmup_steps", 1, "the policy learns in the second step")


def _checkpoints(edits: Edits, spec: ExperimentSpec) -> None:
    edits.at_most("checkpoint.every_steps", STEPS, COSTS)
    edits.set("checkpoint.upload_to", None, "nothing of a trial leaves this machine")
    if spec.checkpoint.resume_from is not None:
        edits.set("checkpoint.resume_from", None, "the small model has no checkpoint to go on from")
        edits.set("checkpoint.load_contents", ["model", "optimizer", "extra"], "as above")


def _keeping(edits: Edits, spec: ExperimentSpec) -> None:
    edits.set("tracking.trackers", [{"kind": "jsonl"}], "nothing of a trial leaves this machine")
    edits.set("evaluation.every_versions", None, COSTS)
    edits.at_most("evaluation.deadline_seconds", 300, COSTS)
    edits.set("job.held_out.every_steps", None, COSTS)
    if spec.finished_job is None and spec.trains and not spec.algorithm.is_pure_distillation:
        given = spec.health.max_groups_without_signal
        most = FEW_SIGNALLESS if given is None else min(given, FEW_SIGNALLESS)
        edits.set("health.max_groups_without_signal", most, "a trial that learns nothing ends")


def _texts(node: Any) -> list[str]:
    """List the texts of a document: prompts, templates, schemas."""
    if isinstance(node, str):
        return [node]
    below = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
    return [text for each in below for text in _texts(each)]
