"""Runs of a setting of OPPO's paper in virtual time, and their figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from statistics import NormalDist, fmean

import numpy as np

from benchmarks.paper.assumptions import CAPTURED, MICRO_BATCH_TOKENS, ROUND_S, Sampled, Setting
from oppo_megatron.config.derived import switched
from oppo_megatron.config.overlap import DeltaConfig
from oppo_megatron.config.ppo import ForcedLimits
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.role_memory import planned_memory
from oppo_megatron.records import StepSignals
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.pricing.model import Decoding
from oppo_megatron.sim.pricing.prices import Prices
from oppo_megatron.sim.runs.step_costs import StepCosts, cluster_costs
from oppo_megatron.sim.runs.virtual import VirtualRun, VirtualStep
from oppo_megatron.uniforms import uniforms

REWARD_SPREAD = 1.0
"""Assumed standard deviation of one response's reward; a batch's mean varies by this over the root of B."""
Signals = Callable[[int, StepSignals], StepSignals]


@dataclass(frozen=True)
class Summary:
    """Means per step after the first `warm_up` steps, and how often the trained rollouts had been deferred.

    `decode_s` and `scored_s` (exposed) are seconds of the actor; `in_use` is the share of places in the batch that run.
    """

    steps: Sequence[VirtualStep] = field(repr=False)
    batch: int
    warm_up: int

    @cached_property
    def steady(self) -> Sequence[VirtualStep]:
        return self.steps[self.warm_up :]

    @property
    def step_s(self) -> float:
        return fmean(step.step_s for step in self.steady)

    @property
    def decode_steps(self) -> float:
        return fmean(step.decode_steps for step in self.steady)

    @property
    def delta(self) -> float:
        return fmean(step.delta for step in self.steady)

    @property
    def deferrals(self) -> float:
        return float(np.concatenate([step.deferrals for step in self.steady]).mean())

    @property
    def deferred_percent(self) -> Mapping[int, float]:
        """Return the percent of trained rollouts by the number of deferrals."""
        counts = Counter(np.concatenate([step.deferrals for step in self.steady]).tolist())
        return {steps: 100 * count / counts.total() for steps, count in sorted(counts.items())}

    @property
    def scored_s(self) -> float:
        return fmean(step.parts.score_exposed_s for step in self.steady)

    @property
    def update_s(self) -> float:
        return fmean(step.parts.update_s for step in self.steady)

    @property
    def decode_s(self) -> float:
        return fmean(step.parts.decode_s for step in self.steady)

    @property
    def own_scoring_s(self) -> float:
        """Return the seconds of the reference, which is on the GPUs that decode."""
        return fmean(step.line["score_busy_s"] for step in self.steady)

    @property
    def tokens(self) -> float:
        return fmean(float(step.lengths.sum()) for step in self.steady)

    @property
    def in_use(self) -> float:
        return fmean(1 - step.line["tail_waste"] for step in self.steady)


@dataclass(frozen=True)
class Case:
    """A setting with its prices, computed once for all runs."""

    setting: Setting
    seed: int

    @cached_property
    def config(self) -> TrainConfig:
        return self.setting.config(self.seed)

    @cached_property
    def lengths(self) -> ForcedLimits:
        forced = self.config.rollout.lengths
        assert forced is not None
        return ForcedLimits.of(forced, self.setting.lengths.limit, self.seed)

    @cached_property
    def sampled(self) -> Sampled:
        return Sampled(self.lengths, self.setting.batch)

    @cached_property
    def cluster(self) -> Cluster:
        return self.setting.cluster()

    @cached_property
    def costs(self) -> StepCosts:
        tokens, lengths = self.setting.lengths.prompt, self.sampled.middle()
        return replace(cluster_costs(self.config, self.cluster, tokens, lengths, captured=CAPTURED), round_s=ROUND_S)

    @cached_property
    def padded(self) -> Mapping[str, float]:
        """Return the seconds of sequential phases if every sequence is as long as the batch's longest."""
        decoding = Decoding(self.setting.lengths.prompt, [round(self.sampled.longest())] * self.setting.batch, CAPTURED)
        return {" ".join(key): seconds for key, seconds in Prices(self.config, self.cluster, decoding).rows().items()}

    @property
    def fullest_gb(self) -> float:
        return max(planned_memory(self.config, on_cpu=self.cluster.gpu.on_cpu)) / 1e9

    def reward_s(self, response_tokens: float) -> float:
        """Return the seconds that the reward model takes to read a batch."""
        line = self.costs.actions.prefill_at("reward", 0)
        tokens = self.setting.batch * self.setting.lengths.prompt + response_tokens
        return line.fixed_s * ceil(tokens / MICRO_BATCH_TOKENS) + line.per_token_s * tokens

    def run(
        self, mode: str, steps: int, *, delta: DeltaConfig | None = None, chunk: int | None = None, signals: Signals | None = None
    ) -> Summary:
        """Play `steps` steps of a mode of `config/derived.py`; `delta` and `chunk` replace the assumed ones."""
        config = switched(self.config, mode)
        overlap = config.overlap
        if delta is not None:
            overlap = overlap.model_copy(update={"delta": delta})
        if chunk is not None:
            overlap = overlap.model_copy(update={"chunk": chunk})
        config = config.model_copy(update={"overlap": overlap})
        run = VirtualRun(
            config, self.costs, self.lengths, prompt_tokens=self.setting.lengths.prompt, signals=signals, endless=True
        )
        return Summary(list(run.steps(steps)), self.setting.batch, steps // 5)


def fixed(delta: int) -> DeltaConfig:
    return DeltaConfig(rule="fixed", initial=delta, max=delta)


def rewards(points: Sequence[tuple[int, float]], steps: int, last_step: int, batch: int, seed: int) -> Signals:
    """Return mean rewards that run straight from 0 through `points` (step, reward), with the spread of `batch` responses.

    `last_step` steps are compressed into `steps`.
    """
    at, values = zip((0, 0.0), *points, strict=True)

    def shown(step: int, signals: StepSignals) -> StepSignals:
        mean = float(np.interp(step * last_step / steps, at, values))
        draw = uniforms(seed, [step], [0])[0]
        noise = NormalDist().inv_cdf(min(max(draw, 2.0**-53), 1 - 2.0**-53)) * REWARD_SPREAD / batch**0.5
        return StepSignals(mean + noise, signals.tail_waste, signals.ess, signals.length_gap)

    return shown
