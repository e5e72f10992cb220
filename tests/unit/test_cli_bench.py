"""`oppo bench` and `oppo plan measure`: arguments, refusals, placements that are measured, runs that fail or are stopped."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.bench.suite import BenchStopped
from oppo_megatron.cli.bench import add_arguments, chosen, load_base, run
from oppo_megatron.cli.lengths import forced_lengths
from oppo_megatron.cli.load import load_settings
from oppo_megatron.cli.main import main
from oppo_megatron.cli.measure import START, describe_work, failure, run_logged, this_machine
from oppo_megatron.cli.parser import counts
from oppo_megatron.cli.plan.measure import report
from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.cores import usable_cores
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.candidates import Machine, Run, choose, find_candidates, fingerprint, measure_all, to_record
from tests.support.commands import LEAST, enter, refused

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


@pytest.mark.parametrize(("kind", "words"), [
    ("overlap", "--steps --repeats --prompt-tokens --trace --lognormal --modes --placements --out"),
    ("decode", "--batch --new --peers --lognormal --out"), ("gpu", "--sizes --seconds --trl --out"),
    ("", "overlap decode gpu docs/benchmarks.md benchmarks/README.md"),
])  # fmt: skip
def test_each_kind_explains_itself(kind: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *kind.split(), "--help"])
    assert end.value.code == 0 and not set(words.split()) - set(capsys.readouterr().out.replace(";", " ").split())


def test_arguments_become_settings_and_forced_lengths_take_the_place_of_the_files(config: Path) -> None:
    base = load_base(parsed(config, "seed=5", "--steps", "4", "--out", "o", "--prompt-tokens", "7"))
    assert (base.seed, base.steps, base.run_dir) == (5, 4, Path("o"))
    assert base.data.max_prompt_tokens == 7 and base.data.path == Path("o/inputs/prompts.jsonl")
    assert base.rollout.forced_lengths == [4, 0.5] and load_base(parsed(config)).steps == 3
    drawn = load_base(parsed(config, "--lognormal", "6,1.5")).rollout.lengths
    assert (drawn.median, drawn.sigma, drawn.trace) == (6, 1.5, None)
    traced = load_base(parsed(config, "--trace", "a trace.csv")).rollout.lengths
    assert (traced.median, traced.scale, traced.trace, traced.column) == (None, "auto", Path("a trace.csv"), None)
    named = parsed(config, "--trace", "a trace.csv", "--trace-column", "my tokens")
    assert load_base(named).rollout.lengths.column == "my tokens"
    with pytest.raises(ConfigError, match="--trace-column my tokens names a column of no file"):
        forced_lengths(parsed(config, "--trace-column", "my tokens"))


def test_wrong_arguments_and_an_earlier_benchmark_are_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modes = refused(capsys, "bench", "overlap", config, "--out", "out", "--modes", "full,fill")
    assert "--modes names fill; choose from sequential, intra" in modes
    placements = refused(capsys, "bench", "overlap", config, "--out", "out", "--placements", "pairs")
    assert "--placements names pairs; choose from pair, single, replicas" in placements
    for arguments in (["--steps", "0"], ["--lognormal", "5"], ["--repeats", "x"], ["--trace", "t", "--lognormal", "1,1"]):
        with pytest.raises(SystemExit) as end:
            main(["bench", "overlap", str(config), *arguments])
        assert end.value.code == 2
    assert not Path("out").exists()
    Path("out").mkdir()
    Path("out", "overlap.json").write_text("{}")
    said = refused(capsys, "bench", "overlap", config, "--out", "out", "--prompt-tokens", "4")
    assert "overlap.json holds an earlier benchmark, which is not overwritten" in said
    assert [path.name for path in Path("out").iterdir()] == ["overlap.json"], "its inputs stay as they are"


def test_a_benchmark_that_is_asked_to_stop_ends_what_it_started(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(args: argparse.Namespace) -> int:
        raise BenchStopped("asked to stop in the run a")

    with pytest.raises(SystemExit) as end:
        run(argparse.Namespace(measure=lambda args: os.kill(os.getpid(), signal.SIGTERM)))
    assert end.value.code == run(argparse.Namespace(measure=stopped)) == 143
    assert capsys.readouterr().err == "oppo bench: asked to stop in the run a\n"


def test_lists_of_arguments() -> None:
    assert counts("1,8") == [1, 8]
    for text in ("0", "1,"):
        with pytest.raises(argparse.ArgumentTypeError):
            counts(text)
    assert chosen("--modes", None, ["a", "b"]) == ["a", "b"] and chosen("--modes", ["b", "b"], ["a", "b"]) == ["b"]
    assert chosen("--modes", ["b", "all"], ["a", "b"]) == ["a", "b"]
    with pytest.raises(ConfigError, match="--modes names ''; choose from a, b, or all"):
        chosen("--modes", ["a", ""], ["a", "b"])


AUTO = LEAST + "placement: {mode: auto}\nruntime: {device: cpu}\n"
LISTED = ("single", "1 rank"), *((name, "2 ranks") for name in (
    "disaggregated 1 | 1", "disaggregated 1 | 1 (reference: actor)", "colocated dp 2",
))  # fmt: skip


@pytest.fixture
def auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return enter(tmp_path, monkeypatch, AUTO)


def write_record(auto: Path) -> dict[str, Any]:
    settings, machine = load_settings("train", auto, []), Machine("cpu", usable_cores())
    options = find_candidates(settings, machine)
    trials = measure_all(options.candidates, lambda c, turn: Run(2, 100, 3.0 + (c.name != "disaggregated 1 | 1"), 1.0, 1.0))
    record = to_record(fingerprint(settings, machine), options, trials, choose(options, trials))
    Path("run").mkdir()
    Path("run/placement.json").write_text(json.dumps(record))
    return record


@pytest.mark.parametrize("command", [["validate", "--skip-data"], ["train", "--dry-run"], ["plan", "schedule"]])
def test_candidates_are_listed_and_the_measured_used(auto: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert main([*command, str(auto)]) == 0
    out = capsys.readouterr().out
    assert "`oppo train` would first measure these on" in out and "3 steps each" in out
    assert all(f"  {name:38}  {ranks}\n" in out for name, ranks in LISTED) and not Path("run").exists()
    write_record(auto)
    assert main([*command, str(auto)]) == 0
    captured = capsys.readouterr()
    assert "placement: disaggregated 1 | 1, as measured before (run/placement.json)" in captured.err
    assert "would first measure" not in captured.out
    if command[0] == "train":
        assert "mode: disaggregated" in captured.out and "mode: auto" not in captured.out
        assert main([*command, str(auto), "rollout.batch_size=16"]) == 0
        assert "would first measure these" in capsys.readouterr().out, "another configuration"


def test_a_run_uses_what_was_measured(auto: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(auto)
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr("oppo_megatron.cli.run.launch", lambda *arguments, **_: calls.append(arguments) or 0)
    assert main(["train", str(auto), "steps=5"]) == 0
    [(kind, launched, world_size)] = calls
    assert (kind, launched.placement.mode, launched.steps, world_size) == ("train", "disaggregated", 5, 2)


@pytest.mark.parametrize("text", ["{", "[]", '{"key": 3}x', "{}"])
def test_a_broken_record_is_named(auto: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    Path("run").mkdir()
    Path("run/placement.json").write_text(text)
    said = refused(capsys, "train", auto, "--dry-run")
    assert "run/placement.json is not what `oppo` wrote" in said and "remove it to measure again" in said


@pytest.mark.parametrize(("command", "says"), [
    ("train", "the launcher has started 2 ranks.*`oppo plan measure CONFIG`"),
    ("plan measure", "the launcher has started 2 ranks.*`oppo plan measure CONFIG`"),
    ("bench overlap", "started 2 ranks, but `oppo bench` starts the ranks of each run itself"),
])  # fmt: skip
def test_ranks_of_a_launcher_are_refused(
    auto: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, says: str
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert re.search(says, refused(capsys, *command.split(), auto), re.DOTALL)


def test_what_cannot_be_measured_is_refused(auto: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "bench", "overlap", auto)
    assert "placement.mode is auto, which `oppo train` measures" in said, "commands that do not measure say who does"
    said = refused(capsys, "validate", "--skip-data", auto, "critic.ranks=1", "ppo.minibatches=3")
    assert "2 problems" in said and "critic.ranks is 1, but placement.mode auto chooses" in said
    Path("run").mkdir()
    Path("run/summary.json").write_text("{}")
    for command in (["train"], ["plan", "measure"]):
        assert "holds a finished run" in refused(capsys, *command, auto)
    assert not Path("run/placement").exists()


def test_the_report_has_the_table_the_reason_and_the_lines_to_paste(auto: Path) -> None:
    record = write_record(auto)
    record["candidates"][0] = {"name": "single", "placement": {}, "ranks": 1, "failure": "ended by SIGKILL", "runs": []}
    lines = "\n".join(report(record))
    table = [line.split() for line in lines.splitlines()]
    assert ["disaggregated", "1", "|", "1", "2", "1", "1.50", "0.50", "0.50", "0.50", "33.33", "1.00", "0.00"] in table
    assert "failed: single: ended by SIGKILL" in lines and "needs 33.3% more time" in lines
    assert lines.endswith("placement:\n  mode: disaggregated\n  actor: {tp: 1, pp: 1, dp: 1}\n  scorer: {tp: 1, pp: 1, dp: 1}\n")
    auto.write_text(AUTO.replace("placement: {mode: auto}", lines[lines.index("placement:\n") :]))
    assert main(["validate", "--skip-data", str(auto)]) == 0


def test_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo_megatron.cli.measure.cuda_devices", lambda: 0)
    for device in ("auto", "cpu"):
        assert this_machine(RuntimeConfig(device=device)) == Machine("cpu", usable_cores())
    with pytest.raises(ConfigError, match="runtime.device is 'cuda', but torch finds no CUDA device"):
        this_machine(RuntimeConfig(device="cuda"))
    monkeypatch.setattr("oppo_megatron.cli.measure.cuda_devices", lambda: 4)
    assert this_machine(RuntimeConfig()) == Machine("cuda", 4)
    assert this_machine(RuntimeConfig(device="cpu")).device == "cpu"


TRACEBACK = """Traceback (most recent call last):
  File "x.py", line 1, in f
ValueError: first

During handling of the above exception, another exception occurred:
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
[W1] some warning at exit
"""


@pytest.mark.parametrize(("code", "output", "expected"), [
    (2, "warning\noppo train: 2 problems:\n  - no\n", "2 problems: - no"),
    (1, TRACEBACK, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
    (-9, "", "ended by SIGKILL, which mostly means that memory ran out"), (-6, "terminate called", "ended by SIGABRT"),
    (1, "nothing of use", "ended with exit code 1"),
])  # fmt: skip
def test_why_a_run_failed(code: int, output: str, expected: str) -> None:
    assert failure(code, output) == expected


def test_a_measuring_run_is_this_command_line_with_its_imports_and_output_in_a_log(tmp_path: Path) -> None:
    (tmp_path / "reached.py").write_text("print('found')")
    start = START.replace("sys.exit", "import reached; sys.exit")
    command = [sys.executable, "-c", start, json.dumps([*sys.path, str(tmp_path)]), "train", "none.yaml"]
    before = signal.getsignal(signal.SIGTERM)
    assert run_logged(command, tmp_path / "log") == 2
    said = (tmp_path / "log").read_text()
    assert "found" in said and "none.yaml" in said, said
    assert signal.getsignal(signal.SIGTERM) == before


CHILD = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
PARENT = """
import sys
from pathlib import Path
from oppo_megatron.cli.measure import run_logged
run_logged([sys.executable, "-c", sys.argv[1], sys.argv[2]], Path(sys.argv[2] + ".log"))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -2)])
def test_a_signal_ends_the_measuring_run_too(tmp_path: Path, number: int, code: int) -> None:
    started = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(started)], stderr=subprocess.DEVNULL)
    while not (started.exists() and started.read_text()):
        assert parent.poll() is None
        time.sleep(0.02)
    parent.send_signal(number)
    assert parent.wait(timeout=30) == code
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_threads_that_leave_cores_idle_are_told_of(auto: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> str:
        settings = load_settings("train", auto, [])
        return describe_work(settings, find_candidates(settings, Machine("cpu", 2)))

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "idle" not in work()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS=1 leaves cores idle in single: unset it" in work()
