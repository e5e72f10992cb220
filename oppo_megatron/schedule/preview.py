from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from oppo_megatron.config.derived import batch_rows, max_context, members
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import role_placements
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.actions import Schedule
from oppo_megatron.schedule.checking.timeline import Timeline, simulate
from oppo_megatron.schedule.checking.transport import GLOO, Transport
from oppo_megatron.schedule.plan import cache_slots, delta_rule, new_planner, plan_step, round_generator
from oppo_megatron.schedule.planning.planner import PlannedRound, RoundPlanner
from oppo_megatron.schedule.rounds import KVBudget, Round, Site
from oppo_megatron.schedule.weaving.communication import add_communication
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.generators import GENERATORS


@dataclass(frozen=True)
class Preview:
    """`clock`: decode steps at the end. `changed`: ranks reordered because held sends would deadlock."""

    round: Round
    clock: int
    num_rounds: int
    site: Site
    schedule: Schedule
    budgets: Mapping[str, Sequence[KVBudget]]
    generator: str
    assumed: tuple[str, ...]
    changed: tuple[int, ...] = ()


def preview(
    config: TrainConfig,
    number: int,
    *,
    prompt_tokens: int | None = None,
    generator: str | None = None,
    costs: Costs | None = None,
    transport: Transport = GLOO,
) -> Preview:
    """Plan round `number` (from 1). Raises ConfigError if it does not exist, ScheduleError if a run would refuse it."""
    length = prompt_tokens if prompt_tokens is not None else max(1, config.data.max_prompt_tokens // 2)
    if not 1 <= length <= config.data.max_prompt_tokens:
        raise ConfigError(
            f"prompts of {length} tokens: they have 1 to data.max_prompt_tokens = {config.data.max_prompt_tokens}; "
            "give a number of these"
        )
    site = Site(role_placements(config))
    chosen = generator or round_generator(config.overlap, site)
    rounds = _rounds(config, site, chosen, length, costs, transport)
    if not 1 <= number <= len(rounds):
        raise ConfigError(f"round {number}: the first step has rounds 1 to {len(rounds)}; ask for one of these")
    planned, clock = rounds[number - 1], sum(each.round.steps for each in rounds[:number])
    budgets = {
        role: [KVBudget(cache_slots(config, role, placement), max_context(config))] * placement.dp
        for role, placement in site.placements.items()
    }
    free = planned.schedule
    if transport.holds:
        free = _rounds(config, site, chosen, length, costs, transport.free)[number - 1].schedule
    changed = tuple(rank for rank in site.ranks if free.of(rank) != planned.schedule.of(rank))
    schedule = planned.schedule.shifted(planned.round.index - 1)
    return Preview(planned.round, clock, len(rounds), site, schedule, budgets, chosen, _assumed(config, site, length), changed)


def _rounds(
    config: TrainConfig, site: Site, generator: str, prompt_tokens: int, costs: Costs | None, transport: Transport
) -> list[PlannedRound]:
    most = config.rollout.max_response_tokens
    planner = new_planner(config, site, generator, lambda _: most, costs=costs, transport=transport)
    return [*first_step(config, planner, prompt_tokens)]


def least_s(round_: Round, site: Site, timeline: Timeline, costs: Costs) -> tuple[float, float]:
    """Lower bounds: seconds of the actor alone, and of the busiest rank."""
    alone = replace(round_, prefill={role: work for role, work in round_.prefill.items() if role == "actor"})
    schedule = add_communication(GENERATORS["sequential"](alone, site, costs), alone, site)
    return simulate(schedule, alone, site, costs).makespan_s, max(map(timeline.busy_s, timeline.spans), default=0.0)


def first_step(config: TrainConfig, planner: RoundPlanner, prompt_tokens: int) -> Iterator[PlannedRound]:
    """Yield rounds until the batch is scored; they also end when prompts may enter."""
    prompt, chunk, clock = (0,) * prompt_tokens, config.overlap.chunk_tokens, 0
    period = config.overlap.admission_period
    rows = batch_rows(config)
    rollouts = [Rollout(Prompt(number, number, "", prompt), number) for number in range(_in_flight(config))]
    stream, number = plan_step(config).stream, 1
    while sum(rollout.finished for rollout in rollouts) < rows:
        active = [rollout for rollout in rollouts if not rollout.finished]
        steps = chunk if period is None else min(chunk, period - clock % period)
        planned = planner.plan(number, active, rollouts if stream else [], steps, list)
        yield planned
        clock += planned.round.steps
        _grow(rollouts, planned.round, number, config.rollout.max_response_tokens)
        planner.actor.record(active)
        number += 1
    batch = [rollout for rollout in rollouts if rollout.finished][:rows]
    while any(book.owes(batch) for book in planner.scorers.values()):
        yield planner.plan(number, [], batch, chunk, list)
        number += 1


def _grow(rollouts: Sequence[Rollout], round_: Round, clock: int, most: int) -> None:
    for growth in (growth for replica in round_.decode for batch in replica for growth in batch):
        rollout = rollouts[growth.seq_id]
        rollout.tokens.extend([0] * growth.new)
        if len(rollout.tokens) == most:
            rollout.finish_clock, rollout.finish_reason = clock, "length"


def _in_flight(config: TrainConfig) -> int:
    return batch_rows(config) + delta_rule(config.overlap).initial * members(config).size


def _assumed(config: TrainConfig, site: Site, prompt_tokens: int) -> tuple[str, ...]:
    batch, delta, dp = config.rollout.batch_size, delta_rule(config.overlap).initial, site.placements["actor"].dp
    each = members(config)
    groups = f" groups of {each.trained}" * (each.trained > 1) + ", and a greedy one for each prompt" * each.greedy
    unfiltered = ("no filter (every group is kept)",) if config.filter is not None else ()
    return (
        f"{_in_flight(config)} sequences (rollout.batch_size {batch} + delta {delta}{groups}) over {dp} "
        f"{'replica' if dp == 1 else 'replicas'} of the actor",
        *unfiltered,
        f"prompts of {prompt_tokens} tokens",
        f"responses of {config.rollout.max_response_tokens} tokens (none ends sooner)",
        f"chunks of {config.overlap.chunk_tokens}",
    )
