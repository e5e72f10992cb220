"""The planner of a configuration, the same for a run and for a preview of it."""

from __future__ import annotations

from collections.abc import Callable

from oppo_megatron.config.derived import READ_GREEDY, max_context, members, share_of_sequences
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.memory import kv_slots, slot_tokens
from oppo_megatron.layout.placements import RolePlacement, named_roles
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.schedule.checking.transport import GLOO, Transport
from oppo_megatron.schedule.plan import late_scorers
from oppo_megatron.schedule.planning.actor_book import ActorBook
from oppo_megatron.schedule.planning.alike import Alike
from oppo_megatron.schedule.planning.book import Grouping
from oppo_megatron.schedule.planning.planner import RoundPlanner
from oppo_megatron.schedule.planning.scoring_book import ScoringBook
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.schedule.weaving.costs import Costs


def new_planner(
    config: TrainConfig,
    site: Site,
    generator: str,
    limit: Callable[[int], int],
    *,
    costs: Costs | None = None,
    rank: int | None = None,
    transport: Transport = GLOO,
) -> RoundPlanner:
    """A planner with empty books.

    `limit(seq_id)` is the most tokens of a response; `rank` and `transport` as in `RoundPlanner`.
    """
    slots = {role: cache_slots(config, role, placement) for role, placement in site.placements.items()}
    each = members(config)
    alike = Alike()
    groups, steps = Grouping(each.size, config.debug.fork, greedy=each.greedy), config.scores_steps
    return RoundPlanner(
        site,
        generator,
        config.overlap.weave,
        config.runtime.micro_batch_tokens,
        max_context(config),
        ActorBook(site.placements["actor"].dp, slots["actor"], limit, groups),
        {
            role: ScoringBook(
                role, placement.dp, slots[role], groups, every_token=steps, reads_greedy=role in READ_GREEDY, alike=alike
            )
            for role, placement in site.placements.items()
            if role != "actor"
        },
        costs or Costs(),
        rank,
        late_scorers(site),
        transport,
    )


def cache_slots(config: TrainConfig, role: str, placement: RolePlacement) -> int:
    """Sequences that the cache of one replica holds: its share of all, or what runtime.kv_cache_mb allows."""
    model, share = named_roles(config)[role], share_of_sequences(config, role, placement.dp)
    context, budget_mb = slot_tokens(max_context(config), config.runtime.kv_layout), config.runtime.kv_cache_mb
    if budget_mb is None:
        return share
    return kv_slots(read_hf_config(model), placement, model.dtype, slots=share, context=context, budget_mb=budget_mb)
