"""Groups, presets, filters, and settings of the rollout, the reward and the update, in short real runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from oppo_megatron.config.algorithm import PRESETS
from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.reliability import GuardsConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.length_trace import forced_quantile
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.errors import RewardError
from oppo_megatron.layout.placements import named_roles, role_placements, world_size
from oppo_megatron.train.logs.journal import lost_gradient
from tests.e2e.matrix import BY_LENGTH, BY_PARITY, FEATURES, WITHOUT_CRITIC, overcommitted
from tests.e2e.matrix import grouped as of_groups
from tests.support.hf import save_tiny
from tests.support.ppo import DEEP, Outcome, Workspace, assert_same, deep, read_outcome, run_ppo_ranks, weight_distance
from tests.support.ranks import run_ranks

LIKE_OTHERS = ("dr_grpo", "gspo", "cispo", "magistral", "reinforce_pp_baseline")  # of the same groups as grpo, rloo and dapo
CRITIC_FREE = [name for name, preset in PRESETS.items() if preset.baseline != "critic"]
CARRIED: dict[str, Any] = {
    "overlap.intra": True, "overlap.inter": True, "overlap.delta": {"rule": "fixed", "initial": 2, "max": 2},
}  # fmt: skip
BY_RULE = {"reward": None, "rewards": [{"kind": "verifier", "name": "arithmetic"}], "filter": None}


def grouped(workspace: Workspace, name: str, preset: str, size: int, **changes: Any) -> dict[str, Any]:
    return deep(workspace, name, **of_groups(preset, size, **changes))


@pytest.mark.parametrize("preset", CRITIC_FREE)
@pytest.mark.long
def test_every_preset_is_the_same_streamed(workspace: Workspace, preset: str) -> None:
    one = run_ppo_ranks(grouped(workspace, f"{preset}-plain", preset, 8))
    changes = {"placement": {"mode": "disaggregated"}, "overlap.intra": True}
    assert_same(run_ppo_ranks(grouped(workspace, f"{preset}-streamed", preset, 8, **changes)), one)


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=pytest.mark.long) if name in LIKE_OTHERS else name for name in CRITIC_FREE]
)
def test_a_preset_trains_with_carried_groups(workspace: Workspace, preset: str) -> None:
    size = max(2, min(PRESETS[preset].group_size, 4))
    config = grouped(workspace, f"{preset}-carried", preset, size, **CARRIED, steps=3)
    run = run_ppo_ranks(config)
    batches = run.batches()
    trained = [seq_id for batch in batches for seq_id in batch]
    assert len(trained) == len(set(trained)) == 48
    greedy = PRESETS[preset].baseline == "greedy"
    whole = size + greedy  # sequence ids of a prompt
    for batch in batches:
        assert [seq_id % whole for seq_id in batch] == list(range(size)) * (16 // size)
    assert [row["seq_id"] for row in run.greedy] == [i + size for i in trained[::size]] * greedy
    assert sum(row["deferrals"] for row in run.rollouts) > 0, "some groups should be carried"
    deferrals: dict[int, set[int]] = {}
    for row in [*run.rollouts, *run.greedy]:
        deferrals.setdefault(row["seq_id"] // whole, set()).add(row["deferrals"])
    assert all(len(of_group) == 1 for of_group in deferrals.values())
    dropped = sum(line.get("groups_dropped") or 0 for line in run.metrics)
    assert (PRESETS[preset].filter is not None or not dropped) and len(deferrals) == 48 // size
    assert max(deferrals) < len(deferrals) + dropped, "no prompt beyond the last that was needed"
    has_reference = PRESETS[preset].kl["mode"] != "none"
    assert ("reference" in named_roles(TrainConfig(**config))) == has_reference
    assert all((line["kl_mean"] is None) == (not has_reference) for line in run.metrics)
    assert all(line["grad_norm"] > 0 for line in run.metrics)


def test_ratios_of_responses_keep_the_gradient_of_carried_rows(workspace: Workspace) -> None:
    common = CARRIED | {"steps": 3, "ppo.minibatches": 1}
    decoupled, behaviour = (
        run_ppo_ranks(grouped(workspace, f"gspo-{name}", "gspo", 4, **common, **changes)).metrics
        for name, changes in (("decoupled", {}), ("behaviour", {"ppo.staleness": "behaviour"}))
    )
    assert sum(line["stale_token_fraction"] for line in decoupled) > 0, "some responses should be carried"
    assert not any(line["lost_gradient_stale"] or line["clip_fraction"] for line in decoupled)
    assert max(line["lost_gradient_stale"] for line in behaviour) > 0.2
    assert not any(line["lost_gradient_fresh"] for line in behaviour)
    assert "set ppo.staleness to decoupled" in str([lost_gradient(line, "behaviour") for line in behaviour])
    assert not any(lost_gradient(line, "decoupled") for line in decoupled)


def test_rounding_takes_no_gradient_from_ratios_of_responses(workspace: Workspace) -> None:
    """GSPO's range is narrower than what bfloat16 rounds between decoding and training; nothing is clipped at a ratio of 1."""
    apart = {"placement": {"mode": "colocated", "actor": {"dp": 2}}, "actor.train": {"tp": 2}}  # rounds otherwise on any machine
    config = grouped(workspace, "gspo-16", "gspo", 4, **apart, **{"runtime.dtype": "bfloat16", "ppo.minibatches": 1, "steps": 1})
    (line,) = run_ppo_ranks(config).metrics
    assert line["logprob_gap"] > 4e-4 and line["clip_fraction"] == line["lost_gradient_fresh"] == 0


def test_fewer_groups_than_replicas_are_corrected(workspace: Workspace) -> None:
    """A group of three is read cheapest by one replica, and the other must take part in computing its log-probs again."""
    one = {"rollout.batch_size": 3, "rollout.max_response_tokens": 4, "ppo.minibatches": 1, "ppo.staleness": "decoupled"}
    by: dict[str, Any] = {"mode": "colocated"}
    plain, divided = (
        run_ppo_ranks(grouped(workspace, f"one-group-{dp}", "gspo", 3, **one, placement=by | {"actor": {"dp": dp}}))
        for dp in (1, 2)
    )
    assert_same(divided, plain)


@pytest.mark.long
def test_a_rule_without_a_reference_leaves_no_scorer(workspace: Workspace) -> None:
    config = grouped(workspace, "alone", "dapo", 4, **CARRIED, **BY_RULE)
    assert list(role_placements(TrainConfig(**config))) == ["actor"]
    one = run_ppo_ranks(config)
    apart = {"placement": {"mode": "disaggregated", "actor": {"pp": 2}}}
    spread = grouped(workspace, "alone-pp2", "dapo", 4, **CARRIED, **BY_RULE, **apart)
    assert world_size(TrainConfig(**spread)) == 2
    assert_same(run_ppo_ranks(spread), one)
    assert not [name for line in one.metrics for name in line if name.startswith("critic_")]
    beside = deep(workspace, "verifier", **WITHOUT_CRITIC, placement={"mode": "disaggregated", "reference": "actor"})
    beside |= {name: BY_RULE[name] for name in ("reward", "rewards")}
    assert world_size(TrainConfig(**beside)) == 1 and len(run_ppo_ranks(beside).metrics) == 3


def test_several_responses_a_prompt_are_those_of_rows_that_stand_as_often(workspace: Workspace) -> None:
    """Tells groups from rows by the order in a batch alone: no baseline and no carried rollouts."""
    rows = (workspace.root / "data" / "prompts.jsonl").read_text().splitlines(keepends=True)
    repeated = workspace.root / "each-twice.jsonl"
    repeated.write_text("".join(row * 2 for row in rows))
    common: dict[str, Any] = {**WITHOUT_CRITIC, "data.shuffle": False, "steps": 2, "ppo.minibatches": 1}
    ours = run_ppo_ranks(deep(workspace, "two-responses", **common, **{"rollout.group_size": 2}))
    plain = run_ppo_ranks(deep(workspace, "two-rows", **common, **{"data.path": str(repeated)}))
    assert ours.tokens() == plain.tokens()
    assert [sorted(batch) for batch in ours.batches()] == [sorted(batch) for batch in plain.batches()]
    assert weight_distance(ours.actor, plain.actor) < 2e-4
    answers: dict[str, list[list[int]]] = {}
    for row in sorted(ours.rollouts, key=lambda row: row["seq_id"]):
        answers.setdefault(row["prompt"], []).append(row["tokens"])
    pairs = [each for each in answers.values() if len(each) == 2]
    assert len(pairs) >= 4 and all(first != second for first, second in pairs)


LONGEST = 40
"""`rollout.max_response_tokens`"""


@pytest.fixture(scope="module")
def workspace(workspace: Workspace) -> Workspace:
    shape = {name: DEEP[name] for name in DEEP if name not in ("model_type", "initializer_range")}
    save_tiny(workspace.root / "actor", "qwen2", **shape)
    return workspace


def remax(workspace: Workspace, name: str, size: int = 2, **changes: Any) -> dict[str, Any]:
    """16 responses a step, in groups of `size` with a greedy one each that is not among them."""
    actor = {"actor.init": None, "actor.checkpoint": str(workspace.root / "actor")}
    return grouped(workspace, name, "remax", size, **actor | changes)


@pytest.fixture(scope="module")
def plain(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(remax(workspace, "plain"))


def test_greedy_responses_are_the_likeliest_of_their_weights(workspace: Workspace, plain: Outcome) -> None:
    """Token by token, by transformers, of the weights that the run began with; the temperature of the others is 1."""
    model = AutoModelForCausalLM.from_pretrained(workspace.root / "actor", dtype=torch.float32).eval()
    first = [row for row in plain.greedy if row["step"] == 1]
    assert len(first) == 8 and {version for row in first for version in row["versions"]} == {0}
    for row in first:
        tokens: list[int] = []
        while len(tokens) < len(row["tokens"]):
            with torch.inference_mode():
                logits = model(torch.tensor([[*row["prompt_tokens"], *tokens]])).logits[0, -1]
            tokens.append(int(logits.argmax()))
        assert row["tokens"] == tokens, row["seq_id"]
    sampled = {row["seq_id"] // 3: row["tokens"] for row in plain.rollouts if row["step"] == 1}
    assert any(sampled[row["seq_id"] // 3] != row["tokens"] for row in first)


def test_what_is_told_of_a_batch_is_of_what_is_trained(plain: Outcome) -> None:
    for line in plain.metrics:
        trained, greedy = ([row for row in rows if row["step"] == line["step"]] for rows in (plain.rollouts, plain.greedy))
        assert (len(trained), len(greedy)) == (16, 8)
        assert line["reward_mean"] == pytest.approx(sum(row["reward"] for row in trained) / 16)
        assert line["greedy_reward_mean"] == pytest.approx(sum(row["reward"] for row in greedy) / 8)
        parts = line["reward_parts"]
        assert line["reward_mean"] == pytest.approx(parts["model"] + 0.5 * parts["arithmetic"])
        assert line["trained_len_mean"] == pytest.approx(sum(len(row["tokens"]) for row in trained) / 16)
        assert line["tokens"] == sum(len(row["tokens"]) for row in [*trained, *greedy]), "what is decoded is counted"
        assert line["kl_mean"] is not None and line["grad_norm"] > 0


def test_each_score_is_of_its_own_response(workspace: Workspace) -> None:
    run = run_ppo_ranks(remax(workspace, "lengths", **BY_LENGTH, steps=1))
    assert len(run.greedy) == 8 and {len(row["tokens"]) for row in run.greedy} != {len(row["tokens"]) for row in run.rollouts}
    for row in [*run.rollouts, *run.greedy]:
        assert row["reward"] == pytest.approx(-len(row["tokens"]) / LONGEST)


STEPS, BATCH, GROUP = 3, 6, 2


def dapo(workspace: Workspace, name: str, **changes: Any) -> dict[str, Any]:
    parity = BY_PARITY | {"options": {"calls": str(calls_of(workspace, name))}}
    alone = {"rewards": [parity], "reward": None, "ppo.kl": {"mode": "none"}}
    return deep(workspace, name, **FEATURES["filter"].changes | overcommitted(0) | alone | changes)


def calls_of(workspace: Workspace, name: str) -> Path:
    return workspace.root / f"{name}.calls"


@pytest.fixture(scope="module")
def sequential(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(dapo(workspace, "sequential"))


def dropped(outcome: Outcome) -> int:
    return sum(line["groups_dropped"] for line in outcome.metrics)


def test_groups_that_are_all_the_same_are_dropped(workspace: Workspace, sequential: Outcome) -> None:
    assert [len(batch) for batch in sequential.batches()] == [BATCH] * STEPS
    rewards = {row["seq_id"]: row["reward"] for row in sequential.rollouts}
    groups = {seq_id // GROUP for seq_id in rewards}
    assert all(rewards[GROUP * g] != rewards[GROUP * g + 1] for g in groups)
    assert dropped(sequential) > 1 and sum(line["backfilled"] for line in sequential.metrics) == GROUP * dropped(sequential)
    assert max(groups) + 1 == len(groups) + dropped(sequential), "no prompt beyond the last that was needed"
    for line in sequential.metrics:
        assert line["keep_rate"] == 3 / (3 + line["groups_dropped"]) and line["equal_groups"] == line["carried"] == 0
    calls = calls_of(workspace, "sequential").read_text().splitlines()
    assert len(calls) == STEPS * BATCH + GROUP * dropped(sequential), "each response once"


@pytest.mark.long
def test_a_response_is_dropped_where_its_greedy_one_scores_the_same(workspace: Workspace) -> None:
    changes = {"algorithm": {"preset": "remax"}, "filter": "reward", "rollout.group_size": 1, "overlap.intra": True}
    one = run_ppo_ranks(dapo(workspace, "greedy", **overcommitted(1) | changes))
    assert [len(batch) for batch in one.batches()] == [BATCH] * STEPS and len(one.greedy) == STEPS * BATCH
    rewards = {row["seq_id"]: row["reward"] for row in [*one.rollouts, *one.greedy]}
    assert all(rewards[seq_id] != rewards[seq_id + 1] for seq_id in rewards if seq_id % 2 == 0)
    assert dropped(one) > 1 and all(line["equal_groups"] == 0 for line in one.metrics)
    calls = calls_of(workspace, "greedy").read_text().splitlines()
    assert len(calls) == 2 * (STEPS * BATCH + dropped(one)), "each response once"
    apart = {"placement": {"mode": "disaggregated", "actor": {"tp": 2}}, "overlap.chunk": 7}
    assert_same(run_ppo_ranks(dapo(workspace, "greedy-apart", **overcommitted(1) | changes | apart)), one)


def flat(workspace: Workspace, name: str, unlike: int, **changes: Any) -> dict[str, Any]:
    rows = (workspace.root / "data" / "prompts.jsonl").read_text().splitlines()
    level = {"kind": "python", "entry_point": "tests.e2e.rewards:level"}
    level |= {"options": {"flat": [json.loads(row)["prompt"] for row in rows[unlike:]]}}
    return dapo(workspace, name, **{"rewards": [level], "data.shuffle": False} | changes)


def test_a_filter_that_drops_everything_has_an_end(workspace: Workspace) -> None:
    with pytest.raises(AssertionError, match=r"SamplingError.*3[0-2] groups were judged in this step, and 0 of them kept \(0\."):
        run_ppo_ranks(flat(workspace, "nothing", 0))
    with pytest.raises(AssertionError, match="none of the last 4 groups was worth training, and no step was made"):
        run_ppo_ranks(flat(workspace, "no-step", 0, **{"steps": None, "data.max_rows": 4}))


def test_prompts_of_which_nothing_is_left_end_the_run_after_its_last_batch(workspace: Workspace) -> None:
    heldout = {
        "data": {"path": str(workspace.root / "data" / "heldout.jsonl"), "max_prompt_tokens": 96, "max_rows": 4},
        "metrics": [{"kind": "verifier", "name": "arithmetic"}],
    }
    config = flat(workspace, "end", 3, **{"steps": None, "data.max_rows": 5, "evaluation": heldout})
    outcome = run_ppo_ranks(config)
    assert [sorted(batch) for batch in outcome.batches()] == [list(range(BATCH))]
    assert json.loads((Path(config["run_dir"]) / "summary.json").read_text())["heldout_accuracy"].keys() == {"0", "1"}


@pytest.mark.parametrize(("minibatch", "warmup"), [(0, 0), (1, 0), (1, 1)])
def test_a_gap_is_found_in_any_minibatch(workspace: Workspace, minibatch: int, warmup: int) -> None:
    """The actor's first update; the gap is found behind the first minibatch, where weights have moved, too."""
    config = workspace.config(f"gap-{minibatch}-{warmup}", steps=1 + warmup, **{"ppo.critic_warmup_steps": warmup})
    assert config["ppo"]["minibatches"] == 2
    (error,) = run_ranks(1, "tests.e2e.jobs:train_with_a_wrong_logprob", config=config, minibatch=minibatch, step=1 + warmup)
    assert "the log-prob of a token differs by 5.00e-01 between decoding and training" in error


@pytest.mark.parametrize(("limit", "dtype", "temperature", "expected"), [
    ("auto", "float32", 1.0, 1e-4), ("auto", "float32", 2.0, 1e-4), ("auto", "float32", 0.0, 1e-4),
    ("auto", "float32", 0.1, 1e-3), ("auto", "bfloat16", 1.0, 0.25), ("auto", "bfloat16", 0.5, 0.5),
    (0.5, "float32", 1.0, 0.5), (None, "float32", 1.0, None),
])  # fmt: skip
def test_the_limit_of_the_gap(limit: Any, dtype: str, temperature: float, expected: float | None) -> None:
    assert GuardsConfig(logprob_gap=limit).gap_limit(dtype, temperature) == pytest.approx(expected)


@pytest.mark.parametrize("mode", [pytest.param("single", marks=pytest.mark.long), "disaggregated"])
def test_responses_are_as_long_as_the_trace_says(workspace: Workspace, shared_data: Path, mode: str) -> None:
    forced = str(shared_data / "trace_servegen_deepseek_r1_hist.csv")
    changes = {"placement": {"mode": mode}, "rollout.forced_lengths": forced, "overlap.intra": mode != "single"}
    config = workspace.config(f"trace-{mode}", steps=2, **changes)
    outcome = run_ppo_ranks(config)
    checked = TrainConfig(**config)
    lengths = checked.rollout.lengths
    trace = forced_quantile(lengths, checked.rollout.max_response_tokens)
    stopping = Stopping.of(checked.rollout, (), checked.seed, trace, forced=lengths)
    assert [len(tokens) for _, tokens in sorted(outcome.tokens().items())] == [stopping.limit(i) for i in range(12)]
    assert {row["finish_reason"] for row in outcome.rollouts} == {"length"}


def test_a_text_ends_responses_alike_whatever_is_decoded_together(workspace: Workspace) -> None:
    stop = ["1", "3", "e ", "\n"]
    outcomes = []
    for name, changes in {
        "plain": {}, "sync": {"overlap.chunk": 3}, "streamed": {"placement": {"mode": "disaggregated"}, "overlap.intra": True},
    }.items():  # fmt: skip
        config = workspace.config(f"stop-{name}", steps=2, **{"rollout.stop": stop, **changes})
        if name == "sync":
            run_ranks(1, "tests.e2e.jobs:train_reading_seldom", config=config, every=5)
        outcomes.append(read_outcome(Path(config["run_dir"])) if name == "sync" else run_ppo_ranks(config))
    plain = outcomes[0]
    assert all(other.tokens() == plain.tokens() and other.batches() == plain.batches() for other in outcomes[1:])
    reasons = [row["finish_reason"] for row in plain.rollouts]
    assert reasons.count("stop") > 3 and reasons == [row["finish_reason"] for row in outcomes[1].rollouts]
    tokenizer = load_tokenizer(TokenizerConfig(path=workspace.root / "tokenizer.model"))
    for row in plain.rollouts:
        before, text = tokenizer.decode(row["tokens"][:-1]), tokenizer.decode(row["tokens"])
        assert any(each in text for each in stop) == (row["finish_reason"] == "stop")
        assert not any(each in before for each in stop)
    config = workspace.config("stop-resumed", steps=2, **{"rollout.stop": stop, "checkpoint.every_steps": 1})
    assert run_ranks(1, "tests.e2e.jobs:train_until", config=config, rounds=4, rank=0) == [False]
    config["checkpoint"]["resume"] = True
    assert run_ppo_ranks(config).tokens() == plain.tokens()


@pytest.mark.parametrize("entry", ["not_a_number", "failing"])
def test_a_reward_that_fails_stops_the_run_and_keeps_what_is_written(workspace: Workspace, entry: str) -> None:
    rewards = [{"kind": "python", "entry_point": f"tests.e2e.rewards:{entry}"}]
    config = workspace.config(entry, reward=None, rewards=rewards)
    with pytest.raises(AssertionError, match=RewardError.__name__) as failure:
        run_ppo_ranks(config)
    assert "sequence" in str(failure.value) and entry in str(failure.value)
    assert (Path(config["run_dir"]) / "config.yaml").exists() and not (Path(config["run_dir"]) / "summary.json").exists()
