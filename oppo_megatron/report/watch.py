"""`oppo watch`: shows a run repeatedly until it has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import count

from rich.console import Console, Group, RenderableType
from rich.live import Live

from oppo_megatron.report.live import Glance, glance
from oppo_megatron.report.terminal import Block, draw, head, row_of, rows_of

TURN_S = 6.0
"""How long a part is shown where the terminal is too low for all of them; at least from one look to the next."""


def watch(path: str | os.PathLike[str], interval_s: float, console: Console, *, once: bool = False) -> None:
    """Show a run in the terminal, anew every `interval_s` seconds, until it has finished.  Ctrl-C ends it.

    Where the terminal is too low for all figures it shows them in turn.  With `once`, or where the console is no
    terminal, all are shown once.  Raises DataError.
    """
    now = glance(path)
    if not once and console.is_terminal:
        looks_a_turn = max(1, round(TURN_S / interval_s))
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                for look in count():
                    parts = screens(now, console)
                    live.update(parts[look // looks_a_turn % len(parts)], refresh=True)
                    if now.finished:
                        break
                    time.sleep(interval_s)
                    now = glance(path, before=now)
        except KeyboardInterrupt:
            pass  # the way out of a run that goes on; what was seen last is left on the screen
    console.print(draw(now, console.width))


def screens(now: Glance, console: Console) -> list[RenderableType]:
    """The figures in parts that each fit the terminal."""
    top = head(now)
    free = console.height - _height(top.copy().append("  part 10 of 10"), console)
    parts: list[list[RenderableType]] = [[]]
    used = 0
    for blocks in rows_of(now, console.width):
        row, height = _fitted(blocks, console, free)
        if used + height > free and parts[-1]:
            parts.append([])
            used = 0
        parts[-1].append(row)
        used += height
    of = [f"  part {place} of {len(parts)}" if len(parts) > 1 else "" for place in range(1, 1 + len(parts))]
    return [Group(top.copy().append(told, style="not bold dim"), *part) for told, part in zip(of, parts, strict=True)]


def _fitted(blocks: Sequence[Block], console: Console, free: int) -> tuple[RenderableType, int]:
    """The blocks beside each other, without their last lines where they are higher than `free`; and the height."""
    most_lines = min(free, max(len(block.lines) for block in blocks))  # a line takes a row at least
    while True:
        row = row_of([block.panel(most_lines) for block in blocks])
        height = _height(row, console)
        if height <= free or most_lines <= 1:
            return row, height
        most_lines -= 1


def _height(what: RenderableType, console: Console) -> int:
    return len(console.render_lines(what, pad=False))
