"""Features and layouts of which every pair must train as one process without overlap does: tables, and their runs."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.ppo import DEEP, STEADY_ADAM, WITHOUT_CRITIC, Layout, Outcome, Workspace, deep, parallel, run_ppo_ranks

BELL = "\a"
"""Ends a step of a response; random policies never write a newline."""
EVERY = 14
BY_PARITY = {"kind": "python", "entry_point": "tests.e2e.rewards:parity"}
BY_LENGTH = {"reward": None, "rewards": [{"kind": "verifier", "name": "length", "buffer_tokens": 40}]}
PENALTY = {"mode": "penalty", "coefficient": 0.1}
STEP_REWARDS = [
    {"kind": "process", "step_rewards": "sum", "separator": BELL, "weight": 2.0},
    {"kind": "python", "entry_point": "tests.e2e.rewards:brevity", "options": {"limit": 100}, "weight": 0.1},
]


def roles(actor: dict[str, Any], others: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Shapes of the actor and of the other roles; `settings` are those of the trained ones."""
    trained = {"optimizer": STEADY_ADAM} | settings
    return {"actor": {"init": actor} | trained, "critic": {"init": others} | trained, "reward": {"init": others}}


def overcommitted(delta: int) -> dict[str, Any]:
    return {"overlap.inter": True, "overlap.delta": {"rule": "fixed", "initial": delta, "max": delta}}


def grouped(preset: str, size: int, **changes: Any) -> dict[str, Any]:
    common = {
        "algorithm": {"preset": preset}, "critic": None, "steps": 2,
        "rollout.batch_size": 16, "rollout.group_size": size, "ppo.kl": {}, "ppo.epochs": 1,
    }  # fmt: skip
    return common | changes


APART: dict[str, Any] = {"overlap.without": ["fork"]}
"""Every response reads its own prompt, in decoding, scoring and updates."""

EXPERTS = DEEP | {
    "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip


WINDOWS = {"sliding_window": 12, "head_dim": 8}
FAMILIES = {
    "Phi-3": DEEP | {"model_type": "phi3", "sliding_window": 12, "partial_rotary_factor": 0.5},
    "OLMo 2": DEEP | {"model_type": "olmo2"},
    "Gemma 2": DEEP | WINDOWS | {"model_type": "gemma2", "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 12},
    "Gemma 3": DEEP | WINDOWS | {"model_type": "gemma3_text", "sliding_window_pattern": 2},
    "GPT-OSS": DEEP | WINDOWS | {  # without norms of queries and keys, wider weights make rounding grow to 1e-4 nats
        "model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "initializer_range": 0.2},
}  # fmt: skip


def has_experts(outcome: Outcome) -> bool:
    return any("experts.5." in name for name in outcome.actor)


def has_own_layers(outcome: Outcome) -> bool:
    """Norms after layers, joined projections or sinks, and sequences longer than the windows."""
    longest = max(len(tokens) for tokens in outcome.tokens().values())
    return any("feedforward" in name or "qkv_proj" in name or "sinks" in name for name in outcome.actor) and longest > 12


def total(outcome: Outcome, figure: str) -> float:
    return sum(line[figure] for line in outcome.metrics)


@dataclass(frozen=True)
class Feature:
    """A change of the plain configuration.

    shows: whether the reference run (one process, no overlap) uses the feature.
    also: compares what `assert_same` does not.  soon: the layouts in `make test`.
    stops: the layout that is stopped within its first step, after so many `rounds`, and resumed."""

    changes: dict[str, Any]
    shows: Callable[[Outcome], bool]
    also: Callable[[Outcome, Outcome], None] = lambda ours, theirs: None
    soon: tuple[str, ...] = ()
    stops: str = "1 | 1"
    rounds: int = 2
    reference: dict[str, Any] = field(default_factory=dict)


def lengths_differ(outcome: Outcome) -> bool:
    lengths = {len(row["tokens"]) for row in outcome.rollouts}
    return len(lengths) > 4 and {row["finish_reason"] for row in outcome.rollouts} == {"eos", "length"}


def carries(outcome: Outcome) -> bool:
    return any(row["deferrals"] for row in outcome.rollouts)


def members_differ(outcome: Outcome) -> bool:
    by_group: dict[int, set[tuple[int, ...]]] = {}
    for row in outcome.rollouts:
        by_group.setdefault(row["seq_id"] // 4, set()).add(tuple(row["tokens"]))
    return len(by_group) == 8 and max(map(len, by_group.values())) == 4 and lengths_differ(outcome)


def stale_weights(ours: Outcome, theirs: Outcome) -> None:
    weights, expected = ([line["importance_weight_mean"] for line in o.metrics] for o in (ours, theirs))
    assert weights == pytest.approx(expected, abs=1e-4) and max(abs(weight - 1) for weight in weights) > 1e-3


def pairs_of_groups(ours: Outcome, theirs: Outcome) -> None:
    for one, other in zip(ours.metrics, theirs.metrics, strict=True):
        assert (one["pairs"], one["ties"]) == (other["pairs"], other["ties"]) == (4, 0)
        for figure in ("pair_margin", "implicit_reward_chosen", "implicit_reward_rejected", "chosen_reward_mean"):
            assert one[figure] == pytest.approx(other[figure], abs=1e-4), figure
        assert one["pair_accuracy"] == other["pair_accuracy"] and one["chosen_reward_mean"] > one["rejected_reward_mean"]
        assert one["kl_mean"] is one["kl_coefficient"] is None, "draws and reference have two temperatures"
        assert one["ess"] == pytest.approx(1.0) and "ratio_max" not in one


def pairs_that_tie_are_counted(outcome: Outcome) -> bool:
    rewards = [row["reward"] for row in outcome.rollouts]
    assert rewards == pytest.approx([-len(row["tokens"]) / 40 for row in outcome.rollouts])
    ties = sum(rewards[i] == rewards[i + 1] for i in range(0, len(rewards), 2))
    counted = all(line["pairs"] + line["ties"] == 8 and line["grad_norm"] > 0 for line in outcome.metrics)
    return 0 < ties == total(outcome, "ties") < 16 and counted


def pairs_of_two(outcome: Outcome) -> bool:
    rewards = [row["reward"] for row in outcome.rollouts]
    groups = [set(rewards[i : i + 2]) for i in range(0, len(rewards), 2)]
    counts = [(line["pairs"], line["ties"]) for line in outcome.metrics]
    return total(outcome, "groups_dropped") > 0 and counts == [(8, 0)] * 2 and all(len(group) == 2 for group in groups)


def adapters_move(outcome: Outcome) -> bool:
    """The reference is the model without adapters, so the first margin is 0; the adapter alone is written."""
    first, *_, last = (abs(line["pair_margin"]) for line in outcome.metrics)
    return first < 1e-5 < 1e-4 < last and all("lora_" in name for name in outcome.actor)


def groups_dropped(ours: Outcome, theirs: Outcome) -> None:
    assert [line["groups_dropped"] for line in ours.metrics] == [line["groups_dropped"] for line in theirs.metrics]


def forked_tokens(ours: Outcome, theirs: Outcome) -> None:
    assert min(line["forked_tokens"] for line in ours.metrics) > 0 == total(theirs, "forked_tokens")
    if all(line["chunk_tokens"] == other["chunk_tokens"] for line, other in zip(ours.metrics, theirs.metrics, strict=True)):
        read = [line["prefilled_tokens"] + line["forked_tokens"] for line in ours.metrics]
        assert read == [line["prefilled_tokens"] for line in theirs.metrics]  # other chunks divide the reading otherwise


def no_critic(ours: Outcome, theirs: Outcome) -> None:
    assert ours.critic == {} and not [name for line in ours.metrics for name in line if name.startswith("critic_")]
    assert all(line["value_mean"] is line["explained_variance"] is None for line in ours.metrics)


def step_rewards(ours: Outcome, theirs: Outcome) -> None:
    assert [row["reward"] for row in ours.rollouts] == pytest.approx([row["reward"] for row in theirs.rollouts], abs=1e-4)


FEATURES: dict[str, Feature] = {
    "plain": Feature(
        {}, lengths_differ,
        soon=(
            "1 | 1", "PP2 | TP2", "DP2 | DP2", "PP2, woven", "PP2 and reference TP2 | reward | critic",
            "TP2 x DP2, trained with CP2")),
    "overcommitted": Feature(overcommitted(4), carries, soon=("PP2, woven",)),
    "stale caches kept": Feature(
        overcommitted(4) | {"overlap.carry": "keep", "ppo.staleness": "decoupled"},
        carries, also=stale_weights, soon=("DP2 | DP2",), rounds=1),
    "backfill": Feature(
        overcommitted(3) | {"steps": 6, "overlap.backfill": 4, "overlap.chunk": 2},
        lambda outcome: total(outcome, "backfilled") > 6, soon=("PP2 x DP2, woven",), stops="DP2 | DP2", rounds=1),
    "without a critic": Feature(WITHOUT_CRITIC, lengths_differ, also=no_critic, soon=("1 | 1, reference with the actor",)),
    "groups": Feature(grouped("grpo", 4), members_differ, soon=("DP2 | DP2", "PP2 | TP2"), reference=APART),
    "pairs": Feature(
        grouped("online_dpo", 4, **{"rollout.temperature": 0.9}), members_differ, also=pairs_of_groups, soon=("PP2 | TP2",),
        reference=APART),
    "pairs by a rule, filtered": Feature(
        grouped(
            "online_dpo", 2, **overcommitted(1), **BY_LENGTH, filter="reward",
            **{"ppo.entropy_coefficient": 0.0, "overlap.backfill": EVERY}),
        pairs_of_two, also=groups_dropped, soon=("1 | 1",)),
    "pairs by a rule": Feature(
        grouped("online_dpo", 2, **BY_LENGTH, **{"ppo.entropy_coefficient": 0.0}), pairs_that_tie_are_counted, soon=("1 | 1",)),
    "greedy baseline": Feature(grouped("remax", 2), lambda outcome: len(outcome.greedy) == 16),
    "greedy baseline, carried": Feature(
        grouped("remax", 2, **overcommitted(8), steps=3),
        lambda outcome: any(row["deferrals"] for row in outcome.greedy), soon=("DP2 | DP2",)),
    "filter": Feature(
        grouped(
            "dapo", 2, **overcommitted(1), steps=3, rewards=[BY_PARITY, {"kind": "model", "weight": 0.0}],
            **{"rollout.batch_size": 6, "overlap.backfill": EVERY},
            **{"ppo.minibatches": 1, "ppo.truncated": "mask", "ppo.kl": PENALTY}),
        lambda outcome: total(outcome, "groups_dropped") > 1, also=groups_dropped,
        soon=("DP2 | DP2",), reference=APART),
    "prompts fork": Feature(
        overcommitted(1) | {"rollout.group_size": 3, "overlap.max_staleness": 2, "overlap.intra": True},
        carries, also=forked_tokens, soon=("PP2 | TP2",), reference=APART),
    "process rewards": Feature(
        {"rewards": STEP_REWARDS}, lambda outcome: sum(BELL in row["response"] for row in outcome.rollouts) > 2,
        also=step_rewards, soon=("one rank",)),
    "adapters": Feature(
        roles(DEEP, DEEP, lora={"rank": 4, "alpha": 16.0}), lambda outcome: all("lora_" in name for name in outcome.actor)),
    "adapters of pairs": Feature(
        grouped("online_dpo", 4, steps=3, actor={"init": DEEP, "optimizer": STEADY_ADAM, "lora": {"rank": 4}})
        | {"ppo.entropy_coefficient": 0.0, "ppo.minibatches": 1},
        adapters_move, soon=("1 | 1",)),
    "sliding window": Feature(
        roles(
            DEEP | {"model_type": "mistral", "sliding_window": 12},
            DEEP | {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}),
        lambda outcome: max(len(tokens) for tokens in outcome.tokens().values()) > 12, soon=("TP2 | PP2",)),
    "experts": Feature(
        roles(EXPERTS, DEEP) | overcommitted(3), has_experts,  # rounding grows beyond the tolerance in a critic with experts
        soon=("TP2 | PP2", "DP2, trained with EP2 | 1"), stops="TP2 | PP2"),
    "experts, in groups": Feature(
        grouped("grpo", 4, steps=3, actor={"init": EXPERTS, "optimizer": STEADY_ADAM}), has_experts, reference=APART,
        stops="DP2, trained with EP2 | 1"),
    **{f"{one}, scored by {other}": Feature(roles(FAMILIES[one], FAMILIES[other]), has_own_layers, soon=soon, stops="TP2 | PP2")
       for one, other, soon in (
           ("Gemma 2", "OLMo 2", ("TP2 | PP2",)), ("Gemma 3", "Phi-3", ("PP2 | TP2",)),
           ("OLMo 2", "Gemma 2", ()), ("Phi-3", "Gemma 3", ()))},
    "odd vocabulary": Feature(  # which tensor ranks do not divide
        roles(DEEP | {"vocab_size": 283, "tie_word_embeddings": True}, DEEP | {"vocab_size": 283}),
        lambda outcome: max(max(tokens) for tokens in outcome.tokens().values()) >= 142, soon=("TP2",)),
    "GPT-OSS, scored by OLMo 2": Feature(  # for the critic see "experts"
        roles(FAMILIES["GPT-OSS"], FAMILIES["OLMo 2"]), has_own_layers, soon=("TP2 | PP2",), stops="TP2 | PP2"),
}  # fmt: skip


def on(mode: str, actor: Layout = (1, 1, 1), scorer: Layout = (1, 1, 1), **changes: Any) -> dict[str, Any]:
    """(tp, pp, dp) of the actor and of the scorers."""
    return {"placement": {"mode": mode, "actor": parallel(actor), "scorer": parallel(scorer)}, **changes}


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"placement": {"mode": "single"}}, "1 | 1": on("disaggregated"),
    "1 | 1, reference with the actor": {"placement": {"mode": "disaggregated", "reference": "actor"}},
    "PP2 | TP2": on("disaggregated", (1, 2, 1), (2, 1, 1)), "TP2 | PP2": on("disaggregated", (2, 1, 1), (1, 2, 1)),
    "DP2 | DP2": on("disaggregated", (1, 1, 2), (1, 1, 2)), "TP2": on("colocated", (2, 1, 1), (2, 1, 1)),
    "PP2, woven": on("colocated", (1, 2, 1), (1, 2, 1), **{"overlap.schedule": "woven", "overlap.weave": [3, "auto"]}),
    "PP2 x DP2, woven": on("colocated", (1, 2, 2), (1, 2, 2), **{"overlap.weave": [2, 64]}),
    "DP2, trained with CP2 | 1": on("disaggregated", (1, 1, 2), **{"actor.train.cp": 2}),
}  # fmt: skip
WIDE: dict[str, dict[str, Any]] = {
    "PP4, scorers PP2 x DP2": on("colocated", (1, 4, 1), (1, 2, 2)), "PP4 | 1": on("disaggregated", (1, 4, 1)),
    "PP2 and reference TP2 | reward | critic": on("disaggregated", (1, 2, 1), **{"reward.ranks": "2", "critic.ranks": "3"},
        reference={"init": DEEP, "ranks": "0-1", "parallel": {"tp": 2}}),
    "1 | PP4": on("disaggregated", scorer=(1, 4, 1)), "PP4 x DP2": on("colocated", (1, 4, 2), (1, 4, 2)),
    "TP2 x PP2 x DP2, scorers TP2 x PP4": on("colocated", (2, 2, 2), (2, 4, 1)),
    "TP2 x PP4, scorers TP2 x PP2 x DP2": on("colocated", (2, 4, 1), (2, 2, 2)),
    "TP2 x DP2, trained with CP2": on(
        "colocated", (2, 1, 2), (2, 1, 2), **{"actor.train.cp": 2, "critic.train.cp": 2, "actor.train.sequence_parallel": True}),
    "1 | 1, trained with PP2 x CP2 apart": on(
        "disaggregated", **{"actor.train": {"ranks": "2-5", "pp": 2, "cp": 2}}),
    "PP2, unwoven": on("colocated", (1, 2, 1), (1, 2, 1), **{"overlap.schedule": "intra"}),
    "DP2, scorers TP2": on("colocated", (1, 1, 2), (2, 1, 1)),
}  # fmt: skip
"""For the plain configuration alone."""
DIVIDED: dict[str, dict[str, Any]] = {
    "DP2, trained with EP2 | 1": on("disaggregated", (1, 1, 2), **{"actor.train.ep": 2}),
    "PP2 x DP2, trained with EP2": on("colocated", (1, 2, 2), (2, 2, 1), **{"actor.train": {"ep": 2, "recompute": "full"}}),
    "TP2 x DP3, trained with EP3": on(
        "colocated", (2, 1, 3), (2, 1, 3), **{"actor.train": {"ep": 3, "sequence_parallel": True}}),
    "1 | 1, trained with PP2 x DP2 x EP2 apart": on(
        "disaggregated", **{"actor.train": {"ranks": "2-5", "pp": 2, "dp": 2, "ep": 2}}),
}  # fmt: skip
"""For experts alone."""
FEW_ROUNDS: tuple[dict[str, Any], ...] = ({"overlap.chunk": 64}, {"overlap.intra": False})
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"overlap.chunk": 1}, FEW_ROUNDS[0], {"runtime.kv_layout": "paged"}, overcommitted(0), FEW_ROUNDS[1],
)  # fmt: skip
"""Change nothing of what is trained."""


@dataclass
class Matrix:
    """Runs of features; a reference run is made once."""

    workspace: Workspace
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def reference(self, name: str) -> Outcome:
        feature = FEATURES[name]
        outcome = self.run(self.config(name, "reference", feature.changes | feature.reference))
        assert feature.shows(outcome), f"the run does not use {name}: the comparison would say nothing"
        return outcome

    def run(self, config: dict[str, Any]) -> Outcome:
        name = config["run_dir"]
        if name not in self.outcomes:
            self.outcomes[name] = run_ppo_ranks(config)
        return self.outcomes[name]

    def config(self, feature: str, name: str, changes: dict[str, Any]) -> dict[str, Any]:
        own = "".join(c for c in f"{feature}-{name}" if c.isalnum() or c == "-")
        config = deep(self.workspace, own, **deepcopy(changes))  # a layout's keys go into a feature's roles
        counted = {"options": {"calls": str(calls_of(config))}}
        config["rewards"] = [part | counted if part == BY_PARITY else part for part in config["rewards"]]
        return config

    def in_layout(self, feature: str, layout: str, option: int = 0, name: str = "") -> dict[str, Any]:
        changes = {"overlap.intra": True} | OPTIONS[option] | FEATURES[feature].changes | (LAYOUTS | WIDE | DIVIDED)[layout]
        return self.config(feature, f"{layout}-{option}-{name}", changes)


def option_of(feature: str, layout: str) -> int:
    """Options go round, so that each feature and each layout meets each of them."""
    return (list(FEATURES).index(feature) + [*LAYOUTS, *WIDE, *DIVIDED].index(layout)) % len(OPTIONS)


def calls_of(config: dict[str, Any]) -> Path:
    return run_dir(config).with_suffix(".calls")


def run_dir(config: dict[str, Any]) -> Path:
    return Path(config["run_dir"])
