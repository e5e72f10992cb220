"""Progress on the console: one live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TextIO, final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from oppo_megatron.clock import format_duration

PLAIN_INTERVAL_S = 2.0


@final
class Progress:
    """Shows a run's progress; a context manager.

    `auto` is `live` in a terminal, else `plain`: the first and last step, and others at most every `PLAIN_INTERVAL_S` seconds.
    `total_steps` None: unknown.
    """

    def __init__(
        self, mode: Literal["auto", "live", "plain", "off"], total_steps: int | None, title: str, stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self._stream = sys.stdout if stream is None else stream
        console = Console(file=self._stream, force_terminal=True if mode == "live" else None)
        if mode == "auto":
            mode = "live" if console.is_terminal and not console.is_dumb_terminal else "plain"
        self.mode = mode
        self._total_steps = total_steps
        self._title = title
        self._clock = clock
        self._first: tuple[int, float] | None = None  # step and time of the first update
        self._printed_at = float("-inf")
        self._unprinted: str | None = None
        self._live = Live(_one_line(f"{title}  starting"), console=console, auto_refresh=False)

    def update(self, step: int, fields: Mapping[str, Any]) -> None:
        if self.mode == "off":
            return
        of_total, eta, now, total = "", [], self._clock(), self._total_steps
        self._first = first_step, first_time = self._first or (step, now)
        if total is not None:
            of_total = f"/{total}"
            if first_step < step < total:  # from the pace since the first update, because start-up does not count
                eta = [f"ETA {format_duration((now - first_time) / (step - first_step) * (total - step))}"]
        line = "  ".join([f"{self._title} {step}{of_total}", *eta, *describe(fields)])
        if self.mode == "live":
            self._live.update(_one_line(line), refresh=True)
            return
        self._unprinted = line
        if step == self._total_steps or self._clock() - self._printed_at >= PLAIN_INTERVAL_S:
            self._print_line()

    def note(self, text: str) -> None:
        if self.mode == "live":
            self._live.console.print(text, markup=False, highlight=False)
        elif self.mode == "plain":
            print(text, file=self._stream, flush=True)

    def _print_line(self) -> None:
        print(self._unprinted, file=self._stream, flush=True)
        self._unprinted = None
        self._printed_at = self._clock()

    def __enter__(self) -> Progress:
        if self.mode == "live":
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.mode == "live":
            self._live.stop()
        elif self._unprinted is not None:
            self._print_line()


def describe(fields: Mapping[str, Any]) -> list[str]:
    """Label the fields shown of a metrics line, and rates and shares whose parts it has."""
    shown = dict(fields)
    if shown.get("tokens_per_s") is None and shown.get("tokens") and shown.get("step_s"):  # 0: nothing was left to decode
        shown["tokens_per_s"] = shown["tokens"] / shown["step_s"]
    if shown.get("scoring_hidden") is None and shown.get("score_exposed_s") is not None and shown.get("score_busy_s"):
        shown["scoring_hidden"] = max(0.0, 1.0 - shown["score_exposed_s"] / shown["score_busy_s"])
    if isinstance(shown.get("deferred"), Mapping):
        shown["deferred"] = sum(count for times, count in shown["deferred"].items() if int(times) > 0)
    return [f"{label} {form(shown[name])}" for name, label, form in SHOWN if shown.get(name) is not None]


def _one_line(text: str) -> Text:
    """Cut, never wrap: a live line of changing height flickers."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def _rate(value: float) -> str:
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.1f}k"


# field, label, format
SHOWN: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("reward_mean", "reward", "{:.3f}".format),
    ("loss", "loss", "{:.4f}".format),
    ("accuracy", "acc", "{:.1%}".format),
    ("tokens_per_s", "tok/s", _rate),
    ("scoring_hidden", "hidden", "{:.0%}".format),
    ("deferred", "deferred", str),
    ("delta", "delta", str),
    ("chunk_tokens", "chunk", str),
    ("kl_mean", "KL", "{:.3g}".format),
)
