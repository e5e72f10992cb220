"""`oppo config`: explains keys, lists them, and prints a file with its defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from oppo_megatron.cli.main import main
from oppo_megatron.config.describe import COMMANDS, all_settings
from oppo_megatron.config.load import load_config
from oppo_megatron.config.run import TrainSettings

CONFIG = """
run_dir: run
tokenizer: {path: nowhere}
data: {path: rows.jsonl}
actor: {checkpoint: nowhere}
critic: {checkpoint: nowhere}
rewards: [{kind: verifier, name: gsm8k}, {kind: model, weight: 0.5}]
rollout: {batch_size: 8, max_response_tokens: 20}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    return "c.yaml"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["config", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["config", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


def test_a_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--explain", "runtime.timeout_s")
    commands = "oppo train, oppo sft, oppo rm, oppo dpo, oppo serve"
    assert out.splitlines()[0] == f"runtime.timeout_s  ({commands})"
    for line in ("value:   number, > 0", "unit:    s", "default: 1800.0", "time limit of a message or collective"):
        assert line in out
    assert "`eq4`, `algorithm1`" in shown(capsys, "--explain", "overlap.delta.rule")


def test_a_section_lists_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--explain", "overlap.delta")
    assert "overlap.delta.window" in out and "4 prompts" in out and "value:   section" in out
    assert "rewards[].entry_point" in shown(capsys, "--explain", "rewards")


def test_commands_that_differ_in_a_key_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--explain", "rewards.kind")
    assert out.count("rewards[].kind") == 1 and "(oppo train, oppo serve)" in out
    both = shown(capsys, "--explain", "reward")
    assert "reward  (oppo train)" in both and "reward  (oppo serve)" in both
    assert "serve" not in shown(capsys, "--explain", "reward", "--kind", "train").partition("\n")[0]


def test_an_unknown_key_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean `overlap.delta.max`" in refused(capsys, "--explain", "overlap.delta.maxx")
    assert "`actor.optimizer.lr`" in refused(capsys, "--explain", "lr")
    assert "oppo config --list" in refused(capsys, "--explain", "qqqqqq")
    assert "give CONFIG.yaml, --explain KEY, --list or --init" in refused(capsys)


def test_the_value_of_a_file_is_shown(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "here:    8\n" in shown(capsys, config, "--explain", "rollout.batch_size")
    assert "here:    12\n" in shown(capsys, config, "rollout.batch_size=12", "--explain", "rollout.batch_size")
    assert "here:    0.5\n" in shown(capsys, config, "--explain", "rewards.1.weight")
    assert "here:    [1.0, 0.5]\n" in shown(capsys, config, "--explain", "rewards.weight")
    assert "here:    null\n" in shown(capsys, config, "--explain", "rewards.7.weight")
    assert "here:    null\n" in shown(capsys, config, "--explain", "evaluation.data.path")


def test_a_file_is_printed_resolved_and_reads_back(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("whole.yaml").write_text(shown(capsys, config, "seed=7"))
    whole = load_config(TrainSettings, "whole.yaml")
    assert whole == load_config(TrainSettings, config, ["seed=7"]) and whole.seed == 7
    assert "did you mean `seed`" in refused(capsys, config, "sead=7")


def test_the_list_has_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--list")
    listed = {line.split()[0] for line in out.splitlines() if line.startswith("  ")}
    assert listed == {each.key for kind in COMMANDS.values() for each in all_settings(kind) if each.section is None}
    assert "oppo sft:" not in shown(capsys, "--list", "--kind", "train")
    assert max(map(len, out.splitlines())) <= 140
