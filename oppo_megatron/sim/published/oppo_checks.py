"""Whether OPPO's printed figures go together, with the arithmetic; all of it computed from `oppo.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from oppo_megatron.config.overlap import DeltaConfig
from oppo_megatron.control.delta_controllers import make_delta_controller
from oppo_megatron.records import StepSignals
from oppo_megatron.sim.published.oppo import (
    ABLATION,
    BASELINE,
    BATCH,
    DEFERRED_MEAN,
    DEFERRED_PERCENT,
    DELTA_POLICIES,
    HEADLINE_SPEEDUP,
    INTER_ONLY,
    INTRA_ONLY,
    MULTINODE_S,
    SCORING_HIDDEN_PERCENT,
    SPEEDUPS,
    UTILIZATION,
    minutes_of,
    speedup_of,
)

RULE_BASED = "gsm8k7b (rule-based reward)"


Verdict = Literal["agree", "contradict", "unexplained"]
"""`unexplained`: both may be true, but the paper does not say how."""


@dataclass(frozen=True)
class Check:
    """Two statements that meet in `where`: `printed` as one of them, `computed` from the other, and how."""

    where: str
    printed: float
    computed: float
    verdict: Verdict
    arithmetic: str


def checks() -> Iterator[Check]:
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
    """Prompts: that a mean of so many deferrals stands for, where every step trains B and carries delta."""
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
    """Speed-up of hiding all scoring that takes this share of a step: no intra-step overlap of scoring exceeds it."""
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
    """Both rules by the controllers of a run, shown rewards that rise."""
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
