"""Progress lines: what they show and how often."""

from __future__ import annotations

import io

import pytest

from oppo_megatron.clock import format_duration
from oppo_megatron.train.logs.console import Progress, describe


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(total: int | None, num_steps: int, step_s: float, mode: str = "plain") -> list[str]:
    stream, clock = io.StringIO(), Clock()
    with Progress(mode, total, "ppo", stream, clock) as progress:
        for step in range(1, num_steps + 1):
            clock.now += step_s
            progress.update(step, {"reward_mean": step / 10})
    return stream.getvalue().splitlines()


def test_plain_lines_are_throttled_but_first_and_last_are_there() -> None:
    steps = [line.split()[1] for line in run(total=10, num_steps=10, step_s=0.5)]
    assert steps == ["1/10", "5/10", "9/10", "10/10"]


@pytest.mark.parametrize("total", [None, 20])
def test_the_last_line_is_there_where_the_run_ends_early(total: int | None) -> None:
    lines = run(total, num_steps=7, step_s=0.01)
    assert len(lines) == 2
    assert lines[0].startswith("ppo 1") and lines[1].startswith("ppo 7")
    assert lines[1].endswith("reward 0.700")


def test_slow_steps_print_each_line_once_with_time_left() -> None:
    lines = run(total=3, num_steps=3, step_s=60.0)
    assert lines == ["ppo 1/3  reward 0.100", "ppo 2/3  ETA 1m00s  reward 0.200", "ppo 3/3  reward 0.300"]


def test_off_is_silent() -> None:
    stream = io.StringIO()
    with Progress("off", 2, "ppo", stream) as progress:
        progress.note("hello")
        progress.update(1, {"reward_mean": 1.0})
    assert stream.getvalue() == ""


def test_auto_looks_at_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert Progress("auto", 1, "ppo", Terminal()).mode == "live"
    assert Progress("auto", 1, "ppo", io.StringIO()).mode == "plain"
    monkeypatch.setenv("TERM", "dumb")
    assert Progress("auto", 1, "ppo", Terminal()).mode == "plain"


def test_live_shows_the_line_and_notes_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    with Progress("live", 3, "[sft]", stream) as progress:
        progress.note("[note] 1 row refused")
        progress.update(2, {"loss": 1.25, "accuracy": 0.5, "tokens_per_s": 12345, "delta": 3, "chunk_tokens": 16, "kl_mean": 0.1})
    shown = stream.getvalue()
    assert "[note] 1 row refused" in shown
    assert "[sft] 2/3  loss 1.2500  acc 50.0%  tok/s 12.3k" in shown
    assert "KL" not in shown  # cut at the edge of the terminal, not wrapped


def test_describe_derives_rates_and_shares() -> None:
    line = {
        "reward_mean": 0.5, "tokens": 1000, "step_s": 2.0, "score_exposed_s": 0.5, "score_busy_s": 2.0, "delta": 4,
        "deferred": {"0": 28, "1": 3, "2": 1}, "chunk_tokens": 32, "kl_mean": 0.0123, "unknown": 1,
    }  # fmt: skip
    told = ["reward 0.500", "tok/s 500", "hidden 75%", "deferred 4", "delta 4", "chunk 32", "KL 0.0123"]
    assert describe(line) == told
    missing = {"reward_mean": None, "tokens": 5, "step_s": 0.0, "score_exposed_s": 1.0, "score_busy_s": None}
    assert describe(missing) == []
    assert describe({"loss": 0.5, "accuracy": 1.0}) == ["loss 0.5000", "acc 100.0%"]
    # a step whose whole batch was carried decodes nothing, and has no rate
    assert describe({"reward_mean": 0.5, "tokens": 0, "step_s": 2.0}) == ["reward 0.500"]


def test_durations() -> None:
    told = ["0s", "59s", "1m00s", "3m07s", "1h00m", "2h05m"]
    assert [format_duration(s) for s in (0, 59.4, 60, 187, 3599.6, 7500)] == told
