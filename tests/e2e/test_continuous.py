"""Continuous generation: equal to the synchronous run without run-ahead, repeatable from its log, bounded in staleness."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from oppo_megatron.config.algorithm import PRESETS
from oppo_megatron.layout.placements import world_size
from oppo_megatron.nesting import read_json
from oppo_megatron.rundir.metrics_log import read_installs
from oppo_megatron.sim.runs.continuous import ContinuousRun
from oppo_megatron.sim.runs.step_costs import built_in_costs
from oppo_megatron.uniforms import uniforms
from tests.e2e.test_resume import assert_bit_equal, checkpoints, resumed, rewound, stop
from tests.support.configs import run_of
from tests.support.ppo import SHAPE, STEADY_ADAM, Workspace, assert_same, read_outcome, run_ppo_ranks, weight_distance
from tests.support.ranks import run_ranks

STEPS, BATCH = 6, 6
FIXED = {"rule": "fixed", "initial": 0, "max": 0}
GRPO = {"algorithm": {"preset": "grpo"}, "critic": None, "rollout.group_size": 3}
SINGLE = {"mode": "single"}
PLACEMENTS = {
    "1": SINGLE,
    "1+1": {"mode": "disaggregated"},
    "dp2+1": {"mode": "disaggregated", "actor": {"dp": 2}},
    "tp2 shared": {"mode": "colocated", "actor": {"tp": 2}},
    "pp2+1": {"mode": "disaggregated", "actor": {"pp": 2}},
}


def continuous(workspace: Workspace, name: str, ahead: int, **changes: Any) -> dict[str, Any]:
    """`ahead`: batches."""
    settings = {
        "overlap.intra": True, "overlap.inter": True, "overlap.continuous": {"lag_steps": 5}, "steps": STEPS,
        "overlap.max_staleness": max(1, ahead), "actor.optimizer": STEADY_ADAM,
    }  # fmt: skip
    if not ahead:
        settings["overlap.delta"] = FIXED
    return workspace.config(name, **(settings | changes))


def installs(config: dict[str, Any]) -> list[tuple[int, int]]:
    return list(read_installs(Path(config["run_dir"]) / "installs.jsonl").items())


APART = {
    "1 | 1 | 1": ({"mode": "disaggregated"}, {"ranks": "2"}),
    "1 | 1 | tp2": ({"mode": "disaggregated"}, {"ranks": "2-3", "tp": 2}),
    "pp2 shared | dp2": ({"mode": "colocated", "actor": {"pp": 2}}, {"ranks": "2-3", "pp": 1}),
    "dp2 | scorer trains": ({"mode": "disaggregated", "actor": {"dp": 2}}, {"ranks": "2"}),
}
ONE_EACH: dict[str, Any] = {"placement": APART["1 | 1 | 1"][0], "actor.train": APART["1 | 1 | 1"][1]}
DAPO = {"algorithm": {"preset": "dapo"}, "critic": None, "rollout.group_size": 3, "overlap.backfill": 4, "overlap.chunk": 4}
ALGORITHMS = {"ppo": {}, "grpo": GRPO, "dapo": DAPO | {"rewards": [{"kind": "model"}], "reward": {"init": SHAPE}}}
ALIKE = [(algorithm, "1", lag) for algorithm in ALGORITHMS for lag in (0, 9, "asap")]
QUICK = [("ppo", "dp2+1"), ("ppo", "pp2 shared | dp2"), ("dapo", "tp2 shared"), ("dapo", "1 | 1 | 1")]
EVERYWHERE = [(algorithm, layout) for algorithm in ALGORITHMS for layout in ("tp2 shared", "dp2+1", *APART)]
ALIKE += [pytest.param(*case, 0, marks=() if case in QUICK else pytest.mark.long) for case in EVERYWHERE]


@pytest.mark.parametrize(("algorithm", "layout", "lag"), ALIKE)
def test_without_run_ahead_it_is_the_synchronous_run(workspace: Workspace, algorithm: str, layout: str, lag: Any) -> None:
    placement, train = APART.get(layout) or (PLACEMENTS[layout], {})
    changes = {**ALGORITHMS[algorithm], "overlap.intra": True, "steps": 4, "placement": placement, "actor.train": train}
    changes["overlap.schedule"] = "intra"  # woven rounds are cut by measured times
    inter = {"overlap.inter": True, "overlap.delta": FIXED} if algorithm == "dapo" else {"overlap.inter": False}
    plain = run_ppo_ranks(workspace.config(f"plain-{algorithm}-{layout}-{lag}", **changes, **inter))
    rules = {"overlap.inter": True, "overlap.delta": FIXED, "overlap.continuous": {"lag_steps": lag}}
    ours = run_ppo_ranks(workspace.config(f"ahead0-{algorithm}-{layout}-{lag}", **changes, **rules))
    for line in ours.metrics:
        assert line.pop("queued_batches") == 0 and line.pop("install_lag") == 0
    assert_bit_equal(ours, plain)


@pytest.mark.long
@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in ALGORITHMS])
def test_every_preset_is_the_same_run_on_ranks_of_each_kind(workspace: Workspace, preset: str) -> None:
    group = 1 if preset.startswith(("remax", "reinforce_pp")) and preset != "reinforce_pp_baseline" else 2
    changes: dict[str, Any] = {"algorithm": {"preset": preset}, "critic": None, "rollout.group_size": group, "steps": 4}
    rules = {"overlap.continuous": {"lag_steps": 6}, "overlap.chunk": 4}
    plain = run_ppo_ranks(continuous(workspace, f"{preset}-plain", 2, **changes, **rules))
    assert max(row["deferrals"] for row in plain.rollouts) == 2
    assert_same(run_ppo_ranks(continuous(workspace, f"{preset}-apart", 2, **changes, **rules, **ONE_EACH)), plain)


@pytest.mark.parametrize("ahead", [1, 2])
def test_staleness_is_bounded_and_every_prompt_trained_once(workspace: Workspace, ahead: int) -> None:
    config = continuous(workspace, f"bounded-{ahead}", ahead, **GRPO)
    run = run_ppo_ranks(config)
    assert Counter(row["seq_id"] for row in run.rollouts) == {i: 1 for i in range(STEPS * BATCH)}
    for row in run.rollouts:
        stale = row["step"] - 1 - row["versions"][0]
        assert 0 <= stale <= row["deferrals"] <= ahead
        assert row["versions"] == sorted(row["versions"])
    assert max(row["step"] - 1 - row["versions"][0] for row in run.rollouts) == ahead
    assert [version for version, _ in installs(config)] == list(range(1, STEPS + 1))


def test_a_log_repeats_the_run_in_another_placement(workspace: Workspace) -> None:
    live = continuous(workspace, "live", 2, **GRPO, **{"overlap.continuous": {"lag_steps": "asap"}, "overlap.chunk": 4})
    first = run_ppo_ranks(live)
    log = Path(live["run_dir"]) / "installs.jsonl"
    for name, placement in PLACEMENTS.items():
        again = continuous(
            workspace, f"again-{name}", 2, **GRPO,
            **{"overlap.continuous": {"replay": str(log)}, "placement": placement, "overlap.chunk": 7},
        )  # fmt: skip
        assert_same(run_ppo_ranks(again), first)
        assert installs(again) == installs(live)


@pytest.mark.parametrize("name", APART)
def test_training_on_other_ranks_is_the_same_run(workspace: Workspace, name: str) -> None:
    placement, train = APART[name]
    changes: dict[str, Any] = {**GRPO, "overlap.intra": True, "steps": STEPS, "actor.optimizer": STEADY_ADAM}
    plain = run_ppo_ranks(workspace.config(f"apart-plain-{name}", **changes))
    ours = run_ppo_ranks(workspace.config(f"apart-{name}", **changes, **{"placement": placement, "actor.train": train}))
    assert_same(ours, plain)


@pytest.mark.parametrize("install", ["staged", "pause"])
@pytest.mark.parametrize("name", APART)
def test_decoding_goes_on_while_other_ranks_train(workspace: Workspace, name: str, install: str) -> None:
    placement, train = APART[name]
    rules = {"lag_steps": "asap", "install": install}
    live = continuous(
        workspace, f"live-{name}-{install}", 2, **GRPO,
        **{"overlap.continuous": rules, "overlap.chunk": 4, "placement": placement, "actor.train": train},
    )  # fmt: skip
    run = run_ppo_ranks(live)
    again = continuous(workspace, f"replay-{name}-{install}", 2, **GRPO, **{
        "overlap.continuous": {"replay": str(Path(live["run_dir"]) / "installs.jsonl")},
    })  # fmt: skip
    assert_same(run_ppo_ranks(again), run)
    assert installs(again) == installs(live)


CRITIC_APART = {
    "1 | 1 | 1": ({"mode": "disaggregated"}, {"ranks": "2"}, "2"),
    "pp2 shared | tp2": ({"mode": "colocated", "actor": {"pp": 2}}, {"ranks": "2-3", "pp": 1, "tp": 2}, "2-3"),
    "1 | 1 | dp2, critic on one": ({"mode": "disaggregated"}, {"ranks": "2-3"}, "3"),
}


@pytest.mark.parametrize("rules", [None, {"lag_steps": 7}], ids=["in turns", "lag 7"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) if "dp2" in name else name for name in CRITIC_APART])
def test_a_critic_may_be_on_ranks_that_only_train(workspace: Workspace, name: str, rules: Any) -> None:
    """It values whole responses there, and is the critic of one process."""
    placement, train, critic = CRITIC_APART[name]
    changes = {"overlap.continuous": rules, "overlap.chunk": 4, "critic.optimizer": STEADY_ADAM}
    plain = run_ppo_ranks(continuous(workspace, f"valued-plain-{name}-{rules is None}", 2, **changes))
    apart = {"placement": placement, "actor.train": train, "critic.ranks": critic}
    config = continuous(workspace, f"valued-{name}-{rules is None}", 2, **changes, **apart)
    ours = run_ppo_ranks(config)
    assert_same(ours, plain)
    assert weight_distance(ours.critic, plain.critic) < 1e-4
    assert all(line["critic_loss"] > 0 for line in ours.metrics)
    if rules is not None:
        assert installs(config)[-1][0] == STEPS


def test_virtual_time_makes_the_same_batches_and_a_log_that_a_run_replays(workspace: Workspace) -> None:
    placement, train = APART["1 | 1 | 1"]
    fixed = {**GRPO, "placement": placement, "actor.train": train, "rollout.forced_lengths": [12, 1.0], "overlap.chunk": 4}
    config = continuous(workspace, "virtual", 2, **fixed)
    run = run_ppo_ranks(config)
    rows = {row["seq_id"]: row for row in run.rollouts}
    lengths, prompts = ({i: len(row[name]) for i, row in rows.items()} for name in ("tokens", "prompt_tokens"))

    def played(config: dict[str, Any]) -> tuple[ContinuousRun, list[list[int]]]:
        checked, sizes = run_of(config), [prompts[i] for i in range(len(prompts))]
        virtual = ContinuousRun(checked, built_in_costs(checked, 64), lengths.__getitem__, prompt_tokens=sizes)
        return virtual, [step.seq_ids.tolist() for step in virtual.steps(STEPS)]

    virtual, batches = played(config)
    assert batches == run.batches() and virtual.installs == installs(config)
    asap, batches = played(continuous(workspace, "virtual-asap", 2, **fixed, **{"overlap.continuous": {"lag_steps": "asap"}}))
    assert asap.installs != virtual.installs
    log = workspace.root / "virtual.jsonl"
    log.write_text("".join(f'{{"version": {version}, "clock": {clock}}}\n' for version, clock in asap.installs))
    again = continuous(workspace, "virtual-again", 2, **fixed, **{"overlap.continuous": {"replay": str(log)}})
    assert run_ppo_ranks(again).batches() == batches and installs(again) == asap.installs


@pytest.mark.parametrize("name", ["1", "1 | 1 | 1"])
def test_a_filter_drops_groups_while_others_wait_or_are_trained(workspace: Workspace, name: str) -> None:
    placement, train = APART.get(name, (SINGLE, {}))
    changes = ALGORITHMS["dapo"] | {"placement": placement, "actor.train": train}
    live = continuous(workspace, f"dapo-live-{name}", 2, **changes, **{"overlap.continuous": {"lag_steps": 9}})
    run = run_ppo_ranks(live)
    assert max(row["deferrals"] for row in run.rollouts) <= 2 and len(run.rollouts) == STEPS * BATCH


@pytest.mark.parametrize("metric", ["model", pytest.param("verifier", marks=pytest.mark.long)])
def test_verdicts_do_not_wait_for_an_update(workspace: Workspace, metric: str) -> None:
    """Decoding ranks drop groups meanwhile; the trainer follows, and the log repeats the run."""
    rewards = [{"kind": "model"}] if metric == "model" else [{"kind": "verifier", "name": "arithmetic"}, {"kind": "model"}]
    changes = ALGORITHMS["dapo"] | {"rewards": rewards, "filter": "reward", "steps": 7, "overlap.chunk": 2}
    name = f"verdicts-{metric}"
    live = continuous(workspace, name, 1, **changes, **ONE_EACH, **{"overlap.continuous": {"lag_steps": "asap"}})
    decoding, scoring, _ = run_ranks(3, "tests.e2e.jobs:train_with_long_updates", config=live, seconds=1.0)
    assert max(decoding, scoring) < 0.7, "an update takes a second"
    run = read_outcome(Path(live["run_dir"]))
    replay = {"overlap.continuous": {"replay": str(Path(live["run_dir"]) / "installs.jsonl")}}
    again = continuous(workspace, f"{name}-again", 1, **changes, **replay)
    assert_same(run_ppo_ranks(again), run)
    assert installs(again) == installs(live)


@pytest.mark.parametrize("name", ["1", "1 | 1 | 1"])
def test_a_batch_that_a_guard_skips_lets_prompts_in_all_the_same(workspace: Workspace, name: str) -> None:
    placement, train = APART.get(name, (SINGLE, {}))
    guards = {"action": "skip", "ratio_max": 1.0001}
    changes = {"placement": placement, "actor.train": train, "guards": guards, "steps": 3}
    config = continuous(workspace, f"skips-{name}", 2, **GRPO, **changes)
    run = run_ppo_ranks(config)
    assert [line["skipped"] is not None for line in run.metrics] == [True] * 3
    assert {version for row in run.rollouts for version in row["versions"]} == {0}, "the weights are the first ones"
    assert [version for version, _ in installs(config)] == [1, 2, 3]


REDRAW = {"overlap.carry": "redraw"}


@pytest.mark.parametrize("rules", [None, {"lag_steps": 7}, {"lag_steps": "asap"}], ids=["in turns", "lag 7", "asap"])
@pytest.mark.parametrize("name", ["1", *APART])
def test_no_token_is_stale_if_they_are_drawn_again(workspace: Workspace, name: str, rules: Any) -> None:
    placement, train = APART.get(name, (SINGLE, {}))
    changes = {**REDRAW, "overlap.continuous": rules, "placement": placement, "actor.train": train, "actor.optimizer.lr": 1e-4}
    config = continuous(workspace, f"redraw-{name}-{rules}", 2, **GRPO, **changes, **{"overlap.chunk": 4, "steps": 4})
    config["overlap"]["delta"] = {"rule": "fixed", "initial": 4, "max": 4}
    run = run_ppo_ranks(config)
    assert sorted(run.tokens()) == list(range(4 * BATCH))
    assert all(set(row["versions"]) == {row["step"] - 1} for row in run.rollouts), "each token is the training policy's"
    assert any(row["deferrals"] for row in run.rollouts) and max(line["logprob_gap"] for line in run.metrics) < 1e-4
    kept = [line["tokens_kept"] for line in run.metrics if "tokens_kept" in line]
    assert kept and all(0 <= share <= 1 for share in kept) and 0 < sum(kept) < len(kept)


def settings_of(number: int) -> dict[str, Any]:
    """Random settings of an overcommitted run."""
    choose = random.Random(number)
    group, placement = choose.choice([1, 3]), choose.choice([SINGLE, *(place for place, _ in APART.values())])
    ahead = choose.choice([1, 2, 3]) * BATCH // group
    top_k, temperature = choose.choice([(0, 1.0), (0, 0.7), (6, 1.0), (6, 1.3)])
    return {
        "seed": 100 + number, "overlap.carry": "redraw", "overlap.chunk": choose.randrange(1, 12), "placement": placement,
        "overlap.delta": {"rule": "fixed", "initial": ahead, "max": ahead}, "overlap.max_staleness": 4, "overlap.intra": True,
        "overlap.inter": True, "actor.optimizer.lr": 10 ** choose.uniform(-5, -2.7), "rollout.top_k": top_k, "steps": 4,
        "rollout.temperature": temperature, **(GRPO if group > 1 else {"algorithm": {"preset": "reinforce_pp"}, "critic": None}),
    }  # fmt: skip


class Policy:
    """A version of the policy as transformers computes it."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    def logits(self, row: dict[str, Any]) -> torch.Tensor:
        """[T, V] before each response token."""
        with torch.no_grad():
            logits = self.model(torch.tensor([[*row["prompt_tokens"], *row["tokens"]]])).logits[0]
        return logits[len(row["prompt_tokens"]) - 1 : -1]


def drawn(logits_TV: torch.Tensor, numbers: list[float], top_k: int, tokens: list[int]) -> list[float]:
    """How far each number lies outside of its token's part of the cumulative distribution: 0 for a token that is drawn."""
    kept_TK, ids_TK = logits_TV.topk(top_k, -1) if top_k else (logits_TV, torch.arange(logits_TV.shape[-1]).expand_as(logits_TV))
    ends_TK, found = kept_TK.softmax(-1).cumsum(-1), []
    for ends, ids, token, number in zip(ends_TK, ids_TK, tokens, numbers, strict=True):
        place = ids.tolist().index(token)
        begin = float(ends[place - 1]) if place else 0.0
        found.append(max(begin - number, number - float(ends[place]), 0.0))
    return found


@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.long) if n >= 3 else n for n in range(20)])
def test_a_redrawn_run_is_one_that_decodes_each_prompt_in_the_step_that_trains_it(
    workspace: Workspace, tmp_path: Path, number: int
) -> None:
    """By transformers, from the start of each response: no response is carried there."""
    settings = settings_of(number)
    config = workspace.config(f"random-{number}", **settings)
    run_ranks(world_size(run_of(config)), "tests.e2e.jobs:train_and_keep_weights", config=config, folder=tmp_path)
    run, far, most = read_outcome(Path(config["run_dir"])), [], 0.0
    eos = {row["tokens"][-1] for row in run.rollouts if row["finish_reason"] == "eos"}
    for row in run.rollouts:
        assert set(row["versions"]) == {row["step"] - 1} and eos.isdisjoint(row["tokens"][:-1])
        assert row["tokens"][-1] in eos or len(row["tokens"]) == config["rollout"]["max_response_tokens"]
        logits_TV = Policy(tmp_path / str(row["step"] - 1)).logits(row) / settings["rollout.temperature"]
        count = len(row["tokens"])
        numbers = uniforms(config["seed"], [row["seq_id"]] * count, range(count))
        far += drawn(logits_TV, numbers, settings["rollout.top_k"], row["tokens"])
        logp_T = logits_TV.log_softmax(-1)[range(count), row["tokens"]]
        most = max(most, float((logp_T - torch.tensor(row["logprobs"], dtype=torch.float64)).abs().max()))
    assert any(row["deferrals"] for row in run.rollouts)
    assert max(far) < 1e-5 and sum(each > 0 for each in far) <= 2, "a tie within rounding may go either way"
    assert most < 1e-4


@pytest.mark.parametrize("name", ["1", "1 | 1 | tp2"])
def test_a_tokens_log_prob_is_that_of_its_versions_weights(workspace: Workspace, tmp_path: Path, name: str) -> None:
    placement, train = APART.get(name, (SINGLE, {}))
    rules = {"overlap.continuous": {"lag_steps": 6}, "placement": placement, "actor.train": train, "overlap.chunk": 4}
    config = continuous(workspace, f"versions-{name}", 2, **GRPO, **rules)
    run_ranks(world_size(run_of(config)), "tests.e2e.jobs:train_and_keep_weights", config=config, folder=tmp_path)
    policies = {version: Policy(tmp_path / str(version)) for version in range(STEPS)}
    spans = []
    for row in read_outcome(Path(config["run_dir"])).rollouts:
        spans.append(len(set(row["versions"])))
        for version in set(row["versions"]):
            logp_TV = policies[version].logits(row).log_softmax(-1)
            for place, (token, logp, of) in enumerate(zip(row["tokens"], row["logprobs"], row["versions"], strict=True)):
                assert of != version or abs(float(logp_TV[place, token]) - logp) < 1e-4
    assert max(spans) > 1, "some response should span an installation"


@pytest.mark.parametrize("carry", ["keep", "recompute", "redraw"])
def test_updates_that_change_nothing_change_no_token(workspace: Workspace, carry: str) -> None:
    still = {**GRPO, "actor.optimizer.lr": 1e-30, "steps": STEPS}
    plain = run_ppo_ranks(workspace.config(f"still-{carry}", **still, **{"overlap.intra": True}))
    rules = {"overlap.carry": carry, "overlap.continuous": {"lag_steps": 4}, "overlap.chunk": 4}
    run = run_ppo_ranks(continuous(workspace, f"still-ahead-{carry}", 2, **still, **rules))
    assert run.tokens() == plain.tokens() and run.batches() != plain.batches()
    assert max(version for row in run.rollouts for version in row["versions"]) > 1
    assert {line.get("tokens_kept", 1.0) for line in run.metrics} == {1.0}


STOPPED: dict[str, dict[str, Any]] = {"1": GRPO, "1 | 1 | 1": GRPO | ONE_EACH, "critic trains": ONE_EACH | {"critic.ranks": "2"}}


@pytest.mark.long
@pytest.mark.parametrize("kv", ["recompute", "keep"])
@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_or_killed_run_goes_on_as_the_run_that_never_stopped(workspace: Workspace, name: str, kv: str) -> None:
    """Stopped anywhere, also with batches in the queue, and killed after any step, to resume from that step's checkpoint."""
    changes = {
        **STOPPED[name], "overlap.continuous": {"lag_steps": 11}, "overlap.chunk": 3, "overlap.carry": kv,
        "checkpoint": {"every_steps": 1, "keep": 9}, "overlap.backfill": False,
    }  # fmt: skip
    config = continuous(workspace, f"steps-{name}-{kv}", 2, **changes)
    plain = run_ppo_ranks(config)
    clocks = []
    for rounds in (2, 5, 8, 11):
        stopped = continuous(workspace, f"stopped-{name}-{kv}-{rounds}", 2, **changes)
        stop(stopped, rounds=rounds)
        clocks.append("clock" in checkpoints(stopped)[-1])
        assert_bit_equal(resumed(stopped), plain)
        assert installs(stopped) == installs(config)
    assert any(clocks)
    states = [read_json(path.read_text()) for path in Path(config["run_dir"]).glob("checkpoints/*/state.json")]
    assert any(state["queue"] for state in states), "some checkpoint should hold a batch that is not trained yet"
    for left in range(1, STEPS):
        assert_bit_equal(resumed(rewound(config, str(left), left)), plain)


@pytest.mark.parametrize("rounds", [4, 7, 10])
@pytest.mark.parametrize("then", [None, {"lag_steps": 11}, {"lag_steps": "asap"}], ids=["in turns", "lag 11", "asap"])
@pytest.mark.parametrize("first", [None, {"lag_steps": 11}], ids=["from turns", "from lag 11"])
def test_a_run_may_be_resumed_in_the_other_mode(workspace: Workspace, first: Any, then: Any, rounds: int) -> None:
    """With batches in its queue, or within a step: each prompt is trained once, within the bound."""
    changes = {**GRPO, "overlap.chunk": 3, "overlap.delta": {"rule": "fixed", "initial": 4, "max": 4}}
    name = f"switched-{rounds}-{'turns' if first is None else 'lag'}-{'turns' if then is None else then['lag_steps']}"
    config = continuous(workspace, name, 2, **changes, **{"overlap.continuous": first})
    stop(config, rounds=rounds)
    run = resumed(continuous(workspace, name, 2, **changes, **{"overlap.continuous": then}))
    assert Counter(row["seq_id"] for row in run.rollouts) == {i: 1 for i in range(STEPS * BATCH)}
    assert [line["step"] for line in run.metrics] == list(range(1, STEPS + 1))
    assert max(row["deferrals"] for row in run.rollouts) <= 2
