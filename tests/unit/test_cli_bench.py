"""`oppo bench`: its help, its arguments, and what they do to a configuration."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import pytest

from oppo_megatron.bench.outcomes import BenchStopped
from oppo_megatron.cli.bench import KINDS, run
from oppo_megatron.cli.bench.common import chosen, load_base, numbers, whole_numbers
from oppo_megatron.cli.lengths import counts, forced_lengths
from oppo_megatron.cli.main import main
from oppo_megatron.errors import ConfigError

CONFIG = """
run_dir: run
steps: 9
tokenizer: {path: tok}
data: {path: rows.jsonl, max_prompt_tokens: 20}
actor: {init: {model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
               num_attention_heads: 4}}
critic: {init: "${actor.init}"}
reward: {init: "${actor.init}"}
rewards: [{kind: model}]
rollout: {batch_size: 8, max_response_tokens: 20}
debug: {forced_lengths: [4, 0.5]}
"""
TRACE = "GeneratedTokens,my tokens\n5,1\n9,2\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tok").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1"}\n')
    (tmp_path / "a trace.csv").write_text(TRACE)
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    return path


def parsed(config: Path, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    KINDS["overlap"].add_arguments(parser)
    return parser.parse_args([str(config), *arguments])


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_explains_itself(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", kind, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert KINDS[kind].ABOUT.splitlines()[0] in out
    of_runs = {"--steps", "--repeats", "--prompt-tokens", "--trace", "--lognormal"}
    studies = ("laws", "machine", "real", "paper", "scale-study")
    without = ("decode", "gpu", "seeds", *studies)  # these have no configuration
    options = {"--out"} | (set() if kind in without else of_runs)
    own = {
        "planning": {"--ranks", "--sequences"},
        "prices": {"--cluster", "--costs", "--lognormal"},
    }  # these make no runs
    options = own.get(kind, options)
    assert all(option in out for option in options)


def test_the_table_of_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert all(f"{kind} {module.HELP}" in out for kind, module in KINDS.items()) and "docs/benchmarks.md" in out


def test_common_arguments_become_settings(config: Path) -> None:
    base = load_base(parsed(config, "seed=5", "--steps", "4", "--out", "o", "--prompt-tokens", "7"))
    assert (base.seed, base.steps, base.run_dir) == (5, 4, Path("o"))
    assert base.data.max_prompt_tokens == 7 and base.data.path == Path("o/inputs/prompts.jsonl")
    assert base.debug.forced_lengths == [4, 0.5]
    assert load_base(parsed(config)).steps == 9


def test_forced_lengths_take_the_place_of_the_files(config: Path) -> None:
    drawn = load_base(parsed(config, "--lognormal", "6,1.5")).debug.lengths
    assert drawn is not None and (drawn.median, drawn.sigma, drawn.trace) == (6, 1.5, None)
    traced = load_base(parsed(config, "--trace", "a trace.csv")).debug.lengths
    assert traced is not None and (traced.median, traced.scale) == (None, "auto")
    assert traced.trace == Path("a trace.csv") and traced.column is None
    column = load_base(parsed(config, "--trace", "a trace.csv", "--trace-column", "my tokens")).debug.lengths
    assert column is not None and column.column == "my tokens"
    with pytest.raises(ConfigError, match="--trace-column my tokens names a column of no file"):
        forced_lengths(parsed(config, "--trace-column", "my tokens"))


def test_wrong_arguments_are_told_before_anything_starts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        ("overlap", "--modes", "full,fill"): "--modes names fill; choose from sequential, intra",
        ("overlap", "--placements", "pairs"): "--placements names pairs; choose from pair, single, replicas",
        ("delta", "--rules", "fixed"): "--rules names fixed",
        ("delta", "overlap.inter=false"): "set overlap.inter=true",
        ("chunk", "overlap.intra=false"): "set overlap.intra=true",
        ("chunk", "--sizes", "99"): "none is within rollout.max_response_tokens, 20",
        ("weave", "--modes", "x"): "--modes names x",
        ("scaling", "--axis", "batch", "overlap.delta.max=99"): "overlap.delta.max is 99",
    }
    for (kind, *arguments), message in wrong.items():
        assert main(["bench", kind, str(config), "--out", "out", *arguments]) == 2
        assert message in capsys.readouterr().err
    for arguments in (
        ["--steps", "0"],
        ["--lognormal", "5"],
        ["--repeats", "x"],
        ["--trace", "t", "--lognormal", "1,1"],
    ):
        with pytest.raises(SystemExit) as end:
            main(["bench", "overlap", str(config), *arguments])
        assert end.value.code == 2
    assert not Path("out").exists()


def test_an_earlier_benchmark_is_not_written_over(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out", "delta.json").write_text("{}")
    assert main(["bench", "delta", str(config), "--out", "out", "--prompt-tokens", "4"]) == 2
    assert "delta.json holds the figures of an earlier benchmark" in capsys.readouterr().err
    assert [path.name for path in Path("out").iterdir()] == ["delta.json"], "its inputs stay as they are"


def test_a_benchmark_that_is_told_to_stop_ends_what_it_started(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(args: argparse.Namespace) -> int:
        raise BenchStopped("told to stop in the run a")

    with pytest.raises(SystemExit) as end:
        run(argparse.Namespace(measure=lambda args: os.kill(os.getpid(), signal.SIGTERM)))
    assert end.value.code == run(argparse.Namespace(measure=stopped)) == 143
    assert capsys.readouterr().err == "oppo bench: told to stop in the run a\n"


def test_ranks_of_a_launcher_are_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "overlap", str(config)]) == 2
    assert "started 2 ranks, but `oppo bench` starts those of each run itself" in capsys.readouterr().err


def test_lists_of_arguments() -> None:
    assert counts("1,8") == [1, 8] and whole_numbers("0,4") == [0, 4] and numbers("0.5,2") == [0.5, 2.0]
    for parse, text in (
        (counts, "0"),
        (counts, "1,"),
        (whole_numbers, "-1"),
        (numbers, "1,x"),
        (numbers, "0"),
        (numbers, "inf"),
    ):
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)
    assert chosen("--modes", None, ["a", "b"]) == ["a", "b"] and chosen("--modes", ["b", "b"], ["a", "b"]) == ["b"]
    assert chosen("--modes", ["b", "all"], ["a", "b"]) == ["a", "b"]
    with pytest.raises(ConfigError, match="--modes names ''; choose from a, b, or all"):
        chosen("--modes", ["a", ""], ["a", "b"])
