"""Schedules as text, the places of messages in them, and grids and pictures of their timelines."""

import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.errors import ScheduleError
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule, parse_schedule
from oppo_megatron.schedule.checking.checker import check
from oppo_megatron.schedule.checking.timeline import Timeline, simulate
from oppo_megatron.schedule.preview import COLOURS, FAULT_COLOUR, colour, draw, failing_times, letter, render
from oppo_megatron.schedule.rounds import Growth, Round
from oppo_megatron.schedule.weaving.components import add_communication
from oppo_megatron.schedule.weaving.costs import Costs, Linear
from oppo_megatron.schedule.weaving.generators import GENERATORS, intra
from tests.support.schedules import LAYOUTS, ample_budgets, build, colocated, disaggregated, make_round, make_site

NUMBERS = st.integers(0, 10_000)
ROLES = st.sampled_from(("actor", "reference", "critic", "reward"))
STEPS = st.none() | NUMBERS
SENT = (Op.SEND, Op.RECV)
MESSAGES = st.builds(Action, NUMBERS, st.sampled_from(SENT), ROLES, NUMBERS, NUMBERS, STEPS, st.sampled_from(Payload), NUMBERS)
OTHERS = st.builds(Action, NUMBERS, st.sampled_from([op for op in Op if op not in SENT]), ROLES, NUMBERS, NUMBERS, STEPS)


@given(st.lists(MESSAGES | OTHERS, max_size=30))
def test_a_schedule_is_read_back(actions: list[Action]) -> None:
    ranks = dict.fromkeys(action.rank for action in actions)
    schedule = Schedule({rank: tuple(action for action in actions if action.rank == rank) for rank in ranks})
    assert parse_schedule(schedule.text()) == schedule
    assert parse_schedule(f"# a remark\n\n{schedule.text()}\n  # the end\n") == schedule
    assert schedule.shifted(3).shifted(0).text().count("\n") == schedule.text().count("\n")


def test_lists_keep_their_order_may_be_empty_and_begin_with_a_rank() -> None:
    schedule = parse_schedule("rank 1\n  decode actor m1 c2 s0\n  decode actor m0 c2 s0\nrank 0\n")
    assert [action.micro_batch for action in schedule.of(1)] == [1, 0]
    assert schedule.of(0) == () and schedule.of(7) == ()
    assert schedule.text().startswith("rank 0\nrank 1\n")
    assert schedule.shifted(2).of(1)[0] == Action(1, Op.DECODE, "actor", 1, 4, 0)
    with pytest.raises(ScheduleError, match="line 2: .* before any `rank N` line"):
        parse_schedule("\nprefill reward m0 c1\n")


@pytest.mark.parametrize(("line", "about"), [
    ("decode actor c1 s0", "is not an action"), ("decode actor m0 c-1", "is not an action"),
    ("decode  actor m0 c1", "is not an action"), ("decipher actor m0 c1", "is not an action"),
    ("decode actor m0 c" + 5000 * "1", "is not an action"), ("decode actor m\N{ARABIC-INDIC DIGIT ONE} c1", "is not an action"),
    ("rank " + 5000 * "1", "is not an action"), ("send actor m0 c1 -> 1", "need both"), ("send hidden actor m0 c1", "need both"),
    ("send hidden actor m0 c1 <- 1", "need both"), ("recv hidden actor m0 c1 -> 1", "need both"),
    ("recv letter actor m0 c1 <- 1", "is not an action"), ("decode hidden actor m0 c1 s0", "only send"),
    ("prefill reward m0 c1 -> 2", "only send"), ("rank 0", "second list"), ("rank x", "is not an action"),
])  # fmt: skip
def test_malformed_text_is_named_with_its_line(line: str, about: str) -> None:
    with pytest.raises(ScheduleError, match="line 4: ") as error:
        parse_schedule(f"rank 0\n  prefill reward m0 c1\n\n  {line}\n")
    assert about in str(error.value) and line in str(error.value)


@given(st.text(max_size=60))
def test_any_other_text_is_refused_or_read(text: str) -> None:
    try:
        schedule = parse_schedule(text)
    except ScheduleError as error:
        assert str(error).startswith("line ")
    else:
        assert parse_schedule(schedule.text()) == schedule


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_places_of_messages(layout: tuple[int, int, int], name: str) -> None:
    """Hidden state: received directly before its use, sent directly after it.  Tokens: before the next step, or last."""
    site = colocated(layout)
    compute = GENERATORS[name](make_round(site), site, Costs())
    for rank, own in add_communication(compute, make_round(site), site).actions.items():
        assert tuple(a for a in own if a.payload is None and a.op is not Op.GATHER) == compute.of(rank)
        for at, action in enumerate(own):
            same = (action.role, action.micro_batch, action.step)
            if action.payload is Payload.HIDDEN:
                other = own[at + 1] if action.op is Op.RECV else own[at - 1]
                assert other.op in (Op.DECODE, Op.PREFILL)
                assert (other.role, other.micro_batch, other.step) == same
            if action.payload is Payload.TOKENS and action.op is Op.RECV:
                assert _after_tokens(own[at + 1 :], action)


def _after_tokens(rest: tuple[Action, ...], tokens: Action) -> bool:
    """True where the next step of these sequences follows, or nothing but messages and the gather."""
    following = [a for a in rest if a.op not in (Op.RECV, Op.GATHER)]
    if tokens.step == 2:
        return not following
    first = following[0]
    return (first.op, first.micro_batch, first.step) == (Op.DECODE, tokens.micro_batch, (tokens.step or 0) + 1)


def test_gather_and_chunk_end_the_lists() -> None:
    site = disaggregated((1, 2, 2), (1, 1, 1))
    round_ = make_round(site)
    schedule = add_communication(intra(round_, site, Costs()), round_, site)
    actor, chunk = site.placements["actor"], round_.index
    for rank in actor.ranks:
        gather, *chunks = [a for a in schedule.of(rank) if a.op is Op.GATHER or a.payload is Payload.CHUNK]
        assert gather == Action(rank, Op.GATHER, "actor", 0, chunk)
        assert schedule.of(rank)[-1 - len(chunks) :] == (gather, *chunks)
        assert bool(chunks) == (rank == site.source)
    (listener,) = site.listeners
    assert str(schedule.of(listener)[-1]) == f"recv chunk actor m0 c{chunk} <- {site.source}"


SITE = make_site((1, 2, 1), {"reward": (0, 1, 2, 1)})
ROUND = Round(2, 1, (((Growth(0, 5, 1),), (Growth(1, 5, 1),)),), {"reward": (((Growth(0, 0, 4, 1), Growth(1, 0, 4, 1)),),)})
# decode 2 s, sample 1 s, prefill 4 s, score 1 s, messages 0 s
COSTS = Costs(Linear(2, 0), Linear(1, 0), {}, Linear(4, 0), Linear(1, 0), 0.0)


def grid(text: str) -> dict[int, str]:
    return {int(rank): cells for rank, cells in re.findall(r"^rank +(\d+) \|(.*)\|", text, re.MULTILINE)}


def broken() -> tuple[Schedule, Timeline]:
    schedule = build(ROUND, SITE)
    lists = {rank: tuple(a for a in own if not str(a).startswith("send hidden reward")) for rank, own in schedule.actions.items()}
    return Schedule(lists), simulate(Schedule(lists), ROUND, SITE, COSTS)


GOLDEN = """\
        0      17000.0 ms
rank 0 |D0D1....R0--.....|  53% idle
rank 1 |..D0sD1s....R0--r|  35% idle
D decode, R prefill reward
r score reward, s sample, . idle
digits: micro-batch
"""


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_grid_is_compressed_and_never_wrapped(width: int) -> None:
    site = colocated((1, 4, 2))
    round_ = make_round(site, steps=12)
    timeline = simulate(build(round_, site), round_, site)
    text = render(timeline, width)
    cells = grid(text)
    assert sorted(cells) == list(range(8)) and len({len(row) for row in cells.values()}) == 1
    assert max(map(len, text.splitlines())) <= width
    for rank, row in cells.items():  # what is shown as idle is what is idle
        assert row.count(".") / len(row) == pytest.approx(timeline.bubble(rank), abs=0.2)


def test_grid_of_a_known_timeline_and_letters_that_tell_operations_and_roles_apart() -> None:
    scorers = ("reference", "critic", "reward")
    kinds = [(op, "actor") for op in (Op.DECODE, Op.SAMPLE, Op.PREFILL)] + [*product((Op.PREFILL, Op.SCORE), scorers)]
    actions = [Action(0, op, role, 0, 0) for op, role in kinds]
    letters = [letter(action) for action in actions]
    assert len(set(letters)) == len(letters) and all(len(each) == 1 for each in letters)
    assert letter(Action(0, Op.PREFILL, "judge", 0, 0)) == "X"
    assert len({colour(action) for action in actions}) == len(COLOURS)
    assert render(simulate(build(ROUND, SITE), ROUND, SITE, COSTS), 36) == GOLDEN


def test_the_cells_of_faults_are_marked_and_where_one_starts_that_hangs_nothing() -> None:
    schedule, timeline = broken()
    faults = check(schedule, ROUND, SITE, ample_budgets(SITE))
    rows = grid(render(timeline, 80, faults))
    assert timeline.stuck[1].reason.startswith("no such message has been sent; rank 0 has ended")
    stuck_at = max(span.end_s for span in timeline.spans[1])
    column = min(len(rows[1]) - 1, int(stuck_at / timeline.makespan_s * len(rows[1])))
    assert rows[1].index("!") == column and rows[1].count("!") == 1
    assert rows[0].index("!") == len(rows[0]) - 1, "the action that rank 0 lacks belongs after its last"
    assert "! fault" in render(timeline, 80, faults)
    assert "! fault" not in render(simulate(build(ROUND, SITE), ROUND, SITE, COSTS), 80)
    schedule = build(ROUND, SITE)
    own = list(schedule.of(1))
    position = next(i for i, action in enumerate(own) if action.op is Op.SAMPLE)
    own[position - 1], own[position] = own[position], own[position - 1]
    turned = Schedule({0: schedule.of(0), 1: tuple(own)})
    timeline, faults = simulate(turned, ROUND, SITE, COSTS), check(turned, ROUND, SITE, {})
    assert not timeline.stuck and faults
    times = failing_times(timeline, faults, 1)
    assert timeline.spans[1][position - 1].start_s in times and not failing_times(timeline, faults, 0)
    assert "!" in grid(render(timeline, 80, faults))[1]


def test_picture_has_every_role_and_the_fault(tmp_path: Path) -> None:
    matplotlib_image = pytest.importorskip("matplotlib.image")
    schedule, timeline = broken()
    faults = check(schedule, ROUND, SITE, {})
    sound, failing = tmp_path / "sound.png", tmp_path / "failing.png"
    draw(simulate(build(ROUND, SITE), ROUND, SITE, COSTS), sound, title="sound")
    draw(timeline, failing, faults, title="failing")

    def colours(path: Path) -> set[str]:
        pixels = (matplotlib_image.imread(path)[..., :3].reshape(-1, 3) * 255).round().astype(int)
        return {f"#{colour:06X}" for colour in set((pixels @ [0x10000, 0x100, 1]).tolist())}

    drawn = {COLOURS[name] for name in ("decode", "sample", "prefill reward")}
    assert drawn <= colours(sound) and FAULT_COLOUR not in colours(sound)
    assert FAULT_COLOUR in colours(failing)
    timeline = simulate(Schedule({}), Round(1, 0), SITE)  # nothing to do
    assert set("".join(grid(render(timeline, 60)).values())) == {"."}
    draw(timeline, tmp_path / "empty.png")
