"""ROLL's devices: which the trainer and the engines have, what the trainer divides among them, and which both share."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from flotilla.importers.parameter import UNSET
from flotilla.importers.roll.rows import CONFIG, INFER, TRAIN
from flotilla.importers.source import Source
from flotilla.importers.values import same, wrong
from flotilla.shared.config.sections.parallelism import MOST_RANKS

Fields = dict[str, Any]

RANGE = re.compile(r"list\(range\((\d+),\s*(\d+)\)\)")
SPLITS = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
OF_A_NODE = 8
"""ROLL's own num_gpus_per_node."""


def devices_of(source: Source, name: str) -> list[int] | None:
    """Read the numbers of a device mapping; None where there is none.

    Raises:
        InvalidSpec: it is no list of devices.
    """
    written = source.value(name)
    if written is None or written is UNSET:
        return None
    if isinstance(written, list):
        return [int(each) for each in written]
    spans = RANGE.findall(str(written))
    rest = RANGE.sub("", str(written)).replace("+", "").strip()
    if not spans or rest:
        raise wrong(name, written, "of the form list(range(0,8)), or a list of devices")
    return [number for start, end in spans for number in range(int(start), int(end))]


def shares_of_the_batch(source: Source) -> int:
    """Count the devices that hold a share of the batch.

    Raises:
        InvalidSpec: the mapping is no list of devices.
    """
    devices = devices_of(source, f"{TRAIN}.device_mapping")
    split = math.prod(source.required(f"{TRAIN}.{CONFIG}.{kind}_size") for kind in SPLITS)
    return max(int((1 if devices is None else len(devices)) // split), 1)


def placement(source: Source) -> Fields:
    """Make the devices of the trainer, as many on each machine, and the engines that each have one."""
    trainer = devices_of(source, f"{TRAIN}.device_mapping")
    if trainer is None or not 1 < len(trainer) <= MOST_RANKS:
        return {}
    of_nodes = Counter(number // _of_a_node(source) for number in trainer)
    if len(set(of_nodes.values())) > 1:
        return {}
    tensor, pipeline, context = (int(source.required(f"{TRAIN}.{CONFIG}.{kind}_size")) for kind in SPLITS)
    if (
        pipeline > 1
        or len(trainer) % (tensor * context)
        or (tensor > 1 and context > 1)
        or _has_adapters(source, tensor)
    ):
        return {}
    source.has("num_gpus_per_node")
    fields: Fields = {"resources.trainer.devices": len(trainer) // len(of_nodes)}
    fields |= {"parallelism.nodes": len(of_nodes)} if len(of_nodes) > 1 else {}
    fields |= {"parallelism.tensor_parallel": tensor} if tensor > 1 else {}
    fields |= {"parallelism.sequence_parallel": context} if context > 1 else {}
    fields |= _critic(source, len(trainer), tensor, context)
    return fields | _engines(source, trainer)


def _critic(source: Source, ranks: int, tensor: int, context: int) -> Fields:
    """Make how the ranks are divided for the critic, where the file says so and it is not as for the policy."""
    names = [f"critic.{CONFIG}.{kind}_parallel_size" for kind in ("tensor_model", "context")]
    if source.value("adv_estimator") != "gae" or not source.given.keys() & set(names):
        return {}
    sizes = [int(source.required(name)) for name in names]
    if sizes == [tensor, context]:
        return {}
    if ranks % math.prod(sizes) or min(sizes) > 1:
        for name in source.given.keys() & set(names):
            source.put_aside(source.given[name].spelling, f"the {ranks} devices of the trainer cannot be divided so")
        return {}
    return {"parallelism.critic": {"tensor_parallel": sizes[0], "sequence_parallel": sizes[1]}}


def _engines(source: Source, trainer: Sequence[int]) -> Fields:
    """Make the number of engines, where each has one device, and turns on those that the trainer has, too."""
    name = f"{INFER}.device_mapping"
    if name not in source.given or _is_split(source):
        return {}
    engines = devices_of(source, name)
    if not engines:
        return {}
    turns: Fields = {"resources.sharing": "time"} if set(engines) & set(trainer) else {}
    return {"resources.rollouts.min": len(engines), **turns}


def _is_split(source: Source) -> bool:
    """Whether an engine computes on several devices, which the embedded one does not."""
    per_worker = source.given.get(f"{INFER}.num_gpus_per_worker")
    written = {} if per_worker is None else {per_worker.spelling: per_worker.value}
    for tree in (f"{INFER}.strategy_args", f"{INFER}.{CONFIG}"):
        written |= {name: value for name, value in source.trees.get(tree, {}).items() if "parallel_size" in name}
    return any(not same(value, 1) for value in written.values() if value is not None)


def _has_adapters(source: Source, tensor: int) -> bool:
    """Whether adapters are trained on layers that ranks divide, which there is not."""
    return tensor > 1 and f"{TRAIN}.model_args.lora_target" in source.given


def _of_a_node(source: Source) -> int:
    given = source.given.get("num_gpus_per_node")
    return given.value if given is not None and isinstance(given.value, int) and given.value > 0 else OF_A_NODE
