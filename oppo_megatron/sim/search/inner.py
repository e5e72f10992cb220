"""Settings within a plan: memory that costs no time is given back, micro-batches are halved or doubled, and a chunk is chosen."""

from __future__ import annotations

from dataclasses import replace
from math import log2, sqrt

from oppo_megatron.config.derived import least_micro_batch
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.schedule.weaving.costs import Linear
from oppo_megatron.sim.pricing.prices import Prices
from oppo_megatron.sim.search.exact import Plan, Search, held_bytes
from oppo_megatron.sim.search.options import Option
from oppo_megatron.sim.search.table import PriceTable

FACTORS = (1, 2, 4, 0.5, 0.25, 0.125)
"""Of the configuration's `runtime.micro_batch_tokens`, in the order in which equals are taken."""
MOST_TOKENS = 32768
CHUNKS = (16, 1024)


def eased(search: Search, plan: Plan) -> Plan:
    """The plan with smaller layouts where a step takes no longer with them: scorers first, then the trained."""
    stacks, rule = search.stacks(plan.homes), search.rule(plan.homes)
    assert stacks is not None, "a plan has an option of each role"
    for role in reversed(range(len(plan.homes))):
        for option in stacks[role].options:
            options = (*plan.options[:role], option, *plan.options[role + 1 :])
            if role == 0 and (option.serving, option.training) != (plan.options[0].serving, plan.options[0].training):
                continue
            if rule.step_ns([each.times for each in options]) > plan.step_ns:
                continue
            fullest = int(held_bytes(plan.homes, options).sum(axis=0).max())
            smaller = replace(plan, options=options, fullest_bytes=fullest)
            if fullest < plan.fullest_bytes and search.accepts(smaller):
                plan = smaller
    return plan


def micro_batches(config: TrainConfig) -> list[int]:
    """Sizes to try, the configuration's first; the longest sequence fits into each."""
    own, least = config.runtime.micro_batch_tokens, least_micro_batch(config)
    sizes = dict.fromkeys(max(least, round(own * factor)) for factor in FACTORS)
    return [size for size in sizes if size in (own, least) or size <= MOST_TOKENS]


def with_micro_batch(config: TrainConfig, tokens: int) -> TrainConfig:
    return config.model_copy(update={"runtime": config.runtime.model_copy(update={"micro_batch_tokens": tokens})})


def repriced(table: PriceTable, search: Search, plan: Plan) -> Plan:
    """The same homes and layouts by the prices of another table, that of another size of micro-batches."""
    options = tuple(table.again(role, each) for role, each in zip(table.roles, plan.options, strict=True))
    step_ns = int(search.rule(plan.homes).step_ns([option.times for option in options]))
    return Plan(plan.homes, options, step_ns, int(held_bytes(plan.homes, options).sum(axis=0).max()))


def chosen_chunk(prices: Prices, options: tuple[Option, ...], longest: int) -> int:
    """Decode steps of a round: a power of two next to sqrt(f T / s).

    f: seconds that a round costs whatever its size, T decode steps of a step, s seconds of scoring what one of them decodes.  A
    round costs f once, and the last chunk's scoring, s for each of its steps, is what nothing hides.
    """
    costs = prices.costs()
    scorers = [role for role in costs.prefill if role != "actor"]
    lines = [line for role in scorers for line in _lines(costs.prefill[role])]
    round_s = costs.message_s + sum(line.fixed_s for line in lines) + len(scorers) * costs.score.fixed_s
    scoring_s = sum(option.times.serving for option in options[1:]) / 1e9 / longest
    best = sqrt(round_s * longest / scoring_s) if scoring_s else CHUNKS[0]
    power = round(log2(min(max(best, CHUNKS[0]), CHUNKS[1])))
    return int(min(2**power, longest))


def with_chunk(config: TrainConfig, tokens: int) -> TrainConfig:
    chunk = config.overlap.chunk.model_copy(update={"tokens": tokens})
    return config.model_copy(update={"overlap": config.overlap.model_copy(update={"chunk": chunk})})


def with_delta(config: TrainConfig, initial: int) -> TrainConfig:
    delta = config.overlap.delta.model_copy(update={"initial": initial})
    return config.model_copy(update={"overlap": config.overlap.model_copy(update={"delta": delta})})


def _lines(lines: Linear | tuple[Linear, ...]) -> tuple[Linear, ...]:
    return (lines,) if isinstance(lines, Linear) else lines
