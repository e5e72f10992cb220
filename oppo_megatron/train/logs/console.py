"""Progress on the console: one live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
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
        self,
        mode: Literal["auto", "live", "plain", "off"],
        total_steps: int | None,
        title: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
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
        of_total = "" if self._total_steps is None else f"/{self._total_steps}"
        left_s = self._seconds_left(step)
        eta = [] if left_s is None else [f"ETA {format_duration(left_s)}"]
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

    def _seconds_left(self, step: int) -> float | None:
        """Estimate from the pace since the first update (start-up does not count), or None."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        first_step, first_time = self._first
        if self._total_steps is None or not first_step < step < self._total_steps:
            return None
        return (now - first_time) / (step - first_step) * (self._total_steps - step)

    def _print_line(self) -> None:
        print(self._unprinted, file=self._stream, flush=True)
        self._unprinted = None
        self._printed_at = self._clock()

    def __enter__(self) -> Progress:
        if self.mode == "live":
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.mode == "live":
            self._live.stop()
        elif self._unprinted is not None:
            self._print_line()


def describe(fields: Mapping[str, Any]) -> list[str]:
    derived = {**fields, **_derived(fields)}
    return [f"{label} {form(derived[name])}" for name, label, form in SHOWN if derived.get(name) is not None]


def _derived(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rates and shares whose parts a metrics line has."""
    derived: dict[str, Any] = {}
    if fields.get("tokens_per_s") is None and fields.get("tokens") and fields.get("step_s"):  # 0: nothing was left to decode
        derived["tokens_per_s"] = fields["tokens"] / fields["step_s"]
    if fields.get("scoring_hidden") is None and fields.get("score_exposed_s") is not None and fields.get("score_busy_s"):
        derived["scoring_hidden"] = max(0.0, 1.0 - fields["score_exposed_s"] / fields["score_busy_s"])
    if isinstance(fields.get("deferred"), Mapping):
        derived["deferred"] = sum(count for times, count in fields["deferred"].items() if int(times) > 0)
    return derived


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
