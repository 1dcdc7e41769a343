"""What an experiment will take, before anything starts: memory of its processes, and the arithmetic of its batches."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from flotilla.shared.config.sections.engine import TorchEngineConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidRequest, InvalidSpec, ModelError
from flotilla.shared.host.control_groups import available_bytes
from flotilla.shared.models.hub import model_directory
from flotilla.shared.service.devices import decided_here, machine_devices
from flotilla.shared.sizes.batches import arithmetic_of
from flotilla.shared.sizes.engine import engine_footprint
from flotilla.shared.sizes.fitting import overflow, refusal
from flotilla.shared.sizes.model import read_sizes
from flotilla.shared.sizes.parts import Footprint, Part, in_words
from flotilla.shared.sizes.trainer import MOST_TOKENS, pass_of, read_others, trainer_footprint

OTHER_BYTES: Final = 600 * 10**6
"""Gateway, reward, sandbox, the services around engine and trainer, and Redis, measured on the arithmetic example."""


@dataclass(frozen=True)
class Sizing:
    """What an experiment takes on one machine.

    Attributes:
        spec: of it.
        processes: each with how many there are of it.
        unknown: why a part of it is not predicted; empty where all is.
        is_open: the spec leaves a device to ``auto`` on a machine with GPUs, and the fleet decides it: what is said
            is for what this process would take, and nothing is refused.
    """

    spec: ExperimentSpec
    processes: Sequence[tuple[Footprint, int]]
    unknown: str = ""
    is_open: bool = False

    def facts(self) -> list[dict[str, object]]:
        """Write the processes for programs: bytes of each, and of its parts."""
        return [
            {
                "process": each.name,
                "count": count,
                "device": each.device,
                "bytes": each.total,
                "needed_bytes": each.needed_on_host + each.needed_on_device,
                "parts": {part.name: part.num_bytes for part in each.parts},
            }
            for each, count in self.processes
        ]

    def lines(self, available: int, *, is_brief: bool = False) -> list[str]:
        """Write it for people: a line for each process, one for their sum, and the arithmetic of batches.

        Args:
            available: bytes of memory here.
            is_brief: leave out how parts are counted, and what ``check`` raises.
        """
        found = [f"memory     {_line(each, count, is_brief=is_brief)}" for each, count in self.processes]
        if self.unknown:
            found.append(f"memory     not predicted: {self.unknown}")
        if self.is_open:
            device = self.processes[0][0].device
            found.append(f"memory     auto is taken to be {device} here; the fleet decides it, and nothing is refused")
        if self.processes:
            most = sum(each.host_bytes * count for each, count in self.processes)
            found.append(f"memory     at most {in_words(most)} of {in_words(available)} that are available here")
            if (refused := self.refusal(available)) is not None:
                found += [] if is_brief else [f"memory     `flotilla run` here would refuse: {refused}"]
            elif (why := overflow(self.processes, available)) is not None:
                found.append(f"memory     {why}")
        return [*found, *batch_lines(self.spec)]

    def refusal(self, available: int) -> str | None:
        """Return why it cannot fit, with the arithmetic, and keys that would help; None where it may."""
        return None if self.is_open else refusal(self.processes, available, "this machine")

    def check(self, available: int) -> None:
        """Refuse what cannot fit.

        Raises:
            InvalidSpec: it cannot; the message is that of ``refusal``.
        """
        if (why := self.refusal(available)) is not None:
            raise InvalidSpec(why)


def _line(process: Footprint, count: int, *, is_brief: bool) -> str:
    parts = " + ".join(f"{part.name} {in_words(part.num_bytes)}" for part in process.parts)
    several = "" if count == 1 else f"{count} x "
    return f"{several}{process.name}, at most {in_words(process.total)}: {parts if is_brief else process.arithmetic()}"


def size_up(spec: ExperimentSpec, *, rollouts: int | None = None) -> Sizing:
    """Predict what an experiment takes on a machine that has all of it. Blocks for nvidia-smi, and headers of files.

    Args:
        spec: of the experiment; its model is on this machine, or nothing is predicted.
        rollouts: that there are; None: as many as the spec asks for.
    """
    try:
        sizes = read_sizes(model_directory(spec.model))
    except ModelError as error:
        return Sizing(spec, (), error.detail)
    spec, free, is_open = _placed(spec)
    processes: list[tuple[Footprint, int]] = []
    missing: list[str] = []
    if spec.trains:
        others, missing = read_others(spec)
        ranks = max(1, spec.parallelism.ranks // spec.parallelism.nodes)
        processes.append((trainer_footprint(spec, sizes, free=free, others=others), 1))
        if ranks > 1:
            follower = trainer_footprint(spec, sizes, free=free, others=others, publishes=False)
            processes.append((replace(follower, name="other rank of the trainer"), ranks - 1))
    engine, unknown = engine_footprint(spec, sizes), [f"the model of {field}, which is not here" for field in missing]
    if engine is not None:
        processes.append((engine, spec.resources.rollouts.min if rollouts is None else rollouts))
    elif spec.needs_rollouts and not isinstance(spec.rollout.engine, TorchEngineConfig):
        unknown.append(f"{spec.rollout.engine.kind} takes what rollout.engine.options say")
    processes.append((Footprint("other services", "cpu", [Part("processes", OTHER_BYTES, "measured")]), 1))
    return Sizing(spec, processes, "; ".join(unknown), is_open)


def _placed(spec: ExperimentSpec) -> tuple[ExperimentSpec, int | None, bool]:
    """Decide what is ``auto`` by this machine's devices; with the bytes that its trainer has, and if it is still open.

    A fleet gives its services devices of its own, and may decide otherwise where there are GPUs.
    """
    is_open = "auto" in {spec.parallelism.device, spec.rollout.engine.device, spec.model.dtype}
    devices = machine_devices() if is_open or spec.parallelism.device.startswith("cuda") else ()
    with contextlib.suppress(InvalidRequest):
        spec = decided_here(spec)
    if not spec.parallelism.device.startswith("cuda"):
        return spec, available_bytes(), is_open and bool(devices)
    return spec, min((each.memory_bytes or 0 for each in devices), default=0) or None, is_open and bool(devices)


def available_here() -> int:
    """Count the bytes of this machine's memory that are available to this process."""
    return available_bytes()


def batch_lines(spec: ExperimentSpec) -> list[str]:
    """Write the arithmetic of a step's batches; nothing where nothing is trained."""
    if not spec.trains:
        return []
    step = arithmetic_of(spec)
    largest, bound = pass_of(spec, step), spec.optimisation.micro_batch_tokens
    device = "cuda" if spec.parallelism.device.startswith("cuda") else "cpu"
    told = f"at most {MOST_TOKENS[device]} tokens, as memory allows" if bound == "auto" else f"{bound} tokens"
    per_rank = "" if step.shares == 1 else f" on each of {step.shares} ranks"
    steps, updates = spec.optimisation.steps, _counted(step.updates, "optimiser update")
    rows = "rows" if spec.finished_job is not None else "prompts"
    if step.is_bounded:
        lengths = f"{step.prompt_tokens} + {step.sampled_tokens}" if step.prompt_tokens else f"{step.sampled_tokens}"
        sample, of_step, in_all = f"at most {lengths} tokens", f", a step {step.tokens}", f"{steps * step.tokens}"
        filled = f" ({_counted(largest.sequences, 'sample')} of the largest length)"
    else:
        sample, of_step, in_all, filled = "any number of tokens (job.max_tokens is unbounded)", "", "", ""
    return [
        f"batch      {step.prompts} {rows} x {step.group_size} = {step.samples} samples a step, {updates} of "
        f"{step.samples // step.mini_batches} samples",
        f"batch      a sample has {sample}{of_step}; "
        f"an update at most {_counted(step.passes(largest), 'pass')}{per_rank}, of {told}{filled}",
        f"batch      {steps} steps: {_counted(steps * step.updates, 'update')}, {steps * step.samples} samples"
        + (f", at most {in_all} tokens" if in_all else ""),
    ]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"
