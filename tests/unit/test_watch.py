"""`oppo report --watch`: follow a run in the terminal while another process writes it."""

from __future__ import annotations

import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from oppo_megatron.cli.main import main
from oppo_megatron.report.watch import blocks, glance, last_objects, spark, watch
from oppo_megatron.rundir.directory import write_json
from tests.support.runs import append, metrics_line, rollout, write_run


def shown(path: Path, width: int = 130, now: float | None = None) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(*blocks(glance(path, now), width))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 130])
def test_all_figures_of_a_run_that_goes_on(tmp_path: Path, width: int) -> None:
    run = write_run(tmp_path / "run", steps=6, finished=False)
    text = shown(run.path, width)
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


def test_the_newest_response_is_one_that_is_trained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", finished=False)
    append(run.rollouts, rollout(4, 9, "a new one"))
    append(run.rollouts, rollout(4, 10, "its greedy baseline") | {"greedy": True})
    assert glance(run.path).newest["response"] == "a new one"


def test_without_a_terminal_it_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", finished=False)
    assert main(["report", str(run.path), "--watch"]) == 0
    assert "step 4 of 4" in capsys.readouterr().out
    assert main(["report", str(run.path), "--watch", "--interval", "0.01"]) == 2
    assert main(["report", str(run.path), "--watch", "--no-png"]) == 2
    assert main(["report", str(run.path), str(run.path), "--watch"]) == 2


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
