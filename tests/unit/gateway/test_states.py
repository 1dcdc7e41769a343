import pytest

from flotilla.services.gateway.lifecycle.states import (
    Action,
    LifecycleEvent,
    after_action,
    after_event,
    allowed_actions,
)
from flotilla.shared.errors import ActionNotAllowed
from flotilla.shared.schemas.experiment import ExperimentState as State


def test_a_life_from_draft_to_completed() -> None:
    state: State | None = State.DRAFT
    assert state is not None
    state = after_action(state, Action.START)
    assert state is State.STARTING

    state = after_event(state, LifecycleEvent.READY)
    paused = after_action(state, Action.PAUSE)
    assert (state, paused) == (State.RUNNING, State.PAUSED)
    assert paused is not None and after_action(paused, Action.RESUME) is State.RUNNING

    state = after_event(state, LifecycleEvent.TRAINED)
    assert after_event(state, LifecycleEvent.QUIET, outcome=State.COMPLETED) is State.COMPLETED


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("action", list(Action))
def test_an_action_is_either_allowed_or_refused_with_the_names_of_those_that_are(state: State, action: Action) -> None:
    if action in allowed_actions(state):
        after = after_action(state, action)
        assert after is None or after is not state
        return

    with pytest.raises(ActionNotAllowed) as refusal:
        after_action(state, action)

    for allowed in allowed_actions(state):
        assert allowed.value in refusal.value.detail
    assert state.value in refusal.value.detail


@pytest.mark.parametrize("state", [state for state in State if state.is_final])
def test_only_a_person_leads_out_of_a_final_state(state: State) -> None:
    may_resume = [] if state is State.COMPLETED else [Action.RESUME]
    assert allowed_actions(state) == [*may_resume, Action.EXTEND, Action.DELETE]
    assert all(after_event(state, event) is state for event in LifecycleEvent)


def test_every_state_at_work_can_break() -> None:
    working = [State.STARTING, State.RUNNING, State.PAUSED, State.STOPPING]
    assert [after_event(state, LifecycleEvent.BROKEN) for state in working] == [State.FAILED] * 4
    assert after_event(State.DRAFT, LifecycleEvent.BROKEN) is State.DRAFT
