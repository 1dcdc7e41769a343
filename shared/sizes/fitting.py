"""Whether processes fit into the memory that there is, and the message if they do not."""

from collections.abc import Sequence
from typing import Final

from flotilla.shared.errors import ModelError, Unavailable
from flotilla.shared.sizes.parts import Footprint, in_words

TOLERANCE: Final = 0.15
"""Predictions are that far from what is measured at most (docs/sizes.md): so much less may still do."""
MOST_REMEDIES: Final = 3


def refusal(processes: Sequence[tuple[Footprint, int]], room: int, where: str) -> str | None:
    """Return why processes cannot fit, with the arithmetic and the keys that would help; None where they may.

    Args:
        processes: each with how many there are of it, all on one machine.
        room: bytes of its memory.
        where: that is, for the message.
    """
    needed = sum(each.needed_on_host * count for each, count in processes)
    if needed * (1 - TOLERANCE) <= room:
        return None
    sums = "; ".join(
        f"{'' if count == 1 else f'{count} x '}{each.name}, at least {in_words(each.needed_on_host)}: "
        + " + ".join(
            f"{part.name} {in_words(part.needed)} ({part.counted})"
            for part in each.parts
            if part.needed and (each.is_on_cpu or part.is_on_host)
        )
        for each, count in processes
    )
    return (
        f"at least {in_words(needed)} of memory are needed and {where} has {in_words(room)}: {sums}."
        f"{_advice(processes)}"
    )


def _advice(processes: Sequence[tuple[Footprint, int]]) -> str:
    found = sorted(
        ((key, saved * count) for each, count in processes for key, saved in each.remedies), key=lambda each: -each[1]
    )
    if not found:
        return ""
    told = ", ".join(f"{key} (about {in_words(saved)} less)" for key, saved in found[:MOST_REMEDIES])
    return f" What would help: {told}"


def overflow(processes: Sequence[tuple[Footprint, int]], room: int) -> str | None:
    """Report that the longest allowed samples may exceed the memory; None if they fit."""
    most = sum(each.host_bytes * count for each, count in processes)
    if most <= room:
        return None
    return f"with samples of the largest length it would be {in_words(most - room)} too much.{_advice(processes)}"


def check_host(footprint: Footprint, *, total: int, available: int) -> None:
    """Refuse to start a process that cannot fit into the host's memory.

    Args:
        footprint: of the process.
        total: bytes of memory that the host, or a limit on this process, has.
        available: of them, the unused ones.

    Raises:
        ModelError: it needs more than there is at all.
        Unavailable: it needs more than is available now.
    """
    if (why := refusal([(footprint, 1)], total, "this machine")) is not None:
        raise ModelError(why)
    if (why := refusal([(footprint, 1)], available, "this machine now")) is not None:
        raise Unavailable(why)


def check_device(footprint: Footprint, total: int) -> None:
    """Refuse to start a process that cannot fit into its device's memory.

    Raises:
        ModelError: it needs more than the device has.
    """
    needed = footprint.needed_on_device
    if needed * (1 - TOLERANCE) > total:
        parts = [each for each in footprint.parts if each.needed and not each.is_on_host]
        sums = " + ".join(f"{each.name} {in_words(each.needed)} ({each.counted})" for each in parts)
        raise ModelError(
            f"at least {in_words(needed)} of memory are needed on {footprint.device}, which has {in_words(total)}: "
            f"{sums}.{_advice([(footprint, 1)])}"
        )
