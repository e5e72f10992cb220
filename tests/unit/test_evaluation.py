"""Evaluation: estimates, tables of graded answers, rows that are held out, the best step, and runs that are found again."""

import math
import random
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from oppo_megatron.algorithms.supervised_losses import preference_table
from oppo_megatron.config.derived import best_standard
from oppo_megatron.config.evaluation import PAPER_TASKS, EvaluationConfig, Standard
from oppo_megatron.config.load import dump_config
from oppo_megatron.config.run import RunConfig
from oppo_megatron.config.run_rules import heldout_rules
from oppo_megatron.config.supervised import DPOConfig, RewardModelConfig, SFTConfig
from oppo_megatron.control.estimates import estimate, moments_of, paired_difference, ratios
from oppo_megatron.data.supervised_rows import Rows, describe_seen, split_rows
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.evaluation.grading import LENGTH, Answer, Judged, Measured, as_json, as_table
from oppo_megatron.evaluation.tasks import find_tasks, main_figure
from oppo_megatron.mcore.vocab import VocabShards, likeliest_share
from oppo_megatron.policy.finding import RUN_CONFIG, read_run
from oppo_megatron.rundir.checkpoints import Position
from oppo_megatron.train.heldout import HeldoutLog
from tests.support.ppo import SHAPE


def judged(name: str, values: list[list[float]]) -> Judged:
    answers = [
        Answer(row, sample, f"prompt {row}", "text", "eos" if value else "length", 10 * (row + 1), {})
        for row, samples in enumerate(values)
        for sample, value in enumerate(samples)
    ]
    return Judged(name, answers, [{"right": value} for samples in values for value in samples])


def test_a_prompt_counts_once_and_table_and_json_have_the_same_figures() -> None:
    found = estimate({0: [1.0, 0.0], 1: [1.0, 1.0], 2: [0.0, 0.0]})
    assert (found.mean, found.n) == (0.5, 3) and found.error == pytest.approx(0.5 / math.sqrt(3))
    assert estimate({0: [1.0, 0.0]}).error is None
    before, after = {0: [0.0], 1: [10.0], 2: [20.0]}, {0: [1.0], 1: [11.0], 2: [21.0]}
    found = paired_difference(before, after)
    assert (found.mean, found.error, found.n) == (1.0, 0.0, 3), "prompts differ much, the policies by one everywhere"
    policies = [judged("before", [[0.0], [1.0]]), judged("after", [[1.0], [1.0]])]
    first, second = as_json(policies, ["right"], {"seed": 0})["policies"]
    assert first["metrics"]["right"] == {"mean": 0.5, "error": 0.5, "n": 2} and "difference" not in first
    assert second["difference"]["right"] == {"mean": 0.5, "error": 0.5, "n": 2}
    assert second["metrics"][LENGTH]["mean"] == 15.0 and first["finish_reasons"] == {"eos": 0.5, "length": 0.5}
    head, right, length, *ended = as_table(policies, ["right"]).splitlines()
    assert head.split() == ["before", "after", "minus", "before"]
    assert right.split() == ["right", "0.5", "±", "0.5", "1", "±", "0", "+0.5", "±", "0.5"]
    assert length.startswith(LENGTH) and [line.split()[2] for line in ended] == ["eos", "length"]


def test_tasks_are_a_row_per_metric_with_the_errors_that_they_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    def policy(name: str, values: list[float]) -> Measured:
        documents = {str(place): value for place, value in enumerate(values)}
        whole = {"mean": 9.0 + values[0], "error": None, "documents": {}}
        return Measured(name, (), (), {"arc acc": {"mean": 0.25, "error": 0.125, "documents": documents}, "arc f1": whole})

    policies = [policy("a", [0.0, 1.0]), policy("b", [1.0, 1.0])]
    first, second = as_json(policies, ["arc acc", "arc f1"], {})["policies"]
    assert first["metrics"]["arc acc"] == {"mean": 0.25, "error": 0.125, "n": 2}, "the harness's errors, not the documents'"
    assert second["difference"] == {
        "arc acc": {"mean": 0.5, "error": 0.5, "n": 2},
        "arc f1": {"mean": 1.0, "error": None, "n": 0},
    }
    head, acc, f1 = as_table(policies, ["arc acc", "arc f1"]).splitlines()
    assert acc.split()[2:5] == ["0.25", "±", "0.12"] and f1.split()[2:] == ["9", "10", "+1"]
    metrics = {name: {"mean": mean, "error": 0.5} for name, mean in (("f1", 1.0), ("acc", 2.0), ("acc_norm", 3.0))}
    assert [main_figure({"metrics": dict(list(metrics.items())[:n])})[0] for n in (1, 2, 3)] == [1.0, 2.0, 3.0]

    evaluation = {"data": {"path": "x"}, "metrics": [{"kind": "verifier", "name": "gsm8k"}]}
    names = EvaluationConfig.model_validate({**evaluation, "tasks": ["paper", "gsm8k@5", "piqa"]}).names
    assert names == ["accuracy", "response_tokens", "truncated", *PAPER_TASKS, "piqa"]
    with pytest.raises(ValueError, match="pattern"):
        EvaluationConfig.model_validate({**evaluation, "tasks": ["gsm8k@many"]})
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install 'oppo-megatron\[lm-eval\]'"):
        find_tasks(["gsm8k"], None, "--task-data")


def rows_of(prompts: Iterable[int]) -> Rows[tuple[list[int], list[int]]]:
    return Rows(([prompt], [place]) for place, prompt in enumerate(prompts))


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.5, 0.9])
def test_rows_of_a_prompt_stay_together_and_nothing_is_lost(fraction: float) -> None:
    rows = rows_of([n % 60 for n in range(200)])
    training, held = split_rows(rows, fraction, seed=5)
    assert sorted([*training, *held], key=lambda row: row[1]) == rows
    assert not {row[0][0] for row in training} & {row[0][0] for row in held}
    assert training == sorted(training, key=lambda row: row[1]) and held == sorted(held, key=lambda row: row[1])
    assert 0 < len(held) <= max(1, round(fraction * len(rows)))


def test_prompts_are_held_out_by_the_seed_mostly_stay_so_and_are_counted_if_trained_on() -> None:
    chosen = [split_rows(rows_of(range(100)), 0.2, seed)[1] for seed in (1, 1, 2)]
    assert [len(held) for held in chosen] == [20, 20, 20] and chosen[0] == chosen[1] != chosen[2]
    before, after = (split_rows(rows_of(range(n)), 0.2, 1)[1] for n in (1000, 1010))
    assert len({row[0][0] for row in before} & {row[0][0] for row in after}) >= 0.95 * len(before)
    training, held = split_rows(rows_of(range(50)), 0.2, 1)
    assert describe_seen((row[0] for row in held), (row[0] for row in training)) == []
    (told,) = describe_seen([[1, 2], [3], [3]], [[3], [1]])
    assert told.startswith("2 of 3 held-out prompts are trained on, too")

    for prompts in ([1, 1, 1, 1], [1], [1, 1, 2, 2]):  # no share can be held out
        with pytest.raises(DataError, match="evaluation.data"):
            split_rows(rows_of(prompts), 0.25, 1)


def test_means_and_errors_are_those_of_the_statistics_book() -> None:
    rng = random.Random(1)
    table = [[1.0, rng.random(), float(rng.random() > 0.4)] for _ in range(50)]
    parts = [moments_of(table[:20], 3), moments_of(table[20:], 3), moments_of([], 3)]
    for column, (mean, error) in enumerate(ratios([sum(each) for each in zip(*parts, strict=True)], 3), start=1):
        values = [row[column] for row in table]
        assert mean == pytest.approx(statistics.fmean(values))
        assert error == pytest.approx(statistics.stdev(values) / math.sqrt(50))
    assert ratios(moments_of([[4.0, 2.0]], 2), 2) == [(0.5, None)]


def test_the_error_of_a_mean_a_token_is_that_of_many_draws_of_rows() -> None:
    """Rows of unlike lengths: the estimate of one sample is near the spread of the means of 600 others."""
    rng = random.Random(2)

    def draw() -> list[list[float]]:
        lengths = [rng.randint(1, 30) for _ in range(200)]
        return [[float(n), n * rng.gauss(2.0, 0.5)] for n in lengths]

    means = [ratios(moments_of(draw(), 2), 2)[0][0] for _ in range(600)]
    (_, error), *_ = ratios(moments_of(draw(), 2), 2)
    assert error == pytest.approx(statistics.stdev(means), rel=0.15)


def config(kind: type[RunConfig], **changes: Any) -> RunConfig:
    tree = {"run_dir": "r", "tokenizer": {"path": "t"}, "data": {"path": "d"}, "model": {"checkpoint": "m"}}
    return kind.model_validate(tree | changes)


HALF = {"fraction": 0.5}
OFTEN = {**HALF, "every_steps": 5}
FILE = {"data": {"path": "h"}}


@pytest.mark.parametrize(("changes", "standard"), [
    ({}, None), ({"evaluation": HALF}, None), ({"evaluation": OFTEN}, Standard("loss", "min")),
    ({"evaluation": OFTEN, "checkpoint": {"keep_best": "accuracy"}}, Standard("accuracy", "max")),
    ({"evaluation": OFTEN, "early_stop": {"metric": "accuracy"}}, Standard("accuracy", "max")),
    ({"evaluation": OFTEN, "checkpoint": {"keep_best": "max loss"}}, Standard("loss", "max")),
])  # fmt: skip
def test_what_names_the_best_step(changes: dict[str, Any], standard: Standard | None) -> None:
    chosen = config(SFTConfig, **changes)
    assert best_standard(chosen) == standard and list(heldout_rules(chosen)) == []
    assert config(RewardModelConfig, **changes).measured == ["loss", "accuracy", "margin"] * (OFTEN in changes.values())
    assert chosen.measured == ["loss", "accuracy"] * (OFTEN in changes.values())


@pytest.mark.parametrize(("kind", "changes", "words"), [
    (SFTConfig, {"evaluation": {}}, "neither of data and fraction"),
    (SFTConfig, {"evaluation": {**HALF, **FILE}}, "both of data and fraction"),
    (SFTConfig, {"evaluation": OFTEN, "early_stop": {"metric": "margin"}}, "choose from loss, accuracy"),
    (SFTConfig, {"evaluation": FILE, "early_stop": {"metric": "loss"}}, "set evaluation.every_steps"),
    (SFTConfig, {"checkpoint": {"keep_best": True}}, "set evaluation.every_steps"),
    (RewardModelConfig, {"evaluation": OFTEN, "checkpoint": {"keep_best": "los"}}, "loss, accuracy, margin"),
    (SFTConfig, {"evaluation": OFTEN, "checkpoint": {"keep_best": "reward"}}, "choose from loss, accuracy"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(kind: Any, changes: dict[str, Any], words: str) -> None:
    problems = list(heldout_rules(config(kind, **changes)))
    assert len(problems) == 1 and words in problems[0]


def test_the_first_of_equal_steps_is_the_best_and_step_0_is_none() -> None:
    log = HeldoutLog(Standard("loss", "min"))
    for step, loss in enumerate([0.5, 3.0, math.nan, 2.0, 2.0, 2.5]):
        log.record(step, {"loss": (loss, None), "accuracy": (1.0, 0.1)})
    assert log.best() == (3, 2.0)
    other = HeldoutLog(Standard("accuracy", "max"))
    other.load_state_dict(log.state_dict())
    assert other.summary(None)["best"] == {"step": 1, "metric": "accuracy", "value": 1.0}
    third = other.summary(None)["heldout"]["3"]
    assert third == {"mean": {"loss": 2.0, "accuracy": 1.0}, "error": {"loss": None, "accuracy": 0.1}}
    rewards = HeldoutLog(Standard("reward", "max"))
    assert rewards.summary((0.25, Position(4)))["best"] == {"step": 4, "metric": "reward", "value": 0.25}
    assert rewards.summary(None)["best"] is None and HeldoutLog(None).summary(None)["best"] is None


def test_equally_likely_tokens_share_a_hit() -> None:
    """All alike give chance; two that rounding parts half each, in whichever order it puts them."""
    close = 2.0 * (1 + 2**-22)
    rows = [0.0, 0.0, 0.0], [2.0, close, 1.0], [close, 2.0, 1.0], [2.0, 1.9, 1.0], [2.0, 1.9, 1.0]
    share_R = likeliest_share(torch.tensor(rows), torch.tensor([2, 0, 0, 0, 1]), VocabShards())
    assert share_R.tolist() == pytest.approx([1 / 3, 0.5, 0.5, 1.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_measured_stays_on_the_models_device(dtype: torch.dtype) -> None:
    with FakeTensorMode(), torch.no_grad():
        cuda = torch.device("cuda")
        targets_R = torch.empty(5, dtype=torch.int64, device=cuda)
        right_R = likeliest_share(torch.empty(5, 16, device=cuda, dtype=dtype), targets_R, VocabShards())
        assert (right_R.device.type, right_R.dtype, tuple(right_R.shape)) == ("cuda", torch.float32, (5,))
        table = preference_table(torch.empty(4, 2, device=cuda, dtype=dtype))
        assert (table.device.type, table.dtype, tuple(table.shape)) == ("cuda", dtype, (4, 4))


@pytest.mark.parametrize(("kind", "changes"), [
    (SFTConfig, {}), (RewardModelConfig, {}), (RewardModelConfig, {"separator": "\n"}), (DPOConfig, {}),
    (DPOConfig, {"dpo": {"loss": "kto"}}),
])  # fmt: skip
def test_a_recorded_configuration_is_read_again(kind: type[RunConfig], changes: dict[str, Any], tmp_path: Path) -> None:
    written = config(kind, run_dir=str(tmp_path), batch_size=2, max_tokens=16, model={"init": SHAPE}, **changes)
    dump_config(written, tmp_path / RUN_CONFIG)
    assert read_run(tmp_path) == written
