"""Runs in virtual time against closed forms, and what must hold of any of them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.dry_run import MODEL_70B
from oppo_megatron.config.derived import switched
from oppo_megatron.config.ppo import ForcedLimits
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.schedule.weaving.costs import Costs, Linear
from oppo_megatron.sim.runs.continuous import ContinuousRun
from oppo_megatron.sim.runs.step_costs import StepCosts, built_in_costs
from oppo_megatron.sim.runs.virtual import VirtualRun, VirtualStep, metrics_lines
from tests.support.virtual import SIZES, Layout, OrderedRun, drawn, plain, tree

PROMPT, NONE = 32, Linear(0.0, 0.0)
UPDATES = {"actor": Linear(0.2, 1e-5), "critic": Linear(0.1, 2e-5)}
COSTS = StepCosts(Costs(), UPDATES, {"actor": 0.05}, round_s=1e-3, step_s=0.01)


def play(
    config: TrainConfig, count: int, costs: StepCosts = COSTS, player: type[VirtualRun] = VirtualRun, **options: Any
) -> list[VirtualStep]:
    forced = config.rollout.lengths
    assert forced is not None
    limits = ForcedLimits.of(forced, config.rollout.max_response_tokens, config.seed)
    return list(player(config, costs, limits, prompt_tokens=PROMPT, **options).steps(count))


@pytest.mark.parametrize("player", [VirtualRun, OrderedRun])
def test_a_sequential_step_on_one_rank_by_hand(player: type[VirtualRun]) -> None:
    """Prompts, 24 decode steps of 16 sequences, three scorers, two updates, a move of weights, one after the other."""
    step, _ = play(switched(plain(rollout={"forced_lengths": [24.0, 0.0]}), "sequential"), 2, player=player)
    costs, rows, length, rounds = Costs(), 16, 24, 2
    decode = costs.default_prefill(rows * (PROMPT - 1))
    decode += length * (costs.decode_at(0)(rows) + costs.sample(rows)) + rounds * 1e-3
    tokens = rows * (PROMPT + length)
    scores = [(tokens - rows, rows * length)] * 2 + [(tokens, rows)]  # the reward reads the last token, too
    scored = sum(costs.default_prefill(new) + costs.score(outputs) for new, outputs in scores)
    parts = step.parts
    assert parts.decode_s == pytest.approx(decode) and parts.score_exposed_s == pytest.approx(scored)
    assert parts.update_s == pytest.approx(UPDATES["actor"](rows * length))
    assert parts.critic_exposed_s == pytest.approx(UPDATES["critic"](rows * length))
    assert parts.reallocate_s == 0.05 and parts.idle_s == pytest.approx(0.01 + 1e-3)  # a round that only scores
    assert step.step_s == pytest.approx(parts.total)
    assert (step.decode_steps, step.clock, step.tokens) == (24, 24, 16 * 24)


@pytest.mark.parametrize("player", [VirtualRun, OrderedRun])
@pytest.mark.parametrize("ahead_s", [0.0, 0.05])
def test_a_scorer_beside_is_a_queue_with_one_server(player: type[VirtualRun], ahead_s: float) -> None:
    """A step ends when slow scorers have worked off all rounds; meanwhile the actor makes its update's first forward pass."""
    prefill = {"actor": Linear(ahead_s, 0.0)}
    slow = replace(COSTS, actions=replace(Costs(), default_prefill=Linear(0.5, 0.0), prefill=prefill))
    config = switched(plain(actor=(1, 1, 1), scorer=(1, 1, 1), rollout={"forced_lengths": [24.0, 0.0]}), "intra")
    step, _ = play(config, 2, slow, player)
    rounds, roles, outputs = 3, 3, 2 * 16 * 24 + 16
    scorers = rounds * (roles * (0.5 + Costs().score.fixed_s) + 1e-3) + outputs * Costs().score.per_token_s
    assert step.step_s == pytest.approx(scorers + UPDATES["actor"](16 * 24) - ahead_s + 0.05 + 0.01)
    own_round = 1e-3  # that only scores, and finds nothing to do on the actor's rank
    assert step.parts.score_exposed_s == pytest.approx(scorers - step.parts.decode_s - own_round - ahead_s)


@pytest.mark.parametrize("ranks, updates_s", [("1", 5.0 + 1.0 + 3.0), ("2", 5.0 + 1.0), ("0-1", 5.0 + 1.0 + 3.0)])
def test_a_step_waits_for_all_updates_if_the_actor_trains_on_other_ranks(ranks: str, updates_s: float) -> None:
    """The critic's follows the actor's on common ranks; else both run at once."""
    costs = replace(COSTS, updates={"actor": Linear(5.0, 0.0), "critic": Linear(3.0, 0.0)}, moves={"actor": 1.0})
    scored = plain(actor=(1, 1, 1), scorer=(1, 1, 1), rollout={"forced_lengths": [24.0, 0.0]}, overlap={"without": ["scores"]})
    train = scored.actor.train.model_copy(update={"ranks": ranks, "dp": 2 if ranks == "0-1" else 1})
    config = scored.model_copy(update={"actor": scored.actor.model_copy(update={"train": train})})
    for step in play(config, 3, costs):
        parts = step.parts
        assert step.step_s == pytest.approx(parts.decode_s + parts.score_exposed_s + updates_s + 0.01, abs=0.01)
        assert parts.update_s == 5.0 and parts.reallocate_s == 1.0 and parts.idle_s > -1e-9


def test_continuous_generation_waits_for_the_critic_at_an_installation() -> None:
    scored = plain(
        actor=(1, 1, 1), scorer=(1, 1, 1), rollout={"forced_lengths": [24.0, 0.0]}, overlap={"continuous": {}, "max_staleness": 1}
    )
    train = scored.actor.train.model_copy(update={"ranks": "2"})
    config = scored.model_copy(update={"actor": scored.actor.model_copy(update={"train": train})})
    quick, slow = (
        play(config, 6, replace(COSTS, updates=UPDATES | {"critic": Linear(critic_s, 0.0)}), ContinuousRun)
        for critic_s in (0.0, 3.0)
    )
    for without, step in zip(quick[2:], slow[2:], strict=True):
        assert step.step_s == pytest.approx(without.step_s + 3.0, abs=0.5) and step.line["idle_s"]["actor"] > 2.9


def test_assumed_updates_follow_the_layout_that_trains() -> None:
    """Four stages in a row of one replica take as long as four replicas, but for the pipeline's ends."""
    small = plain(actor=(1, 1, 4), runtime={"device": "cpu", "micro_batch_tokens": 256}, rollout={"batch_size": 256})
    staged = small.with_values({"actor.train.pp": 4, "actor.train.dp": 1})
    tokens = small.rollout.batch_size * small.rollout.max_response_tokens
    apart, together = (built_in_costs(each, PROMPT).updates["actor"](tokens) for each in (staged, small))
    assert together <= apart < 2 * together


@pytest.mark.parametrize("player", [VirtualRun, OrderedRun])
def test_a_hidden_update_of_the_critic_shows_where_it_holds_up_scores(player: type[VirtualRun]) -> None:
    """Scoring takes no time, so the scores of a step are there when the critic's update of the step before has ended."""
    actions = Costs(Linear(1e-3, 0.0), NONE, {}, NONE, NONE, 0.0)
    costs = StepCosts(actions, {"actor": Linear(0.2, 0.0), "critic": Linear(5.0, 0.0)})
    config = plain(scorer=(1, 1, 1), rollout={"forced_lengths": [24.0, 0.0]}, overlap={"inter": False})
    steps = play(config, 4, costs, player)
    lines = list(metrics_lines(steps))[:3]
    decode_s = 24 * 1e-3
    assert [line["critic_exposed_s"] for line in lines] == pytest.approx([5.0 - 0.2 - decode_s] * 3)
    assert [step.step_s for step in steps] == pytest.approx([decode_s + 0.2, *[5.0] * 3])
    assert [step.parts.critic_exposed_s for step in steps] == pytest.approx([0.0, *[5.0 - 0.2 - decode_s] * 3])
    waits = {"rollout": {"forced_lengths": [24.0, 0.0]}, "overlap": {"inter": False, "without": ["critic"]}}
    waiting = play(plain(scorer=(1, 1, 1), **waits), 2, costs, player)
    assert [step.step_s for step in waiting] == pytest.approx([decode_s + 5.0] * 2)
    assert [step.parts.critic_exposed_s for step in waiting] == pytest.approx([5.0 - 0.2] * 2)


@pytest.mark.parametrize("delta", [0, 3, 8, 12, None])
def test_mean_deferrals_are_mean_delta_over_batch(delta: int | None) -> None:
    fixed = {"rule": "fixed", "initial": delta, "max": delta}
    rule = {"rule": "measured", "initial": 2, "max": 12, "window": 1} if delta is None else fixed
    steps = play(plain(overlap={"delta": rule, "chunk": 16}), 80, endless=True)[10:]
    assert len({step.delta for step in steps}) > 2 if delta is None else {step.delta for step in steps} == {delta}
    deferrals = fmean(times for step in steps for times in step.deferrals.tolist())
    assert deferrals == pytest.approx(fmean(step.delta for step in steps) / 16, rel=0.1 if delta is None else 0.05)


@pytest.mark.parametrize("mode", ["sequential", "full"])
def test_a_longer_run_begins_as_a_shorter_one(mode: str) -> None:
    """Line by line: also the last of the shorter one, part of which shows in the step behind it."""
    config = switched(plain(actor=(1, 2, 2), scorer=(1, 1, 2)), mode)
    lines = [list(metrics_lines(play(config, count + 1, endless=True)))[:count] for count in (3, 7)]
    assert lines[0] == lines[1][:3] and len(lines[1]) == 7


def dearer() -> Iterator[StepCosts]:
    def more(line: Linear) -> Linear:
        return Linear(1.5 * line.fixed_s + 1e-3, 1.5 * line.per_token_s)

    actions, updates = COSTS.actions, COSTS.updates
    for what in ("decode", "sample", "default_prefill", "score"):
        yield replace(COSTS, actions=replace(actions, **{what: more(getattr(actions, what))}))
    yield replace(COSTS, actions=replace(actions, message_s=4 * actions.message_s))
    for role, line in updates.items():
        yield replace(COSTS, updates={**updates, role: more(line)})
    for change in {"moves": {"actor": 1.0}}, {"round_s": 2 * COSTS.round_s}, {"step_s": 2 * COSTS.step_s}:
        yield replace(COSTS, **change)


@pytest.mark.parametrize(("actor", "scorer"), [((1, 1, 2), None), ((1, 2, 1), (1, 1, 2))])
def test_nothing_that_takes_longer_makes_a_run_faster(actor: Layout, scorer: Layout | None) -> None:
    for mode in ("sequential", "full"):
        config = switched(plain(actor=actor, scorer=scorer, overlap={"schedule": "intra"}), mode)
        before = play(config, 4)
        for costs in dearer():
            after = play(config, 4, costs)
            assert after[-1].begun_s + after[-1].step_s >= before[-1].begun_s + before[-1].step_s - 1e-9, (mode, costs)
            assert [step.seq_ids.tolist() for step in after] == [step.seq_ids.tolist() for step in before]


PAIRS = [((1, 1, 1), (1, 1, 1)), ((1, 1, 2), (1, 1, 1)), ((1, 1, 2), (1, 1, 2)), ((2, 1, 1), (1, 1, 4))]


@settings(max_examples=15)
@given(st.sampled_from(PAIRS), st.floats(1e-6, 1e-3), st.floats(1e-7, 1e-4), st.integers(1, 96))
def test_streaming_never_costs_where_rounds_cost_nothing(pair: list[Layout], row: float, token: float, chunk: int) -> None:
    """Scorers of their own, and nothing fixed in a round, an action or a message: `intra` is never slower than `sequential`."""
    costs = StepCosts(Costs(Linear(1e-3, row), NONE, {}, Linear(0.0, token), NONE, 0.0), UPDATES)
    config = plain(actor=pair[0], scorer=pair[1], overlap={"chunk": chunk})
    intra, sequential = (play(switched(config, mode), 3, costs)[-1] for mode in ("intra", "sequential"))
    assert intra.begun_s + intra.step_s <= (sequential.begun_s + sequential.step_s) * (1 + 1e-9)


@pytest.mark.parametrize("player", [VirtualRun, OrderedRun])
def test_void_micro_steps_cost_nothing_and_scorers_hear_of_a_chunk_a_message_later(player: type[VirtualRun]) -> None:
    """The batch is complete after 10 of 64 decode steps: of the others no stage computes, and no message is sent."""
    costs = StepCosts(Costs(Linear(1.0, 0.0), NONE, {}, NONE, NONE, message_s=0.25))
    overlap = tree()["overlap"] | {"chunk": 64, "weave": [1, "auto"]}
    config = plain(actor=(1, 2, 1), scorer=(1, 1, 1), overlap=overlap, rollout={"batch_size": 4, "max_response_tokens": 96})
    step = next(player(config, costs, lambda seq_id: 10 if seq_id < 4 else 90, prompt_tokens=PROMPT).steps(1))
    assert step.clock == 10 and step.parts.decode_s == pytest.approx(10 * 2 * 1.0 + (10 + 9) * 0.25)
    # Scorers hear of a chunk a message later.
    costs = StepCosts(Costs(Linear(1e-3, 0.0), NONE, {}, NONE, NONE, message_s=1.0))
    config = switched(plain(scorer=(1, 1, 1), rollout={"forced_lengths": [24.0, 0.0]}, overlap={"chunk": 64}), "intra")
    assert play(config, 1, costs, player)[0].step_s == pytest.approx(24 * 1e-3 + 1.0)


def furthest(config: TrainConfig, costs: StepCosts = COSTS, count: int = 3) -> float:
    pairs = list(zip(*(play(config, count, costs, each, endless=True) for each in (VirtualRun, OrderedRun)), strict=True))
    assert all((units.seq_ids == actions.seq_ids).all() and units.clock == actions.clock for units, actions in pairs)
    return max(abs(units.step_s / actions.step_s - 1) for units, actions in pairs)


NEAR = [
    ((1, 1, 1), None), ((2, 1, 2), None), ((1, 4, 1), None), ((1, 2, 2), (1, 1, 2)), ((1, 1, 4), (2, 1, 2)),
    ((2, 2, 2), (1, 2, 4)),
]  # fmt: skip
MANY = [
    ((1, 4, 6), None, None, "full"), ((1, 2, 20), None, None, "full"), ((1, 1, 24), None, (2, 2, 6), "sequential"),
    ((1, 2, 12), (1, 4, 2), None, "full"), ((1, 1, 20), (1, 2, 4), None, "full"),
]  # fmt: skip
DEAR = replace(COSTS, actions=Costs(default_prefill=Linear(4e-3, 4e-5), message_s=1e-3))
"""Scoring fits into the gaps of decoding in part, and messages are slow."""


@pytest.mark.parametrize(("actor", "scorer", "reference", "mode"), MANY)
def test_rounds_of_more_than_16_ranks_are_within_two_percent_of_actions(
    actor: Layout, scorer: Layout | None, reference: Layout | None, mode: str
) -> None:
    own = {} if reference is None else {"parallel": dict(zip(SIZES, reference, strict=True))}
    changes = {"rollout": {"batch_size": 50, "max_response_tokens": 96}, "runtime": {"micro_batch_tokens": 256}}
    config = plain(actor=actor, scorer=scorer, reference={"init": MODEL_70B, **own}, **changes)
    assert furthest(switched(config, mode), DEAR, count=2) < 0.02


@pytest.mark.parametrize("mode", ["sequential", "full"])
@pytest.mark.parametrize(("actor", "scorer"), NEAR)
@pytest.mark.parametrize("schedule", ["intra", "woven"])
def test_rounds_are_within_two_percent_of_actions(actor: Layout, scorer: Layout | None, schedule: str, mode: str) -> None:
    assert furthest(switched(plain(actor=actor, scorer=scorer, overlap={"schedule": schedule}), mode)) < 0.02


@pytest.mark.parametrize("seed", range(24))
def test_rounds_are_within_two_percent_of_actions_on_layouts_drawn_at_random(seed: int) -> None:
    assert furthest(*drawn(seed), count=2) < 0.02


@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
def test_rounds_are_within_two_percent_of_actions_on_many_layouts(part: int) -> None:
    found = {seed: furthest(*drawn(seed)) for seed in range(100 + 75 * part, 175 + 75 * part)}
    assert {seed: share for seed, share in found.items() if share >= 0.02} == {}


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["sequential", "intra", "woven"])
def test_rounds_are_within_two_percent_of_actions_on_every_layout_of_up_to_16_ranks(schedule: str) -> None:
    for actor in [each for each in product((1, 2, 4), (1, 2, 4), (1, 2, 4, 8)) if np.prod(each) <= 16]:
        beside = [each for each in ((1, 1, 1), (1, 2, 2), actor) if np.prod(actor) + np.prod(each) <= 16]
        for scorer in (None, *beside):
            config = plain(actor=actor, scorer=scorer, overlap={"schedule": "woven" if schedule == "woven" else "intra"})
            assert furthest(switched(config, "sequential" if schedule == "sequential" else "full")) < 0.02, (actor, scorer)


def test_signals_reach_the_rule_of_delta_and_no_steps_are_refused() -> None:
    config = plain(overlap={"delta": {"rule": "eq4", "initial": 2, "max": 6, "window": 1}}, steps=12)
    steps = play(config, 6, signals=lambda step, seen: replace(seen, reward_mean=float(step)))
    assert [step.delta for step in steps] == [2, 2, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match="0 steps are asked for; ask for 1 or more"):
        play(config, 0)
