"""`oppo watch`: look at a run again and again until it has ended."""

from __future__ import annotations

import os
import time

from rich.console import Console
from rich.live import Live

from oppo_megatron.report.live import glance
from oppo_megatron.report.terminal import draw


def watch(path: str | os.PathLike[str], interval_s: float, console: Console, *, once: bool = False) -> None:
    """Show a run in the terminal, anew every `interval_s` seconds, until it has finished.  Ctrl-C ends it.

    With `once`, or where the console is no terminal, it is shown once.  Raises DataError.
    """
    now = glance(path)
    if not once and console.is_terminal:
        try:
            with Live(draw(now, console.width), console=console, screen=True, auto_refresh=False) as live:
                while not now.finished:
                    time.sleep(interval_s)
                    now = glance(path, before=now)
                    live.update(draw(now, console.width), refresh=True)
        except KeyboardInterrupt:
            pass  # the way out of a run that goes on; what was seen last is left on the screen
    console.print(draw(now, console.width))
