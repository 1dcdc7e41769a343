"""How a local fleet divides the GPUs of its machine among the trainers and rollouts that it starts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from flotilla.shared.config.rules.devices import (
    DeviceNeed,
    devices_of_engine,
    ranks_of_a_node,
    rollout_need,
    trainer_need,
)
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wish:
    """What services of a kind want.

    Attributes:
        devices: each of them; None for an even part of what the others leave, 0 for none.
    """

    devices: int | None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """How the devices are to be divided.

    Attributes:
        are_shared: trainers divide all of them, and so do rollouts.
        why_whole: why they are not to be divided at all; empty where they are.
    """

    trainers: Wish = Wish()
    rollouts: Wish = Wish()
    are_shared: bool = False
    why_whole: str = ""


@dataclass(frozen=True, slots=True)
class Division:
    """Which service sees which devices.

    Attributes:
        trainers, rollouts: of each service, what it sees; None where each sees all.
        sentence: what was done and why; empty on a machine without devices.
    """

    trainers: Sequence[Labels] | None = None
    rollouts: Sequence[Labels] | None = None
    sentence: str = ""


def wishes_of(spec: ExperimentSpec) -> Wishes:
    """Read from a spec how its own fleet divides the devices."""
    devices = (spec.parallelism.device, spec.rollout.engine.device)
    if any(":" in device and device != "cuda:0" for device in devices):
        return Wishes(why_whole=f"the spec names them by number ({' and '.join(devices)})")
    return Wishes(
        trainers=_wish(trainer_need(spec), ranks_of_a_node(spec)),
        rollouts=_wish(rollout_need(spec), devices_of_engine(spec)),
        are_shared=spec.shares_devices and spec.resources.lending is None,
    )


def check_devices(spec: ExperimentSpec, num_devices: int) -> None:
    """Refuse what no service that is started on this machine could have: it would be waited for without an end.

    Args:
        spec: of the experiment.
        num_devices: GPUs of this machine that its services may have.

    Raises:
        InvalidSpec: a service needs more.
    """
    for name, need in (("trainer", trainer_need(spec)), ("rollouts", rollout_need(spec))):
        if need.count > num_devices:
            by_options = (
                name == "rollouts" and spec.resources.rollouts.devices == "auto" and devices_of_engine(spec) > 1
            )
            field = "rollout.engine.options" if by_options else f"resources.{name}.devices"
            raise InvalidSpec(
                f"{field}: {need.count} GPUs are asked for, and this machine has {num_devices} for "
                "the fleet; to use what is there: --set resources.trainer.devices=auto "
                "--set resources.rollouts.devices=auto --set parallelism={} --set resources.sharing=none"
            )


def divide(labels: Labels, wishes: Wishes, *, num_trainers: int, num_rollouts: int) -> Division:
    """Divide devices.

    Args:
        labels: what CUDA_VISIBLE_DEVICES calls them.
        wishes: what each service wants.
        num_trainers, num_rollouts: how many services there are.
    """
    if not labels or not num_trainers + num_rollouts:
        return Division()
    if wishes.why_whole:
        return Division(sentence=f"{_named(labels)}, which every service sees: {wishes.why_whole}")
    trainers, rollouts = [wishes.trainers] * num_trainers, [wishes.rollouts] * num_rollouts
    if wishes.are_shared:
        dealt = _dealt(labels, trainers), _dealt(labels, rollouts)
        first, second = dealt
    else:
        together = _dealt(labels, [*trainers, *rollouts])
        first, second = (None, None) if together is None else (together[:num_trainers], together[num_trainers:])
    if first is None or second is None:
        wanted = "services" if None in {wish.devices for wish in trainers + rollouts} else "the services ask for"
        return Division(sentence=f"{_named(labels)}, which every service sees: there are fewer of them than {wanted}")
    parts = {**_parts("trainer", first), **_parts("rollout", second)}
    told = "; ".join(f"{name} {_named(part)}" for name, part in parts.items())
    left = [label for label in labels if not any(label in part for part in parts.values())]
    rest = f"; {', '.join(left)} unused" if left else ""
    return Division(first, second, f"{told}{rest}{' (in turns)' if wishes.are_shared else ''}")


def _wish(need: DeviceNeed, used: int) -> Wish:
    return Wish((need.count or used) if need.is_used else 0)


def _dealt(labels: Labels, wishes: Sequence[Wish]) -> list[Labels] | None:
    """Assign devices in order; None if there are not enough for all that ask for some."""
    fixed = sum(wish.devices or 0 for wish in wishes)
    num_even = sum(wish.devices is None for wish in wishes)
    even, over = divmod(len(labels) - fixed, num_even) if num_even else (0, 0)
    if fixed > len(labels) or (num_even and even < 1):
        return None
    dealt, start = [], 0
    for wish in wishes:
        count = wish.devices
        if count is None:
            count, over = (even + 1, over - 1) if over > 0 else (even, over)
        dealt.append(labels[start : start + count])
        start += count
    return dealt


def _parts(kind: str, parts: Sequence[Labels]) -> dict[str, Labels]:
    return {
        kind if len(parts) == 1 and kind == "trainer" else f"{kind}-{number}": part for number, part in enumerate(parts)
    }


def _named(labels: Labels) -> str:
    return f"cuda {','.join(labels)}" if labels else "none"
