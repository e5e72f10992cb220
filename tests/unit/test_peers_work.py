"""Work that a peer is given, and whether runs did it, held against a real run of ours; the script in TRL's environment."""

import argparse
import ast
import json
import math
import os
import sys
from copy import deepcopy
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from benchmarks.peers import comparison
from benchmarks.peers.comparison import how_it_runs, main, require_peer, with_threads
from benchmarks.peers.hf_generate import measure_generate, require_cuda
from benchmarks.peers.outcome import COLUMNS, Ours, draw, forcing, padding, real_tokens, table_rows, unequal_work
from benchmarks.peers.settings import require_same_work
from benchmarks.peers.trl_common import Clock, ForcedGenerate, ForcedRows, PeerError
from benchmarks.peers.trl_training import REQUIREMENTS, require_versions
from benchmarks.peers.trl_training import main as check_peer
from benchmarks.peers.work import build_work, export_models, free_token
from oppo_megatron.bench.suite import BenchError
from oppo_megatron.config.load import load_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.records import Prompt
from oppo_megatron.report.comparison import format_table
from oppo_megatron.rewards.verifiers import length_score
from tests.support.ppo import Workspace, run_ppo_ranks

SAME: dict[str, Any] = {"rewards": [{"kind": "model"}], "rollout.forced_lengths": [10, 0.8], "ppo.entropy_coefficient": 0.0}
SEQUENTIAL = Ours("1 x 1", carries=False, streams_here=False, shares_ranks=True)
CARRYING = Ours("2 x 1", carries=True, streams_here=False, shares_ranks=False)


def settings(workspace: Workspace, name: str, **changes: Any) -> dict[str, Any]:
    return workspace.config(name, **{**SAME, **changes})


def work_of(config: TrainConfig, out: Path) -> dict[str, Any]:
    return build_work(config, out, device="cpu", dtype="float32", threads=1, micro_batch=None)


@pytest.fixture(scope="module")
def work(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return work_of(TrainConfig(**settings(workspace, "work")), tmp_path_factory.mktemp("work"))


def trl_lines(work: dict[str, Any]) -> list[dict[str, Any]]:
    lines = []
    for step in range(work["steps"]):
        rows = slice(step * work["batch_size"], (step + 1) * work["batch_size"])
        prompts, lengths = [len(prompt) for prompt in work["prompts"][rows]], work["lengths"][rows]
        lines.append({
            "step_s": 10.0, "other_s": 1.0, "generate_s": 4.0, "score_s": 2.0, "train_s": 3.0, "forcing_s": 0.04,
            "prompt_tokens": prompts, "response_tokens": list(lengths),
            "computed_tokens": len(lengths) * (max(prompts) + max(lengths)),
        })  # fmt: skip
    return lines


def our_lines(work: dict[str, Any]) -> list[dict[str, Any]]:
    lines = []
    for step, line in enumerate(trl_lines(work)):
        tokens = sum(line["response_tokens"])
        lines.append({
            "step_s": 20.0 if step == 0 else 5.0, "decode_s": 2.0, "score_exposed_s": 1.0, "train_s": 1.0, "tokens": tokens,
            "critic_update_s": 0.5, "critic_exposed_s": 0.25, "trained_len_mean": tokens / work["batch_size"],
        })  # fmt: skip
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("sequential", marks=pytest.mark.long), "full"])
def test_our_run_does_the_work_that_the_peer_is_given(workspace: Workspace, work: dict[str, Any], mode: str) -> None:
    full, delta = mode == "full", {"rule": "fixed", "initial": 2, "max": 2}
    run = settings(workspace, mode, **{"overlap.intra": full, "overlap.inter": full, "overlap.delta": delta})
    outcome = run_ppo_ranks(run)
    prompts, lengths = {}, {}
    for row in outcome.rollouts:
        prompts[row["seq_id"]], lengths[row["seq_id"]] = row["prompt"], len(row["tokens"])
    assert [lengths[i] for i in range(len(lengths))] == work["lengths"]
    how = how_it_runs(TrainConfig(**run))
    assert how.carries == full and how.streams_here == full and how.shares_ranks
    assert unequal_work(work, [trl_lines(work)], {mode: (how, [outcome.metrics])}) == []
    row = table_rows(work, [trl_lines(work)], {mode: (how, [outcome.metrics])})[1]
    assert row["step_s"] >= row["train_s"] > 0 and (row["score_s"] is None) == full


def test_work_is_the_configurations(workspace: Workspace, work: dict[str, Any], tmp_path: Path) -> None:
    config = TrainConfig(**settings(workspace, "work"))
    assert len(work["prompts"]) == len(work["lengths"]) == 3 * config.rollout.batch_size
    assert all(1 <= length <= config.rollout.max_response_tokens for length in work["lengths"])
    assert len(set(work["lengths"])) > 3
    assert not any(work["pad_id"] in prompt for prompt in work["prompts"]) and work["pad_id"] != work["eos_id"]
    assert work["ppo"]["num_ppo_epochs"] == 2 and work["ppo"]["num_mini_batches"] == 2
    assert work["optimizer"]["adam_beta2"] == config.actor.optimizer.betas[1]
    assert json.loads(json.dumps(work)) == work
    with pytest.raises(ConfigError, match=r"need 600, but epochs=1 gives 64"):
        work_of(TrainConfig(**settings(workspace, "early", steps=100, epochs=1)), tmp_path)


def test_exported_models_are_what_trl_loads(work: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    models = {}
    for role, path in work["models"].items():
        loader = AutoModelForCausalLM if role in ("actor", "reference") else AutoModelForSequenceClassification
        models[role], report = loader.from_pretrained(path, output_loading_info=True, local_files_only=True)
        assert not report["missing_keys"] and not report["unexpected_keys"], role
        assert models[role].dtype == torch.float32
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(models["actor"](tokens).logits, models["reference"](tokens).logits, rtol=0, atol=1e-5)
    assert models["critic"].score.weight.shape == models["reward"].score.weight.shape == (1, 32)
    assert not torch.equal(models["critic"].score.weight, models["reward"].score.weight)


GRPO: dict[str, Any] = {
    **SAME, "algorithm": {"preset": "grpo"}, "critic": None, "reward": None,
    "rewards": [{"kind": "verifier", "name": "length", "buffer_tokens": 12}], "rollout.batch_size": 8, "rollout.group_size": 4,
    "rollout.max_response_tokens": 24, "ppo": {},
}  # fmt: skip
"""Rewards from -1 to 0 by the length of a response."""


def grpo(workspace: Workspace, name: str, **changes: Any) -> TrainConfig:
    return TrainConfig(**workspace.config(name, **{**GRPO, **changes}))


def test_work_of_groups(workspace: Workspace, tmp_path: Path) -> None:
    work = work_of(grpo(workspace, "groups", **{"actor.optimizer": {"clip_grad": 0.5}}), tmp_path)
    assert work["algorithm"] == "grpo" and work["group_size"] == 4 and set(work["models"]) == {"actor", "reference"}
    prompts = work["prompts"]
    assert len(prompts) == 24 and all(prompts[i] == prompts[i - i % 4] for i in range(24)) and prompts[0] != prompts[4]
    assert work["length_penalty"] == {"max_completion_len": 24, "soft_punish_cache": 12} and "ppo" not in work
    told = {"beta": 0.04, "epsilon": 0.2, "epsilon_high": 0.2, "max_grad_norm": 0.5, "loss_type": "grpo"}
    assert told.items() <= work["grpo"].items() and not work["grpo"]["use_bias_correction_kl"]
    free = grpo(workspace, "free", **{"ppo.kl": {"mode": "none"}, "ppo.clip_high": 0.3})
    assert not how_it_runs(free).shares_ranks, "there is no critic's update"
    work = work_of(free, tmp_path / "free")
    assert set(work["models"]) == {"actor"} and (work["grpo"]["beta"], work["grpo"]["epsilon_high"]) == (0.0, 0.3)


def test_rewards_by_length_are_compared(workspace: Workspace, tmp_path: Path) -> None:
    work = work_of(grpo(workspace, "rewards"), tmp_path)
    rewards = [length_score(length, 24, 12) for length in work["lengths"]]
    means = [fmean(rewards[first : first + 8]) for first in (0, 8, 16)]
    assert len(set(means)) > 1
    right = [line | {"reward_mean": mean} for line, mean in zip(trl_lines(work), means, strict=True)]
    ours = [line | {"reward_mean": mean} for line, mean in zip(our_lines(work), means, strict=True)]
    assert unequal_work(work, [right], {"ours": (SEQUENTIAL, [ours])}) == []
    swapped = [line | {"reward_mean": mean} for line, mean in zip(ours, reversed(means), strict=True)]
    (fault,) = unequal_work(work, [], {"ours": (SEQUENTIAL, [swapped])})
    assert fault.startswith("ours, run 1: mean rewards are ")
    assert unequal_work(work, [], {"ours": (CARRYING, [swapped])}) == []
    right[2]["reward_mean"] += 1e-3
    assert "TRL, run 1: mean rewards" in unequal_work(work, [right], {})[0]


def test_what_trl_cannot_do_of_grpo_is_refused_all_at_once(workspace: Workspace) -> None:
    wrong = {
        "algorithm": {"preset": "grpo", "reduction": "token_mean"}, "rewards": [{"kind": "verifier", "name": "arithmetic"}],
        "ppo": {"minibatches": 2, "dual_clip": 3.0, "kl": {"estimator": "k2"}}, "steps": 1,
    }  # fmt: skip
    with pytest.raises(ConfigError) as error:
        require_same_work(grpo(workspace, "wrong", **wrong), None)
    said = ("algorithm.reduction is token_mean", "by k3", "ppo.minibatches 2", "dual_clip", "name: length", "--steps")
    assert [word for word in said if not any(word in problem for problem in error.value.problems)] == []
    assert len(error.value.problems) == len(said)
    require_same_work(grpo(workspace, "right"), micro_batch=4)
    with pytest.raises(ConfigError, match="algorithm.preset is dapo, .* choose from ppo, grpo"):
        require_same_work(grpo(workspace, "other", algorithm={"preset": "dapo"}), None)


def test_the_algorithm_names_the_configuration_where_none_is_given() -> None:
    def read(*arguments: str) -> tuple[str, list[str]]:
        parser = argparse.ArgumentParser()
        comparison.add_arguments(parser)
        args = comparison.with_config(parser.parse_intermixed_args(list(arguments)))
        return str(args.config), args.overrides

    assert read() == ("examples/benchmark/overlap.yaml", [])
    assert read("--algorithm", "grpo", "seed=2") == ("examples/benchmark/grpo.yaml", ["algorithm.preset=grpo", "seed=2"])
    for algorithm, path in comparison.CONFIGS.items():
        config = load_config(TrainConfig, Path(__file__).resolve().parents[2] / path)
        require_same_work(config, micro_batch=None)
        assert config.algorithm.preset == algorithm
    assert read("c.yaml", "seed=2", "--algorithm", "ppo") == ("c.yaml", ["algorithm.preset=ppo", "seed=2"])


def test_padding_token_is_the_largest_that_is_free() -> None:
    assert free_token(10, [Prompt(0, 0, "", (1, 9)), Prompt(1, 1, "", (7, 2))], eos_id=8) == 6
    with pytest.raises(ConfigError, match="all 3 tokens"):
        free_token(3, [Prompt(0, 0, "", (0, 1))], eos_id=2)


def test_what_trl_cannot_do_is_refused_all_at_once(workspace: Workspace) -> None:
    wrong = {
        "steps": 1, "rewards": [{"kind": "verifier", "name": "arithmetic"}], "rollout.forced_lengths": None,
        "rollout.top_p": 0.9, "ppo.kl": {"estimator": "k2"}, "ppo.entropy_coefficient": 0.01, "ppo.value_clip": 0,
        "critic.optimizer": {"lr": 1e-3}, "actor.optimizer": {"decay": "linear"},
    }  # fmt: skip
    with pytest.raises(ConfigError) as error:
        require_same_work(TrainConfig(**settings(workspace, "wrong", **wrong)), micro_batch=4)
    asked = ("forced_lengths", "top_p", "kl", "entropy", "value_clip", "one optimizer", "constant", "--steps", "reward model")
    problems = " ".join(error.value.problems)
    assert len(error.value.problems) == len(asked) + 1 and "--trl-micro-batch 4" in problems
    assert [word for word in asked if word not in problems] == []
    require_same_work(TrainConfig(**settings(workspace, "right")), micro_batch=None)


def test_other_work_is_found(work: dict[str, Any]) -> None:
    right, ours = trl_lines(work), our_lines(work)
    assert unequal_work(work, [right], {"ours": (SEQUENTIAL, [ours])}) == []
    shorter = deepcopy(right)
    shorter[1]["response_tokens"][0] += 1
    (fault, *_) = unequal_work(work, [right, shorter], {})
    assert "step 2 has response_tokens" in fault and "TRL, run 2" in fault
    assert "2 steps, not 3" in unequal_work(work, [right[:2]], {})[0]
    moved = deepcopy(ours)
    moved[0]["tokens"] += 5
    moved[1]["tokens"] -= 5
    assert "decoded by step" in unequal_work(work, [], {"ours": (SEQUENTIAL, [moved])})[0]
    assert unequal_work(work, [], {"ours": (CARRYING, [moved])}) == [], "only the run compares"
    moved[2]["trained_len_mean"] += 1
    assert "trained, not" in unequal_work(work, [], {"ours": (CARRYING, [moved])})[0]


def test_table_has_medians_and_ratios_to_trl(work: dict[str, Any], tmp_path: Path) -> None:
    woven, lines = Ours("1 x 2", carries=True, streams_here=True, shares_ranks=True), our_lines(work)
    ours = {"sequential": (SEQUENTIAL, [lines]), "pair": (CARRYING, [lines]), "woven": (woven, [lines])}
    trl, sequential, apart, together = table_rows(work, [trl_lines(work)], ours)
    assert trl["times_trl_step"] == trl["times_trl_run"] == 1 and trl["rest_s"] == 1.0
    assert (sequential["step_s"], sequential["first_step_s"], sequential["total_s"]) == (5.0, 20.0, 30.0)
    assert sequential["times_trl_step"] == 2.0 and sequential["times_trl_run"] == 1.0
    assert (sequential["train_s"], sequential["rest_s"]) == (1.5, 0.5), "both updates, one after the other"
    assert (apart["train_s"], apart["rest_s"]) == (1.25, 0.75), "what is waited for of the critic's"
    assert (together["generate_s"], together["score_s"], together["train_s"]) == (3.5, None, 1.5)
    assert sequential["tokens_per_s"] == pytest.approx(real_tokens(work) / 30)
    text = format_table(COLUMNS, [trl, together])
    assert len({len(line) for line in text.splitlines()}) == 1 and " - " in text
    theirs = trl_lines(work)
    assert forcing([theirs]) == (0.04, pytest.approx(0.01))
    assert 1 < padding([theirs]) == pytest.approx(sum(line["computed_tokens"] for line in theirs) / real_tokens(work))
    draw([trl, sequential], "title", tmp_path / "trl.png")
    assert (tmp_path / "trl.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_environment_or_other_versions_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python, out = tmp_path / "python", tmp_path / "out"
    with pytest.raises(BenchError, match="make bench-trl"):
        require_peer(python)
    config = str(Path(__file__).resolve().parents[2] / "examples" / "benchmark" / "overlap.yaml")
    assert main([config, "--peer-python", str(python), "--out", str(out)]) == 2
    assert "make bench-trl" in capsys.readouterr().err and not out.exists(), "nothing was begun"
    python.write_text("no program")
    assert main([str(tmp_path / "no.yaml"), "--peer-python", str(python), "--out", str(out)]) == 2
    assert f"compare: {python}: Permission denied" in capsys.readouterr().err
    with pytest.raises(BenchError, match="trl none"):
        require_peer(Path(sys.executable))
    for other, message in (("true", "so it is not Python; name the one of TRL's"), ("false", "exit code 1, in silence")):
        with pytest.raises(BenchError, match=message):
            require_peer(Path("/usr/bin") / other)


def test_a_comparison_that_is_told_to_stop_ends_the_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, pid = tmp_path / "python", tmp_path / "pid"
    python.write_text(f"#!/bin/sh\necho $$ > {pid}\nkill -TERM $PPID\nexec sleep 60\n")
    python.chmod(0o755)
    (tmp_path / "work.json").write_text('{"device": "cpu"}')
    monkeypatch.setattr(comparison, "compare", lambda args: comparison.run_peer(python, tmp_path / "work.json", tmp_path))
    with pytest.raises(SystemExit, match="143"):
        main(["c.yaml"])
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_threads_are_shared_by_the_ranks(workspace: Workspace) -> None:
    pair = TrainConfig(**settings(workspace, "pair", placement={"mode": "disaggregated"}, runtime={"device": "cpu"}))
    assert how_it_runs(with_threads(pair, "pair", 4)).layout == "2 x 2"
    assert how_it_runs(with_threads(pair, "single", 4)).layout == "1 x 4"
    with pytest.raises(ConfigError, match="--threads 3"):
        with_threads(pair, "pair", 3)


def test_what_is_wrong_in_one_mode_is_found_before_any_run_and_the_dtype_is_of_all_roles(workspace: Workspace) -> None:
    config = TrainConfig(**settings(workspace, "modes", **{"overlap.delta": {"initial": 2, "max": 99}}))
    with pytest.raises(ConfigError, match=r"single-full: overlap.delta.max is 99"):
        comparison.our_configs(config, ["single"], ["sequential", "full"], threads=1)
    assert list(comparison.our_configs(config, ["single"], ["sequential"], threads=1)) == ["single-sequential"]
    config = TrainConfig(**settings(workspace, "dtype", runtime={"device": "cpu"}))
    mixed = config.model_copy(update={"critic": config.critic.model_copy(update={"dtype": "bfloat16"})})
    with pytest.raises(ConfigError, match="--dtype"):
        comparison.prepared(mixed, None)
    both = comparison.prepared(mixed, "bfloat16")
    assert {both.actor.dtype, both.critic.dtype, both.reward.dtype} == {"bfloat16"} and both.runtime.device == "cpu"


def test_generate_is_measured_and_an_earlier_comparison_not_written_over(workspace: Workspace, tmp_path: Path) -> None:
    comparison.require_unused(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(ConfigError, match="--out"):
        comparison.require_unused(tmp_path)
    paths = export_models(TrainConfig(**settings(workspace, "hf")), tmp_path / "models")
    found = measure_generate(Path(paths["actor"]), 2, 4, 6, "float32", repeats=1, device="cpu")
    assert found["tokens_per_s"] > 0 and found["prefill_s"] > 0
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="CUDA device"):
            require_cuda()


EOS, PAD, VOCAB, PROMPT = 2, 9, 10, 3


def test_script_needs_nothing_of_this_package() -> None:
    scripts = sorted(REQUIREMENTS.parent.glob("trl_*.py"))
    assert len(scripts) == 5
    for script in scripts:
        tree = ast.parse(script.read_text(encoding="utf-8"))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {f"{n.module}.{a.name}" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
        ours = [name for name in names if name.split(".")[0] in ("oppo_megatron", "benchmarks")]
        assert [name for name in ours if not name.startswith("benchmarks.peers.trl_")] == [], script


def test_versions_are_those_that_are_pinned_and_others_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    pins = dict(line.split("==") for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#"))
    assert set(pins) == {"torch", "trl", "transformers", "accelerate", "requests"}
    built = {**pins, "torch": pins["torch"] + "+cpu"}
    assert require_versions(REQUIREMENTS.read_text(), built.get) == built
    # TRL alone has to be as pinned on a GPU's machine; in this environment it is missing.
    found = {"trl": "1.13.0", "torch": "2.13.0"}
    with pytest.raises(PeerError) as error:
        require_versions("torch==2.13.0\n# a comment\ntrl==1.12.0\naccelerate==1.15.0\n", found.get)
    text = str(error.value)
    assert "trl 1.13.0 (pinned: 1.12.0)" in text and "accelerate none (pinned: 1.15.0)" in text
    assert "torch" not in text and "make bench-trl" in text
    pins, found = "torch==2.13.0\ntrl==1.12.0\n", {"trl": "1.12.0", "torch": "2.11.0+cu130"}
    assert require_versions(pins, found.get, ["trl"]) == found
    for wrong, said in (({**found, "trl": "1.13.0"}, "trl 1.13.0"), ({"trl": "1.12.0"}, "torch none")):
        with pytest.raises(PeerError, match=said):
            require_versions(pins, wrong.get, ["trl"])
    assert check_peer(["--check"]) == 2 and "trl none" in capsys.readouterr().err


def generate(input_ids: torch.Tensor, logits_processor: list[ForcedRows]) -> torch.Tensor:
    """A sampling loop as that of transformers: rows that drew EOS are padded, all ended rows end the loop."""
    generator = torch.Generator().manual_seed(1)
    unfinished_B = torch.ones(len(input_ids), dtype=torch.bool)
    while unfinished_B.any():
        scores_BV = torch.zeros(len(input_ids), VOCAB)
        for processor in logits_processor:
            scores_BV = processor(input_ids, scores_BV)
        drawn_B = torch.multinomial(scores_BV.softmax(-1), 1, generator=generator)[:, 0]
        drawn_B = torch.where(unfinished_B, drawn_B, PAD)
        unfinished_B &= drawn_B != EOS
        input_ids = torch.cat([input_ids, drawn_B[:, None]], 1)
    return input_ids


def test_forced_rows_end_with_eos_at_the_length_of_their_call_and_never_before() -> None:
    lengths = [5, 1, 12, 5]
    forced = ForcedRows(lengths, PROMPT, EOS, PAD)
    responses = generate(torch.full((4, PROMPT), 7), [forced])[:, PROMPT:]
    assert responses.shape[1] == max(lengths)
    for row, length in zip(responses.tolist(), lengths, strict=True):
        assert row.index(EOS) == length - 1
        assert PAD not in row[:length] and set(row[length:]) <= {PAD}
    assert forced.seconds > 0
    work = {"lengths": [3, 1, 2, 4], "eos_id": EOS, "pad_id": PAD}
    forced = ForcedGenerate(generate, work)
    prompts = torch.full((2, PROMPT), 7)
    found = [forced(input_ids=prompts)[:, PROMPT:] for _ in range(2)]
    assert [(row != PAD).sum().item() for rows in found for row in rows] == work["lengths"]
    assert forced.rows == 4 and forced.seconds > 0


def test_clock_divides_a_step_into_its_phases() -> None:
    waits: list[None] = []
    clock = Clock(lambda: waits.append(None))
    clock.begin()
    for phase in ("generate", "score", "train", "train", "score"):  # the later ones are entered already
        clock.enter(phase)
    seconds = clock.end()
    assert set(seconds) == {"step_s", "other_s", "generate_s", "score_s", "train_s"}
    assert all(value >= 0 for value in seconds.values())
    assert math.isclose(sum(value for name, value in seconds.items() if name != "step_s"), seconds["step_s"], rel_tol=1e-6)
    assert len(waits) == 6  # made, begun, three boundaries, the end
    clock = Clock(lambda: None)  # a step that skips a phase
    clock.enter("score")
    clock.enter("generate")
    with pytest.raises(PeerError, match="2 phases"):
        clock.end()
