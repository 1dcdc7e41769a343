"""Which of verl's trainers a script starts, with which file of defaults, and which words it is given."""

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from flotilla.importers.composition import Beside, Composition
from flotilla.importers.hydra import OVERRIDE, problem
from flotilla.importers.programs import program_of, which
from flotilla.importers.shell import Command, Script
from flotilla.importers.source import Given
from flotilla.importers.verl.carried import carried
from flotilla.shared.errors import InvalidSpec

MODULE: Final = "python -m"
"""How the report calls the program that a script starts."""
CONFIG: Final = "--config-name"


class Kind(StrEnum):
    """How a trainer of verl's and its rollouts take turns."""

    SYNCHRONOUS = "synchronous"
    ONE_STEP_OFF = "one_step_off"
    FULLY_ASYNC = "fully_async"
    DAPO = "dapo"


IMPLIED: Mapping[Kind, Mapping[str, Any]] = MappingProxyType(
    {
        Kind.SYNCHRONOUS: {},
        Kind.FULLY_ASYNC: {"data.train_batch_size": 0},
        Kind.ONE_STEP_OFF: {"algorithm.rollout_correction.bypass_mode": True},
        Kind.DAPO: {
            "reward_model.reward_manager": "dapo",
            "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": 0.0,
            "trainer.project_name": "verl-dapo",
        },
    }
)
"""What the file of a trainer sets, beyond that of ``main_ppo``."""
TRAINERS: Mapping[str, Kind] = MappingProxyType(
    {
        "verl.trainer.main_ppo": Kind.SYNCHRONOUS,
        "verl.trainer.main_ppo_sync": Kind.SYNCHRONOUS,
        "recipe.transfer_queue.main_ppo": Kind.SYNCHRONOUS,
        "examples.split_placement.main_ppo_split": Kind.SYNCHRONOUS,
        "recipe.dapo.main_dapo": Kind.DAPO,
        "recipe.dapo.src.main_dapo": Kind.DAPO,
        "recipe.one_step_off_policy.main_ppo": Kind.ONE_STEP_OFF,
        "recipe.one_step_off_policy.async_main_ppo": Kind.ONE_STEP_OFF,
        "verl.experimental.one_step_off_policy.main_ppo": Kind.ONE_STEP_OFF,
        "recipe.fully_async_policy.fully_async_main": Kind.FULLY_ASYNC,
        "verl.experimental.fully_async_policy.fully_async_main": Kind.FULLY_ASYNC,
    }
)
OWN: Mapping[str, Kind] = MappingProxyType(
    {
        "ppo_trainer": Kind.SYNCHRONOUS,
        "ppo_megatron_trainer": Kind.SYNCHRONOUS,
        "transfer_queue_ppo_trainer": Kind.SYNCHRONOUS,
        "ppo_trainer_split": Kind.SYNCHRONOUS,
        "dapo_trainer": Kind.DAPO,
        "dapo_megatron_trainer": Kind.DAPO,
        "one_step_off_ppo_trainer": Kind.ONE_STEP_OFF,
        "one_step_off_ppo_megatron_trainer": Kind.ONE_STEP_OFF,
        "fully_async_ppo_trainer": Kind.FULLY_ASYNC,
        "fully_async_ppo_megatron_trainer": Kind.FULLY_ASYNC,
    }
)
"""verl's own files of defaults, which the tables know."""
EMPTY: Mapping[str, str] = MappingProxyType({"rm_config": "fapo/config"})
"""Files of verl's recipes that set nothing beyond ``ppo_trainer``, with the end of their folder."""
STRATEGY: Final = "actor_rollout_ref.actor.strategy"
GENERATORS: Final = frozenset({"main_generation", "main_generation_server"})
"""Programs that answer problems and train nothing."""
UNKNOWN: Final = (
    "no trainer of verl that this importer knows: what its own code and file of defaults set is not in this report; "
    f"the parameters are read as those of verl.trainer.main_ppo (known are {', '.join(TRAINERS)})"
)
OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "verl.trainer.main": "EasyR1's trainer, whose keys (worker.*, data.rollout_batch_size) and defaults are its "
        "own: its files are not read; write what they say as keys of verl's",
    }
)
"""Trainers built on verl that are often met, and why their files are not read."""
OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "--config-name": CONFIG, "-cn": CONFIG, "--config-path": "--config-path", "-cp": "--config-path",
        "--config-dir": "--config-dir", "-cd": "--config-dir",
    }
)  # fmt: skip
"""Hydra's options that say which file is read."""
WITHOUT_EFFECT: Final = frozenset({"--cfg", "-c", "--info", "-i", "--package", "-p", "--experimental-rerun"})
"""Hydra's options with a value, that choose no file."""
PYTHON = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|deepspeed)")
ENGINES = frozenset({"rollout.nnodes", "rollout.n_gpus_per_node"})
"""Keys of the trainers that have engines of their own; one-step-off takes a batch size, fully asynchronous none."""
ASYNC_ONLY = frozenset({"rollout.total_rollout_steps", "rollout.test_freq"})
PROGRAM = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|deepspeed|accelerate|ray|uv|bash|sh|source|\.)")
TRAINER = re.compile(r"\bmain_(?:ppo|dapo|eval|generation)\w*|\bfully_async_main\b|\bsft_trainer\b")
MAX_ABOVE = 8


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of a trainer.

    Attributes:
        module: its dotted name, or its file where that is no trainer of verl's.
        overrides: Hydra's ``key=value``.
        options: of Hydra, by their long names.
        refusals: parameters whose value is not known, and words that cannot be read.
    """

    module: str
    overrides: Sequence[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    refusals: Sequence[Given] = ()

    @property
    def kind(self) -> Kind:
        """How trainer and rollouts take turns; a program that is not known is taken for the synchronous trainer."""
        return TRAINERS.get(self.module, Kind.SYNCHRONOUS)


def find_launch(script: Script, source: str, program: int | None = None) -> Launch | None:
    """Find the one start of a trainer; None in a fragment that starts no program.

    Args:
        program: number of the program that is meant, where there are several; counted from 1.

    Raises:
        InvalidSpec: there are several, or only programs that are given no parameters of verl's.
    """
    started = [found for command in script.commands for found in _programs(command)]
    known = [each for each in started if each[1] in TRAINERS]
    with_parameters = [each for each in started if any(_is_parameter(word) for word in each[0].words[each[2] :])]
    chosen = known or with_parameters
    mine = [each for each in started if each in known or each in with_parameters]
    names = [module for _, module, _ in mine]
    if program is not None:
        return _launch(*program_of(mine, names, program, source))
    if (both := _answered_and_scored(chosen)) is not None:
        return both
    if len(chosen) > 1:
        raise problem(source, chosen[1][1], f"the script starts verl more than once: {which(names)}")
    if chosen:
        return _launch(*chosen[0])
    programs = [command for command in script.commands if PROGRAM.fullmatch(command.words[0])]
    if started or programs:
        name = started[0][1] if started else " ".join(programs[0].words[:3])
        raise problem(source, name, f"no trainer of verl is started here (known are {', '.join(TRAINERS)})")
    return None


def is_started(text: str) -> bool:
    """Whether a script names a trainer outside of comments, be it where it is not reached."""
    return any(TRAINER.search(line) is not None for line in text.splitlines() if not line.lstrip().startswith("#"))


def _answered_and_scored(started: Sequence[tuple[Command, str, int]]) -> Launch | None:
    """Join a program that answers problems and one that scores its answers; None where they are not these two."""
    if len(started) != 2 or last_name(started[0][1]) not in GENERATORS or not is_scoring(started[1][1]):
        return None
    answering, scoring = (_launch(*each) for each in started)
    function = [word for word in scoring.overrides if word.startswith("custom_reward_function.")]
    refusals = [each for each in scoring.refusals if each.spelling.startswith("custom_reward_function.")]
    return replace(answering, overrides=[*answering.overrides, *function], refusals=[*answering.refusals, *refusals])


def _programs(command: Command) -> Iterator[tuple[Command, str, int]]:
    """Return what a command starts by Python, with the position of its first argument."""
    is_python = False
    for position, word in enumerate(command.words):
        following = command.words[position + 1] if position + 1 < len(command.words) else ""
        if word in {"-m", "--module"} and re.fullmatch(r"[A-Za-z_][\w.]*", following):
            yield command, following, position + 2
            return
        if word.endswith(".py") and (is_python or position == 0):
            yield command, _dotted(word), position + 1
            return
        is_python = is_python or PYTHON.fullmatch(word) is not None


def _dotted(path: str) -> str:
    """Name the module of a file, where it is one of verl's trainers; a bare ``main_ppo.py`` is verl's own."""
    dotted = path.removesuffix(".py").strip("./~").replace("/", ".")
    known = [name for name in TRAINERS if dotted == name or dotted.endswith(f".{name}")]
    bare = [name for name in TRAINERS if "/" not in path.removeprefix("./") and name.endswith(f".{dotted}")]
    return known[0] if known else bare[0] if bare and not known else path


def _is_parameter(word: str) -> bool:
    return _is_override(word) and "." in word.partition("=")[0]


def _is_override(word: str) -> bool:
    match = OVERRIDE.match(word.strip())
    return match is not None and (match[3] is not None or match[1] == "~")


def _launch(command: Command, module: str, start: int) -> Launch:
    if command.problem is not None and not command.unknown:  # whether it runs at all is not known
        raise command.problem
    overrides: list[str] = []
    options: dict[str, str] = {}
    refusals: list[Given] = []
    pending: str | None = None
    for number, word in enumerate(command.words[start:], start):
        if (error := command.unknown.get(number)) is not None:
            refusals.append(_refusal(word, error))
            pending = None
        elif pending is not None:
            options[pending] = word
            pending = None
        elif word.startswith("-"):
            name, equals, value = word.partition("=")
            wanted = OPTIONS.get(name) or (name if name in WITHOUT_EFFECT else None)
            if wanted is not None and equals:
                options[wanted] = value
            pending = wanted if not equals else None
            if wanted is None:
                refusals.append(Given(value or True, name, "script", refusal="no option of Hydra's that is read here"))
        elif _is_override(word):
            overrides.append(word)
        elif word.strip():
            refusals.append(Given(True, word, "script", refusal="no parameter: verl's have the form key=value"))
    return Launch(module, overrides, options, refusals)


def _refusal(word: str, error: InvalidSpec) -> Given:
    name, equals, value = word.replace('"', "").replace("'", "").partition("=")
    is_parameter = bool(equals) and OVERRIDE.match(f"{name}=x") is not None
    spelling = name.lstrip("+~") if is_parameter else word
    return Given(value if is_parameter else word, spelling, "script", refusal=error.detail)


def program_given(launch: Launch) -> list[Given]:
    """Return the program as a parameter, where it is not verl's usual one."""
    if launch.module in TRAINERS:
        return said(launch.kind, launch.module, "script")
    is_known = is_fine_tuning(launch.module) or is_scoring(launch.module) or last_name(launch.module) in GENERATORS
    why = None if is_known else OTHERS.get(launch.module, UNKNOWN)
    return [Given(launch.module, MODULE, "script", refusal=why)]


def is_fine_tuning(module: str) -> bool:
    """Whether a program is verl's trainer of supervised fine-tuning."""
    return last_name(module) in {"sft_trainer", "fsdp_sft_trainer"}


def is_scoring(module: str) -> bool:
    """Whether a program scores answers that were written before."""
    return last_name(module) == "main_eval"


def last_name(module: str) -> str:
    """Return the last part of a program's name."""
    return module.removesuffix(".py").replace("/", ".").rpartition(".")[2]


def said(kind: Kind, module: str | None, where: str) -> list[Given]:
    """Return the program of a kind that its parameters alone do not tell from the synchronous one."""
    if kind not in {Kind.ONE_STEP_OFF, Kind.DAPO}:
        return []
    usual = next(name for name, each in TRAINERS.items() if each is kind)
    return [Given(module or usual, MODULE, where)]


def config_values(launch: Launch, beside: Beside, own: frozenset[str]) -> tuple[dict[str, Any], list[Given]]:
    """Read the file that ``--config-name`` names, unless it is verl's own.

    Returns:
        Dotted names, and the refusal of a file that is not found.

    Raises:
        InvalidSpec: it does not parse.
    """
    written, folder = launch.options.get(CONFIG), launch.options.get("--config-path", "")
    more = launch.options.get("--config-dir")
    name = (written or "").removesuffix(".yaml").removesuffix(".yml")
    is_verls = not folder or posixpath.normpath(folder) == "config" or _is_of_verl(folder)
    if not name or (name in OWN and is_verls):
        if folder and not is_verls:
            why = f"{folder} is not a folder of verl's, and which of its files is meant is not said: give {CONFIG}"
            return {}, [Given(folder, "--config-path", "script", refusal=why)]
        return {}, []
    places = [*_places(folder, name), *(_places(more, name) if more else [])]
    for place in places:
        if (text := beside(place)) is not None:
            return Composition(beside, own).read(text, source=place, folder=posixpath.dirname(place)), []
    if EMPTY.get(name, "-") == "/".join(posixpath.normpath(folder).split("/")[-2:]):
        return {}, []
    if (text := carried(posixpath.join(folder, name))) is not None:
        return Composition(beside, own).read(text, source=name), []
    why = (
        f"no file of verl's that this importer knows, and not found as {posixpath.join(folder, name)}.yaml beside the "
        "script or above it: its values are not in this report; give --config-dir DIR, the folder that it lies in"
    )
    return {}, [Given(written, CONFIG, "script", refusal=why)]


def _is_of_verl(folder: str) -> bool:
    parts = posixpath.normpath(folder).split("/")
    return parts[-1:] == ["config"] and parts[-3:-1] in (
        ["verl", "trainer"],
        *(name.split(".")[-3:-1] for name in TRAINERS),
    )


def _places(folder: str, name: str) -> Iterator[str]:
    """Return where a file may lie: as written, in the folder that the user names, or from a folder above."""
    yield posixpath.normpath(posixpath.join(folder, name))
    yield name
    if folder and not folder.startswith(("/", "~")):
        for number in range(1, MAX_ABOVE):
            yield posixpath.normpath(posixpath.join("../" * number, folder, name))


def kind_of_keys(names: Mapping[str, Any]) -> Kind | None:
    """Return one-step-off if a file's keys say so: it has engines of its own, and a batch size above 0."""
    is_async = any(name.startswith("async_training.") or name in ASYNC_ONLY for name in names)
    has_batch = names.get("data.train_batch_size") not in {None, 0}
    return Kind.ONE_STEP_OFF if ENGINES & set(names) and has_batch and not is_async else None


def implied(kind: Kind, entries: Any) -> dict[str, Any]:
    """Return what the file of a trainer sets beyond that of ``main_ppo``; the one of Megatron, what it trains by."""
    is_megatron = isinstance(entries, list) and any("megatron" in str(entry) for entry in entries)
    return {**IMPLIED[kind], **({STRATEGY: "megatron"} if is_megatron else {})}


def kind_of_defaults(entries: Any) -> Kind | None:
    """Return which trainer a YAML file is of, by the file of verl's that its ``defaults`` name."""
    names = [str(entry).partition("@")[0].rpartition("/")[2] for entry in entries] if isinstance(entries, list) else []
    return next((OWN[name] for name in names if name in OWN), None)
