"""verl as a system to import from, and how its launch files are read.

verl's ``trainer.val_only``: the held-out problems are answered and graded once, and nothing is trained.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from flotilla.importers.composition import Beside, Composition
from flotilla.importers.hydra import apply_hydra_overrides, as_given, problem
from flotilla.importers.parameter import UNSET, Inherit, ignored
from flotilla.importers.shell import given_variables, read_script
from flotilla.importers.source import Given, Source, System, make_system
from flotilla.importers.verl import (
    actor,
    algorithm,
    data,
    datasets,
    distillation,
    gdpo,
    images,
    launch,
    learning,
    megatron,
    offload,
    overrides,
    profiler,
    releases,
    rewards,
    rules,
    silent,
    tools,
    trainer,
)

NOT_REACHED: Final = (
    "no trainer of verl is started here: the script ends before, or starts one in a branch that is not taken; give the "
    "variable that this depends on as NAME=VALUE"
)
VALIDATION_ONLY: Final = "trainer.val_only"
KEPT: Final = ("name", "seed", "model", "data", "rollout", "reward", "samples", "tracking", "evaluation")
"""Sections that say how problems are answered and graded, and how that is kept."""
OF_TRAINING: Final = (
    "model.lora", "data.path", "data.sources", "data.max_rows", "data.shuffle", "reward.group_filter",
    "evaluation.every_versions",
)  # fmt: skip
"""Of these what training alone reads."""


def only_validated(source: Source, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Leave of a spec what an evaluation reads, where the run ends after its validation; else return all of it."""
    if not source.value(VALIDATION_ONLY):
        return dict(fields)
    if not any(field.startswith("evaluation.") for field in fields):
        source.refuse(VALIDATION_ONLY, "there are no held-out problems to answer: give data.val_files")
        return dict(fields)
    left = {field: value for field, value in fields.items() if _is_read(field)}
    source.missing[:] = [each for each in source.missing if _is_read(each.partition(":")[0])]
    for name in [*source.read]:
        targets = source.system.parameters[name].targets
        if targets and name != VALIDATION_ONLY and not any(_is_read(target) for target in targets):
            source.read.discard(name)
    return left | {"job.kind": "evaluation"}


def _is_read(field: str) -> bool:
    is_training = any(field == each or field.startswith(f"{each}.") for each in OF_TRAINING)
    return field.partition(".")[0] in KEPT and not is_training


OWN = frozenset(
    {*launch.OWN, "sft_trainer",
     "dp_actor", "megatron_actor", "legacy_data", "dp_ref", "megatron_ref", "rollout", "hf_model",
     "dp_critic", "megatron_critic", "dp_reward_model", "megatron_reward_model", "dp_reward_loop",
     "megatron_reward_loop", "rollout_correction"}
)  # fmt: skip
"""verl's own files of defaults, which the tables know."""

VERL: System = make_system(
    "verl",
    (
        data.DATA, data.ROLLOUT, tools.ROWS, actor.MODEL_ROWS, actor.ACTOR_ROWS, actor.REFERENCE_ROWS,
        actor.CRITIC_ROWS, distillation.ROWS, gdpo.ROWS, images.ROWS,
        actor.OPTIM_ROWS, actor.MEGATRON_ROWS, megatron.TRANSFORMER_ROWS, megatron.ROUTER_ROWS,
        algorithm.ALGORITHM_ROWS,
        algorithm.LEGACY_ROWS, algorithm.CORRECTION_ROWS, algorithm.REWARD_ROWS, trainer.TRAINER_ROWS,
        trainer.ASYNC_ROWS, trainer.OTHER_ROWS, trainer.LAUNCH_ROWS,
        profiler.ROWS, silent.ROWS,
        ignored("names the class that verl reads a section into", "_target_"),
    ),
    rules=(
        datasets.rows, rules.batches, rules.lengths, rules.schedule, learning.advantage, learning.policy_loss,
        learning.kl, learning.old_policy, learning.critic, images.images, images.adapters, overrides.overrides,
        learning.resampling,
        distillation.distillation, rewards.rewards,
        rules.evaluation, rules.checkpoints, rules.beginning, rules.placement, offload.offload, offload.kernels,
        megatron.router,
        rules.publication, rules.tracking, profiler.profiler,
        tools.episodes, releases.told,
    ),
    spellings={name: targets[0] for name, targets in trainer.LAUNCH_VARIABLES.items()},
    finish=only_validated,
)  # fmt: skip


def read_verl(
    text: str,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    *,
    source: str,
    is_script: bool,
    beside: Beside,
    program: int | None = None,
) -> list[Given]:
    """Read verl's YAML, or a launch script, with ``KEY=VALUE`` from the command line.

    Args:
        program: number of the program that is meant, where a script starts several.

    Raises:
        InvalidSpec: something cannot be read; ``errors`` has its place.
    """
    if is_script:
        return tools.with_tools(_from_script(text, overrides, environment, source, beside, program), beside)
    flat = Composition(beside, OWN).read(text, source=source)
    names = flat | dict(pair.lstrip("+~").split("=", 1) for pair in overrides if "=" in pair)
    kind = launch.kind_of_defaults(flat.get("defaults")) or launch.kind_of_keys(names) or launch.Kind.SYNCHRONOUS
    implied = launch.implied(kind, flat.get("defaults"))
    given = tools.with_tools(_resolved(flat, [], overrides, implied, environment, where="file"), beside)
    is_said = any(each.spelling == launch.MODULE for each in given)
    return given if is_said else [*given, *launch.said(kind, None, "default")]


def default_of(name: str) -> object:
    """Return verl's default of a parameter, for interpolations; UNSET if it has none."""
    row = VERL.parameters.get(name)
    if row is None:
        return UNSET
    return default_of(row.default.name) if isinstance(row.default, Inherit) else row.default


def _from_script(
    text: str,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    source: str,
    beside: Beside,
    program: int | None,
) -> list[Given]:
    fixed = given_variables(overrides, text, source=source)
    dotted = [pair for pair in overrides if pair.partition("=")[0] not in fixed]
    script = read_script(text, fixed, source=source, environment=environment)
    found = launch.find_launch(script, source, program)
    if found is None:  # a fragment without a command: its variables are all that there is
        known = {*trainer.LAUNCH_VARIABLES, *(row.name for row in trainer.LAUNCH_ROWS)}
        flat = {name: value for name, value in script.variables.items() if name in known}
        if script.ends or launch.is_started(text) or not flat:
            raise problem(script.ends or source, "exit" if script.ends else "nothing", NOT_REACHED)
        return _resolved(flat, [], dotted, {}, environment, where="script")
    flat, refusals = launch.config_values(found, beside, OWN)
    refusals = [*launch.program_given(found), *refusals, *found.refusals]
    kind = found.kind
    if kind is launch.Kind.SYNCHRONOUS:
        names = [found.options.get(launch.CONFIG, "").removesuffix(".yaml"), *(flat.get("defaults") or [])]
        kind = launch.kind_of_defaults(names) or kind
    implied = launch.implied(kind, [found.options.get(launch.CONFIG, ""), *(flat.get("defaults") or [])])
    resolved = _resolved(flat, found.overrides, dotted, implied, environment, where="script")
    return [*refusals, *(replace(each, lacks=script.lacking(each.spelling)) for each in resolved)]


def _resolved(
    flat: Mapping[str, Any],
    words: Sequence[str],
    overrides: Sequence[str],
    implied: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    where: str,
) -> list[Given]:
    """Join a file's values, a script's words and our command line, each over the one before."""
    of_file = set(flat)
    joined, of_script = apply_hydra_overrides(flat, words)
    written = {*joined, *(pair.partition("=")[0].lstrip("+~") for pair in overrides)}
    said = {**joined, **dict(pair.lstrip("+~").split("=", 1) for pair in overrides if "=" in pair)}
    implied = {name: value for name, value in implied.items() if not _is_written(name, written)}
    implied |= releases.of_older(said)
    joined, touched = apply_hydra_overrides({**joined, **implied}, overrides)
    found = []
    for each in as_given(joined, touched, default_of, environment):
        is_file = each.spelling in of_file and each.spelling not in of_script
        origin = "default" if each.spelling in implied else "file" if is_file and where == "script" else where
        found.append(replace(each, where="override" if each.spelling in touched else origin))
    return found


def _is_written(name: str, written: Container[str]) -> bool:
    row = VERL.parameters[name]
    return any(each in written for each in (name, *row.aliases))
