"""Which of ROLL's pipelines a script starts, and with which file."""

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from flotilla.importers.composition import Beside
from flotilla.importers.hydra import problem
from flotilla.importers.programs import program_of, which
from flotilla.importers.roll.distillation import PURE
from flotilla.importers.shell import Command, read_script
from flotilla.importers.source import Given

MODULE: Final = "python"
"""How the report calls the program that a script starts."""
DPO: Final = "start_dpo_pipeline.py"
SFT: Final = "start_sft_pipeline.py"
DISTILL: Final = "start_distill_pipeline.py"
TEXT: Final = "start_rlvr_pipeline.py"
VISION: Final = "start_rlvr_vl_pipeline.py"
PIPELINES: Mapping[str, str | None] = {
    "rlvr": None, "agentic": None, "onpolicy_distill": None, "dpo": None, "sft": None, "distill": None,
    "rlvr_vl": None, "reward_fl": "images are no answers of a policy here",
    "distill_vl": "there are no images, only text",
    "agentic_rollout": "answers without training are no experiment",
}  # fmt: skip
"""Pipelines of ROLL, and why one is not read; None where it is."""
PROGRAM = re.compile(r"(?:.*/)?start_(?P<name>\w+?)_pipeline\.py")
OPTIONS: Final = ("--config_path", "--config_name")
MAX_ABOVE = 8


def find_file(
    text: str, environment: Mapping[str, str], *, source: str, beside: Beside, program: int | None = None
) -> tuple[str, str, list[Given]]:
    """Find the file that a script gives to a pipeline.

    Args:
        program: number of the pipeline that is meant, where it starts several; counted from 1.

    Returns:
        Its text, its folder as ``beside`` knows it, and what the pipeline itself says: a refusal where it is not read.

    Raises:
        InvalidSpec: the script starts no pipeline, or several, or the file is not found.
    """
    script = read_script(text, {}, source=source, environment=environment)
    started = [(command, found) for command in script.commands if (found := _program(command))]
    names = [f"start_{name}_pipeline.py" for _, (_, name) in started]
    if program is not None:
        started = [program_of(started, names, program, source)]
    if len(started) > 1:
        raise problem(source, len(started), f"the script starts several pipelines: {which(names)}")
    if not started:
        known = ", ".join(f"start_{name}_pipeline.py" for name, why in PIPELINES.items() if why is None)
        raise problem(source, len(started), f"the script must start one pipeline of ROLL's ({known}) once")
    command, (position, name) = started[0]
    if command.problem is not None and not command.unknown:  # whether it runs at all is not known
        raise command.problem
    options = _options(command, position)
    folder, file = options.get(OPTIONS[0], ""), options.get(OPTIONS[1])
    if file is None:
        raise command.problem or problem(source, name, f"give {OPTIONS[1]}: the file of the pipeline is not said")
    why = PIPELINES.get(name, "no pipeline of ROLL's that this importer knows; its file is read as that of rlvr")
    said = [] if why is None else [Given(f"start_{name}_pipeline.py", MODULE, "script", refusal=why)]
    said += [Given(True, PURE, "script")] if name == "onpolicy_distill" else []
    is_said = f"start_{name}_pipeline.py" in {DPO, SFT, DISTILL, TEXT, VISION}
    said += [Given(f"start_{name}_pipeline.py", MODULE, "script")] if is_said else []
    for place in _places(posixpath.dirname(command.words[position]), folder, file.removesuffix(".yaml")):
        if (config := beside(place)) is not None:
            return config, posixpath.dirname(place), said
    raise problem(source, posixpath.join(folder, file), f"{OPTIONS[1]} is not found beside the script or above it: "
                  "give --config-dir DIR, the folder that it lies in")  # fmt: skip


def _program(command: Command) -> tuple[int, str] | None:
    for position, word in enumerate(command.words):
        if (match := PROGRAM.fullmatch(word)) is not None:
            return position, match["name"]
    return None


def _options(command: Command, position: int) -> dict[str, str]:
    """Return the options that say which file is read; an unknown folder may be the script's own."""
    found: dict[str, str] = {}
    words: Sequence[str] = command.words
    for number in range(position + 1, len(words)):
        name, equals, value = words[number].partition("=")
        where = number if equals else number + 1
        if name in OPTIONS and where < len(words) and where not in command.unknown:
            found[name] = value if equals else words[where]
    return found


def _places(program: str, folder: str, name: str) -> Iterator[str]:
    """Return where a file may lie: below the program's folder, which is above the script's, or beside the script."""
    for number in range(MAX_ABOVE):
        yield posixpath.normpath(posixpath.join("../" * number, program, folder, name))
    for number in range(MAX_ABOVE):
        yield posixpath.normpath(posixpath.join("../" * number, folder, name))
    yield name
