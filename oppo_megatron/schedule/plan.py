from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oppo_megatron.config.derived import READ_GREEDY, max_context, members, share_of_sequences
from oppo_megatron.config.overlap import DeltaConfig, OverlapConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.memory import kv_slots, slot_tokens
from oppo_megatron.layout.placements import RolePlacement, decodes_and_scores, named_roles
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.schedule.links import GLOO, Transport
from oppo_megatron.schedule.planning.actor_book import ActorBook
from oppo_megatron.schedule.planning.book import Grouping
from oppo_megatron.schedule.planning.planner import RoundPlanner
from oppo_megatron.schedule.planning.scoring_book import ScoringBook
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.schedule.weaving.costs import Costs


@dataclass(frozen=True)
class StepPlan:
    """`stream`: score while decoding. `wait_for_critic` before a step. `forward_ahead`: begin updates before the last scores."""

    stream: bool
    wait_for_critic: bool
    forward_ahead: bool


def plan_step(config: TrainConfig) -> StepPlan:
    stream = config.overlap.intra
    return StepPlan(
        stream=stream,
        wait_for_critic=not stream or "critic" in config.overlap.without,
        forward_ahead=stream and "scores" not in config.overlap.without,
    )


def delta_rule(overlap: OverlapConfig) -> DeltaConfig:
    """Without inter-step overlap, fixed at 0."""
    return overlap.delta if overlap.inter else DeltaConfig(rule="fixed", initial=0, max=0)


def round_generator(overlap: OverlapConfig, site: Site) -> str:
    """Name or user's function; `auto` weaves only if some rank decodes and scores."""
    if not overlap.intra:
        return "sequential"
    if overlap.schedule != "auto":
        return overlap.schedule
    return "woven" if decodes_and_scores(site.placements) else "intra"


def late_scorers(site: Site) -> frozenset[str]:
    """Roles that score only complete batches; otherwise the actor would wait."""
    actor = site.placements["actor"]
    if actor.pp > 1 or not site.listeners:
        return frozenset()
    own = set(actor.ranks)
    return frozenset(role for role, placement in site.placements.items() if role != "actor" and set(placement.ranks) <= own)


def scoring_delay(update_s: float, work: Sequence[float], arrivals: Sequence[float]) -> float:
    """Seconds that an update before scoring adds to its end; `work`: seconds per round, `arrivals`: chunk times."""

    def end(spared_s: float) -> float:
        now = work[0] - spared_s
        for index, seconds in enumerate(work[1:]):
            now += seconds
            if index < len(arrivals):
                now = max(now, arrivals[index])
        return now

    return end(0.0) - end(update_s)


def new_planner(
    config: TrainConfig, site: Site, generator: str, limit: Callable[[int], int], *, costs: Costs | None = None,
    rank: int | None = None, transport: Transport = GLOO,
) -> RoundPlanner:  # fmt: skip
    """`limit(seq_id)`: most tokens of a response."""
    slots = {role: cache_slots(config, role, placement) for role, placement in site.placements.items()}
    each = members(config)
    groups, steps = Grouping(each.size, "fork" not in config.overlap.without, greedy=each.greedy), config.scores_steps
    return RoundPlanner(
        site,
        generator,
        config.overlap.weave,
        config.runtime.micro_batch_tokens,
        max_context(config),
        ActorBook(site.placements["actor"].dp, slots["actor"], limit, groups),
        {
            role: ScoringBook(role, placement.dp, slots[role], groups, every_token=steps, reads_greedy=role in READ_GREEDY)
            for role, placement in site.placements.items()
            if role != "actor"
        },
        costs or Costs(),
        rank,
        late_scorers(site),
        transport,
    )


def cache_slots(config: TrainConfig, role: str, placement: RolePlacement) -> int:
    """Sequences in a replica's cache, limited by `runtime.kv_cache_mb`."""
    model, share = named_roles(config)[role], share_of_sequences(config, role, placement.dp)
    context, budget_mb = slot_tokens(max_context(config), config.runtime.kv_layout), config.runtime.kv_cache_mb
    if budget_mb is None:
        return share
    return kv_slots(read_hf_config(model), placement, model.dtype, slots=share, context=context, budget_mb=budget_mb)
