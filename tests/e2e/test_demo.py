"""`oppo demo --quick`: the whole chain, what it leaves, and what a second start reuses."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.cli.main import main

STAGES = ["data", "tokenizer", "sft", "rm", "sequential", "oppo"]
FIGURES = {"step_s", "scoring_hidden", "reward_first", "reward_last", "deferred"} | {
    f"{figure}_{when}" for figure in ("accuracy", "error") for when in ("before", "after")
}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "arithmetic"
OPPO = [sys.executable, "-c", "import sys; from oppo_megatron.cli.main import main; sys.exit(main())"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    assert main(["demo", "--quick", "--out", str(out)]) == 0
    return out


def made_at(out: Path) -> dict[str, str]:
    return {name: json.loads((out / name / "stage.json").read_text())["identity"] for name in STAGES}


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_what_it_leaves(demo: Path) -> None:
    assert {"demo.json", "reward.png", "timeline.png", *STAGES} <= {path.name for path in demo.iterdir()}
    for picture in ("reward.png", "timeline.png"):
        assert (demo / picture).read_bytes().startswith(b"\x89PNG")
    for name in ("sft", "rm", "sequential", "oppo"):
        assert {"config.yaml", "metrics.jsonl", "trace.json", "summary.json", "weights"} <= {
            path.name for path in (demo / name).iterdir()
        }


def test_figures(demo: Path) -> None:
    report = json.loads((demo / "demo.json").read_text())
    sequential, oppo = report["sequential"], report["oppo"]
    assert set(sequential) == set(oppo) == FIGURES
    assert report["speedup"] == pytest.approx(sequential["step_s"] / oppo["step_s"])
    assert report["solution_tokens"]["p99"] >= 5 * report["solution_tokens"]["median"]
    for name, figures in (("sequential", sequential), ("oppo", oppo)):
        steady = lines(demo / name)[1:]
        assert figures["step_s"] == pytest.approx(sum(line["step_s"] for line in steady) / len(steady))
        assert 0 <= figures["scoring_hidden"] <= 1
    assert set(sequential["deferred"]) == {"0"}, "plain PPO carries nothing"
    assert sequential["scoring_hidden"] < 0.1, "plain PPO stands still while it is scored"


def test_both_runs_train_as_much_from_the_same_start(demo: Path) -> None:
    runs = {name: lines(demo / name) for name in ("sequential", "oppo")}
    assert len(runs["sequential"]) == len(runs["oppo"])
    report = json.loads((demo / "demo.json").read_text())
    assert report["sequential"]["accuracy_before"] == report["oppo"]["accuracy_before"]
    assert sum(report["sequential"]["deferred"].values()) == sum(report["oppo"]["deferred"].values())
    assert any(line["carried"] for line in runs["oppo"]), "OPPO carries rollouts over steps"


def test_a_second_start_reuses_everything(demo: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before, report = made_at(demo), json.loads((demo / "demo.json").read_text())
    assert main(["demo", "--quick", "--out", str(demo)]) == 0
    assert made_at(demo) == before and json.loads((demo / "demo.json").read_text()) == report
    output = capfd.readouterr().out
    assert output.count("reused") == len(STAGES)
    assert "speed-up" in output and "held-out accuracy after" in output


@pytest.mark.long
def test_the_examples_of_process_rewards_go_on_from_a_demo(demo: Path, tmp_path: Path) -> None:
    for name in ("data", "tokenizer", "sft"):
        shutil.copytree(demo / name, tmp_path / "runs" / "demo" / name)
    writer = [sys.executable, str(EXAMPLES / "write_steps.py"), "runs/demo/data/steps.jsonl", "200"]
    few = {
        "prm": ["rm", str(EXAMPLES / "prm.yaml"), "steps=3", "epochs=1", "evaluation.every_steps=3"],
        "ppo_process": ["train", str(EXAMPLES / "ppo_process.yaml"), "steps=2", "rollout.batch_size=8", "evaluation=null"],
    }
    for command in (writer, *([*OPPO, *arguments] for arguments in few.values())):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    trained = lines(tmp_path / "runs" / "demo" / "process")
    assert len(trained) == 2 and set(trained[-1]["reward_parts"]) == {"arithmetic", "process"}


def test_an_algorithm_without_a_critic_takes_the_same_start(
    demo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("data", "tokenizer", "sft"):
        shutil.copytree(demo / name, tmp_path / name)
    assert main(["demo", "--quick", "--algorithm", "dapo", "--out", str(tmp_path)]) == 0
    output = capfd.readouterr().out
    assert output.count("reused") == 3 and "[5/5] dapo: OPPO, both overlaps" in output
    assert "DAPO on arithmetic" in output and "scoring time hidden" not in output
    assert not (tmp_path / "rm").exists() and not (tmp_path / "oppo" / "weights" / "critic").exists()
    report = json.loads((tmp_path / "demo.json").read_text())
    before = json.loads((demo / "demo.json").read_text())["oppo"]["accuracy_before"]
    for name in ("sequential", "oppo"):
        assert report[name]["accuracy_before"] == before and report[name]["scoring_hidden"] is None
        assert sum(report[name]["deferred"].values()) == 3 * 16
    assert set(report["sequential"]["deferred"]) == {"0"} and any(line["carried"] for line in lines(tmp_path / "oppo"))


@pytest.mark.long
def test_a_removed_stage_is_made_again_with_those_behind_it(demo: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(demo, out)
    shutil.rmtree(out / "oppo")
    before = made_at(demo)
    assert main(["demo", "--quick", "--out", str(out)]) == 0
    assert {name for name, identity in made_at(out).items() if identity != before[name]} == {"oppo"}


def test_an_interrupted_demo_says_how_to_go_on(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*OPPO, "demo", "--quick", "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    while not (tmp_path / "sft" / "stage.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 130, output + errors
    assert "continues from there" in output and "Traceback" not in errors
    assert json.loads((tmp_path / "tokenizer" / "stage.json").read_text())["finished"] is True
    assert json.loads((tmp_path / "sft" / "stage.json").read_text())["finished"] is False


def test_missing_configurations_are_one_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path / "out"), "--configs", str(tmp_path)]) == 2
    assert "name their folder with --configs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
