"""Figures of the paper "OPPO: Accelerating PPO-based RLHF via Pipeline Overlap" (anonymous, under review), as printed.

Nothing is computed here, and contradictions stand as they are (`oppo_checks.py`).  Figures 2 to 7 have no data in the
text: of them only what the prose says is here.  Not stated anywhere: lengths of prompts and responses, delta and chunk of the
main runs, seconds of the stages, micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BATCH, GPUS_TRAINING, GPUS_SCORING = 112, 7, 1
"""Sequences of a step "unless otherwise specified"; GPUS that generate and train, and that score (section 4.1)."""
CHUNK_CANDIDATES, CHUNK_PERIOD, DELTA_MOMENTUM = (128, 256, 512), 50, 1
"""Tokens, steps, prompts: the examples of sections 3.1 and 3.2."""
EVAL_STEPS = {"se7b": 800, "se3b": 1200}
"""Steps after which models were evaluated (appendix A.1.4): 7B and 3B."""
SCORING_HIDDEN_PERCENT = 17
""""Streaming hides about 17% of scoring latency within generation" (section 4.3, 7B)."""
HEADLINE_SPEEDUP, HEADLINE_UTILIZATION = (1.8, 2.8), (1.4, 2.1)
"""Least and most (abstract)."""


@dataclass(frozen=True)
class Speedup:
    """Section 4.2 and figure 3: minutes to a target reward; None where the text has none."""

    setup: str
    target_reward: float | None
    baseline_minutes: int | None
    oppo_minutes: int | None
    stated: float


SPEEDUPS = (
    Speedup("se7b", 4.17, 4300, 2300, 1.9),
    Speedup("se3b", 5.12, 13000, 5200, 2.5),
    Speedup("code3b", None, None, None, 2.4),
    Speedup("gsm8k7b", None, None, None, 2.8),
    Speedup("gsm8k7b (rule-based reward)", None, None, None, 2.35),
)


@dataclass(frozen=True)
class Ablation:
    """Section 4.3 and figure 6: minutes to the same reward; the baseline has no speed-up."""

    setup: str
    variant: str
    minutes: int
    stated: float | None


BASELINE, INTRA_ONLY, INTER_ONLY = "TRL", "intra only (w/o inter)", "inter only (w/o intra)"
ABLATION = (
    Ablation("se7b", BASELINE, 4200, None),
    Ablation("se7b", INTRA_ONLY, 3500, 1.2),
    Ablation("se7b", INTER_ONLY, 2700, 1.6),
    Ablation("se3b", BASELINE, 13000, None),
    Ablation("se3b", INTRA_ONLY, 10000, 1.3),
    Ablation("se3b", INTER_ONLY, 6300, 2.06),
)


@dataclass(frozen=True)
class Utilization:
    """Section 4.2 and figure 5: GPU utilization "in the inference stage", in percent."""

    setup: str
    baseline: float
    oppo: float
    stated: float

    @property
    def gain(self) -> float:
        return self.oppo / self.baseline


UTILIZATION = (
    Utilization("se7b", 50.6, 71.0, 1.4),
    Utilization("se3b", 38.7, 73.6, 1.9),
    Utilization("gsm8k7b", 45.7, 67.3, 1.5),
    Utilization("code3b", 35.7, 74.1, 2.1),
)
DEFERRED_PERCENT: Mapping[int, float] = {0: 78.48, 1: 20.20, 2: 0.23, 3: 1.05}
DEFERRED_MEAN = 0.24
"""Table 2: share of requests by the number of steps they were deferred, and their average."""
DELTA_POLICIES = (("dynamic", "adapted"), ("fixed", "8"), ("fixed", "4"))
"""Figure 7a, fastest first."""
CHUNKS: Mapping[str, str] = {
    "10": "severe contention when models are colocated (example of small)",
    "100": "high overhead; throughput reduced despite high overlap",
    "500": "best: fastest step",
    "1000-3000": "step time rises again; close to sequential",
    "3000": "low overlap; reverts to sequential (example of large)",
}
"""Figure 7b and section 3.1, by tokens."""
REWARD_POINTS: Mapping[str, tuple[tuple[int, float], ...]] = {
    "se7b": ((150, 2.0), (600, 4.1)),
    "se3b": ((150, 2.0), (1000, 5.12)),
}
"""Section 4.2, of figure 4: step and mean reward; the second point is where it levels off."""
MULTINODE_S: Mapping[str, float] = {"TRL": 498.30, "OPPO": 111.08}
"""Table 1: seconds of a step of `multinode`."""
FRAMEWORKS_S: Mapping[str, float] = {
    "VeRL w/ DP": 125.36, "VeRL w/ DP+SP": 120.47, "VeRL Fully Async w/ SP": 161.21, "AReaL": 109.92, "OPPO": 99.84,
}  # fmt: skip
"""Table 4: seconds of a step beside other systems, of no stated setup."""


def speedup_of(setup: str) -> Speedup:
    return next(row for row in SPEEDUPS if row.setup == setup)


def minutes_of(setup: str, variant: str) -> Ablation:
    return next(row for row in ABLATION if (row.setup, row.variant) == (setup, variant))
