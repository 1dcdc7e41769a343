"""Which of ROLL's pipelines a file is of, and so by which tables it is read."""

from collections.abc import Sequence

from flotilla.importers.roll.distilled import OF_TEACHING, ROLL_DISTILL, STUDENT
from flotilla.importers.roll.fine_tuning import OF_ANSWERS, ROLL_SFT, WORKER
from flotilla.importers.roll.finished import OF_PAIRS, ROLL_DPO
from flotilla.importers.roll.launch import DISTILL, DPO, MODULE, SFT
from flotilla.importers.roll.system import ROLL, read_roll
from flotilla.importers.source import Given, System


def roll_of(given: Sequence[Given]) -> System:
    """Find the tables of ROLL's pipeline, which a script names, and a file shows by names that it alone has."""
    started = {each.value for each in given if each.spelling == MODULE}
    names = {each.spelling for each in given}
    if DISTILL in started or names & OF_TEACHING or any(name.startswith(f"{STUDENT}.") for name in names):
        return ROLL_DISTILL
    if DPO in started or names & OF_PAIRS:
        return ROLL_DPO
    is_sft = SFT in started or names & OF_ANSWERS or any(name.startswith(f"{WORKER}.") for name in names)
    return ROLL_SFT if is_sft else ROLL


__all__ = ["ROLL", "read_roll", "roll_of"]
