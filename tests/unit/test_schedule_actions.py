"""The text form of schedules: what is written is read back, and what is malformed is named with its line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.errors import ScheduleError
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule, parse_schedule

NUMBERS = st.integers(0, 10_000)
ROLES = st.sampled_from(("actor", "reference", "critic", "reward"))
STEPS = st.none() | NUMBERS
MESSAGES = st.builds(
    Action, NUMBERS, st.sampled_from((Op.SEND, Op.RECV)), ROLES, NUMBERS, NUMBERS, STEPS, st.sampled_from(Payload), NUMBERS
)
OTHERS = st.builds(
    Action, NUMBERS, st.sampled_from([op for op in Op if op not in (Op.SEND, Op.RECV)]), ROLES, NUMBERS, NUMBERS, STEPS
)


@given(st.lists(MESSAGES | OTHERS, max_size=30))
def test_a_schedule_is_read_back(actions: list[Action]) -> None:
    ranks = dict.fromkeys(action.rank for action in actions)
    schedule = Schedule({rank: tuple(action for action in actions if action.rank == rank) for rank in ranks})
    assert parse_schedule(schedule.text()) == schedule
    assert parse_schedule(f"# a remark\n\n{schedule.text()}\n  # the end\n") == schedule
    assert schedule.shifted(3).shifted(0).text().count("\n") == schedule.text().count("\n")


def test_lists_keep_their_order_and_may_be_empty() -> None:
    schedule = parse_schedule("rank 1\n  decode actor m1 c2 s0\n  decode actor m0 c2 s0\nrank 0\n")
    assert [action.micro_batch for action in schedule.of(1)] == [1, 0]
    assert schedule.of(0) == () and schedule.of(7) == ()
    assert schedule.text().startswith("rank 0\nrank 1\n")
    assert schedule.shifted(2).of(1)[0] == Action(1, Op.DECODE, "actor", 1, 4, 0)


@pytest.mark.parametrize(
    ("line", "about"),
    [
        ("decode actor c1 s0", "is not an action"),
        ("decode actor m0 c-1", "is not an action"),
        ("decode  actor m0 c1", "is not an action"),
        ("decipher actor m0 c1", "is not an action"),
        ("decode actor m0 c" + 5000 * "1", "is not an action"),
        ("decode actor m\N{ARABIC-INDIC DIGIT ONE} c1", "is not an action"),
        ("rank " + 5000 * "1", "is not an action"),
        ("send actor m0 c1 -> 1", "need both"),
        ("send hidden actor m0 c1", "need both"),
        ("send hidden actor m0 c1 <- 1", "need both"),
        ("recv hidden actor m0 c1 -> 1", "need both"),
        ("recv letter actor m0 c1 <- 1", "is not an action"),
        ("decode hidden actor m0 c1 s0", "only send"),
        ("prefill reward m0 c1 -> 2", "only send"),
        ("rank 0", "second list"),
        ("rank x", "is not an action"),
    ],
)
def test_malformed_text_is_named_with_its_line(line: str, about: str) -> None:
    with pytest.raises(ScheduleError, match="line 4: ") as error:
        parse_schedule(f"rank 0\n  prefill reward m0 c1\n\n  {line}\n")
    assert about in str(error.value) and line in str(error.value)


def test_an_action_before_any_rank_is_refused() -> None:
    with pytest.raises(ScheduleError, match="line 2: .* before any `rank N` line"):
        parse_schedule("\nprefill reward m0 c1\n")


@given(st.text(max_size=60))
def test_any_other_text_is_refused_or_read(text: str) -> None:
    try:
        schedule = parse_schedule(text)
    except ScheduleError as error:
        assert str(error).startswith("line ")
    else:
        assert parse_schedule(schedule.text()) == schedule
        assert isinstance(schedule, Schedule)
