"""verl as a system to import from, and how its launch files are read."""

import re
from collections.abc import Container, Mapping, Sequence

from flotilla.importers.composition import Beside, Composition
from flotilla.importers.hydra import apply_hydra_overrides, as_given, problem
from flotilla.importers.parameter import UNSET, Inherit, System, ignored, make_system
from flotilla.importers.shell import NAME, Script, read_script
from flotilla.importers.source import Given
from flotilla.importers.verl import actor, algorithm, data, datasets, learning, rules, trainer

OWN = frozenset(
    {"ppo_trainer", "ppo_megatron_trainer", "fully_async_ppo_trainer", "fully_async_ppo_megatron_trainer", "dp_actor",
     "megatron_actor", "legacy_data", "dp_ref", "megatron_ref", "rollout", "hf_model", "dp_critic", "megatron_critic",
     "dp_reward_model", "megatron_reward_model", "dp_reward_loop", "megatron_reward_loop", "rollout_correction"}
)  # fmt: skip
"""verl's own files of defaults, which the tables know."""
OPTIONS = ("--config-name", "--config-path", "--config-dir")

VERL: System = make_system(
    "verl",
    (
        data.DATA, data.ROLLOUT, actor.MODEL_ROWS, actor.ACTOR_ROWS, actor.REFERENCE_ROWS, actor.CRITIC_ROWS,
        actor.OPTIM_ROWS, actor.MEGATRON_ROWS, algorithm.ALGORITHM_ROWS, algorithm.LEGACY_ROWS,
        algorithm.CORRECTION_ROWS, algorithm.REWARD_ROWS, trainer.TRAINER_ROWS, trainer.ASYNC_ROWS,
        trainer.OTHER_ROWS, trainer.LAUNCH_ROWS,
        ignored("names the class that verl reads a section into", "_target_"),
    ),
    rules=(
        datasets.rows, rules.batches, rules.lengths, rules.schedule, learning.advantage, learning.policy_loss,
        learning.kl, learning.old_policy, learning.critic, learning.resampling, rules.rewards, rules.evaluation,
        rules.checkpoints, rules.placement, rules.publication, rules.tracking,
    ),
    spellings={name: targets[0] for name, targets in trainer.LAUNCH_VARIABLES.items()},
)  # fmt: skip


def read_verl(
    text: str, overrides: Sequence[str], environment: Mapping[str, str], *, source: str, is_script: bool, beside: Beside
) -> list[Given]:
    """Read verl's YAML, or a launch script, with ``KEY=VALUE`` from the command line.

    Raises:
        InvalidSpec: something cannot be read; ``errors`` has its place.
    """
    if is_script:
        return _from_script(text, overrides, environment, source)
    flat, touched = apply_hydra_overrides(Composition(beside, OWN).read(text, source=source), overrides)
    return as_given(flat, touched, default_of, environment)


def default_of(name: str) -> object:
    """Give verl's default of a parameter, for interpolations; UNSET if it has none."""
    row = VERL.parameters.get(name)
    if row is None:
        return UNSET
    return default_of(row.default.name) if isinstance(row.default, Inherit) else row.default


def _from_script(text: str, overrides: Sequence[str], environment: Mapping[str, str], source: str) -> list[Given]:
    fixed = dict(pair.split("=", 1) for pair in overrides if "=" in pair and NAME.fullmatch(pair.partition("=")[0]))
    dotted = [pair for pair in overrides if pair.partition("=")[0] not in fixed]
    unused = next((name for name in fixed if not re.search(rf"\b{re.escape(name)}\b", text)), None)
    if unused is not None:
        raise problem(unused, fixed[unused], f"{source} uses no variable of this name")
    script = read_script(text, fixed, source=source)
    module, words = _trainer_command(script, source)
    flat, _ = apply_hydra_overrides({}, [word for word in words if not word.startswith("-")])
    if not module:  # a fragment without a command: its variables are all that there is
        known = {*trainer.LAUNCH_VARIABLES, *(row.name for row in trainer.LAUNCH_ROWS)}
        flat = {name: value for name, value in script.variables.items() if name in known}
    implied = {"data.train_batch_size": 0} if "fully_async" in module and "data.train_batch_size" not in flat else {}
    flat, touched = apply_hydra_overrides({**flat, **implied}, dotted)
    return [
        Given(each.value, each.spelling, _origin(each.spelling, touched, implied))
        for each in as_given(flat, touched, default_of, environment)
    ]


def _origin(name: str, touched: Container[str], implied: Container[str]) -> str:
    return "override" if name in touched else "default" if name in implied else "script"


def _trainer_command(script: Script, source: str) -> tuple[str, list[str]]:
    """Find the command that starts verl; gives its module and the words after it."""
    found: list[tuple[str, list[str]]] = []
    for command in script.commands:
        words = command.words
        for position, word in enumerate(words):
            module = words[position + 1] if word == "-m" and position + 1 < len(words) else ""
            if "verl" in module or "main_ppo" in module or "fully_async" in module:
                start = position + 2
            elif word.endswith(("main_ppo.py", "fully_async_main.py")):
                module, start = word, position + 1
            else:
                continue
            if command.problem is not None:
                raise command.problem
            found.append((module, _after(words[start:])))
            break
    if len(found) > 1:
        raise problem(source, found[1][0], "the script starts verl more than once: keep one command")
    return found[0] if found else ("", [])


def _after(words: Sequence[str]) -> list[str]:
    """Drop Hydra's options, with the values that stand apart from them."""
    kept, is_value = [], False
    for word in words:
        if not is_value and not word.startswith(OPTIONS):
            kept.append(word)
        is_value = word in OPTIONS
    return kept
