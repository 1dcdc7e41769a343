"""A sandbox says for which experiment it is there: without that an experiment that runs code never starts."""

from flotilla.services.sandbox.__main__ import Waiting
from flotilla.services.sandbox.spare_time import SpareTime
from flotilla.shared.schemas.service import Assignment, DesiredState, ObservedState, WorkState


async def test_a_sandbox_follows_the_experiment_that_it_is_assigned_to() -> None:
    told: list[None] = []
    spare = SpareTime(2, least=0.05, now=lambda: 0.0, busy=lambda: 0.0, own=lambda: 0.0)
    waiting = Waiting(spare, lambda: {"runs": 3.0})
    waiting.notify = lambda: told.append(None)
    assignment = Assignment(experiment_id="a", revision=1, spec={}, directory="/nowhere")
    seen, own = [waiting.observe()], []

    for state, given in (
        (WorkState.RUNNING, assignment),
        (WorkState.DRAINING, assignment),
        (WorkState.IDLE, None),
    ):
        await waiting.apply(DesiredState(tag=state.value, state=state, assignment=given))
        seen.append(waiting.observe())
        own.append(spare.own_experiment)

    assert seen == [
        ObservedState(load={"runs": 3.0}),
        ObservedState(experiment_id="a", state=WorkState.RUNNING, load={"runs": 3.0}),
        ObservedState(experiment_id="a", state=WorkState.FINISHED, load={"runs": 3.0}),
        ObservedState(load={"runs": 3.0}),
    ]
    assert own == ["a", "a", None], "whose programs are not bounded"
    assert len(told) == 3
