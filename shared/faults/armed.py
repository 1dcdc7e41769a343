"""Where faults can happen, and whether this process has some: decided once, at its start, by its ``__main__``.

Sites read ``armed()``. Without a plan that is None, and all that a site costs is this call.
"""

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flotilla.shared.faults.sites import PROCESSES, VARIABLE

if TYPE_CHECKING:
    from flotilla.shared.faults.injector import Injector
    from flotilla.shared.faults.plan import FaultPlan

log = logging.getLogger(__name__)

_injector: "Injector | None" = None


def armed() -> "Injector | None":
    """The faults of this process; None unless a plan was given at its start."""
    return _injector


def arm_from(environment: Mapping[str, str], process: str) -> None:
    """Arm this process with the plan of ``FLOTILLA_FAULTS``; nothing happens where that is not set.

    Args:
        environment: the process's.
        process: its name, one of ``PROCESSES``.

    Raises:
        InvalidRequest: the plan is malformed; the detail names what is allowed.
    """
    text = environment.get(VARIABLE, "")
    if text:
        # Here, since most processes have no faults, and a command line waits for its imports.
        from flotilla.shared.faults.plan import parse_plan

        arm(parse_plan(text), process)


def arm(plan: "FaultPlan", process: str) -> "Injector":
    """Arm this process with a plan, and log a warning."""
    global _injector
    from flotilla.shared.faults.injector import Injector

    assert process in PROCESSES, process
    _injector = Injector(process, plan)
    faults = [fault.model_dump(mode="json", exclude_defaults=True, by_alias=True) for fault in _injector.faults]
    log.warning("FAULT INJECTION IS ON: this process fails on purpose", extra={"armed": process, "faults": faults})
    return _injector


def disarm() -> None:
    """Have no faults any more."""
    global _injector
    _injector = None


def arm_process(process: str) -> None:
    """Arm this process by its own environment; for ``__main__`` modules."""
    arm_from(os.environ, process)
