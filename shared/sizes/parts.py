"""What a process is predicted to take: named parts that add up, each with how it is counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

GIGABYTE: Final = 10**9


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        name: of it.
        num_bytes: at the process's peak.
        counted: the arithmetic in words and numbers, such as ``596.0 M x 4 bytes``.
        is_on_host: whether it is in the host's memory wherever the process computes.
        least: what is taken in any case, where samples may turn out shorter; None: all of it.
    """

    name: str
    num_bytes: int
    counted: str
    is_on_host: bool = False
    least: int | None = None

    @property
    def needed(self) -> int:
        """What is taken in any case."""
        return self.num_bytes if self.least is None else self.least


@dataclass(frozen=True, slots=True)
class Footprint:
    """One process.

    Attributes:
        name: of the process.
        device: that it computes on.
        parts: without those that are 0.
        remedies: keys that make it smaller, the largest saving first, each with what it would save.
    """

    name: str
    device: str
    parts: Sequence[Part]
    remedies: Sequence[tuple[str, int]] = ()

    @property
    def is_on_cpu(self) -> bool:
        """Whether all of it is in the host's memory."""
        return not self.device.startswith("cuda")

    @property
    def host_bytes(self) -> int:
        """Of the host's memory."""
        return sum(each.num_bytes for each in self.parts if self.is_on_cpu or each.is_on_host)

    @property
    def device_bytes(self) -> int:
        """Of the device's memory; 0 on a CPU."""
        return sum(each.num_bytes for each in self.parts if not (self.is_on_cpu or each.is_on_host))

    @property
    def total(self) -> int:
        """Of both."""
        return sum(each.num_bytes for each in self.parts)

    @property
    def needed_on_host(self) -> int:
        """Of the host's memory, however short samples are."""
        return sum(each.needed for each in self.parts if self.is_on_cpu or each.is_on_host)

    @property
    def needed_on_device(self) -> int:
        """Of the device's memory, however short samples are; 0 on a CPU."""
        return sum(each.needed for each in self.parts if not (self.is_on_cpu or each.is_on_host))

    def arithmetic(self) -> str:
        """Write the parts as a sum, each with how it is counted."""
        return " + ".join(f"{each.name} {in_words(each.num_bytes)} ({each.counted})" for each in self.parts)


def in_words(num_bytes: float) -> str:
    """Write bytes for people: 1.23 GB, 46 MB or 12.3 kB."""
    if num_bytes >= GIGABYTE:
        return f"{num_bytes / GIGABYTE:.2f} GB"
    if num_bytes >= 10**6:
        return f"{num_bytes / 10**6:.0f} MB"
    return f"{num_bytes / 10**3:.1f} kB"


def counted(parameters: int, size: float) -> str:
    """Write the arithmetic of parameters times bytes."""
    return f"{parameters / 10**6:.1f} M x {size:g} bytes"
