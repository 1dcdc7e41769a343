"""How OpenRLHF's command lines and launch scripts are read: which program they start, and its flags."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from flotilla.importers.hydra import problem
from flotilla.importers.programs import program_of, which
from flotilla.importers.shell import Command, given_variables, read_script
from flotilla.importers.source import Given
from flotilla.shared.errors import InvalidSpec

MODULE: Final = "python -m"
"""How the report calls the program that is started."""
PPO: Final = "openrlhf.cli.train_ppo_ray"
NOT_TRAINERS: Final = ("serve_rm", "batch_inference", "interactive_chat", "lora_combiner", "merge")
"""Programs of OpenRLHF that train nothing, by a part of their names."""
ON_FINISHED: Final = tuple(f"openrlhf.cli.train_{each}" for each in ("sft", "dpo", "rm", "kto", "kd"))
"""Trainers on finished answers, which have flags of their own."""
OTHER: Final = (
    f"the fleet has no job of this kind; those that it has are {PPO} and {', '.join(ON_FINISHED)}: train otherwise "
    "first, then set --pretrain to the result"
)
UNKNOWN: Final = (
    f"no program of OpenRLHF's that this importer knows: what its own code sets is not in this report; its flags are "
    f"read as those of {PPO}"
)
OWN = re.compile(r"openrlhf\.cli\.\w+")
PYTHON = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|deepspeed)")
NOTHING: Mapping[int, InvalidSpec] = {}


def read_openrlhf(
    words: Sequence[str], *, where: str = "command line", unknown: Mapping[int, InvalidSpec] = NOTHING
) -> list[Given]:
    """Read a command line: perhaps what starts the program, then ``--flag``, ``--flag value ...``, ``--flag=value``.

    Args:
        words: of the command line.
        where: it is from, for the report.
        unknown: why a word is not known, by its number: its flag is refused.

    Raises:
        InvalidSpec: there is a value without a flag.
    """
    found = find_program(words)
    module, start = found if found is not None else (PPO, 0)
    given: dict[str, list[str]] = {}
    refusals: dict[str, str] = {}
    current: str | None = None
    for number, word in enumerate(words[start:], start):
        is_flag = word.startswith("--") and len(word) > 2
        if is_flag:
            current, equals, value = word.partition("=")
            given[current] = [value] if equals else []
        elif current is None and number not in unknown:
            raise problem(where, word, "a command line of OpenRLHF consists of flags and their values")
        elif current is not None:
            given[current].append(word)
        if number in unknown:
            name = current if current is not None else word
            given.setdefault(name, [])
            refusals[name] = unknown[number].detail
    program = [] if module == PPO else [Given(module, MODULE, where, refusal=_why_not(module))]
    if module in ON_FINISHED:
        program = [Given(module, MODULE, where)]
    return program + [Given(_value(values), name, where, refusal=refusals.get(name)) for name, values in given.items()]


def read_openrlhf_script(
    text: str,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    *,
    source: str,
    program: int | None = None,
) -> list[Given]:
    """Read the flags that a launch script gives to OpenRLHF, with ``NAME=VALUE`` from the command line.

    Args:
        program: number of the program that is meant, where it starts several; counted from 1.

    Raises:
        InvalidSpec: the script cannot be followed, starts OpenRLHF not once, or has no variable of a name.
    """
    fixed = given_variables(overrides, text, source=source)
    other = next((pair for pair in overrides if pair.partition("=")[0] not in fixed), None)
    if other is not None:
        raise problem("command line", other, f"beside {source} there may be NAME=VALUE, for its variables")
    script = read_script(text, fixed, source=source, environment=environment)
    started = [(command, found) for command in script.commands if (found := find_program(command.words))]
    mine = [each for each in started if OWN.fullmatch(each[1][0]) or _has_model(each[0], each[1][1])]
    names = [module for _, (module, _) in mine]
    known = [command for command, (module, _) in mine if module == PPO]
    trainers = known or [command for command, (module, _) in mine if module in ON_FINISHED]
    chosen = trainers or [command for command, _ in mine]
    if program is not None:
        chosen = trainers = [program_of(mine, names, program, source)[0]]
    if not chosen:
        _raise_unknown(script.commands)
        raise problem(source, "nothing", f"the script must start {PPO} once")
    if trainers[1:]:
        raise problem(source, len(trainers), f"the script starts several programs: {which(names)}")
    if chosen[0].problem is not None and not chosen[0].unknown:  # whether it runs at all is not known
        raise chosen[0].problem
    flags = read_openrlhf(chosen[0].words, where="script", unknown=chosen[0].unknown)
    return [replace(each, lacks=script.lacking(each.spelling)) for each in flags]


def find_program(words: Sequence[str]) -> tuple[str, int] | None:
    """Find what a command line starts by Python, and the position of its first argument; None where it is flags."""
    if not words or words[0].startswith("--"):
        return None
    is_python = False
    for position, word in enumerate(words):
        before = words[position - 1] if position else ""
        if OWN.fullmatch(word) or (before in {"-m", "--module"} and re.fullmatch(r"[A-Za-z_][\w.]*", word)):
            return word, position + 1
        if word.endswith(".py") and (is_python or position == 0):
            name = word.removesuffix(".py").replace("/", ".")
            own = [each for each in (PPO, *ON_FINISHED) if name in {each, each.rpartition(".")[2]}]
            own += [each for each in (PPO, *ON_FINISHED) if name.endswith(f".{each}")]
            return (own[0] if own else word), position + 1
        is_python = is_python or PYTHON.fullmatch(word) is not None
    return None


def _has_model(command: Command, start: int) -> bool:
    return any(word.partition("=")[0] in {"--pretrain", "--actor.model_name_or_path"} for word in command.words[start:])


def _raise_unknown(commands: Sequence[Command]) -> None:
    """Return what is not known in a command that may be the one that is searched for."""
    for command in commands:
        if command.problem is not None and any("openrlhf" in word or "$" in word for word in command.words):
            raise command.problem


def _why_not(module: str) -> str:
    if not OWN.fullmatch(module):
        return UNKNOWN
    return "trains nothing" if any(part in module for part in NOT_TRAINERS) else OTHER


def _value(values: Sequence[str]) -> Any:
    if not values:
        return True
    return values[0] if len(values) == 1 else list(values)
