"""What the trainer keeps of the groups that it trains: whole steps, with all that only it knows about their tokens."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from flotilla.services.trainer.data.plan import StepGroups
from flotilla.services.trainer.learning.learner import StepResult
from flotilla.shared.checkpoints.lineage import follow
from flotilla.shared.config.sections.tracking import SamplesConfig
from flotilla.shared.samples.folder import CHANGES, step_name
from flotilla.shared.samples.recorder import KeepsEnded, NothingKept, SampleRecorder
from flotilla.shared.schemas.live_changes import LiveChange
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleFile, SampleKind
from flotilla.shared.schemas.service import Failure

COMPONENT = "samples"


class StepSamples:
    """Hands trained steps to the recorder; without one it keeps nothing.

    Args:
        recorder: writes them; None if the spec turns it off.
    """

    def __init__(self, recorder: SampleRecorder | None) -> None:
        self._recorder = recorder

    @property
    def ended(self) -> KeepsEnded:
        """The receiver of groups that end without being trained."""
        return NothingKept() if self._recorder is None else self._recorder

    def figures(self) -> dict[str, float]:
        """Return the record's figures for a step's report."""
        if self._recorder is None:
            return {}
        return {
            "samples/written_bytes": float(self._recorder.written_bytes),
            "samples/lost_files": float(self._recorder.lost_files),
        }

    def trained(
        self,
        planned: StepGroups,
        result: StepResult,
        version: int,
        parent: str,
        lag: Callable[[int], int],
        changes: Sequence[LiveChange] = (),
    ) -> None:
        """Keep the groups of a step, or the first of them.

        Args:
            planned: the step.
            result: of training it.
            version: that was trained.
            parent: the lineage that the step continued.
            lag: versions from the one that sampled a token to the one that was trained.
            changes: of the spec while the experiment ran, which the step was trained with, oldest first.
        """
        recorder, traced = self._recorder, result.traced
        if recorder is None or traced is None or recorder.config.groups_per_step == 0:
            return
        most = recorder.config.groups_per_step

        def make() -> SampleFile:
            kept = [
                KeptGroup(group, SampleKind.TRAINED, tokens=tokens)
                for group, tokens in traced.of_groups(planned.groups[:most], lag)
            ]
            facts = _facts(planned, result, parent) | {"num_kept": len(kept)}
            if changes:
                facts[CHANGES] = [each.model_dump(mode="json") for each in changes]
            return SampleFile(step_name(planned.plan.step), kept, planned.plan.step, version, facts)

        recorder.keep(make)


def _facts(planned: StepGroups, result: StepResult, parent: str) -> dict[str, Any]:
    plan = planned.plan
    return {
        "num_groups": len(planned.groups),
        "parent": parent,
        "lineage": follow(parent, plan.step, plan.group_ids),
        "metrics": dict(result.metrics),
        "grad_norms": [update.grad_norm for update in result.updates],
        "learning_rates": [update.learning_rate for update in result.updates],
    }


def from_threads(component: str, on_failure: Callable[[Failure | None], None]) -> Callable[[str | None], None]:
    """Make a callback for other threads to report a problem that ends nothing, and None once it is over."""
    loop = asyncio.get_running_loop()

    def tell(problem: str | None) -> None:
        cause = None if problem is None else Failure(component=component, cause=problem, fatal=False)
        loop.call_soon_threadsafe(on_failure, cause)

    return tell


@asynccontextmanager
async def open_samples(
    directory: Path, config: SamplesConfig | None, on_failure: Callable[[Failure | None], None]
) -> AsyncIterator[SampleRecorder | None]:
    """Open the record of an experiment; None where the spec keeps none. What waits is written at the end."""
    if config is None:
        yield None
        return
    tell = from_threads(COMPONENT, on_failure)
    recorder = SampleRecorder(directory, config, writer="trainer", on_problem=tell).start()
    try:
        yield recorder
    finally:
        await asyncio.to_thread(recorder.close)
