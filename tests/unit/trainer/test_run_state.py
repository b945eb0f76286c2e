"""The table of transitions."""

from __future__ import annotations

import pickle

import pytest

from trainer.errors import RunStateError
from trainer.runs.state import ALLOWED, TERMINAL, RunState, check_transition


def test_every_state_has_a_row_and_terminal_states_have_no_way_out() -> None:
    assert set(ALLOWED) == set(RunState)
    assert {state for state, following in ALLOWED.items() if not following} == TERMINAL


def test_every_state_is_reached_from_created_and_reaches_an_end() -> None:
    reached, waiting = set(), [RunState.CREATED]
    while waiting:
        state = waiting.pop()
        if state not in reached:
            reached.add(state)
            waiting += ALLOWED[state]
    assert reached == set(RunState)
    assert all(RunState.FAILED in ALLOWED[state] for state in RunState if state not in TERMINAL)


def test_illegal_transition_names_the_states_that_allow_it() -> None:
    with pytest.raises(RunStateError) as caught:
        check_transition(RunState.STARTING, RunState.PAUSED, action="pause")
    assert str(caught.value) == "cannot pause: the run is starting, must be running"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
