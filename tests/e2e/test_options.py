"""Settings of the rollout, the reward and the update, each in a short real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.reliability import GuardsConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.length_trace import forced_quantile
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.errors import RewardError
from tests.support.ppo import Workspace, read_outcome, run_ppo_ranks
from tests.support.ranks import run_ranks

LONGEST = 40
"""Tokens of a response of the plain configuration."""
RULES: list[dict[str, Any]] = [
    {"kind": "verifier", "name": "arithmetic"},
    {"kind": "verifier", "name": "math"},
    {"kind": "verifier", "name": "length", "buffer_tokens": LONGEST, "weight": 0.5},
    {"kind": "verifier", "name": "format", "pattern": r"\d", "lenient": True, "weight": 0.25},
]


def test_rules_alone(workspace: Workspace) -> None:
    outcome = run_ppo_ranks(workspace.config("rules-only", steps=2, reward=None, rewards=RULES))
    lengths = [-len(row["tokens"]) / LONGEST for row in outcome.rollouts]
    formats = [float(any(character.isdigit() for character in row["response"])) for row in outcome.rollouts]
    assert len(set(lengths)) > 1 and len(set(formats)) == 2, "the run no longer tells the rules apart"
    for row, length, found in zip(outcome.rollouts, lengths, formats, strict=True):
        assert row["reward"] - 0.5 * length - 0.25 * found == pytest.approx(round(row["reward"] - 0.5 * length), abs=1e-6)
    for line, start in zip(outcome.metrics, (0, 6), strict=True):
        parts = line["reward_parts"]
        assert list(parts) == ["arithmetic", "math", "length", "format"]
        assert parts["length"] == pytest.approx(sum(lengths[start : start + 6]) / 6)
        assert parts["format"] == pytest.approx(sum(formats[start : start + 6]) / 6)


@pytest.mark.parametrize(("minibatch", "warmup"), [(0, 0), (1, 0), (1, 1)])
def test_a_gap_is_found_in_any_minibatch(workspace: Workspace, minibatch: int, warmup: int) -> None:
    """The actor's first update; the gap is found behind the first minibatch, where weights have moved, too."""
    config = workspace.config(f"gap-{minibatch}-{warmup}", steps=1 + warmup, **{"ppo.critic_warmup_steps": warmup})
    assert config["ppo"]["minibatches"] == 2
    (error,) = run_ranks(1, "tests.e2e.jobs:train_with_a_wrong_logprob", config=config, minibatch=minibatch, step=1 + warmup)
    assert "the log-prob of a token differs by 5.00e-01 between decoding and training" in error


@pytest.mark.parametrize(
    ("limit", "dtype", "temperature", "expected"),
    [
        ("auto", "float32", 1.0, 1e-4),
        ("auto", "float32", 2.0, 1e-4),
        ("auto", "float32", 0.0, 1e-4),
        ("auto", "float32", 0.1, 1e-3),
        ("auto", "bfloat16", 1.0, 0.25),
        ("auto", "bfloat16", 0.5, 0.5),
        (0.5, "float32", 1.0, 0.5),
        (None, "float32", 1.0, None),
    ],
)
def test_the_limit_of_the_gap(limit: Any, dtype: str, temperature: float, expected: float | None) -> None:
    assert GuardsConfig(logprob_gap=limit).gap_limit(dtype, temperature) == pytest.approx(expected)


def test_greedy_draws_are_certain(workspace: Workspace) -> None:
    """The log-prob that PPO uses is of the policy at temperature 1, not of the draw, which had no choice."""
    outcome = run_ppo_ranks(workspace.config("greedy-draws", steps=1, **{"rollout.temperature": 0.0}))
    assert all(x < 0 for row in outcome.rollouts for x in row["logprobs"])


@pytest.mark.parametrize("mode", ["single", "disaggregated"])
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
        "plain": {},
        "sync": {"overlap.chunk": 3},
        "streamed": {"placement": {"mode": "disaggregated"}, "overlap.intra": True},
    }.items():
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
    assert (Path(config["run_dir"]) / "config.yaml").exists()
    assert not (Path(config["run_dir"]) / "summary.json").exists()
