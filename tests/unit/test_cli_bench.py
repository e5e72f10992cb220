"""`oppo bench`: its help, its arguments, and what they do to a configuration."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import pytest

from oppo_megatron.bench.suite import BenchStopped
from oppo_megatron.cli.bench import add_arguments, chosen, load_base, run
from oppo_megatron.cli.lengths import forced_lengths
from oppo_megatron.cli.main import main
from oppo_megatron.cli.parser import counts
from oppo_megatron.errors import ConfigError
from tests.support.commands import LEAST, enter

CONFIG = LEAST.replace("max_response_tokens: 20}", "max_response_tokens: 20, forced_lengths: [4, 0.5]}")
TRACE = "GeneratedTokens,my tokens\n5,1\n9,2\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a trace.csv").write_text(TRACE)
    return enter(tmp_path, monkeypatch, CONFIG)


def parsed(config: Path, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["overlap", str(config), *arguments])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("overlap", "--steps --repeats --prompt-tokens --trace --lognormal --modes --placements --out"),
        ("decode", "--batch --new --peers --lognormal --out"),
        ("gpu", "--sizes --seconds --trl --out"),
        ("", "overlap decode gpu docs/benchmarks.md benchmarks/README.md"),
    ],
)
def test_each_kind_explains_itself(kind: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *kind.split(), "--help"])
    assert end.value.code == 0 and not set(words.split()) - set(capsys.readouterr().out.replace(";", " ").split())


def test_common_arguments_become_settings(config: Path) -> None:
    base = load_base(parsed(config, "seed=5", "--steps", "4", "--out", "o", "--prompt-tokens", "7"))
    assert (base.seed, base.steps, base.run_dir) == (5, 4, Path("o"))
    assert base.data.max_prompt_tokens == 7 and base.data.path == Path("o/inputs/prompts.jsonl")
    assert base.rollout.forced_lengths == [4, 0.5]
    assert load_base(parsed(config)).steps == 3


def test_forced_lengths_take_the_place_of_the_files(config: Path) -> None:
    drawn = load_base(parsed(config, "--lognormal", "6,1.5")).rollout.lengths
    assert drawn is not None and (drawn.median, drawn.sigma, drawn.trace) == (6, 1.5, None)
    traced = load_base(parsed(config, "--trace", "a trace.csv")).rollout.lengths
    assert traced is not None and (traced.median, traced.scale) == (None, "auto")
    assert traced.trace == Path("a trace.csv") and traced.column is None
    column = load_base(parsed(config, "--trace", "a trace.csv", "--trace-column", "my tokens")).rollout.lengths
    assert column is not None and column.column == "my tokens"
    with pytest.raises(ConfigError, match="--trace-column my tokens names a column of no file"):
        forced_lengths(parsed(config, "--trace-column", "my tokens"))


def test_wrong_arguments_are_refused_before_anything_starts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        ("--modes", "full,fill"): "--modes names fill; choose from sequential, intra",
        ("--placements", "pairs"): "--placements names pairs; choose from pair, single, replicas",
    }
    for arguments, message in wrong.items():
        assert main(["bench", "overlap", str(config), "--out", "out", *arguments]) == 2
        assert message in capsys.readouterr().err
    for arguments in (["--steps", "0"], ["--lognormal", "5"], ["--repeats", "x"], ["--trace", "t", "--lognormal", "1,1"]):
        with pytest.raises(SystemExit) as end:
            main(["bench", "overlap", str(config), *arguments])
        assert end.value.code == 2
    assert not Path("out").exists()


def test_an_earlier_benchmark_is_not_overwritten(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out", "overlap.json").write_text("{}")
    assert main(["bench", "overlap", str(config), "--out", "out", "--prompt-tokens", "4"]) == 2
    assert "overlap.json holds the figures of an earlier benchmark" in capsys.readouterr().err
    assert [path.name for path in Path("out").iterdir()] == ["overlap.json"], "its inputs stay as they are"


def test_a_benchmark_that_is_asked_to_stop_ends_what_it_started(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(args: argparse.Namespace) -> int:
        raise BenchStopped("asked to stop in the run a")

    with pytest.raises(SystemExit) as end:
        run(argparse.Namespace(measure=lambda args: os.kill(os.getpid(), signal.SIGTERM)))
    assert end.value.code == run(argparse.Namespace(measure=stopped)) == 143
    assert capsys.readouterr().err == "oppo bench: asked to stop in the run a\n"


def test_ranks_of_a_launcher_are_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "overlap", str(config)]) == 2
    assert "started 2 ranks, but `oppo bench` starts the ranks of each run itself" in capsys.readouterr().err


def test_lists_of_arguments() -> None:
    assert counts("1,8") == [1, 8]
    for text in ("0", "1,"):
        with pytest.raises(argparse.ArgumentTypeError):
            counts(text)
    assert chosen("--modes", None, ["a", "b"]) == ["a", "b"] and chosen("--modes", ["b", "b"], ["a", "b"]) == ["b"]
    assert chosen("--modes", ["b", "all"], ["a", "b"]) == ["a", "b"]
    with pytest.raises(ConfigError, match="--modes names ''; choose from a, b, or all"):
        chosen("--modes", ["a", ""], ["a", "b"])
