"""What `oppo sft` and `oppo rm` tell of themselves: a line a step, and the summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from oppo_megatron.config.run import SupervisedConfig
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised import num_duplicates
from oppo_megatron.train.logs.console import Progress
from oppo_megatron.train.logs.metrics_log import MetricsLog, read_metrics
from oppo_megatron.train.logs.trackers import Tracker
from oppo_megatron.train.run_dir import RunDirectory


class Report:
    """Figures of each step to the metrics log, the console and the trackers, until `stack` closes.

    `elapsed_s`: what the run took before it was continued.
    """

    def __init__(
        self,
        config: SupervisedConfig,
        title: str,
        steps: int,
        trackers: Tracker,
        stack: ExitStack,
        elapsed_s: float,
    ):
        self._start, self._run = time.monotonic() - elapsed_s, RunDirectory(config.run_dir)
        self._log = stack.enter_context(MetricsLog(self._run.metrics))
        self._trackers = trackers
        stack.callback(self._trackers.close)
        self._progress = stack.enter_context(Progress(config.logging.console, steps, title))
        self.note = self._progress.note

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def step(self, step: int, figures: dict[str, Any], saved: tuple[float, int, float]) -> None:
        """`saved`: what checkpoints have cost since the last step: seconds waited, bytes, seconds beside the run."""
        waited_s, num_bytes, hidden_s = saved
        costs = {"checkpoint_s": waited_s, "checkpoint_bytes": num_bytes, "checkpoint_hidden_s": hidden_s}
        fields = {"time_s": self.elapsed_s, **figures, **costs}
        self._log.write(step, fields)
        self._trackers.log(step, fields)
        self._progress.update(step, fields)

    def begin(self, start: Sequence[str], rows: Sequence[Any], quarantine: Quarantine) -> None:
        """From where the run goes on, how its rows are read, and which are not trained on, or more than once."""
        for note in [*start, *quarantine.notes]:
            self.note(note)
        if quarantine:
            self.note(f"{len(quarantine)} rows set aside, {len(rows)} left; see {self._run.quarantine}")
        if duplicates := num_duplicates(rows):
            self.note(f"{duplicates} of {len(rows)} rows are duplicates of others")


def summary(run: RunDirectory, title: str, rows: Sequence[Any], num_quarantined: int) -> dict[str, Any]:
    """Final figures.  Losses (and accuracies) are of the first and of the last tenth of the steps."""
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
