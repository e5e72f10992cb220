"""Grids: the cells of a known timeline, compression to any width, the failing cell, and the picture's pixels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oppo_megatron.schedule.actions import Action, Op, Schedule
from oppo_megatron.schedule.checking.checker import check
from oppo_megatron.schedule.checking.timeline import Timeline, simulate
from oppo_megatron.schedule.drawing import COLOURS, FAULT_COLOUR, colour, draw, failing_times, letter, render
from oppo_megatron.schedule.rounds import Growth, Round
from oppo_megatron.schedule.weaving.costs import Costs, Linear
from tests.support.schedules import ample_budgets, build, colocated, make_round, make_site

SITE = make_site((1, 2, 1), {"reward": (0, 1, 2, 1)})
ROUND = Round(2, 1, (((Growth(0, 5, 1),), (Growth(1, 5, 1),)),), {"reward": (((Growth(0, 0, 4, 1), Growth(1, 0, 4, 1)),),)})
# decode 2 s, sample 1 s, prefill 4 s, score 1 s, messages 0 s
COSTS = Costs(Linear(2, 0), Linear(1, 0), {}, Linear(4, 0), Linear(1, 0), 0.0)


def grid(text: str) -> dict[int, str]:
    return {int(rank): cells for rank, cells in re.findall(r"^rank +(\d+) \|(.*)\|", text, re.MULTILINE)}


def broken() -> tuple[Schedule, Timeline]:
    """Rank 0 never sends the reward's hidden state."""
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


def test_grid_of_a_known_timeline() -> None:
    assert render(simulate(build(ROUND, SITE), ROUND, SITE, COSTS), 36) == GOLDEN


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


def test_nothing_to_do_is_drawn_as_idle(tmp_path: Path) -> None:
    timeline = simulate(Schedule({}), Round(1, 0), SITE)
    assert set("".join(grid(render(timeline, 60)).values())) == {"."}
    draw(timeline, tmp_path / "empty.png")


def test_letters_tell_operations_and_roles_apart() -> None:
    roles = ("actor", "reference", "critic", "reward")
    actions = [Action(0, Op.DECODE, "actor", 0, 0), Action(0, Op.SAMPLE, "actor", 0, 0)]
    actions += [Action(0, Op.PREFILL, role, 0, 0) for role in roles]
    actions += [Action(0, Op.SCORE, role, 0, 0) for role in roles[1:]]
    letters = [letter(action) for action in actions]
    assert len(set(letters)) == len(letters) and all(len(each) == 1 for each in letters)
    assert letter(Action(0, Op.PREFILL, "judge", 0, 0)) == "X"
    assert len({colour(action) for action in actions}) == len(COLOURS)


def test_the_cells_of_faults_are_marked() -> None:
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


def test_a_fault_that_hangs_nothing_is_marked_where_it_starts() -> None:
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
        return {f"#{r:02X}{g:02X}{b:02X}" for r, g, b in {tuple(p) for p in pixels.tolist()}}

    drawn = {COLOURS[name] for name in ("decode", "sample", "prefill reward")}
    assert drawn <= colours(sound) and FAULT_COLOUR not in colours(sound)
    assert FAULT_COLOUR in colours(failing)
