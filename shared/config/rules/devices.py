"""How many GPUs trainer and rollouts of a spec need, what it may not ask of them, and what ``auto`` is on them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla.shared.config.rules.exactness import check_exactness
from flotilla.shared.config.sections.engine import Options, ServerEngineConfig
from flotilla.shared.config.sections.resources import Sharing
from flotilla.shared.config.tree import Sections

SPLITS = (("tp_size", "tensor_parallel_size", "tp"), ("pp_size", "pipeline_parallel_size", "pp"))
"""What SGLang and vLLM divide a model by, each with its other names."""


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """What a service must have to be of use to an experiment.

    Attributes:
        count: GPUs at least.
        is_used: whether the experiment computes on them; else others may have them meanwhile.
    """

    count: int = 0
    is_used: bool = False


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a service has.

    Attributes:
        count: its GPUs.
        uses_cuda: whether its own torch can use them.
    """

    count: int = 0
    uses_cuda: bool = False


def trainer_need(spec: Sections) -> DeviceNeed:
    """Count the GPUs that each trainer service must have."""
    parallelism, asked = spec.parallelism, spec.resources.trainer.devices
    used = ranks_of_a_node(spec)
    # To move weights off the devices implies that there are some.
    wanted = asked if asked != "auto" else used if parallelism.offload.chosen else 0
    return _need(parallelism.device, wanted, used)


def ranks_of_a_node(spec: Sections) -> int:
    """Count the ranks of each trainer service."""
    return spec.parallelism.ranks // spec.parallelism.nodes


def rollout_need(spec: Sections) -> DeviceNeed:
    """Count the GPUs that each rollout must have; an engine that runs elsewhere has its own."""
    engine, asked = spec.rollout.engine, spec.resources.rollouts.devices
    used = devices_of_engine(spec)
    if isinstance(engine, ServerEngineConfig):
        if engine.url is not None:
            return DeviceNeed()
        if asked == "auto" and (spec.resources.sharing is Sharing.TIME or used > 1):
            # Servers free memory on GPUs only, and to divide a model among devices implies that there are some.
            asked = used
    return _need(engine.device, 0 if asked == "auto" else asked, used)


def devices_of_engine(spec: Sections) -> int:
    """Count the GPUs that one engine computes on, where it does."""
    engine = spec.rollout.engine
    if not isinstance(engine, ServerEngineConfig):
        return 1
    return math.prod(split_sizes(engine.options)) or 1


def tensor_parallel(spec: Sections) -> int:
    """Count the devices that a server divides each layer among."""
    engine, count = spec.rollout.engine, spec.resources.rollouts.devices
    if not isinstance(engine, ServerEngineConfig) or engine.url is not None:
        return 1
    given = {name.lstrip("-").replace("-", "_"): value for name, value in engine.options.items()}
    found = next((given[name] for name in SPLITS[0] if name in given), None)
    if isinstance(found, int) and found > 0:
        return found
    return 1 if count == "auto" or split_sizes(engine.options) else count


def split_sizes(options: Options) -> tuple[int, ...]:
    """Read what a server's options divide the model by; empty where they do not say."""
    return tuple(size for names in SPLITS for size in _sizes(options, names))


def pipeline_stages(options: Options) -> int:
    """Read how many stages a server's options divide the layers into."""
    return math.prod(_sizes(options, SPLITS[1]))


def _sizes(options: Options, names: Sequence[str]) -> list[int]:
    given = {name.lstrip("-").replace("-", "_"): value for name, value in options.items()}
    sizes = [given[name] for name in names if name in given]
    return [size for size in sizes if isinstance(size, int) and size > 0]


def with_ranks_of_devices(given: Any) -> Any:
    """Let ``parallelism.ranks`` be ``resources.trainer.devices`` where only that is said."""
    found = _at(given, "resources", "trainer", "devices")
    parallelism = given.get("parallelism") if isinstance(given, Mapping) else None
    is_said = isinstance(found, int) and not isinstance(found, bool) and found > 0
    if not is_said or not isinstance(parallelism, Mapping | None) or "ranks" in (parallelism or {}):
        return given
    nodes = (parallelism or {}).get("nodes", 1)
    if not isinstance(nodes, int):
        return given
    return {**given, "parallelism": {**(parallelism or {}), "ranks": found * nodes}}


def check_devices(spec: Sections) -> None:
    """Check that devices are asked for where they are used, and as many as are used; and one rollout for one server.

    And that all compute where equal bits can be had, if they are asked for.

    Raises:
        ValueError: they are not.
    """
    check_exactness(spec)
    _check_trainer(spec)
    _check_rollouts(spec)
    _check_server(spec)


def _check_trainer(spec: Sections) -> None:
    count, parallelism = spec.resources.trainer.devices, spec.parallelism
    if count == "auto":
        return
    name = f"resources.trainer.devices {count}"
    if not spec.trains:
        raise ValueError(f"{name} has no effect without a trainer: leave it out")
    _check_device(name, "parallelism.device", parallelism.device)
    if count * parallelism.nodes != parallelism.ranks:
        on = "" if parallelism.nodes == 1 else f" on each of parallelism.nodes {parallelism.nodes}"
        raise ValueError(
            f"{name}{on} and parallelism.ranks {parallelism.ranks} differ, and each rank computes on one device: "
            "make them equal, or leave one of them out"
        )


def _check_rollouts(spec: Sections) -> None:
    count, engine = spec.resources.rollouts.devices, spec.rollout.engine
    if count == "auto":
        return
    name = f"resources.rollouts.devices {count}"
    _check_device(name, "rollout.engine.device", engine.device)
    if not isinstance(engine, ServerEngineConfig):
        if count > 1:
            raise ValueError(
                f"{name} is for one engine, and rollout.engine.kind torch computes on one device: set it to 1 and "
                "resources.rollouts.min to the number of engines, or use kind sglang or vllm"
            )
        return
    if engine.url is not None:
        raise ValueError(f"{name} has no effect with rollout.engine.url, whose server runs already: leave it out")
    sizes = split_sizes(engine.options)
    if sizes and math.prod(sizes) != count:
        raise ValueError(
            f"{name} and rollout.engine.options differ, which divide the model among {math.prod(sizes)}: make them "
            "equal, or leave one of them out"
        )


def _check_server(spec: Sections) -> None:
    engine, rollouts = spec.rollout.engine, spec.resources.rollouts
    if isinstance(engine, ServerEngineConfig) and engine.is_one_server and rollouts.min > 1:
        raise ValueError(
            f"resources.rollouts.min is {rollouts.min}, and at rollout.engine.url {engine.url} there is one server, "
            "which samples for one rollout: set min to 1, or have a server on each machine, at http://127.0.0.1:PORT"
        )


def _check_device(name: str, field: str, device: str) -> None:
    if device == "cpu":
        raise ValueError(f"{name} has no effect while {field} is cpu: set that to cuda or auto, or leave devices out")
    if ":" in device and device != "cuda:0":
        raise ValueError(
            f"{name} counts devices, and {field} {device} names one of those that the service has: write cuda"
        )


def _need(device: str, asked: int, used: int) -> DeviceNeed:
    if device == "cpu":
        return DeviceNeed()
    if device == "auto":
        return DeviceNeed(asked, is_used=True)
    first = int(device.partition(":")[2] or 0)
    return DeviceNeed(asked or first + used, is_used=True)


def _at(node: Any, *path: str) -> Any:
    for part in path:
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def decide(spec: Sections, *, trainers: Sequence[DeviceFacts], rollouts: Sequence[DeviceFacts]) -> dict[str, Any]:
    """Decide what ``auto`` is on the services that an experiment gets first.

    Args:
        spec: of the experiment.
        trainers: what its trainers have; empty where nothing is trained.
        rollouts: what its rollouts have.

    Returns:
        The changes of the spec; empty where it leaves nothing open.
    """
    changes: dict[str, Any] = {}
    trains_on, samples_on = spec.parallelism.device, spec.rollout.engine.device
    if trains_on == "auto" and trainers:
        has = all(each.uses_cuda and each.count >= ranks_of_a_node(spec) for each in trainers)
        on_gpus = "cuda" if spec.parallelism.ranks > 1 else "cuda:0"
        trains_on = on_gpus if has or trainer_need(spec).count else "cpu"
        changes["parallelism"] = {"device": trains_on}
    if samples_on == "auto" and rollouts and spec.samples_answers:
        samples_on = "cuda:0" if _can_sample(spec, rollouts) else "cpu"
        changes["rollout"] = {"engine": {"kind": spec.rollout.engine.kind, "device": samples_on}}
    if spec.model.dtype == "auto":
        used = [trains_on] * spec.trains + [samples_on] * (spec.samples_answers and bool(rollouts))
        is_narrow = all(device.startswith("cuda") for device in used)
        # Asked to round weights for their way, one does not mean to compute with rounded ones.
        is_rounded = spec.asynchrony.publication.wire_dtype is not None
        is_rounded = is_rounded or spec.parallelism.mixed_precision is not None
        changes["model"] = {"dtype": "bfloat16" if is_narrow and not is_rounded else "float32"}
    return changes


def _can_sample(spec: Sections, rollouts: Sequence[DeviceFacts]) -> bool:
    engine, asked = spec.rollout.engine, spec.resources.rollouts.devices
    if not isinstance(engine, ServerEngineConfig):
        return asked != "auto" or all(each.uses_cuda for each in rollouts)
    # Its server has a torch of its own.
    return engine.url is None and (asked != "auto" or all(each.count >= devices_of_engine(spec) for each in rollouts))
