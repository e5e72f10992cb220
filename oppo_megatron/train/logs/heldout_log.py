"""Held-out metrics of a run, by step, and the step after which they were best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from oppo_megatron.config.evaluation import Standard
from oppo_megatron.control.estimates import Figures
from oppo_megatron.rundir.checkpoints import Position


class HeldoutLog:
    """Kept by the rank that tells of the run.  `standard`: what names the best step, where anything does."""

    def __init__(self, standard: Standard | None):
        self.standard = standard
        self._by_step: dict[int, dict[str, Any]] = {}

    def record(self, step: int, figures: Figures) -> dict[str, Any]:
        """Mean and standard error of the metrics after `step` steps, as fields of its line."""
        fields = {
            "heldout": {name: mean for name, (mean, _) in figures.items()},
            "heldout_error": {name: error for name, (_, error) in figures.items()},
        }
        self._by_step[step] = fields
        return fields

    @staticmethod
    def describe(step: int, figures: Figures) -> str:
        """A line for the console; nothing where there are no figures."""
        told = ", ".join(f"{name} {mean:.4g}" for name, (mean, _) in figures.items())
        return f"held out after {step} steps: {told}" if told else ""

    def best(self) -> tuple[int, float] | None:
        """The step, of those that were trained, after which the metric was best, and the metric there."""
        metric = None if self.standard is None else self.standard.metric
        known = [(step, fields["heldout"].get(metric)) for step, fields in self._by_step.items() if step]
        values = [(step, value) for step, value in known if value is not None and value == value]
        if not values or self.standard is None:
            return None
        sign = 1 if self.standard.mode == "max" else -1
        return max(values, key=lambda pair: (sign * pair[1], -pair[0]))

    def describe_best(self) -> str | None:
        """A line that names the best step."""
        found = self.best()
        return (
            None
            if found is None or self.standard is None
            else f"best step {found[0]}: {self.standard.metric} {found[1]:.4g}"
        )

    def summary(self, kept: tuple[float, Position] | None) -> dict[str, Any]:
        """Fields of the summary; `kept` is the best checkpoint, which names the best step where no held-out metric does."""
        found = self.best() or (None if kept is None else (kept[1].step, kept[0]))
        best = None
        if found is not None and self.standard is not None:
            best = {"step": found[0], "metric": self.standard.metric, "value": found[1]}
        return {
            "heldout": {
                str(step): {"mean": v["heldout"], "error": v["heldout_error"]} for step, v in self._by_step.items()
            },
            "best": best,
        }

    def state_dict(self) -> list[tuple[int, dict[str, Any]]]:
        """The state, in plain JSON types."""
        return list(self._by_step.items())

    def load_state_dict(self, state: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        self._by_step = {step: dict(fields) for step, fields in state}
