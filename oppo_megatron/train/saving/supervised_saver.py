"""The checkpoints of supervised training: model, optimizer, and the position in the rows."""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from oppo_megatron.cluster.peers import waiting_for
from oppo_megatron.cluster.world import World
from oppo_megatron.config.derived import best_standard
from oppo_megatron.config.run import SupervisedConfig
from oppo_megatron.data.supervised_rows import Passed, num_batches
from oppo_megatron.errors import CheckpointError
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.mcore.weights.checkpoint import gather_models, load_models
from oppo_megatron.nesting import read_json
from oppo_megatron.rundir.checkpoints import Position
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.train.logs.supervised_report import Report
from oppo_megatron.train.saving.keeper import CheckpointKeeper, Cost, Work
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.resuming import find_whole
from oppo_megatron.train.saving.snapshot import MODELS, STATE, Snapshot, best_of, best_state
from oppo_megatron.train.saving.state import adapter_state, require_same_adapters, require_same_data
from oppo_megatron.train.saving.state_schema import EarlyStopState, unusable
from oppo_megatron.train.saving.telling import config_state, tell_of_changes, tell_of_start

MODEL = "model"
"""Its name in a checkpoint."""

Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Data(_Strict):
    seed: int
    shuffle: bool
    rows: Count
    fingerprint: str


class _State(_Strict):
    """What `state.json` must hold."""

    kind: str
    done: Count
    rows: Count
    updates: Count
    elapsed_s: float
    saved_at: float
    data: _Data
    best: tuple[float, tuple[Count, Annotated[int, Field(ge=-1)]]] | None
    adapters: dict[str, Any] = {}
    best_metric: str | None = None
    heldout: list[tuple[Count, dict[str, dict[str, float | None]]]] = []
    early_stop: EarlyStopState | None = None
    reference: str | None = None
    config: dict[str, Any]


@dataclass(frozen=True)
class FoundSupervised:
    """A checkpoint to continue from."""

    folder: Path
    state: dict[str, Any]

    @property
    def passed(self) -> Passed:
        return Passed(self.state["done"], self.state["rows"])


def find_supervised(config: SupervisedConfig, world: World) -> FoundSupervised | None:
    """The last whole checkpoint where one is asked for; as `find_whole`."""

    def read(folder: Path) -> FoundSupervised:
        path = folder / STATE
        try:
            text = path.read_text(encoding="utf-8")
            _State.model_validate_json(text)
            return FoundSupervised(folder, read_json(text))
        except (OSError, ValueError) as error:
            raise unusable(path, error) from error

    return find_whole(RunDirectory(config.run_dir), world, (STATE,), read) if config.checkpoint.resume else None


class SupervisedSaver(CheckpointKeeper):
    """One rank's part.  `report`: of the rank that has the losses; None on the others."""

    def __init__(
        self,
        config: SupervisedConfig,
        kind: str,
        world: World,
        rows: Sequence[tuple[list[Any], ...]],
        preemption: Preemption,
    ):
        super().__init__(config.checkpoint, best_standard(config), config.run_dir, world, preemption)
        self.config, self.kind = config, kind
        self._config, self._num_rows = config_state(config), len(rows)
        self.reference: str | None = None  # the fingerprint of what preferences are compared with
        self._data = {
            "seed": config.seed,
            "shuffle": config.data.shuffle,
            "rows": len(rows),
            "fingerprint": _hash(rows),
        }

    def require_same_run(self, found: FoundSupervised) -> None:
        """Raises CheckpointError where the checkpoint is of other rows, or has nothing left to train."""
        state = found.state
        if state["kind"] != self.kind:
            raise CheckpointError(
                f"{found.folder} is of a run of `oppo {state['kind']}`; resume it with that, or choose another run_dir"
            )
        require_same_data(state["data"], self._data, noun="rows")
        require_same_adapters(state.get("adapters", {}), adapter_state(self.config))
        steps = self.num_steps(found.passed)
        if steps < state["done"] or (steps == state["done"] and RunDirectory(self.config.run_dir).finished):
            raise CheckpointError(
                f"{found.folder} is after {state['done']} steps, and epochs and steps ask for no more than {steps}: there is "
                "nothing to train; raise them to go on with it, or choose another run_dir"
            )

    def compare(self, reference: str | None, found: FoundSupervised | None) -> None:
        """The fingerprint of what preferences are compared with.  Raises CheckpointError where the run had another."""
        began = None if found is None else found.state.get("reference")
        if found is not None and began is not None and began != reference:
            raise CheckpointError(
                f"the reference (its weights, shape, type or adapters) is not that of the run of {found.folder}: fingerprint "
                f"{(reference or 'none')[:12]}, not {began[:12]}; resume with the same `reference` and `model`, or start a new "
                "run in another run_dir"
            )
        self.reference = reference

    def num_steps(self, passed: Passed) -> int:
        """Steps of the whole run, `passed` being behind it."""
        config = self.config
        return num_batches(self._num_rows, config.batch_size, config.epochs, config.steps, passed)

    def describe(self, found: FoundSupervised) -> list[str]:
        """Report where the run goes on from, and the changed settings."""
        state = found.state
        told = tell_of_start(self.config.run_dir, found.folder.name, state["done"], state["saved_at"])
        return [told, *tell_of_changes(state["config"], self._config, {}, {})]

    def restore(self, trained: TrainedModel, found: FoundSupervised) -> None:
        """Weights, optimizer and schedule.  Raises CheckpointError for other models or a damaged file."""
        self.resume_best(best_of(found.state), found.state.get("best_metric"))
        updates = found.state["updates"]
        with waiting_for("model of the checkpoint", self.world.activity, waits=False):
            load_models(found.folder / MODELS, {MODEL: trained}, {MODEL: updates})
        trained.resume_schedule(updates)

    def save(self, trained: TrainedModel, passed: Passed, report: Report | None, beside: Mapping[str, Any]) -> None:
        """Write the run's state between two steps, and `beside` it, as `write` does."""
        self.conclude()
        position, started = Position(passed.steps), time.monotonic()
        self.judge(position)

        def take(copied: bool) -> Snapshot:
            models = gather_models({MODEL: trained}, copied=copied)
            if report is None:
                return Snapshot(position, models, None, {}, self.best)
            state = {
                "kind": self.kind,
                "done": passed.steps,
                "rows": passed.rows,
                "updates": trained.updates,
                "elapsed_s": report.elapsed_s,
                "saved_at": time.time(),
                "data": self._data,
                "adapters": adapter_state(self.config),
                "best": best_state(self.best),
                "best_metric": self.standard and self.standard.metric,
                "heldout": report.heldout.state_dict(),
                "reference": self.reference,
                **beside,
                "config": self._config,
            }
            return Snapshot(position, models, None, {STATE: json.dumps(state, indent=1)}, self.best)

        def whole(cost: Cost) -> None:
            if report is not None:
                report.note(cost.describe(position.name))

        self.write(Work(position, take, whole, None if report is None else report.note, self.stopping), started)

    def save_end(self, trained: TrainedModel, passed: Passed, report: Report | None, beside: Mapping[str, Any]) -> None:
        """After the last step, behind the weights: a disk that is full now costs no more than the way on from here."""
        if not self.rules.saves_end or self.saved == Position(passed.steps):
            return
        try:
            self.save(trained, passed, report, beside)
            self.conclude()
        except CheckpointError as error:
            if report is not None:
                report.note(f"the run has ended, but cannot be given more steps later: {error}")


def _hash(rows: Sequence[tuple[list[Any], ...]]) -> str:
    """SHA-256 of all rows' tokens and labels, part by part."""
    digest = hashlib.sha256()
    for row in rows:
        for part in row:
            digest.update(len(part).to_bytes(8, "little") + _bytes_of(part))
    return digest.hexdigest()


def _bytes_of(part: list[int] | list[float]) -> bytes:
    return array("d" if any(isinstance(value, float) for value in part) else "q", part).tobytes()
