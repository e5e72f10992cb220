"""Overlap in real runs: what delta > 0 and backfill may change, the critical path by the traces, and the same in virtual time."""

from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from oppo_megatron.cli.main import main
from oppo_megatron.config.overlap import DeltaConfig
from oppo_megatron.control.delta_controllers import RULES, make_delta_controller
from oppo_megatron.records import StepSignals
from oppo_megatron.rundir.metrics_log import read_metrics
from oppo_megatron.rundir.trace import Span, read_trace
from oppo_megatron.sim.runs.virtual import VirtualRun
from tests.support.ppo import SHAPE, Outcome, Workspace, assert_same, deep, read_outcome, run_ppo_ranks, weight_distance
from tests.support.ranks import run_ranks
from tests.support.virtual import OrderedRun, assert_unfolds_alike

STEPS, BATCH, DELTA = 7, 6, 4
DISAGGREGATED = {"mode": "disaggregated"}
EVERY, BACKFILLED = 4, 6
BACKFILL = {
    "steps": BACKFILLED, "overlap.intra": True, "overlap.inter": True, "overlap.delta": {"rule": "fixed", "initial": 3, "max": 3},
    "overlap.chunk": EVERY, "overlap.backfill": EVERY,
}  # fmt: skip


def overcommitted(workspace: Workspace, name: str, **changes: Any) -> dict[str, Any]:
    delta = {"rule": "fixed", "initial": DELTA, "max": DELTA}
    settings = {"overlap.intra": True, "overlap.inter": True, "overlap.delta": delta, "steps": STEPS}
    return workspace.config(name, placement=DISAGGREGATED, **(settings | changes))


@pytest.fixture(scope="module")
def outcome(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(overcommitted(workspace, "first"))


def test_every_prompt_is_trained_exactly_once_as_in_virtual_time(workspace: Workspace, outcome: Outcome) -> None:
    assert Counter(row["seq_id"] for row in outcome.rollouts) == {i: 1 for i in range(STEPS * BATCH)}
    assert [len(batch) for batch in outcome.batches()] == [BATCH] * STEPS
    assert_unfolds_alike(overcommitted(workspace, "first"), outcome, VirtualRun, OrderedRun)


def test_rollouts_are_carried_with_all_their_tokens(outcome: Outcome) -> None:
    carried = [row for row in outcome.rollouts if row["deferrals"]]
    assert carried, "the run should defer something"
    for row in outcome.rollouts:
        assert len(row["tokens"]) == len(row["versions"]) == len(row["logprobs"])
        assert row["versions"] == sorted(row["versions"])
        # A step has one policy version: a rollout's tokens span as many versions as the steps it was decoded in.
        assert row["versions"][-1] <= row["step"] - 1 and row["versions"][0] >= row["step"] - 1 - row["deferrals"]
    assert any(len(set(row["versions"])) > 1 for row in carried), "some rollout should span an update"
    assert max(line["logprob_gap"] for line in outcome.metrics) < 1e-4, "log-probs at decode equal those at training"
    assert max(line["stale_token_fraction"] for line in outcome.metrics) > 0


def test_trained_lengths_stand_beside_submitted_ones_and_rewards_by_length(outcome: Outcome) -> None:
    """Counts as a reader of rollouts.jsonl would: carried ones have the tokens of then, by their versions."""
    gaps = []
    for line in outcome.metrics:
        batch = [row for row in outcome.rollouts if row["step"] == line["step"]]
        later = [row["versions"] for row in outcome.rollouts if row["step"] > line["step"]]
        carried = [so_far for each in later if (so_far := sum(version < line["step"] for version in each))]
        trained = [len(row["tokens"]) for row in batch]
        assert line["carried"] == len(carried) and line["trained_len_max"] == max(trained)
        assert line["trained_len_mean"] == pytest.approx(fmean(trained))
        assert line["submitted_len_mean"] == pytest.approx(fmean(trained + carried))
        assert line["length_gap"] == pytest.approx(1 - fmean(trained) / fmean(trained + carried))
        gaps.append(line["length_gap"])
        batch.sort(key=lambda row: len(row["tokens"]))
        quarters = [batch[:1], batch[1:3], batch[3:4], batch[4:]]
        for name, of in ("length_by_quarter", lambda row: len(row["tokens"])), ("reward_by_quarter", lambda row: row["reward"]):
            assert line[name] == pytest.approx({f"q{k + 1}": fmean(map(of, rows)) for k, rows in enumerate(quarters)}), name
    assert any(gaps)


def test_no_rollout_is_deferred_beyond_the_limit(workspace: Workspace) -> None:
    config = overcommitted(workspace, "cap", **{"overlap.max_staleness": 1})
    capped = run_ppo_ranks(config)
    assert_unfolds_alike(config, capped)
    assert max(row["deferrals"] for row in capped.rollouts) == 1 and sorted(capped.tokens()) == list(range(STEPS * BATCH))


@pytest.mark.parametrize("correction", ["behaviour", "decoupled", "icepop", "seq_mask", "opsm"])
@pytest.mark.parametrize("carry", ["recompute", "keep"])
def test_staleness_settings_run_and_gate_the_fresh_tokens(workspace: Workspace, correction: str, carry: str) -> None:
    changes = {"ppo.staleness": correction, "overlap.carry": carry}
    run = run_ppo_ranks(overcommitted(workspace, f"{correction}-{carry}", **changes))
    assert sorted(run.tokens()) == list(range(STEPS * BATCH)) and max(line["logprob_gap"] for line in run.metrics) < 1e-4
    weights = [line["importance_weight_mean"] for line in run.metrics]
    assert any(w != 1.0 for w in weights) == (correction != "behaviour")
    assert any(line["masked_fraction"] for line in run.metrics) == (correction in ("icepop", "seq_mask", "opsm"))
    assert all(0 < line["ess"] <= 1 + 1e-9 for line in run.metrics)
    gaps = [(line["logprob_gap_judged"], line["logprob_gap"]) for line in run.metrics]
    assert all(0 < judged <= gap or judged == gap == 0 for judged, gap in gaps)
    # Most tokens of the second step are stale; with `behaviour` only the first minibatch's fresh ones are looked at.
    assert all(gap > 0 for step, (_, gap) in enumerate(gaps, 1) if step != 2 or correction != "behaviour")
    spans = [set(row["versions"]) for row in run.rollouts if row["deferrals"]]
    if carry == "keep":  # a token is as old as the oldest weights that it was drawn over
        assert all(len(versions) == 1 for versions in spans)
        assert all(row["step"] - 1 - row["versions"][-1] == row["deferrals"] for row in run.rollouts if row["deferrals"])
    else:
        assert any(len(versions) > 1 for versions in spans)


def test_the_end_of_the_data_is_a_smaller_batch(workspace: Workspace) -> None:
    changes = {"steps": None, "data.max_rows": 20}
    run = run_ppo_ranks(overcommitted(workspace, "end", **changes))
    assert [len(batch) for batch in run.batches()] == [6, 6, 6, 2] and sorted(run.tokens()) == list(range(20))


def test_adaptive_chunk_and_delta_run(workspace: Workspace) -> None:
    changes = {
        "overlap.chunk": [8, 2, 32], "overlap.delta": {"rule": "eq4", "initial": 2, "max": 4, "window": 1},
        "overlap.max_staleness": 2,
    }  # fmt: skip
    run = run_ppo_ranks(overcommitted(workspace, "adaptive", **changes))
    assert {line["chunk_tokens"] for line in run.metrics} >= {2, 8, 32} and len({line["delta"] for line in run.metrics}) > 1
    assert all(line["delta_reason"] and line["chunk_reason"] for line in run.metrics)
    assert max(row["deferrals"] for row in run.rollouts) <= 2 and sorted(run.tokens()) == list(range(STEPS * BATCH))


MEASURED = {"rule": "measured", "initial": 2, "max": DELTA, "window": 1}


@pytest.mark.parametrize("placement", [DISAGGREGATED, {"mode": "disaggregated", "actor": {"dp": 2}}], ids=["1", "dp2"])
def test_delta_from_what_is_measured(workspace: Workspace, placement: dict[str, Any]) -> None:
    """Every rank must decide alike, or the ranks would admit other prompts and fail each other."""
    dp = placement.get("actor", {}).get("dp", 1)
    changes = {"overlap.delta": MEASURED, "overlap.max_staleness": 2, "rollout.forced_lengths": [12, 1.0]}
    config = overcommitted(workspace, f"measured-{dp}", **changes) | {"placement": placement}
    run = run_ppo_ranks(config)
    assert_unfolds_alike(config, run, VirtualRun, OrderedRun)
    assert sorted(run.tokens()) == list(range(STEPS * BATCH))
    assert len({line["delta"] for line in run.metrics}) > 1 and min(line["ess"] for line in run.metrics) < 1
    ended = 0
    for line in run.metrics:
        begun, batch = ended, [row for row in run.rollouts if row["step"] == line["step"]]
        ended = max(begun, *(row["finish_clock"] for row in batch))
        # A sequence runs in every decode step from its first token on, so its end and its length tell in which.
        spans = [(row["finish_clock"] - len(row["tokens"]), row["finish_clock"]) for row in run.rollouts]
        counts = [sum(first < clock <= last for first, last in spans) for clock in range(begun + 1, ended + 1)]
        assert line["tail_waste"] == pytest.approx(1 - fmean(counts) / max(counts) if counts else 0.0, abs=1e-12)
        assert line["length_gap"] == pytest.approx(1 - line["trained_len_mean"] / line["submitted_len_mean"])
    controller, ess = make_delta_controller(DeltaConfig(**MEASURED)), 1.0
    for line in run.metrics:
        assert line["delta"] == controller.value
        signals = StepSignals(line["reward_mean"], line["tail_waste"], ess, line["length_gap"])
        assert line["delta_reason"] == controller.observe(line["step"], signals).reason
        ess = line["ess"]


@pytest.fixture(scope="module")
def backfilled(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(deep(workspace, "backfilled", **BACKFILL))


def test_with_backfill_every_prompt_is_trained_exactly_once(workspace: Workspace, backfilled: Outcome) -> None:
    assert Counter(row["seq_id"] for row in backfilled.rollouts) == {i: 1 for i in range(BACKFILLED * BATCH)}
    assert [len(batch) for batch in backfilled.batches()] == [BATCH] * BACKFILLED
    assert sum(line["backfilled"] for line in backfilled.metrics) > BATCH, "prompts enter within steps"
    assert max(line["carried"] for line in backfilled.metrics) <= BATCH
    assert max(row["deferrals"] for row in backfilled.rollouts) <= 4 and backfilled.metrics[-1]["carried"] == 0
    assert all(0 < line["packing_efficiency"] <= 1 > line["padding_saved"] > 0 for line in backfilled.metrics)
    assert_unfolds_alike(deep(workspace, "backfilled", **BACKFILL), backfilled, VirtualRun, OrderedRun)


@pytest.mark.long
def test_neither_few_slots_nor_a_chunk_that_adapts_change_a_batch(workspace: Workspace, backfilled: Outcome) -> None:
    """Nine slots of half of a cache are four of a whole one."""
    few = {"placement": {"mode": "disaggregated", "actor": {"tp": 2}}, "runtime.kv_cache_mb": 0.3}
    assert_same(run_ppo_ranks(deep(workspace, "few-slots", **BACKFILL | few)), backfilled)
    run = run_ppo_ranks(deep(workspace, "backfill-adaptive", **BACKFILL | {"overlap.chunk": [EVERY, 3, 64]}))
    assert {line["chunk_tokens"] for line in run.metrics} == {3, EVERY}
    assert_same(run, backfilled)


SLOW_S = 0.6
PAIR = {"placement.mode": "disaggregated", "overlap.intra": True}


def run(workspace: Workspace, name: str, ranks: int, **changes: Any) -> tuple[list[dict[str, Any]], list[Counter[str]]]:
    config = deep(workspace, name, steps=3, **changes)
    run_ranks(ranks, "tests.e2e.jobs:train_with_a_slow_critic", config=config, seconds=SLOW_S)
    lines = read_metrics(Path(config["run_dir"]) / "metrics.jsonl")
    spans = [Counter[str]() for _ in lines]
    for span in read_trace(Path(config["run_dir"]) / "trace.json"):
        if span.rank == 0 and span.role == "actor":
            spans[span.step - 1][span.name] += span.end - span.start
    for line in lines:
        assert line["critic_update_s"] > SLOW_S
        assert line["critic_exposed_s"] + line["critic_hidden_s"] == pytest.approx(line["critic_update_s"])
        assert min(line["critic_exposed_s"], line["critic_hidden_s"], line["score_exposed_s"]) >= 0
        assert line["score_hidden_s"] == pytest.approx(max(0.0, line["score_busy_s"] - line["score_exposed_s"]))
    return lines, spans


def test_a_hidden_update_is_exposed_where_the_actor_waits_for_it(workspace: Workspace) -> None:
    lines, spans = run(workspace, "hidden", 2, **PAIR)
    for before, line, seconds in zip(lines, lines[1:], spans[1:], strict=False):
        assert before["critic_exposed_s"] + line["score_exposed_s"] == pytest.approx(seconds["wait_scores"], abs=1e-4)
        busy_elsewhere = seconds["decode"] + spans[line["step"] - 2]["update"]
        assert before["critic_exposed_s"] > SLOW_S / 4 or busy_elsewhere > SLOW_S / 2
        assert before["critic_hidden_s"] > 0, "it began with the actor's own update"
    assert lines[0]["score_exposed_s"] == pytest.approx(spans[0]["wait_scores"], abs=1e-4), "no update is before step 1"
    assert lines[-1]["critic_exposed_s"] == pytest.approx(spans[-1]["wait_update"], abs=1e-3)


def test_a_critic_that_is_waited_for_is_exposed_but_for_the_actors_own_update(workspace: Workspace) -> None:
    lines, spans = run(workspace, "waited", 2, **PAIR, **{"overlap.without": ["critic"]})
    for line, seconds in zip(lines, spans, strict=True):
        assert line["critic_exposed_s"] == pytest.approx(min(seconds["wait_update"], line["critic_update_s"]), abs=1e-3)
        assert line["score_exposed_s"] == pytest.approx(seconds["wait_scores"], abs=1e-4)


def test_no_figure_goes_by_a_clock_that_somebody_sets(workspace: Workspace) -> None:
    """A step that took less than no time has stopped runs, by way of the chunk's tuner."""
    config = workspace.config("set-back", **{"overlap.intra": True, "overlap.chunk": [7, 16, 32, 64]})
    run_ranks(1, "tests.e2e.jobs:train_while_the_clock_is_set_back", config=config)
    lines = read_metrics(Path(config["run_dir"]) / "metrics.jsonl")
    times = [line[name] for line in lines for name in line if name.endswith("_s") and name != "idle_s"]
    assert len(lines) == 3 and all(0 <= seconds < 60 for seconds in times)
    assert all(0 <= span.end - span.start < 60 for span in read_trace(Path(config["run_dir"]) / "trace.json"))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_on_the_actors_ranks_all_of_the_update_is_exposed(workspace: Workspace, ranks: int) -> None:
    mode = {"mode": "colocated", "actor": {"pp": ranks}}
    lines, _ = run(workspace, f"colocated-{ranks}", ranks, placement=mode, **{"overlap.intra": True})
    assert all(line["critic_hidden_s"] == 0 for line in lines)


APART = {"placement.mode": "disaggregated"}
FULL = {"overlap.intra": True, "overlap.inter": True, "overlap.delta": {"rule": "fixed", "initial": 2, "max": 2}}


def both(workspace: Workspace, name: str, **changes: Any) -> tuple[Outcome, Outcome]:
    found = []
    for waits in ([], ["scores"]):
        config = workspace.config(f"{name}-{not waits}", **APART, **FULL, **changes, **{"overlap.without": waits})
        run = Path(config["run_dir"])
        found.append(read_outcome(run) if (run / "summary.json").exists() else run_ppo_ranks(config))
    return found[0], found[1]


def spans_of(workspace: Workspace, name: str, step: int) -> list[Span]:
    spans = [
        span
        for span in read_trace(workspace.root / "runs" / name / "trace.json")
        if span.rank == 0 and span.role == "actor" and span.step == step and span.name in ("update", "wait_scores")
    ]
    return sorted(spans, key=lambda span: span.start)


@pytest.mark.parametrize(("name", "changes"), [
    ("pair", {}),
    pytest.param("whole", {"ppo.epochs": 1, "ppo.minibatches": 1, "runtime.micro_batch_tokens": 150}, marks=pytest.mark.long),
    ("decoupled", {"ppo.staleness": "decoupled"}), pytest.param("tp", {"placement.actor": {"tp": 2}}, marks=pytest.mark.long),
    ("dp", {"placement.actor": {"dp": 2}}),
    pytest.param("trained-dp", {"placement.actor": {"tp": 2}, "actor.train": {"tp": 1, "dp": 2}}, marks=pytest.mark.long),
    pytest.param("stages", {"placement.actor": {"pp": 2}}, marks=pytest.mark.long),
])  # fmt: skip
def test_the_run_is_the_same_to_the_bit(workspace: Workspace, name: str, changes: dict[str, Any]) -> None:
    ahead, after = both(workspace, name, **changes)
    assert any(int(times) > 0 for line in ahead.metrics for times in line["deferred"]), "some were carried"
    assert ahead.tokens() == after.tokens() and ahead.batches() == after.batches()
    assert weight_distance(ahead.actor, after.actor) == weight_distance(ahead.critic, after.critic) == 0.0
    for one, other in zip(ahead.metrics, after.metrics, strict=True):
        for figure in ("actor_loss", "grad_norm", "ess", "logprob_gap", "kl_mean", "critic_loss"):
            assert one[figure] == other[figure], figure


def test_the_update_begins_before_the_wait_for_scores(workspace: Workspace) -> None:
    both(workspace, "pair")
    for step in (1, 2, 3):
        assert [s.name for s in spans_of(workspace, "pair-True", step)] == ["update", "wait_scores", "update"]
        assert [s.name for s in spans_of(workspace, "pair-False", step)] == ["wait_scores", "update"]
    run_ppo_ranks(workspace.config("plain", **APART))
    assert [span.name for span in spans_of(workspace, "plain", 2)] == ["wait_scores", "update"], "plain PPO"


def test_a_batch_that_is_not_trained_leaves_nothing_begun(workspace: Workspace) -> None:
    found = []
    for value in (True, False):
        options = {"name": f"second step {value}", "good": 6, "bad": 6}
        part = {"kind": "python", "entry_point": "tests.e2e.rewards:breaks", "options": options}
        changes = {"reward": None, "rewards": [part], "guards": {"action": "skip"}}
        changes["overlap.without"] = [] if value else ["scores"]
        found.append(run_ppo_ranks(workspace.config(f"skip-{value}", **APART, **FULL, **changes)))
    for outcome in found:
        assert [line["skipped"] is not None for line in outcome.metrics] == [False, True, False]
    ahead, after = found
    assert ahead.tokens() == after.tokens()
    assert weight_distance(ahead.actor, after.actor) == weight_distance(ahead.critic, after.critic) == 0.0


def test_a_reference_with_the_actor_reads_the_batch_last(workspace: Workspace) -> None:
    placement = {"mode": "disaggregated", "reference": "actor"}
    run_ppo_ranks(workspace.config("beside", **FULL, placement=placement))
    for step in (1, 2, 3):
        spans = [s for s in read_trace(workspace.root / "runs" / "beside" / "trace.json") if (s.rank, s.step) == (0, step)]
        decoded = max(span.end for span in spans if span.role == "actor" and span.name == "decode")
        read = [span.start for span in spans if span.role == "reference"]
        assert read and min(read) > decoded


SIZES = {"initial": 3, "max": 6, "window": 1}


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
def test_batches_and_deferrals_are_those_of_a_real_run(workspace: Workspace, rule: str) -> None:
    both = {"overlap.intra": True, "overlap.inter": True, "steps": 8, "overlap.delta": SIZES | {"rule": rule}}
    config = workspace.config(rule, **both)
    outcome = run_ppo_ranks(config)
    assert any(row["deferrals"] for row in outcome.rollouts), "some should be carried"
    assert_unfolds_alike(config, outcome, VirtualRun, OrderedRun)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["sequential", "full", "tp 2"])
def test_a_step_takes_what_the_run_s_own_costs_say(workspace: Workspace, layout: str) -> None:
    """Compare mean steps of a model whose actions take most of a step; without the reading they would be some 30 % short."""
    shape = SHAPE | {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024, "initializer_range": 0.02}
    tensor = {"mode": "colocated", "actor": {"tp": 2}, "scorer": {"tp": 2}}
    config = workspace.config(
        f"own costs {layout}", steps=8, placement=tensor if layout == "tp 2" else {"mode": "disaggregated"},
        **{f"{role}.init": shape for role in ("actor", "critic", "reward")},
        **{f"overlap.{name}": layout != "sequential" for name in ("intra", "inter")},
        **{"overlap.delta": SIZES | {"rule": "fixed"}, "overlap.chunk": 16, "rollout.forced_lengths": [32, 0.8],
           "rollout.batch_size": 12, "rollout.max_response_tokens": 96},
    )  # fmt: skip
    run = Path(config["run_dir"])
    measured = run_ppo_ranks(config).metrics
    out = run.with_name(f"{run.name} played")
    arguments = ["plan", "simulate", str(run / "config.yaml"), "--steps", "8", "--calibrate", str(run), "--out", str(out)]
    assert main(arguments) == 0
    played = read_metrics(out / "metrics.jsonl")
    assert [line["tokens"] for line in played] == [line["tokens"] for line in measured]
    seconds = [fmean(line["step_s"] for line in lines[1:]) for lines in (measured, played)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.25)
