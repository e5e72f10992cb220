"""Figures of the paper "OPPO: Accelerating PPO-based RLHF via Pipeline Overlap" (anonymous, under review), as printed.

Contradictions are kept; `checks` computes them.  Figures 2 to 7 have no data in the text, so only the statements of the prose are
here.  The paper does not state lengths of prompts and responses, delta and chunk of the main runs, seconds of the stages, or
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from oppo_megatron.config.overlap import DeltaConfig
from oppo_megatron.control.delta_controllers import make_delta_controller
from oppo_megatron.records import StepSignals

BATCH, GPUS_TRAINING, GPUS_SCORING = 112, 7, 1
"""Sequences per step "unless otherwise specified"; GPUs that generate and train, and that score (section 4.1)."""
CHUNK_CANDIDATES, CHUNK_PERIOD, DELTA_MOMENTUM = (128, 256, 512), 50, 1
"""Tokens, steps, prompts: examples of sections 3.1 and 3.2."""
EVAL_STEPS = {"se7b": 800, "se3b": 1200}
"""Steps after which models were evaluated (appendix A.1.4): 7B and 3B."""
SCORING_HIDDEN_PERCENT = 17
""""Streaming hides about 17% of scoring latency within generation" (section 4.3, 7B)."""
HEADLINE_SPEEDUP, HEADLINE_UTILIZATION = (1.8, 2.8), (1.4, 2.1)
"""Least and most (abstract)."""


@dataclass(frozen=True)
class Speedup:
    """Section 4.2 and figure 3: minutes to a target reward; None if the text has none."""

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
"""Section 4.2, of figure 4: step and mean reward; it levels off at the second point."""
MULTINODE_S: Mapping[str, float] = {"TRL": 498.30, "OPPO": 111.08}
"""Table 1: seconds of a step of `multinode`."""
FRAMEWORKS_S: Mapping[str, float] = {
    "VeRL w/ DP": 125.36, "VeRL w/ DP+SP": 120.47, "VeRL Fully Async w/ SP": 161.21, "AReaL": 109.92, "OPPO": 99.84,
}  # fmt: skip
"""Table 4: seconds of a step of other systems, with no stated setup."""


def speedup_of(setup: str) -> Speedup:
    return next(row for row in SPEEDUPS if row.setup == setup)


def minutes_of(setup: str, variant: str) -> Ablation:
    return next(row for row in ABLATION if (row.setup, row.variant) == (setup, variant))


RULE_BASED = "gsm8k7b (rule-based reward)"


Verdict = Literal["agree", "contradict", "unexplained"]
"""`unexplained`: both may be true, but the paper does not explain how."""


@dataclass(frozen=True)
class Check:
    """Two statements about one figure: `printed` is one of them, `computed` follows from the other by `arithmetic`."""

    where: str
    printed: float
    computed: float
    verdict: Verdict
    arithmetic: str


def checks() -> Iterator[Check]:
    """Yield whether the printed figures agree with each other."""
    yield from _deferral()
    yield from _ablation()
    yield from _speedups()
    yield from _utilization()
    yield _delta_rules()


def _deferral() -> Iterator[Check]:
    shares = DEFERRED_PERCENT
    fixed = sorted(int(value) for kind, value in DELTA_POLICIES if kind == "fixed")
    largest = fixed[-1]
    yield Check(
        "table 2: shares, %",
        100.0,
        sum(shares.values()),
        "contradict",
        f"{' + '.join(f'{each:.2f}' for each in shares.values())} %",
    )
    yield Check(
        "table 2: mean delta", largest, mean_delta(DEFERRED_MEAN), "unexplained",
        f"each step carries delta, so mean deferrals = mean delta / B: {DEFERRED_MEAN} x {BATCH}; figure 7a has fixed 4 and 8",
    )  # fmt: skip
    for delta in fixed:
        name = f"table 2: mean deferrals at delta {delta}"
        yield Check(name, DEFERRED_MEAN, delta / BATCH, "unexplained", f"{delta} / {BATCH} sequences")
    once, twice, thrice = (sum(share for steps, share in shares.items() if steps >= least) for least in (1, 2, 3))
    yield Check(
        "table 2: deferred again, %", 100 * twice / once, 100 * thrice / twice, "unexplained",
        f"of those deferred once ({twice:.2f}/{once:.2f}) against of those deferred twice ({thrice:.2f}/{twice:.2f})",
    )  # fmt: skip


def mean_delta(deferrals: float) -> float:
    """Return the mean delta that gives this mean of deferrals, if every step trains B rollouts and carries delta."""
    return deferrals * BATCH


def _ablation() -> Iterator[Check]:
    for setup in dict.fromkeys(row.setup for row in ABLATION):
        base = minutes_of(setup, BASELINE).minutes
        intra, inter = (minutes_of(setup, each).minutes for each in (INTRA_ONLY, INTER_ONLY))
        end_to_end = speedup_of(setup)
        assert end_to_end.baseline_minutes is not None and end_to_end.oppo_minutes is not None
        product = base / intra * base / inter
        whole = end_to_end.baseline_minutes / end_to_end.oppo_minutes
        verdict: Verdict = "agree" if abs(product / whole - 1) < 0.05 else "unexplained"
        yield Check(
            f"figure 6, {setup}: product of both gains", whole, product, verdict,
            f"{base}/{intra} x {base}/{inter}; end to end {end_to_end.baseline_minutes}/{end_to_end.oppo_minutes}",
        )  # fmt: skip
    base, intra = minutes_of("se7b", BASELINE).minutes, minutes_of("se7b", INTRA_ONLY).minutes
    yield Check(
        "section 4.3: per cent of scoring hidden", SCORING_HIDDEN_PERCENT, 100 * (1 - intra / base), "contradict",
        f"1 - {intra}/{base} is the share of the whole time; were it of scoring, scoring would be the whole step",
    )  # fmt: skip


def most_intra_gain(scoring_share: float) -> float:
    """Return the speed-up of hiding all scoring, an upper bound of intra-step overlap of scoring."""
    return 1 / (1 - scoring_share)


def _speedups() -> Iterator[Check]:
    main, ablated = speedup_of("se7b"), minutes_of("se7b", BASELINE).minutes
    assert main.baseline_minutes is not None and main.oppo_minutes is not None
    yield Check(
        "se7b: minutes of the baseline", main.baseline_minutes, ablated, "contradict",
        f"sections 4.2 and 4.3; speed-up {main.baseline_minutes / main.oppo_minutes:.2f} or {ablated / main.oppo_minutes:.2f}, "
        f"stated {main.stated}",
    )  # fmt: skip
    model, rule = speedup_of("gsm8k7b").stated, speedup_of(RULE_BASED).stated
    yield Check(
        "GSM8K: speed-up in figure 3", model, rule, "contradict",
        f"sections 4.2 and 4.3; {RULE_BASED.removeprefix('gsm8k7b ')} is said of the second only",
    )  # fmt: skip
    slow, fast = MULTINODE_S[BASELINE], MULTINODE_S["OPPO"]
    yield Check(
        "table 1 against the abstract", HEADLINE_SPEEDUP[1], slow / fast, "contradict",
        f"{slow:.2f}/{fast:.2f}; the abstract ends at {HEADLINE_SPEEDUP[1]}, its least stated case is "
        f"{min(row.stated for row in SPEEDUPS)}",
    )  # fmt: skip


def _utilization() -> Iterator[Check]:
    for row in UTILIZATION:
        main = speedup_of(row.setup)
        if main.baseline_minutes is None or main.oppo_minutes is None:
            speedup = main.stated
        else:
            speedup = main.baseline_minutes / main.oppo_minutes
        yield Check(
            f"figure 5, {row.setup}: busy time left, %", 100.0, 100 * row.gain / speedup, "unexplained",
            f"{row.oppo}/{row.baseline} = {row.gain:.2f} over a speed-up of {speedup:.2f}: the same tokens in less busy time",
        )  # fmt: skip


def _delta_rules() -> Check:
    """Show rising rewards to both rules, by the controllers of a run."""
    delta = 4
    grown = {}
    for rule in ("eq4", "algorithm1"):
        config = DeltaConfig.model_validate({"rule": rule, "initial": delta, "max": 2 * delta, "window": 1})
        controller = make_delta_controller(config)
        for step in (1, 2):
            controller.observe(step, StepSignals(float(step), 0.0, 1.0, 0.0))
        grown[rule] = controller.value - delta
    return Check(
        "eq. 4 against Algorithm 1, line 24", grown["eq4"], grown["algorithm1"], "contradict",
        f"change of a delta of {delta} when the reward rises: the signs differ; the prose is with eq. 4",
    )  # fmt: skip
