"""Acts on the guards' rules (`control/guards.py`): skips an update, stops the run, or rolls it back to a checkpoint.

All ranks have the scores, so each decides alone whether to train on a batch.  Only a role's ranks know the results of its update:
if it may have to be undone, all ranks meet after both updates.

`tools/replay.py` reads rejected batches.  A rollback leaves out the rejected batch and the prompts admitted since the checkpoint,
which would cause the same breach.

Legend: B rollouts, P their prompt tokens, T their response tokens (both packed), G greedy responses.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors.torch import save
from torch import Tensor

from oppo_megatron.algorithms.advantages import Moments
from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import Experience, ScoredBatch
from oppo_megatron.cluster.process_groups import waiting_for
from oppo_megatron.config.derived import members
from oppo_megatron.config.load import config_yaml
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.guards import CODE_SIZE, Breach, Rules, decode, first, non_finite
from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.engine.stream import share
from oppo_megatron.errors import CheckpointError, NumericsError, RewardError
from oppo_megatron.records import Rollout
from oppo_megatron.rundir.directory import RunDirectory, atomic_writer, encode_json
from oppo_megatron.rundir.metrics_log import iter_json_lines
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.train.score_exchange import by_rank

FORMAT = "oppo rejected batch 1"
TENSORS = {
    "prompt_lengths_B": torch.int64, "prompt_tokens_P": torch.int64, "lengths_B": torch.int64, "tokens_T": torch.int64,
    "versions_T": torch.int64, "behaviour_logp_T": torch.float64, "reference_logp_T": torch.float32,
    "values_T": torch.float32, "scores_B": torch.float32, "truncated_B": torch.bool, "step_rewards_T": torch.float32,
    "greedy_scores_G": torch.float32, "greedy_lengths_G": torch.int64, "greedy_truncated_G": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """Facts of a step.  `policy_version`: before the update.  `figures`: statistics known here.  `history`: a `History`."""

    step: int
    seed: int
    total_steps: int
    policy_version: int
    kl_coefficient: float
    config: str
    reason: str
    figures: Mapping[str, float | None]
    history: Mapping[str, float | None]


@dataclass(frozen=True)
class RejectedBatch:
    facts: Facts
    batch: Sequence[Rollout]
    scored: ScoredBatch

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_writer(path.with_suffix(".jsonl")) as lines:
            lines.write(encode_json({"format": FORMAT, **vars(self.facts)}) + "\n")
            for rollout, score in zip(self.batch, self.scored.scores_B.tolist(), strict=True):
                line = {
                    "seq_id": rollout.seq_id,
                    "prompt": rollout.prompt.text,
                    "score": score,
                    "response_tokens": len(rollout.tokens),
                    "oldest_version": min(rollout.versions),
                    "deferrals": rollout.deferrals,
                    "finish_reason": rollout.finish_reason,
                }
                lines.write(encode_json(line) + "\n")
        rollouts, scored = self.batch, self.scored
        tensors = {
            "prompt_lengths_B": torch.tensor([len(r.prompt.tokens) for r in rollouts]),
            "prompt_tokens_P": torch.tensor([t for r in rollouts for t in r.prompt.tokens]),
            "lengths_B": torch.tensor([len(r.tokens) for r in rollouts]),
            "tokens_T": torch.tensor([t for r in rollouts for t in r.tokens]),
            "versions_T": torch.tensor([v for r in rollouts for v in r.versions]),
            "behaviour_logp_T": torch.tensor([x for r in rollouts for x in r.logprobs], dtype=torch.float64),
            "reference_logp_T": torch.empty(0) if scored.reference_logp_T is None else scored.reference_logp_T,
            "values_T": torch.empty(0) if scored.values_T is None else scored.values_T,
            "scores_B": scored.scores_B,
            "truncated_B": scored.truncated_B,
        }
        if scored.step_rewards_T is not None:
            tensors["step_rewards_T"] = scored.step_rewards_T
        if scored.greedy is not None:
            tensors |= {f"greedy_{name}": tensor for name, tensor in vars(scored.greedy).items()}
        on_cpu = {name: tensor.detach().to("cpu", TENSORS[name]).contiguous() for name, tensor in tensors.items()}
        with atomic_writer(path, "wb") as file:  # the library's own writer does not raise OSError for a full disk
            file.write(save(on_cpu, metadata={"format": FORMAT}))


class RollBack(Exception):
    """Raised on every rank once the rollback is on disk; ranks must restart."""


@dataclass(frozen=True)
class Rollback:
    """`left_out`: positions in the prompt stream; `rows`: their data set rows."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    step: int
    reason: str
    checkpoint: str
    left_out: list[int]
    rows: list[int]
    num_written: int

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Rollback:
        try:
            return TypeAdapter(cls).validate_json(json.dumps(line))
        except ValidationError as error:
            raise CheckpointError(f"rollbacks.jsonl has a line that is not a rollback: {line!r:.80}; restore the file") from error

    def describe(self) -> str:
        return f"step {self.step}: {self.reason}: back to {self.checkpoint}; {len(self.left_out)} prompts are left out"


class Rollbacks:
    """Rollbacks of a run.  `checkpoint`: name of the last one, and the stream position of its next prompt."""

    def __init__(self, run: RunDirectory, prompts: PromptStream, done: Sequence[Rollback] = ()):
        self._run, self._prompts, self.done = run, prompts, list(done)
        self.checkpoint: tuple[str, int] | None = None

    @classmethod
    def of_run(cls, run: RunDirectory, prompts: PromptSet, seed: int, shuffle: bool, *, resumed: bool) -> Rollbacks:
        lines: list[Any] = [None]
        if resumed and dist.get_rank() == 0 and run.rollbacks.exists():
            lines = [list(iter_json_lines(run.rollbacks))]
        dist.broadcast_object_list(lines, src=0)
        return cls(run, PromptStream(prompts, seed, shuffle=shuffle), [Rollback.of(line) for line in lines[0] or []])

    @property
    def left_out(self) -> frozenset[int]:
        return frozenset(position for each in self.done for position in each.left_out)

    @property
    def num_written(self) -> int:
        return max((each.num_written for each in self.done), default=0)

    def summary(self) -> dict[str, int]:
        return {"rollbacks": len(self.done), "prompts_left_out": len(self.left_out)}

    def require(self, count: int) -> None:
        if count > len(self.done):
            raise CheckpointError(
                f"{self._run.rollbacks} has {len(self.done)} rollbacks, but the checkpoint was written after {count}: prompts "
                "that were left out would be trained; restore the file next to the checkpoints"
            )

    def go_back(
        self, step: int, breach: Breach, where: str, rejected: Sequence[int], position: int, num_written: int, *, keeper: bool
    ) -> None:
        """Write the rollback and raise RollBack on every rank, or NumericsError.  `position`: of the next prompt to admit."""
        because = f"it was because {breach.message}{where}"
        if len(self.done) >= MAX_ROLLBACKS:
            raise NumericsError(f"the run has gone back {MAX_ROLLBACKS} times already, and may not do so again; {because}")
        if self.checkpoint is None:
            raise NumericsError(f"the run should go back to a checkpoint, but has none; lower checkpoint.every_steps; {because}")
        name, start = self.checkpoint
        left_out = sorted((set(range(start, position)) | set(rejected)) - self.left_out)
        rows = [self._prompts.at(each).row for each in left_out]
        rollback = Rollback(step, breach.reason, name, left_out, rows, num_written)
        if keeper:
            with atomic_writer(self._run.rollbacks) as file:
                file.writelines(encode_json(asdict(each)) + "\n" for each in [*self.done, rollback])
        with waiting_for(f"rollback, step {step}"):
            dist.barrier()
        raise RollBack(rollback.describe())


MAX_SKIPS, MAX_ROLLBACKS = 3, 2
"""Allowed skipped steps in a row and rollbacks of a run; one more ends it."""

KEPT_BATCHES = 8
"""Rejected batches kept per run, for `python -m tools.replay`."""


@dataclass
class Guard:
    config: TrainConfig
    algorithm: Algorithm
    rank: int
    device: torch.device
    site: Site
    total_steps: int
    rollbacks: Rollbacks
    apart: bool = False  # the actor is trained on other ranks than it decodes on
    in_a_row: int = 0
    num_written: int = 0

    def __post_init__(self) -> None:
        config = self.config
        self.rules = Rules(config.guards, config.guards.gap_limit(config.actor.dtype, config.rollout.temperature))

    def examine(self, scored: ScoredBatch, kl_coefficient: float, seen: Moments) -> tuple[Experience, Breach | None]:
        """Return the experience, and a breach if it must not be trained on."""
        breach = None
        try:
            experience = self.algorithm.experience(scored, kl_coefficient, seen=seen)
        except (RewardError, NumericsError) as error:
            experience = self.algorithm.experience(scored, kl_coefficient, check=False, seen=seen)
            breach = non_finite("batch", math.nan, str(error))
        self._require_same(experience.advantages_T)
        kl = experience.stats.kl_mean
        return experience, breach or self.rules.check({} if kl is None else {"kl_mean": kl})

    def _require_same(self, advantages_T: Tensor) -> None:
        """Compare a user's advantages on all ranks, which have just met.  Raises PluginError."""
        if (custom := self.algorithm.advantage) is None:
            return
        with waiting_for("advantages of the ranks"):
            (found,) = by_rank([zlib.crc32(advantages_T.cpu().numpy().tobytes())], self.device)
        if other := next((rank for rank, digest in enumerate(found) if digest != found[0]), None):
            fault = f"returned other numbers on rank {other} than on rank 0 for the same batch"
            raise custom.plugin.refuse(fault, "make it deterministic: every rank calls it for itself")

    def watch(self, role: str, update: Callable[[], dict[str, float]]) -> tuple[dict[str, float], Breach | None]:
        """Update `role`; return statistics (none for a non-finite gradient) and breach."""
        try:
            figures = update()
        except NumericsError as error:
            name = "critic_grad_norm" if role == "critic" else "grad_norm"
            return {}, non_finite(name, math.nan, str(error))
        return figures, self.rules.check(figures)

    def agree(self, breaches: Sequence[Breach | None], step: int) -> Breach | None:
        """Return the first breach of any rank if all ranks must act on it, else this rank's."""
        own = first(breaches)
        if not (self.rules.agree_on_updates or self.apart) or dist.get_world_size() == 1:
            return own
        none = dist.get_world_size()
        with waiting_for(f"guards, step {step}"):
            earliest = torch.tensor([none if own is None else self.rank])
            dist.all_reduce(earliest, op=dist.ReduceOp.MIN)
            if (rank := int(earliest)) == none:
                return None
            code = share(None if own is None else torch.tensor(own.encode()), CODE_SIZE, rank, self.device)
        found = decode(code.tolist())
        return own if own is not None and found is not None and own.encode()[:2] == found.encode()[:2] else found

    def handle(self, breach: Breach | None, rejected: RejectedBatch, position: int, refusal: str | None) -> None:
        """Keep the batch and raise: NumericsError or RewardError to stop, else RollBack.  `refusal`: reason for a NaN score."""
        if breach is None:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        step, done = rejected.facts.step, len(self.rollbacks.done)
        # After a rollback the same step may be rejected again.
        name = f"step-{step}-rollback-{done}" if done else f"step-{step}"
        path = RunDirectory(self.config.run_dir).rejected / f"{name}.safetensors"
        # If the ranks do not meet, only the critic's ranks know the critic's breach.
        alone = breach.figure.startswith("critic_") and not (self.rules.agree_on_updates or self.apart)
        keeper = self.site.placements["critic"].ranks[0] if alone else self.site.source
        if self.rank == keeper and self.num_written < KEPT_BATCHES:
            self.num_written += 1
            figures = {
                name: value if value is not None and math.isfinite(value) else None
                for name, value in rejected.facts.figures.items()
            }
            facts = replace(rejected.facts, config=config_yaml(self.config), reason=breach.reason, figures=figures)
            replace(rejected, facts=facts).write(path)
        where = f" (step {step}; `python -m tools.replay {path}`, in the repository, repeats its update)"
        action = self.config.guards.action
        if action == "rollback":
            groups = members(self.config).of_groups(rollout.seq_id for rollout in rejected.batch)
            keeps = self.rank == self.site.source
            self.rollbacks.go_back(step, breach, where, groups, position, self.num_written, keeper=keeps)
        elif action == "skip" and self.in_a_row > MAX_SKIPS:
            raise NumericsError(
                f"{self.in_a_row} steps in a row were skipped, more than {MAX_SKIPS}; the last because {breach.message}{where}"
            )
        elif action == "stop":
            raise NumericsError(f"{breach.message}{where}") if refusal is None else RewardError(f"{refusal}{where}")

    def state_dict(self) -> dict[str, int]:
        return {"in_a_row": self.in_a_row, "num_written": self.num_written, "rollbacks": len(self.rollbacks.done)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.rollbacks.require(state["rollbacks"])
        self.in_a_row = state["in_a_row"]
        self.num_written = max(state["num_written"], self.rollbacks.num_written)
