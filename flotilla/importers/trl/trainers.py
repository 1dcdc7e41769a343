"""TRL's trainers that the fleet has a job for, and which of them a launch file makes."""

from collections.abc import Mapping, Sequence
from typing import Final

from flotilla.importers.hydra import problem
from flotilla.importers.source import Given, System
from flotilla.importers.trl.command import COMMANDS
from flotilla.importers.trl.finished import TRL_FINISHED
from flotilla.importers.trl.grpo import TRL_GRPO
from flotilla.importers.trl.launch import TRAINER, read_trl
from flotilla.importers.trl.rloo import TRL_RLOO

OFFERED: Final[Mapping[str, System]] = {"GRPOTrainer": TRL_GRPO, "RLOOTrainer": TRL_RLOO, **TRL_FINISHED}
"""The system of each trainer."""


def trl_of(given: Sequence[Given]) -> System:
    """Find the tables that parameters belong to.

    Raises:
        InvalidSpec: there is no job of the trainer's kind.
    """
    trainer = next(each for each in given if each.spelling == TRAINER)
    found = OFFERED.get(str(trainer.value))
    if found is None:
        offered = ", ".join(name for name in COMMANDS.values() if name in OFFERED)
        raise problem(trainer.where, trainer.value, f"the fleet has no job of this kind; those that it has: {offered}")
    return found


__all__ = ["TRL_GRPO", "read_trl", "trl_of"]
