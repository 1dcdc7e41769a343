"""Opening this machine's own isolation: guard and uids are there first, then the best level that holds is chosen."""

import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from flotilla.services.sandbox.executor import Executor
from flotilla.services.sandbox.guard import landlock
from flotilla.services.sandbox.install import compile_guard, install_guard, try_level
from flotilla.services.sandbox.isolation import Place, Slot, candidates, way_to_a, ways_out
from flotilla.services.sandbox.languages import find_languages, find_python
from flotilla.services.sandbox.limits import Limits
from flotilla.services.sandbox.processors import ProcessorGroups
from flotilla.services.sandbox.running import Opened
from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.services.sandbox.slots import own_uids
from flotilla.services.sandbox.spare_time import SpareTime
from flotilla.services.sandbox.trees import own_directory, sweep_groups
from flotilla.shared.errors import Unavailable
from flotilla.shared.host.control_groups import find_mounts
from flotilla.shared.schemas.sandbox import IsolationLevel

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_here(settings: SandboxSettings, num_slots: int, spare: SpareTime) -> AsyncIterator[Opened]:
    """Install the guard, take uids, and choose the best isolation that passes its self-test.

    Args:
        settings: of the service.
        num_slots: how many programs and sessions run at a time.
        spare: what there is for callers that have used much.

    Raises:
        Unavailable: no allowed level works here; the detail has the reason for each.
        InvalidRequest: the configured interpreter cannot be used.
    """
    python = find_python(settings.python)
    with own_directory() as root, own_uids(num_slots, settings.uid_base) as uids:
        slots = _furnish(root, uids)
        mounts = find_mounts()
        sweep_groups(mounts)
        processors = ProcessorGroups.find(
            mounts, shares=settings.processor_shares, processors=settings.processors, spare=spare
        )
        place = Place(python, str(root / "code"), _readable(python, settings.readable_paths))
        await compile_guard(place)
        executor, unavailable = await _choose(settings, place, slots[0], root / "marker", processors)
        _tell(executor.isolation.level, unavailable)
        try:
            yield Opened(executor, slots, find_languages(python), python, unavailable)
        finally:
            await executor.close()


def _tell(level: IsolationLevel, unavailable: Mapping[IsolationLevel, str]) -> None:
    facts = {"isolation": level.value, "unavailable": {name.value: reason for name, reason in unavailable.items()}}
    if IsolationLevel.A in unavailable:
        log.warning(
            "isolation chosen, below the best", extra=facts | {"advice": way_to_a(unavailable[IsolationLevel.A])}
        )
    else:
        log.info("isolation chosen", extra=facts)


def _furnish(root: Path, uids: Sequence[int | None]) -> list[Slot]:
    """Make the service's directory: the guard's code, a directory per slot, and the self-test's marker."""
    root.chmod(0o711)  # programs under other uids pass through it
    install_guard(root / "code")
    marker = root / "marker"
    marker.write_text("outside")
    marker.chmod(0o644)
    slots = [Slot(number, uid, root / f"slot-{number}") for number, uid in enumerate(uids)]
    for slot in slots:
        slot.directory.mkdir()
        slot.directory.chmod(0o711)
    return slots


def _readable(python: str, configured: tuple[str, ...]) -> tuple[str, ...]:
    """List what programs may read outside /usr: what is configured, and the interpreter's own files."""
    prefix = Path(python).resolve().parents[1]
    own = () if prefix.is_relative_to("/usr") else (str(prefix),)
    return (*own, *configured)


async def _choose(
    settings: SandboxSettings, place: Place, slot: Slot, marker: Path, processors: ProcessorGroups | None
) -> tuple[Executor, dict[IsolationLevel, str]]:
    wanted = candidates(settings.level, allows_unsafe=settings.unsafe_sandbox)
    executor, reasons = await _first_that_works(wanted, place, settings.limits, slot, marker, processors)
    if executor is not None:
        return executor, reasons
    others = [level for level in candidates(None, allows_unsafe=settings.unsafe_sandbox) if level not in wanted]
    other, _ = await _first_that_works(others, place, settings.limits, slot, marker, processors)
    works = other.isolation.level if other is not None else None
    ways = ways_out(uid=os.getuid(), landlock_version=landlock.version(), works=works)
    what = f"isolation level {settings.level.value} does not work" if settings.level else "no isolation works"
    why = "; ".join(f"{level.value}: {reason}" for level, reason in reasons.items())
    raise Unavailable(f"{what} here as uid {os.getuid()}: {', or '.join(ways)} ({why})")


async def _first_that_works(
    levels: Sequence[IsolationLevel],
    place: Place,
    limits: Limits,
    slot: Slot,
    marker: Path,
    processors: ProcessorGroups | None,
) -> tuple[Executor | None, dict[IsolationLevel, str]]:
    reasons: dict[IsolationLevel, str] = {}
    for level in levels:
        try:
            return await try_level(level, place, limits, slot, marker, processors), reasons
        except Unavailable as error:
            reasons[level] = error.detail
    return None, reasons
