"""The engine that a launch file names, in words of ours: which overrides ask for it in place of the embedded one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flotilla.importers.source import Given

EMBEDDED: Final = (
    "the fleet samples with its embedded engine, from the same distribution: this changes speed and memory. For vLLM "
    "or SGLang itself set rollout.engine.kind to vllm or sglang, and their arguments in rollout.engine.options"
)
OF_A_SERVER: Final = "the server gets what rollout.engine.options says, whatever this is"
"""What stands in the place of ``EMBEDDED`` where an override asks for a server."""


@dataclass(frozen=True, slots=True)
class EngineNames:
    """What a system calls its engine's settings, in each of their spellings.

    Attributes:
        kinds: of the parameter that says which engine it is; none where it is vLLM alone.
        sizes: of the number of GPUs that one engine is split over.
        shares: of the part of a GPU's memory that it takes.
        shows: parameters whose presence shows that an engine samples at all.
    """

    kinds: tuple[str, ...]
    sizes: tuple[str, ...]
    shares: tuple[str, ...]
    shows: tuple[str, ...] = ()


ROLLOUT = "actor_rollout_ref.rollout"
INFER = "actor_infer.strategy_args"
NAMES: Final[Mapping[str, EngineNames]] = {
    "verl": EngineNames(
        (f"{ROLLOUT}.name",), (f"{ROLLOUT}.tensor_model_parallel_size",), (f"{ROLLOUT}.gpu_memory_utilization",)
    ),
    "openrlhf": EngineNames(
        (),
        ("--vllm_tensor_parallel_size", "--vllm.tensor_parallel_size"),
        ("--vllm_gpu_memory_utilization", "--vllm.gpu_memory_utilization"),
        ("--vllm_num_engines", "--vllm.num_engines"),
    ),
    "roll": EngineNames(
        (f"{INFER}.strategy_name",),
        (f"{INFER}.strategy_config.tensor_parallel_size", "actor_infer.num_gpus_per_worker"),
        (f"{INFER}.strategy_config.gpu_memory_utilization", f"{INFER}.strategy_config.mem_fraction_static"),
    ),
    "trl": EngineNames((), ("vllm_tensor_parallel_size",), ("vllm_gpu_memory_utilization",), ("use_vllm",)),
}
NO: Final = (None, False)
"""Values of a switch that is off."""
OPTIONS: Final[Mapping[str, tuple[str, str]]] = {
    "sglang": ("tp_size", "mem_fraction_static"),
    "vllm": ("tensor_parallel_size", "gpu_memory_utilization"),
}
"""What a server calls its size and its share of the memory."""


RESCORED: Final = "algorithm.old_log_probs=recompute"
"""What an engine that records after cuts needs where the file takes its records for the policy's."""
RESCORED_NOTE: Final = (
    "vLLM records log-probabilities after top-k and top-p where the temperature is not 1, and the file takes them for "
    "the policy's (bypass): here the trainer computes those of the version that sampled, before the cut, instead"
)


def is_rescored(document: Mapping[str, Any]) -> bool:
    """Whether the trainer can give the log-probabilities that a spec takes from vLLM's records: every batch is sampled
    by the version that its step begins with, so that what is computed then is what the engine would have recorded."""
    engine = _section(document, "rollout", "engine").get("kind")
    asynchrony = _section(document, "asynchrony")
    in_step = asynchrony.get("staleness_threshold") == 0 and asynchrony.get("trigger_parameter_sync_step", 1) == 1
    return engine == "vllm" and in_step and _section(document, "algorithm").get("old_log_probs") == "rollout"


def _section(document: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    found: Any = document
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def named_engine(system: str, given: Sequence[Given]) -> str | None:
    """Return the server that a launch file names; None for none, or one that the fleet does not know."""
    names = NAMES.get(system)
    if names is None:
        return None
    values = _values(given)
    shows = "vllm" if _first(values, names.shows) not in NO else None
    kind = _first(values, names.kinds) if names.kinds else shows
    return kind if isinstance(kind, str) and kind in OPTIONS else None


def overrides_for(system: str, given: Sequence[Given], kind: str | None = None) -> tuple[str, ...]:
    """Return the overrides, ``KEY=VALUE``, with which a spec asks for the engine that a launch file names.

    They take over how many GPUs an engine is split over and its share of their memory; nothing for an engine that the
    fleet does not know.

    Args:
        system: whose file it is.
        given: its parameters.
        kind: ask for this server, whichever is named.
    """
    names, kind = NAMES.get(system), kind or named_engine(system, given)
    if names is None or kind is None:
        return ()
    values = _values(given)
    size_option, share_option = OPTIONS[kind]
    size, share = _number(_first(values, names.sizes)), _number(_first(values, names.shares))
    is_split = size is not None and size > 1 and size.is_integer()
    options = [f"{size_option}: {size:.0f}"] if is_split else []
    options += [f"{share_option}: {share:g}"] if share is not None and 0 < share < 1 else []
    return (
        f"rollout.engine.kind={kind}",
        *([f"rollout.engine.options={{{', '.join(options)}}}"] if options else []),
        *([f"resources.rollouts.devices={size:.0f}"] if is_split else []),
    )


def suggestion(overrides: Sequence[str], why_not: str | None) -> list[str]:
    """Return the lines that tell whoever named an engine how to get it, or why this spec cannot have it.

    Args:
        overrides: that ask for it; the first one names it.
        why_not: what is wrong with the spec under them; None where nothing is.
    """
    named = overrides[0].partition("=")[2]
    if why_not is not None:
        return [f"the file names {named}, with which this spec cannot sample: {why_not}"]
    words = [f"--set '{each}'" if " " in each else f"--set {each}" for each in overrides]
    return [f"the file names {named}; for it in the place of the embedded engine (docs/engines.md):", " ".join(words)]


def _values(given: Sequence[Given]) -> dict[str, Any]:
    return {each.spelling: each.value for each in given if each.refusal is None}


def _first(values: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
