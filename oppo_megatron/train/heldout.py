"""Held-out metrics of a run: their schedule and their log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from oppo_megatron.config.evaluation import EarlyStopConfig, Standard
from oppo_megatron.control.estimates import EarlyStop, Figures
from oppo_megatron.rundir.checkpoints import Position


class HeldoutLog:
    def __init__(self, standard: Standard | None):
        self.standard = standard
        self._by_step: dict[int, dict[str, Any]] = {}

    def record(self, step: int, figures: Figures) -> dict[str, Any]:
        fields = {
            "heldout": {name: mean for name, (mean, _) in figures.items()},
            "heldout_error": {name: error for name, (_, error) in figures.items()},
        }
        self._by_step[step] = fields
        return fields

    def best(self) -> tuple[int, float] | None:
        if self.standard is None:
            return None
        values = [(step, mean) for step, mean in self.means(self.standard.metric).items() if step and mean == mean]
        sign = 1 if self.standard.mode == "max" else -1
        return max(values, key=lambda pair: (sign * pair[1], -pair[0]), default=None)

    def means(self, metric: str) -> dict[int, float]:
        known = ((step, fields["heldout"].get(metric)) for step, fields in self._by_step.items())
        return {step: mean for step, mean in known if mean is not None}

    def summary(self, kept: tuple[float, Position] | None) -> dict[str, Any]:
        """Fields of the summary.  The checkpoint `kept` defines the best step if no metric does."""
        found = self.best() or (None if kept is None else (kept[1].step, kept[0]))
        best = None
        if found is not None and self.standard is not None:
            best = {"step": found[0], "metric": self.standard.metric, "value": found[1]}
        heldout = {
            str(step): {"mean": fields["heldout"], "error": fields["heldout_error"]} for step, fields in self._by_step.items()
        }
        return {"heldout": heldout, "best": best}

    def state_dict(self) -> list[tuple[int, dict[str, Any]]]:
        return list(self._by_step.items())

    def load_state_dict(self, state: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        self._by_step = {step: dict(fields) for step, fields in state}


class HeldoutSchedule:
    """When metrics are due, and whether they end the run; the same on every rank."""

    def __init__(self, every_steps: int, stop: EarlyStopConfig | None):
        self.every_steps = every_steps
        self.stop = None if stop is None else EarlyStop(stop)

    @property
    def over(self) -> bool:
        return self.stop is not None and self.stop.due

    def describe_end(self) -> str | None:
        return self.stop.describe() if self.stop is not None and self.stop.due else None

    def due(self, step: int, last: bool) -> bool:
        return step == 0 or last or bool(self.every_steps and step % self.every_steps == 0)

    def observe(self, step: int, figures: Figures) -> None:
        if self.stop is not None:
            self.stop.observe(step, figures[self.stop.config.standard.metric][0])

    def state_dict(self) -> dict[str, Any] | None:
        return None if self.stop is None else self.stop.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if self.stop is not None and state is not None:
            self.stop.load_state_dict(dict(state))
