"""`oppo report --watch` follows a run in the terminal; the part of a trace that is one step, and what its picture draws."""

import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from oppo_megatron.errors import DataError
from oppo_megatron.report.charts import COLOURS, MAX_ROWS, SPAN_COLOURS, new_figure, smooth
from oppo_megatron.report.timeline import OTHER_STEP_ALPHA, StepWindow, draw_window, draw_windows, step_window, waits
from oppo_megatron.report.watch import blocks, glance, last_objects, spark, watch
from oppo_megatron.rundir.directory import write_json
from oppo_megatron.rundir.trace import Span
from tests.support.commands import refused
from tests.support.commands import shown as command
from tests.support.runs import append, metrics_line, rollout, write_run


def overlapped_spans(lengths: list[float]) -> list[Span]:
    """The actor's steps back to back; the critic's update runs 1 s on into the next step; scorers wait early."""
    spans, now = [], 0.0
    for step, length in enumerate(lengths, start=1):
        spans += [
            Span(1, "critic", "wait_tokens", step, now - 0.5, now + 1.0),
            Span(0, "actor", "decode", step, now, now + length - 2.0), Span(1, "critic", "score", step, now + 1.0, now + 2.0),
            Span(0, "actor", "update", step, now + length - 2.0, now + length),
            Span(1, "critic", "update", step, now + length - 1.0, now + length + 1.0),
        ]  # fmt: skip
        now += length
    return spans


def test_a_step_ends_where_the_next_begins_and_the_last_with_its_own_work() -> None:
    window = step_window("run", overlapped_spans([5.0, 6.0, 7.0]), 2)
    assert (window.start, window.end, window.seconds) == (5.0, 11.0, 6.0)
    kinds = {(span.name, span.role, span.step) for span in window.spans}
    assert ("update", "critic", 1) in kinds  # carried over from the step before
    assert ("wait_tokens", "critic", 3) in kinds  # begun before the next step's work
    assert ("decode", "actor", 3) not in kinds and ("decode", "actor", 1) not in kinds
    assert window.lanes == [(0, "actor"), (1, "critic")]
    spans = overlapped_spans([5.0, 6.0])
    spans += [Span(0, "actor", "evaluate", 1, -20.0, -1.0), Span(0, "actor", "evaluate", 2, 12.5, 40.0)]
    window = step_window("run", spans, 2)
    assert (window.start, window.end) == (5.0, 12.0) and step_window("run", spans, 1).start == 0.0


def test_the_median_step_is_chosen_and_never_the_first_and_one_that_is_not_there_is_named() -> None:
    for lengths, chosen in (([50.0, 9.0, 5.0, 7.0, 6.0], 4), ([5.0, 6.0], 2), ([5.0], 1)):
        assert step_window("run", overlapped_spans(lengths), None).step == chosen
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
        (0, SPAN_COLOURS["decode"]): (0.0, 5.0, 1.0), (0, COLOURS["idle"]): (5.0, 10.0, 1.0),
        (1, SPAN_COLOURS["update"]): (0.0, 2.0, OTHER_STEP_ALPHA),
    }  # fmt: skip
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


def test_waits_are_summed_within_the_step_and_smooth_is_a_moving_mean_over_a_tenth() -> None:
    spans = overlapped_spans([5.0, 6.0]) + [Span(0, "actor", "wait_scores", 2, 5.5, 6.0)]
    assert waits(step_window("run", spans, 2)) == {(0, "actor"): {"wait_scores": 0.5}, (1, "critic"): {"wait_tokens": 1.0}}
    assert smooth([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0] and smooth([]) == []
    values = [float(value % 7) for value in range(30)]
    assert smooth(values)[::10][:2] == pytest.approx([sum(values[:2]) / 2, sum(values[9:12]) / 3])


def test_loading_what_a_run_writes_loads_neither_torch_nor_matplotlib() -> None:
    names = "rundir.directory rundir.metrics_log rundir.trace train.logs.console train.logs.trackers report.sections"
    modules = ", ".join(f"oppo_megatron.{name}" for name in names.split())
    heavy = {"torch", "matplotlib", "tensorboard", "wandb", "megatron"}
    code = f"import sys, {modules}; print(sorted({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def shown(path: Path, width: int = 130, now: float | None = None) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(*blocks(glance(path, now), width))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 130])
def test_all_figures_of_a_run_that_goes_on(tmp_path: Path, width: int) -> None:
    text = shown(write_run(tmp_path / "run", steps=6, finished=False).path, width)
    for title in ("figures", "step time", "utilisation", "newest response"):
        assert f" {title} " in text, title
    assert "step 6 of 6" in text and "ago" in text and "the answer is 4" in text
    assert width == 60 or ("0.1 → 0.6" in text and "75.00 %" in text and "206 MiB" in text)
    assert "the reward improves <b>much</b>" in " ".join(text.split()) or width == 60
    assert max(map(len, text.splitlines())) <= width


def test_the_state_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", finished=False)
    written = run.metrics.stat().st_mtime
    assert "last step 3s ago" in shown(run.path, now=written + 3)
    assert "no step for 10m00s" in shown(run.path, now=written + 600)
    assert "finished" in shown(write_run(tmp_path / "done").path)
    fresh = write_run(tmp_path / "fresh", steps=0, finished=False, rollouts=False)
    assert "no reward (no step has ended yet)" in shown(fresh.path)
    fresh.metrics.unlink()
    assert "waiting for its first step" in shown(fresh.path)


def test_it_follows_a_run_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", steps=2, finished=False)
    console = Console(file=StringIO(), force_terminal=True, width=130, height=50)

    def begin_a_line() -> None:
        run.metrics.write_text(run.metrics.read_text() + '{"step": 3, "rew')

    def look_and_end_it() -> None:
        assert "step 2 of 2" in console.file.getvalue() and "step 3 of 2" not in console.file.getvalue()
        run.metrics.write_text(run.metrics.read_text() + 'ard_mean": 0.5}\n')
        append(run.metrics, {**metrics_line(4), "step": 4})

    def look_and_finish() -> None:
        assert "step 4 of 2" in console.file.getvalue() and "finished" not in console.file.getvalue()
        write_json(run.summary, {})

    happens = iter([begin_a_line, look_and_end_it, look_and_finish])
    monkeypatch.setattr(time, "sleep", lambda _: next(happens)())
    watch(run.path, 0.1, console)
    assert next(happens, None) is None and "finished" in console.file.getvalue()


def test_the_newest_response_is_one_that_is_trained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", finished=False)
    append(run.rollouts, rollout(4, 9, "a new one"))
    append(run.rollouts, rollout(4, 10, "its greedy baseline") | {"greedy": True})
    assert glance(run.path).newest["response"] == "a new one"


def test_without_a_terminal_it_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", finished=False)
    assert "step 4 of 4" in command(capsys, "report", run.path, "--watch")
    for more in (["--interval", "0.01"], ["--no-png"], [run.path]):
        refused(capsys, "report", run.path, *more, "--watch")


def test_hostile_responses_do_not_steer_the_terminal(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", finished=False)
    append(run.rollouts, rollout(4, 9, "\x1b[2J\x1b]0;title\x07[bold red]not markup[/]\u202e"))
    text = shown(run.path)
    assert "[bold red]not markup[/]" in text and not any(c in text for c in "\x1b\x07\u202e")


def test_only_whole_lines_of_the_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n{"n": ')
    assert last_objects(path, 1000) == [{"n": 1}, {"n": 2}, {"n": 3}] and last_objects(path, 20) == [{"n": 3}]
    assert last_objects(tmp_path / "absent", 10) == []
    assert spark([0.0, 1.0]) == "▁█" and spark([2.0, 2.0]) == "▁▁"
    assert len(spark(list(range(1000)), 36)) == 36
