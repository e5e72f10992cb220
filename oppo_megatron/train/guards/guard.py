"""Checks each step against the guards' rules (`control/guards.py`), and writes rejected batches for `tools/replay.py`.

The scorers' results for a batch are the same on all ranks, so each rank decides alone whether to train on it.  The results of an
update are known to the ranks of its role only: if it may have to be undone, all ranks meet after both updates.

A rejected batch has all inputs of one update: `step-N.safetensors` holds the tensors (`TENSORS`), `step-N.jsonl` a first line
about the step and then a line per rollout.  The files hold numbers and text only, no pickle.

Legend: B rollouts, P their prompt tokens, T their response tokens (both packed), G greedy responses.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor

from oppo_megatron.algorithms.advantages import Moments
from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import Experience, ScoredBatch
from oppo_megatron.cluster.process_groups import waiting_for
from oppo_megatron.config.derived import members
from oppo_megatron.config.load import config_yaml
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.guards import CODE_SIZE, NO_BREACH, Breach, Rules, decode, first, non_finite
from oppo_megatron.errors import NumericsError, RewardError
from oppo_megatron.mcore.device import on_device
from oppo_megatron.records import Rollout
from oppo_megatron.rundir.directory import RunDirectory, atomic_writer, encode_json
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.train.guards.rollback import Rollbacks

FORMAT = "oppo rejected batch 1"
TENSORS = {
    "prompt_lengths_B": torch.int64, "prompt_tokens_P": torch.int64, "lengths_B": torch.int64, "tokens_T": torch.int64,
    "versions_T": torch.int64, "behaviour_logp_T": torch.float64, "reference_logp_T": torch.float32,
    "values_T": torch.float32, "scores_B": torch.float32, "truncated_B": torch.bool, "step_rewards_T": torch.float32,
    "greedy_scores_G": torch.float32, "greedy_lengths_G": torch.int64, "greedy_truncated_G": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """Facts of the step: the actor's `policy_version` before its update, the run's `config` as YAML, its statistics
    (`figures`), and the `history` of earlier steps (`History`).
    """

    step: int
    seed: int
    total_steps: int
    policy_version: int
    kl_coefficient: float
    config: str
    reason: str
    figures: dict[str, float | None]
    history: dict[str, float | None]


@dataclass(frozen=True)
class RejectedBatch:
    """Inputs of one update of actor and critic."""

    facts: Facts
    batch: Sequence[Rollout]
    scored: ScoredBatch

    def write(self, path: Path) -> None:
        """Write `path` (.safetensors) and its .jsonl, each complete or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_writer(path.with_suffix(".jsonl")) as lines:
            lines.write(encode_json({"format": FORMAT, **vars(self.facts)}) + "\n")
            for rollout, score in zip(self.batch, self.scored.scores_B.tolist(), strict=True):
                lines.write(encode_json(_described(rollout, score)) + "\n")
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with aside.open("wb") as file:  # the library's own writer does not raise OSError for a full disk
                file.write(save(self._tensors(), metadata={"format": FORMAT}))
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def _tensors(self) -> dict[str, Tensor]:
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
        return {name: tensor.detach().to("cpu", TENSORS[name]).contiguous() for name, tensor in tensors.items()}


def _described(rollout: Rollout, score: float) -> dict[str, Any]:
    return {
        "seq_id": rollout.seq_id,
        "prompt": rollout.prompt.text,
        "score": score,
        "response_tokens": len(rollout.tokens),
        "oldest_version": min(rollout.versions),
        "deferrals": rollout.deferrals,
        "finish_reason": rollout.finish_reason,
    }


@dataclass(frozen=True)
class Evidence:
    """Inputs and statistics of one step, from which a rejected batch is written.

    `figures` are statistics that this rank knows, `history` is the state of earlier steps (`History`) with `updates`, the
    actor's optimizer steps.
    """

    step: int
    policy_version: int
    kl_coefficient: float
    batch: Sequence[Rollout]
    scored: ScoredBatch
    figures: Mapping[str, float]
    history: Mapping[str, float | None]
    refusal: str | None  # the scorers' first rank on a reward that is not finite


MAX_SKIPS, MAX_ROLLBACKS = 3, 2
"""Allowed skipped steps in a row, and allowed rollbacks of a run; one more ends it."""

KEPT_BATCHES = 8
"""Rejected batches written per run, for `python -m tools.replay`."""


@dataclass
class Guard:
    """One rank's guard.  `total_steps` counts the run's PPO steps, `in_a_row` the last steps that were skipped, `num_written`
    the rejected batches that the run has kept.
    """

    config: TrainConfig
    algorithm: Algorithm
    rank: int
    device: torch.device
    site: Site
    total_steps: int
    rollbacks: Rollbacks
    in_a_row: int = 0
    num_written: int = 0

    @property
    def rules(self) -> Rules:
        config = self.config
        return Rules(
            config.guards, config.guards.gap_limit(config.actor.dtype, config.rollout.temperature)
        )

    def examine(self, scored: ScoredBatch, kl_coefficient: float, seen: Moments) -> tuple[Experience, Breach | None]:
        """Return the experience, and a breach if it must not be trained on; its figures may then not be finite.

        `seen` are the moments of earlier scores (`build_experience`).
        """
        try:
            experience = self.algorithm.experience(scored, kl_coefficient, seen=seen)
        except (RewardError, NumericsError) as error:
            unchecked = self.algorithm.experience(scored, kl_coefficient, check=False, seen=seen)
            return unchecked, non_finite("batch", math.nan, str(error))
        kl = experience.stats.kl_mean
        return experience, self.rules.check({} if kl is None else {"kl_mean": kl})

    def watch(self, role: str, update: Callable[[], dict[str, float]]) -> tuple[dict[str, float], Breach | None]:
        """Make an update of `role`.  Returns its statistics (none if a gradient was not finite) and its breaches."""
        try:
            figures = update()
        except NumericsError as error:
            name = "critic_grad_norm" if role == "critic" else "grad_norm"
            return {}, non_finite(name, math.nan, str(error))
        return figures, self.rules.check(figures)

    def agree(self, breaches: Sequence[Breach | None], step: int) -> Breach | None:
        """Return the first breach of all ranks if all must act on it, else of this rank."""
        own = first(breaches)
        if not self.rules.agree_on_updates or dist.get_world_size() == 1:
            return own
        mine = on_device(NO_BREACH if own is None else own.encode(), self.device, torch.float64)
        codes = [torch.empty(CODE_SIZE, dtype=torch.float64, device=self.device) for _ in range(dist.get_world_size())]
        with waiting_for(f"guards, step {step}"):
            dist.all_gather(codes, mine)
        found = first(decode(code.tolist()) for code in codes)
        return own if own is not None and found is not None and own.encode()[:2] == found.encode()[:2] else found

    def settle(self, breach: Breach | None, evidence: Evidence, position: int) -> None:
        """Keep the rejected batch; raise NumericsError or RewardError to stop the run, RollBack to return to a checkpoint.

        `position` in the stream of prompts is after all admitted prompts.
        """
        if breach is None:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        action = self.config.guards.action
        too_many = action == "skip" and self.in_a_row > MAX_SKIPS
        if self.rank == self._keeper(breach) and self.num_written < KEPT_BATCHES:
            self.num_written += 1
            self._rejected(breach, evidence).write(self._path(evidence.step))
        if action == "rollback":
            obstacle = self.rollbacks.obstacle(MAX_ROLLBACKS)
            if obstacle is not None:
                raise self._error(breach, evidence, f"{obstacle}; it was because {breach.message}")
            rejected = members(self.config).of_groups(rollout.seq_id for rollout in evidence.batch)
            self.rollbacks.go_back(
                evidence.step, breach.reason, rejected, position, self.num_written, keeper=self.rank == self.site.source
            )
        elif action == "stop" or too_many:
            raise self._error(breach, evidence, self._too_many(breach) if too_many else None)

    def state_dict(self) -> dict[str, int]:
        """State in plain JSON types, on the rank that keeps rejected batches."""
        return {"in_a_row": self.in_a_row, "num_written": self.num_written, "rollbacks": len(self.rollbacks)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from `state`, on every rank; batches kept before a rollback still count."""
        self.rollbacks.require(state["rollbacks"])
        self.in_a_row = state["in_a_row"]
        self.num_written = max(state["num_written"], self.rollbacks.num_written)

    def _keeper(self, breach: Breach) -> int:
        """Rank that writes the batch; if no ranks meet, only the critic's ranks know the critic's breach."""
        alone = breach.of_critic and not self.rules.agree_on_updates
        return self.site.placements["critic"].ranks[0] if alone else self.site.source

    def _rejected(self, breach: Breach, evidence: Evidence) -> RejectedBatch:
        figures = {name: value if math.isfinite(value) else None for name, value in evidence.figures.items()}
        facts = Facts(
            step=evidence.step,
            seed=self.config.seed,
            total_steps=self.total_steps,
            policy_version=evidence.policy_version,
            kl_coefficient=evidence.kl_coefficient,
            config=config_yaml(self.config),
            reason=breach.reason,
            figures=figures,
            history=dict(evidence.history),
        )
        return RejectedBatch(facts, evidence.batch, evidence.scored)

    def _path(self, step: int) -> Path:
        """Path of a rejected batch; after a rollback the same step may be rejected again."""
        suffix = f"-rollback-{len(self.rollbacks)}" if len(self.rollbacks) else ""
        return RunDirectory(self.config.run_dir).rejected / f"step-{step}{suffix}.safetensors"

    def _too_many(self, breach: Breach) -> str:
        return f"{self.in_a_row} steps in a row were skipped, more than {MAX_SKIPS}; the last because {breach.message}"

    def _error(self, breach: Breach, evidence: Evidence, instead: str | None) -> Exception:
        """Return the error that ends the run; `instead` replaces the breach's message."""
        step = evidence.step
        again = f"; `python -m tools.replay {self._path(step)}`, in the repository, repeats its update"
        where = f" (step {step}{again})"
        if instead is not None:
            return NumericsError(f"{instead}{where}")
        if evidence.refusal is not None:
            return RewardError(f"{evidence.refusal}{where}")
        return NumericsError(f"{breach.message}{where}")
