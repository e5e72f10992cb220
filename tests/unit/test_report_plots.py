"""The part of a trace that is one step, and what its picture draws."""

from __future__ import annotations

import subprocess
import sys

import pytest

from oppo_megatron.errors import DataError
from oppo_megatron.report.charts import COLOURS, MAX_ROWS, SPAN_COLOURS, new_figure, smooth
from oppo_megatron.report.timeline import OTHER_STEP_ALPHA, StepWindow, draw_window, draw_windows, step_window, waits
from oppo_megatron.rundir.trace import Span


def overlapped_spans(lengths: list[float]) -> list[Span]:
    """The actor's steps back to back; the critic's update runs 1 s on into the next step; scorers wait early."""
    spans, now = [], 0.0
    for step, length in enumerate(lengths, start=1):
        spans += [
            Span(1, "critic", "wait_tokens", step, now - 0.5, now + 1.0),
            Span(0, "actor", "decode", step, now, now + length - 2.0),
            Span(1, "critic", "score", step, now + 1.0, now + 2.0),
            Span(0, "actor", "update", step, now + length - 2.0, now + length),
            Span(1, "critic", "update", step, now + length - 1.0, now + length + 1.0),
        ]
        now += length
    return spans


def test_a_step_ends_where_the_next_begins() -> None:
    window = step_window("run", overlapped_spans([5.0, 6.0, 7.0]), 2)
    assert (window.start, window.end, window.seconds) == (5.0, 11.0, 6.0)
    kinds = {(span.name, span.role, span.step) for span in window.spans}
    assert ("update", "critic", 1) in kinds  # carried over from the step before
    assert ("wait_tokens", "critic", 3) in kinds  # begun before the next step's work
    assert ("decode", "actor", 3) not in kinds and ("decode", "actor", 1) not in kinds
    assert window.lanes == [(0, "actor"), (1, "critic")]


def test_the_last_step_ends_with_its_own_work_and_evaluation_bounds_nothing() -> None:
    spans = overlapped_spans([5.0, 6.0])
    spans += [Span(0, "actor", "evaluate", 1, -20.0, -1.0), Span(0, "actor", "evaluate", 2, 12.5, 40.0)]
    window = step_window("run", spans, 2)
    assert (window.start, window.end) == (5.0, 12.0)
    assert step_window("run", spans, 1).start == 0.0


def test_the_median_step_is_chosen_and_never_the_first() -> None:
    assert step_window("run", overlapped_spans([50.0, 9.0, 5.0, 7.0, 6.0]), None).step == 4
    assert step_window("run", overlapped_spans([5.0, 6.0]), None).step == 2
    assert step_window("run", overlapped_spans([5.0]), None).step == 1


def test_a_step_that_is_not_there_is_named() -> None:
    with pytest.raises(DataError, match="oppo: the trace has work of steps 1 to 2, asked for 9"):
        step_window("oppo", overlapped_spans([5.0, 6.0]), 9)
    with pytest.raises(DataError, match="has no work"):
        step_window("oppo", [Span(0, "actor", "wait_scores", 1, 0.0, 1.0)], None)


def test_bars_are_clipped_coloured_and_pale_for_other_steps() -> None:
    from matplotlib.colors import to_hex

    axes = new_figure(4.0, 2.0).subplots()
    spans = [
        Span(0, "actor", "decode", 2, 10.0, 15.0), Span(1, "critic", "update", 1, 8.0, 12.0),
        Span(0, "actor", "wait_scores", 2, 15.0, 25.0),
    ]  # fmt: skip
    draw_window(axes, "oppo", StepWindow(2, 10.0, 20.0, spans))
    drawn = {}
    for bars in axes.collections:
        corners = bars.get_paths()[0].get_extents()
        row = round((corners.y0 + corners.y1) / 2)
        drawn[row, to_hex(bars.get_facecolor()[0]).upper()] = (corners.x0, corners.x1, bars.get_alpha())
    assert drawn == {
        (0, SPAN_COLOURS["decode"]): (0.0, 5.0, 1.0),
        (0, COLOURS["idle"]): (5.0, 10.0, 1.0),
        (1, SPAN_COLOURS["update"]): (0.0, 2.0, OTHER_STEP_ALPHA),
    }
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["rank 0 \N{MIDDLE DOT} actor", "rank 1 \N{MIDDLE DOT} critic"]
    assert axes.get_title(loc="left") == "oppo: step 2, 10 s"


@pytest.mark.parametrize("num_runs", [1, 2, 3])
def test_a_timeline_has_a_panel_per_run(num_runs: int) -> None:
    windows = {f"run {k}": step_window("run", overlapped_spans([5.0 + k, 6.0]), 1) for k in range(num_runs)}
    figure = draw_windows(windows)
    assert [axes.get_title(loc="left").split(":")[0] for axes in figure.axes] == list(windows)
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {
        "decode", "score", "update", "waiting", "paler: work of another step", "end of the step",
    }  # fmt: skip


def test_a_timeline_of_many_ranks_shows_the_first_rows() -> None:
    window = StepWindow(1, 0.0, 1.0, [Span(rank, "actor", "decode", 1, 0.0, 1.0) for rank in range(500)])
    (axes,) = draw_windows({"run": window}).axes
    assert len(axes.get_yticks()) == MAX_ROWS and f"first {MAX_ROWS} of 500 rows" in axes.get_title(loc="left")


def test_waits_are_summed_by_rank_role_and_kind_within_the_step() -> None:
    spans = overlapped_spans([5.0, 6.0]) + [Span(0, "actor", "wait_scores", 2, 5.5, 6.0)]
    assert waits(step_window("run", spans, 2)) == {(0, "actor"): {"wait_scores": 0.5}, (1, "critic"): {"wait_tokens": 1.0}}


def test_smooth_is_a_moving_mean_over_a_tenth() -> None:
    assert smooth([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0] and smooth([]) == []
    values = [float(value % 7) for value in range(30)]
    assert smooth(values)[10] == pytest.approx(sum(values[9:12]) / 3)
    assert smooth(values)[0] == pytest.approx(sum(values[:2]) / 2)


def test_loading_what_a_run_writes_loads_neither_torch_nor_matplotlib() -> None:
    rundir = ("rundir.directory", "rundir.metrics_log", "rundir.trace")
    names = (*rundir, "train.logs.console", "train.logs.trackers", "report.build")
    modules = ", ".join(f"oppo_megatron.{name}" for name in names)
    heavy = {"torch", "matplotlib", "tensorboard", "wandb", "megatron"}
    code = f"import sys, {modules}; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
