"""What a shell script starts of TRL: ``trl grpo --flags``, one of TRL's own scripts, or a script of the user's."""

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from flotilla.importers.composition import Beside
from flotilla.importers.hydra import problem
from flotilla.importers.programs import program_of, which
from flotilla.importers.shell import Command, read_script
from flotilla.shared.config.load.yaml_text import read_value, too_large

COMMANDS: Final[Mapping[str, str]] = {
    "grpo": "GRPOTrainer", "sft": "SFTTrainer", "dpo": "DPOTrainer", "reward": "RewardTrainer", "rloo": "RLOOTrainer",
    "kto": "KTOTrainer",
}  # fmt: skip
"""Trainers by the command of ``trl``."""
OWN = re.compile(rf"(?:.*/)?(?:trl|examples)/scripts/(?P<name>{'|'.join(COMMANDS)})(?:_modeling)?\.py")
MODULE = re.compile(rf"trl\.scripts\.(?P<name>{'|'.join(COMMANDS)})")
STARTS = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed)")
CONFIG: Final = "config"
MAX_ABOVE: Final = 8
MAX_WORDS: Final = 4096
"""Of one command."""
WHERE: Final = (
    "in the script's folder or, within its git repository, above it: give --config-dir DIR, the folder that it lies "
    "in; nothing outside of these is read"
)


@dataclass(frozen=True, slots=True)
class Started:
    """One start of a trainer.

    Attributes:
        name: as messages call it.
        trainer: of TRL's own commands; empty where a script of the user's makes it.
        place: of the user's script, as it is written.
        flags: by name, without dashes: text, a list, or true where nothing follows.
        unknown: why a flag's value is not known.
    """

    name: str
    trainer: str
    place: str
    flags: Mapping[str, Any]
    unknown: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Read:
    """What a shell script comes to.

    Attributes:
        trainer: of TRL's own commands; empty where ``text`` makes it.
        text, source: the user's script of Python's, and where it lies.
        values: parameters of the command line, over those of the file that ``--config`` names.
        unknown: why a parameter's value is not known.
    """

    trainer: str
    text: str
    source: str
    values: Mapping[str, Any]
    unknown: Mapping[str, str]


def read_command(
    text: str, fixed: Mapping[str, str], environment: Mapping[str, str], *, source: str, beside: Beside,
    program: int | None,
) -> Read:  # fmt: skip
    """Read the one start of a trainer in a shell script.

    Raises:
        InvalidSpec: there is none, or several, or a file that it names is not found.
    """
    script = read_script(text, fixed, source=source, environment=environment)
    starts = [each for command in script.commands if (each := _started(command)) is not None]
    names = [each.name for each in starts]
    if program is not None:
        starts = [program_of(starts, names, program, source)]
    if len(starts) != 1:
        why = which(names) if starts else f"it starts none of trl {'|'.join(COMMANDS)}, and no script of Python's"
        raise problem(source, len(starts), f"the script must start TRL once: {why}")
    started = starts[0]
    values = dict(started.flags)
    if isinstance(config := values.pop(CONFIG, None), str):
        values = _config(config, source, beside) | values
    if started.trainer:
        return Read(started.trainer, "", source, values, started.unknown)
    for place in _places(started.place):
        if (found := beside(place)) is not None:
            return Read("", found, place, values, started.unknown)
    raise problem(source, started.place, f"this script is not found {WHERE}")


def _started(command: Command) -> Started | None:
    words = command.words[:MAX_WORDS]
    is_started = False
    for number, word in enumerate(words):
        following = words[number + 1] if number + 1 < len(words) else ""
        if posixpath.basename(word) == "trl" and following in COMMANDS:
            return _with_flags(command, number + 2, f"trl {following}", COMMANDS[following], "")
        if is_started and (match := MODULE.fullmatch(word)):
            return _with_flags(command, number + 1, word, COMMANDS[match["name"]], "")
        if word.endswith(".py") and (is_started or number == 0):
            own = OWN.fullmatch(word)
            return _with_flags(command, number + 1, word, COMMANDS[own["name"]] if own else "", word)
        is_started = is_started or STARTS.fullmatch(word) is not None
    return None


def _with_flags(command: Command, first: int, name: str, trainer: str, place: str) -> Started:
    if command.problem is not None and not command.unknown:  # whether it runs at all is not known
        raise command.problem
    if len(command.words) > MAX_WORDS:
        raise problem("script", name, f"a command has {MAX_WORDS} words at most, and this one {len(command.words)}")
    flags: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    last = ""
    for number, word in enumerate(command.words[first:], first):
        is_flag = word.startswith("--") and len(word) > 2
        if is_flag:
            last, equals, value = word[2:].partition("=")
            flags[last] = value if equals else True
        elif last:
            before = flags[last]
            if isinstance(before, list):
                before.append(word)
            else:
                flags[last] = word if before is True else [before, word]
        if last and (error := command.unknown.get(number)) is not None:
            unknown[last] = error.detail
    negated = {each for each in flags if each.startswith("no_") and flags[each] is True}
    return Started(name, trainer, place, {
        **{each: value for each, value in flags.items() if each not in negated},
        **{each.removeprefix("no_"): False for each in negated},
    }, unknown)  # fmt: skip


def _config(name: str, source: str, beside: Beside) -> dict[str, Any]:
    text = next((found for place in _places(name) if (found := beside(place)) is not None), None)
    if text is None:
        raise problem(source, name, f"--config is not found {WHERE}")
    try:
        values = read_value(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise problem(source, name, f"it is no YAML: {error}") from None
    if not isinstance(values, dict) or too_large(values) is not None:
        raise problem(source, name, "it must be a mapping of parameters, of no more than a launch file's size")
    return {str(key): value for key, value in values.items()}


def _places(path: str) -> Iterator[str]:
    for number in range(MAX_ABOVE):
        yield posixpath.normpath(posixpath.join("../" * number, path))
    yield posixpath.basename(path)


def variables_of(overrides: Sequence[str], text: str) -> tuple[dict[str, str], list[str]]:
    """Part ``NAME=VALUE`` of our command line into variables that a shell script uses, and parameters."""
    split = [(each, *each.partition("=")[::2]) for each in overrides]
    used = {name for _, name, _ in split if re.search(rf"\$\{{?{re.escape(name)}\b", text)}
    return {name: value for _, name, value in split if name in used}, [e for e, name, _ in split if name not in used]
