"""The report of supervised training: a line per step, and the summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from oppo_megatron.config.derived import best_standard
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.control.estimates import Figures
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import describe_seen, num_duplicates
from oppo_megatron.layout.holdings import planned_memory
from oppo_megatron.rundir.checkpoints import Position
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.metrics_log import MetricsLog, read_metrics
from oppo_megatron.train.heldout import HeldoutLog
from oppo_megatron.train.logs.console import Progress
from oppo_megatron.train.logs.trackers import Tracker
from oppo_megatron.train.memory_meter import MemoryByRank


class Report:
    """Figures of each step to the metrics log, the console and the trackers, until `stack` closes.

    `elapsed_s`: what the run took before it was continued.
    """

    def __init__(
        self,
        config: SupervisedConfig,
        title: str,
        steps: int,
        device: torch.device,
        trackers: Tracker,
        stack: ExitStack,
        elapsed_s: float,
    ):
        self._title, self._num_quarantined = title, 0
        self._rows: Sequence[Any] = ()
        self._planned_bytes = planned_memory(config, on_cpu=device.type == "cpu")
        self._start, self._run = time.monotonic() - elapsed_s, RunDirectory(config.run_dir)
        self._log = stack.enter_context(MetricsLog(self._run.metrics))
        self._trackers = trackers
        stack.callback(self._trackers.close)
        self._progress = stack.enter_context(Progress(config.logging.console, steps, title))
        self.note = self._progress.note
        self.heldout = HeldoutLog(best_standard(config))
        self._stopped: str | None = None
        self._memory: dict[str, Any] = {}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def step(
        self, step: int, figures: dict[str, Any], saved: tuple[float, int, float], heldout: Figures | None
    ) -> None:
        """`saved` has the costs of checkpoints since the last step: seconds waited, bytes, hidden seconds.

        `heldout` has held-out metrics, if they were measured after the step.
        """
        waited_s, num_bytes, hidden_s = saved
        costs = {"checkpoint_s": waited_s, "checkpoint_bytes": num_bytes, "checkpoint_hidden_s": hidden_s}
        fields = {"time_s": self.elapsed_s, **figures, **costs}
        measured = {} if heldout is None else self.heldout.record(step, heldout)
        self._log.write(step, fields | measured)
        self._trackers.log(step, fields | measured)
        self._progress.update(step, fields)
        if heldout is not None:
            self.note(HeldoutLog.describe(step, heldout))

    def before(self, heldout: Figures) -> None:
        """Held-out metrics before the first step."""
        self._trackers.log(0, self.heldout.record(0, heldout))
        self.note(HeldoutLog.describe(0, heldout))

    def end(self, stopped: str | None, memory: MemoryByRank) -> None:
        """Report the end of the last step; `stopped` is the reason for an early end, if there is one."""
        self._stopped, self._memory = stopped, memory.summary(self._planned_bytes)
        for note in (stopped, self.heldout.describe_best(), memory.describe(self._planned_bytes)):
            if note is not None:
                self.note(note)

    def begin(self, start: Sequence[str], rows: Sequence[Any], held: Sequence[Any], quarantine: Quarantine) -> None:
        """Report the start of the run, how its rows are read, and which rows are left out or repeated."""
        self._rows, self._num_quarantined = rows, len(quarantine)
        for note in [*start, *quarantine.notes]:
            self.note(note)
        if held:
            self.note(f"{len(held)} rows are held out and measured, {len(rows)} are there to train on")
        for note in describe_seen((row[0] for row in held), (row[0] for row in rows)):
            self.note(note)
        if quarantine:
            left = "held-out ones counted" if held else f"{len(rows)} left"
            self.note(f"{len(quarantine)} rows set aside, {left}; see {self._run.quarantine}")
        if duplicates := num_duplicates(rows):
            self.note(f"{duplicates} of {len(rows)} rows are duplicates of others")

    def write_summary(self, best: tuple[float, Position] | None) -> None:
        """Write the last file of a run, which marks it as finished; `best` is the best checkpoint."""
        told = {**self.heldout.summary(best), "stopped_early": self._stopped, **self._memory}
        write_json(self._run.summary, _figures(self._run, self._title, self._rows, self._num_quarantined) | told)


def _figures(run: RunDirectory, title: str, rows: Sequence[Any], num_quarantined: int) -> dict[str, Any]:
    """The summary of all steps.  Losses (and accuracies) are of the first and of the last tenth of the steps."""
    lines = read_metrics(run.metrics)
    tenth = max(1, len(lines) // 10)
    learned = [name for name in ("loss", "accuracy", "margin") if name in lines[0]]
    ends = {"first": lines[:tenth], "last": lines[-tenth:]}
    tokens, seconds = sum(line["tokens"] for line in lines), sum(line["step_s"] for line in lines)
    return {
        "kind": title,
        "steps": len(lines),
        "rows": len(rows),
        "duplicates": num_duplicates(rows),
        "quarantined": num_quarantined,
        "time_s": lines[-1]["time_s"],
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        **{
            f"{name}_{end}": sum(line[name] for line in part) / len(part)
            for name in learned
            for end, part in ends.items()
        },
    }
