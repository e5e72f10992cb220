"""`oppo watch`: the figures of a run in the terminal, while another writes it."""

from __future__ import annotations

import re
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from oppo_megatron.cli.main import main
from oppo_megatron.report.live import glance, last_objects
from oppo_megatron.report.terminal import FRAME, draw, rows_of, spark
from oppo_megatron.report.watch import screens, watch
from oppo_megatron.rundir.directory import write_json
from tests.support.runs import append, metrics_line, rollout, write_run


def shown(path: Path, width: int = 130, now: float | None = None) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(draw(glance(path, now), width))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 130])
def test_all_figures_of_a_run_that_goes_on(tmp_path: Path, width: int) -> None:
    run = write_run(tmp_path / "run", steps=6, finished=False)
    text = shown(run.path, width)
    for title in ("reward", "step time", "utilisation", "Δ and chunk", "deferrals", "lengths", "reward by length", "memory",
                  "last whole step", "newest response"):  # fmt: skip
        assert f" {title} " in text, title
    assert "step 6 of 6" in text and "ago" in text and "step 5, 2 s" in text
    assert "0.1 → 0.6" in text and "75.00 %" in text and "206 MiB" in text and "the answer is 4" in text
    assert "the reward improves <b>much</b>" in " ".join(text.split()) or width == 60
    assert max(map(len, text.splitlines())) <= width


def test_state_is_told(tmp_path: Path) -> None:
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
    """What befalls the run between two looks, of which there is one a pause."""
    run = write_run(tmp_path / "run", steps=2, finished=False)
    console = Console(file=StringIO(), force_terminal=True, width=130, height=50)

    def begin_a_line() -> None:
        append_text(run.metrics, '{"step": 3, "rew')

    def look_and_end_it() -> None:
        assert "step 2 of 2" in console.file.getvalue() and "step 3 of 2" not in console.file.getvalue()
        append_text(run.metrics, 'ard_mean": 0.5}\n')
        append(run.metrics, {**metrics_line(4), "step": 4})

    def look_and_finish() -> None:
        assert "step 4 of 2" in console.file.getvalue() and "finished" not in console.file.getvalue()
        write_json(run.summary, {})

    happens = iter([begin_a_line, look_and_end_it, look_and_finish])
    monkeypatch.setattr(time, "sleep", lambda _: next(happens)())
    watch(run.path, 0.1, console)
    assert next(happens, None) is None and "finished" in console.file.getvalue()


def append_text(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_what_did_not_change_is_not_read_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", finished=False)
    first = glance(run.path)
    second = glance(run.path, before=first)
    assert second.record is first.record and second.quiet_s >= first.quiet_s
    append(run.rollouts, rollout(4, 9, "a new one"))
    assert glance(run.path, before=second).newest["response"] == "a new one"
    append(run.rollouts, rollout(4, 10, "the greedy one beside it") | {"greedy": True})
    assert glance(run.path).newest["response"] == "a new one", "what is trained is shown"


def test_without_a_terminal_it_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", finished=False)
    assert main(["watch", str(run.path)]) == 0
    assert "step 4 of 4" in capsys.readouterr().out
    assert main(["watch", str(run.path), "--interval", "0"]) == 2


def test_hostile_responses_do_not_steer_the_terminal(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", finished=False)
    append(run.rollouts, rollout(4, 9, "\x1b[2J\x1b]0;title\x07[bold red]not markup[/]\u202e"))
    text = shown(run.path)
    assert "[bold red]not markup[/]" in text and not any(c in text for c in "\x1b\x07\u202e")


def test_only_whole_lines_of_the_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n{"n": ')
    assert last_objects(path, 1000) == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert last_objects(path, 20) == [{"n": 3}]
    assert last_objects(tmp_path / "absent", 10) == []


def test_sparkline() -> None:
    assert spark([0.0, 1.0]) == "▁█" and spark([2.0, 2.0]) == "▁▁"
    assert len(spark(list(range(1000)), 36)) == 36


@pytest.mark.parametrize(("interval_s", "turns"), [(2.0, [1, 1, 1, 2, 2, 2, 1]), (18.0, [1, 2, 1, 2, 1, 2, 1])])
def test_every_part_has_its_turn_however_seldom_one_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval_s: float, turns: list[int]
) -> None:
    run = write_run(tmp_path / "run", finished=False)
    console = Console(file=StringIO(), force_terminal=True, width=130, height=34)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == len(turns) - 1:
            write_json(run.summary, {})

    monkeypatch.setattr(time, "sleep", sleep)
    watch(run.path, interval_s, console)
    assert slept == [interval_s] * 6
    assert [int(part) for part in re.findall(r"part (\d) of 2", console.file.getvalue())] == turns


@pytest.mark.parametrize(("width", "height"), [(40, 15), (80, 24), (130, 30)])
def test_a_low_terminal_shows_all_figures_in_turn(tmp_path: Path, width: int, height: int) -> None:
    run = write_run(tmp_path / "run", steps=6, finished=False)
    append(run.metrics, metrics_line(7) | {"step": 7, "memory_peak_mb": [100.0 + k for k in range(64)]})
    console = Console(file=StringIO(), width=width, height=height, highlight=False)
    parts = screens(glance(run.path), console)
    for part in parts:
        assert len(console.render_lines(part, pad=False)) <= height
        console.print(part)
    text = console.file.getvalue()
    for title in ("reward", "step time", "lengths", "memory", "last whole step", "newest response"):
        assert text.count(f" {title} ─") == 1, title
    assert (
        len(parts) > 1
        and f"part {len(parts)} of {len(parts)}" in " ".join(text.split())
        and "more lines: --once shows all" in text
    )
    for row in rows_of(glance(run.path), width):
        bars = [line.plain.rstrip() for block in row for line in block.lines if set("▁█") & set(line.plain)]
        assert all(len(bar) <= width // len(row) - FRAME for bar in bars), "a bar and its text have room on a line"
    lanes = [line for line in text.splitlines() if "rank 0 actor" in line]
    assert len(lanes) == 1 and "█" in lanes[0] and "▒" in lanes[0], "a lane is one line"
