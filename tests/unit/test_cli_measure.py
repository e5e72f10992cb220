"""`placement.mode: auto` at the command line, up to the measuring runs: messages, reuse and errors; how a run ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.cli.load import load_settings
from oppo_megatron.cli.main import main
from oppo_megatron.cli.measure import START, describe_work, failure, run_logged, this_machine
from oppo_megatron.cli.plan.measure import report
from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.cores import usable_cores
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.candidates import Machine, Run, choose, find_candidates, fingerprint, measure_all, to_record
from tests.support.commands import LEAST, enter

CONFIG = LEAST + "placement: {mode: auto}\nruntime: {device: cpu}\n"
LISTED = [
    f"{name:38}  {ranks}"
    for name, ranks in (
        ("single", "1 rank"),
        ("disaggregated 1 | 1", "2 ranks"),
        ("disaggregated 1 | 1 (reference: actor)", "2 ranks"),
        ("colocated dp 2", "2 ranks"),
    )
]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter(tmp_path, monkeypatch, CONFIG)


def write_record(config: Path) -> dict[str, Any]:
    settings = load_settings("train", config, [])
    assert isinstance(settings, TrainSettings)
    machine = Machine("cpu", usable_cores())
    options = find_candidates(settings, machine)
    trials = measure_all(options.candidates, lambda c, turn: Run(2, 100, 3.0 + (c.name != "disaggregated 1 | 1"), 1.0, 1.0))
    record = to_record(fingerprint(settings, machine), options, trials, choose(options, trials))
    Path("run").mkdir()
    Path("run/placement.json").write_text(json.dumps(record))
    return record


@pytest.mark.parametrize("command", [["validate", "--skip-data"], ["train", "--dry-run"], ["plan", "schedule"]])
def test_candidates_are_listed_and_a_measured_one_is_used(
    config: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main([*command, str(config)]) == 0
    out = capsys.readouterr().out
    assert "`oppo train` would first measure these on" in out and "3 steps each" in out
    assert all(f"  {line}\n" in out for line in LISTED) and not Path("run").exists()
    write_record(config)
    assert main([*command, str(config)]) == 0
    captured = capsys.readouterr()
    assert "placement: disaggregated 1 | 1, as measured before (run/placement.json)" in captured.err
    assert "would first measure" not in captured.out
    if command[0] == "train":
        assert "mode: disaggregated" in captured.out and "mode: auto" not in captured.out
        assert main([*command, str(config), "rollout.batch_size=16"]) == 0
        assert "would first measure these" in capsys.readouterr().out, "another configuration"


def test_a_run_uses_what_was_measured(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(config)
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr("oppo_megatron.cli.run.launch", lambda *arguments, **_: calls.append(arguments) or 0)
    assert main(["train", str(config), "steps=5"]) == 0
    [(_, launched, world_size)] = calls
    assert (launched.placement.mode, launched.steps, world_size) == ("disaggregated", 5, 2)


@pytest.mark.parametrize("text", ["{", "[]", '{"key": 3}x', "{}"])
def test_a_broken_record_is_named(config: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    Path("run").mkdir()
    Path("run/placement.json").write_text(text)
    assert main(["train", str(config), "--dry-run"]) == 2
    assert "run/placement.json is not what `oppo` wrote" in (err := capsys.readouterr().err)
    assert "remove it to measure again" in err


@pytest.mark.parametrize("command", [["train"], ["plan", "measure"]])
def test_ranks_of_a_launcher_cannot_be_placed(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*command, str(config)]) == 2
    err = capsys.readouterr().err
    assert "the launcher has started 2 ranks" in err and "`oppo plan measure CONFIG`" in err


def test_commands_that_do_not_measure_say_who_does(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "overlap", str(config)]) == 2
    assert "placement.mode is auto, which `oppo train` settles" in capsys.readouterr().err


def test_a_finished_run_is_not_measured(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/summary.json").write_text("{}")
    for command in (["train"], ["plan", "measure"]):
        assert main([*command, str(config)]) == 2
        assert "holds a finished run" in capsys.readouterr().err
    assert not Path("run/placement").exists()


def test_written_layouts_are_refused_with_all_else(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--skip-data", str(config), "critic.ranks=1", "ppo.minibatches=3"]) == 2
    err = capsys.readouterr().err
    assert "2 problems" in err and "critic.ranks is 1, but placement.mode auto chooses" in err


def test_the_report_has_the_table_the_reason_and_the_lines_to_paste(config: Path) -> None:
    record = write_record(config)
    record["candidates"][0] = {"name": "single", "placement": {}, "ranks": 1, "failure": "ended by SIGKILL", "runs": []}
    lines = "\n".join(report(record))
    table = [line.split() for line in lines.splitlines()]
    assert ["disaggregated", "1", "|", "1", "2", "1", "1.50", "0.50", "0.50", "0.50", "33.33", "1.00", "0.00"] in table
    assert "failed: single: ended by SIGKILL" in lines and "needs 33.3% more time" in lines
    assert lines.endswith("placement:\n  mode: disaggregated\n  actor: {tp: 1, pp: 1, dp: 1}\n  scorer: {tp: 1, pp: 1, dp: 1}\n")
    config.write_text(CONFIG.replace("placement: {mode: auto}", lines[lines.index("placement:\n") :]))
    assert main(["validate", "--skip-data", str(config)]) == 0


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


@pytest.mark.parametrize(
    ("code", "output", "expected"),
    [
        (2, "warning\noppo train: 2 problems:\n  - no\n", "2 problems: - no"),
        (1, TRACEBACK, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        (-9, "", "ended by SIGKILL, which mostly means that memory ran out"),
        (-6, "terminate called", "ended by SIGABRT"),
        (1, "nothing of use", "ended with exit code 1"),
    ],
)
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


def test_threads_that_leave_cores_idle_are_told_of(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> str:
        settings = load_settings("train", config, [])
        assert isinstance(settings, TrainSettings)
        return describe_work(settings, find_candidates(settings, Machine("cpu", 2)))

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "idle" not in work()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS=1 leaves cores idle in single: unset it" in work()
