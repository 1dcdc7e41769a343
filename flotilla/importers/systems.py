"""All systems that launch files are imported from, and one entrance to their readers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from flotilla.importers.composition import Beside, beside, nothing_beside
from flotilla.importers.hydra import problem, without_secrets
from flotilla.importers.openrlhf.finished import FINISHED
from flotilla.importers.openrlhf.launch import MODULE, read_openrlhf, read_openrlhf_script
from flotilla.importers.openrlhf.system import OPENRLHF
from flotilla.importers.roll.pipelines import ROLL, read_roll, roll_of
from flotilla.importers.source import Given, System
from flotilla.importers.trl.trainers import TRL_GRPO, read_trl, trl_of
from flotilla.importers.verl.engine_sft import fine_tuning
from flotilla.importers.verl.generation import OF_PROGRAM
from flotilla.importers.verl.launch import is_fine_tuning, is_scoring, last_name
from flotilla.importers.verl.system import VERL, read_verl
from flotilla.importers.verl.written import VERL_EVAL, is_file_of_answers
from flotilla.shared.errors import InvalidSpec

SYSTEMS: dict[str, System] = {"verl": VERL, "openrlhf": OPENRLHF, "roll": ROLL, "trl": TRL_GRPO}
SCRIPTS = (".sh", ".bash")
HINTS: Mapping[str, tuple[str, ...]] = {
    "openrlhf": ("openrlhf.cli", "openrlhf/cli"),
    "roll": ("actor_train:", "actor_infer:", "start_rlvr_pipeline", "start_agentic_pipeline", "roll.pipeline"),
    "verl": ("verl.", "recipe.", "actor_rollout_ref", "main_ppo", "partial_pretrain"),
    "trl": (
        "trl grpo",
        "trl sft",
        "trl dpo",
        "trl reward",
        "trl/scripts",
        "trl.scripts",
        "from trl",
        "import trl",
        "reward_funcs:",
        "dataset_name:",
        "num_generations:",
    ),
}
"""What shows whose file it is, the first system that has one of its marks; of a script of Python's only TRL's."""
MAX_BYTES = 1_000_000


def read_launch_text(path: Path) -> str:
    """Read a launch file.

    Raises:
        InvalidSpec: it is missing, too large, or not UTF-8.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise problem(str(path), path.name, f"a launch file has {MAX_BYTES} bytes at most")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        why = "it is no text (UTF-8)"
    except OSError as error:
        why = error.strerror or str(error)
    entry = {"path": str(path), "value": None, "allowed": f"cannot be read: {why}"}
    raise InvalidSpec(f"{path}: {entry['allowed']}", errors=[entry])


def detect(text: str, source: str) -> str:
    """Find whose launch file it is.

    Args:
        text: what it holds.
        source: its name.

    Raises:
        InvalidSpec: nothing shows it.
    """
    candidates = ("trl",) if source.endswith(".py") else tuple(HINTS)
    found = next((name for name in candidates if any(mark in text for mark in HINTS[name])), None)
    if found is None:
        raise problem(source, source, f"nothing shows whose file it is: flotilla import {'|'.join(SYSTEMS)} {source}")
    return found


def read(
    system: str,
    text: str,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    *,
    source: str,
    beside: Beside = nothing_beside,
    program: int | None = None,
) -> list[Given]:
    """Read the parameters of a launch file.

    Args:
        system: a name in ``SYSTEMS``.
        text: what the file holds.
        overrides: ``KEY=VALUE`` from the command line; of OpenRLHF's scripts, variables alone.
        environment: for interpolations that read it; variables that may hold secrets are not read.
        source: the file's name; its suffix tells scripts from YAML.
        beside: finds the files that YAML names in ``defaults``.
        program: number of the program that is meant, where a script starts several; counted from 1.

    Raises:
        InvalidSpec: something cannot be read; ``errors`` has its place.
    """
    # What is read is printed, in the spec and in messages; and a file is often somebody else's.
    environment = without_secrets(environment)
    is_script = source.endswith(SCRIPTS) or text.startswith("#!")
    if program is not None and not is_script:
        raise problem(source, program, "--program chooses among what a script starts, and this is no script")
    if system == "openrlhf":
        return read_openrlhf_script(text, overrides, environment, source=source, program=program)
    if system == "trl":
        return read_trl(
            text, overrides, environment, source=source, beside=beside, is_script=is_script, program=program
        )
    read_file = read_verl if system == "verl" else read_roll
    return read_file(text, overrides, environment, source=source, is_script=is_script, beside=beside, program=program)


def system_of(system: str, given: Sequence[Given]) -> System:
    """Find the tables that parameters belong to: a system's programs on finished answers have tables of their own."""
    program = next((str(each.value) for each in given if each.spelling == MODULE), "")
    if system == "openrlhf":
        return FINISHED.get(program, OPENRLHF)
    if system == "trl":
        return trl_of(given)
    names = {each.spelling for each in given}
    if system == "roll":
        return roll_of(given)
    if system == "verl" and (is_scoring(program) if program else is_file_of_answers(names)):
        return VERL_EVAL
    if system == "verl" and (last_name(program) in OF_PROGRAM or (not program and "data.n_samples" in names)):
        return OF_PROGRAM[last_name(program) or "main_generation"]
    is_sft = is_fine_tuning(program) or "model.partial_pretrain" in names
    return fine_tuning(program, names) if system == "verl" and is_sft else SYSTEMS[system]


__all__ = ["HINTS", "SYSTEMS", "beside", "detect", "read", "read_launch_text", "read_openrlhf"]
