"""Why a plan is the best, in a sentence, and what bounds it."""

from __future__ import annotations

from oppo_megatron.sim.search.planning import Confirmed, Planned

PARTS = {
    "decode": "prompts and decoding",
    "scoring": "scoring that nothing hides",
    "update": "the actor's update",
    "critic": "the critic's update",
    "weights": "moves of weights",
    "idle": "waiting for busier ranks",
}


def bounded_by(planned: Planned, each: Confirmed) -> str:
    """The busiest ranks, where the actor waits for them, else the largest part of the actor's step."""
    if each.parts.idle > 0:
        role, _ = planned.rule(each.plan).busiest([option.times for option in each.plan.options])
        return f"{role}'s ranks"
    longest = max(each.parts._fields, key=lambda name: getattr(each.parts, name))
    return f"actor: {longest}"


def reason(planned: Planned) -> str:
    """How much worse the next plan is, and in which part most of that lies."""
    best, others = planned.plans[0], planned.plans[1:]
    told = f"a step takes {best.step_ns / 1e9:.3g} s"
    if not others:
        return f"{told}; no other way to lay out the actor was found to fit"
    following = others[0]
    worse = following.step_ns / best.step_ns - 1
    gains = {name: getattr(following.parts, name) - getattr(best.parts, name) for name in PARTS}
    part = max(gains, key=lambda name: gains[name])
    if gains[part] <= 0:
        return f"{told}, and so does the next plan"
    seconds = getattr(best.parts, part) / 1e9, getattr(following.parts, part) / 1e9
    return (
        f"{told}; the next plan takes {worse:.1%} longer, most of it in {PARTS[part]}: {seconds[0]:.3g} s a step against "
        f"{seconds[1]:.3g}"
    )
