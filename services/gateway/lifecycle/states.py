"""The life of an experiment as a pure state machine.

    draft -> starting -> running <-> paused -> stopping -> stopped | completed
                          any of these, when something breaks -> failed
    stopped, failed -> starting, when it is resumed; these and completed, when it is given more steps

Actions come from people and may be refused; events are the gateway's own conclusions and never are, because they
apply only where ``EVENTS`` has them.
"""

from enum import StrEnum
from typing import Final

from flotilla.shared.errors import ActionNotAllowed
from flotilla.shared.schemas.experiment import ExperimentState as State


class Action(StrEnum):
    """What a person may ask of an experiment."""

    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    EXTEND = "extend"
    """Train more steps, from the last checkpoint on. What is still at work gets its steps without an action."""
    DELETE = "delete"


class LifecycleEvent(StrEnum):
    """What the gateway concludes."""

    READY = "ready"
    """Every service that it needs has started."""
    TRAINED = "trained"
    """All steps are done and durable, and the last evaluation has ended."""
    QUIET = "quiet"
    """No service works for it any more, and nothing is outstanding."""
    BROKEN = "broken"
    """A component cannot continue."""


ACTIONS: Final[dict[State, dict[Action, State | None]]] = {
    State.DRAFT: {Action.START: State.STARTING, Action.DELETE: None},
    State.STARTING: {Action.STOP: State.STOPPING},
    State.RUNNING: {Action.PAUSE: State.PAUSED, Action.STOP: State.STOPPING},
    State.PAUSED: {Action.RESUME: State.RUNNING, Action.STOP: State.STOPPING},
    State.STOPPING: {},
    State.STOPPED: {Action.RESUME: State.STARTING, Action.EXTEND: State.STARTING, Action.DELETE: None},
    State.COMPLETED: {Action.EXTEND: State.STARTING, Action.DELETE: None},
    State.FAILED: {Action.RESUME: State.STARTING, Action.EXTEND: State.STARTING, Action.DELETE: None},
}

EVENTS: Final[dict[State, dict[LifecycleEvent, State]]] = {
    State.STARTING: {LifecycleEvent.READY: State.RUNNING, LifecycleEvent.BROKEN: State.FAILED},
    State.RUNNING: {LifecycleEvent.TRAINED: State.STOPPING, LifecycleEvent.BROKEN: State.FAILED},
    State.PAUSED: {LifecycleEvent.TRAINED: State.STOPPING, LifecycleEvent.BROKEN: State.FAILED},
    State.STOPPING: {LifecycleEvent.BROKEN: State.FAILED},
}


def allowed_actions(state: State) -> list[Action]:
    """List what a person may ask in this state."""
    return list(ACTIONS[state])


def after_action(state: State, action: Action) -> State | None:
    """Find the state that an action leads to; None for a deleted experiment.

    Raises:
        ActionNotAllowed: the state does not allow it; the detail names the actions that it allows.
    """
    if action not in ACTIONS[state]:
        allowed = ", ".join(allowed_actions(state)) or "none"
        raise ActionNotAllowed(
            f"cannot {action} an experiment that is {state}; allowed now: {allowed}", state=state.value, allowed=allowed
        )
    return ACTIONS[state][action]


def after_event(state: State, event: LifecycleEvent, *, outcome: State = State.STOPPED) -> State:
    """Find the state that a conclusion leads to; the same state where the conclusion means nothing.

    Args:
        state: of the experiment.
        event: what was concluded.
        outcome: what ``quiet`` leads to, stopped or completed.
    """
    if state is State.STOPPING and event is LifecycleEvent.QUIET:
        return outcome
    return EVENTS.get(state, {}).get(event, state)
