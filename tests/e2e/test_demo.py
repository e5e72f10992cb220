"""First steps of a user: oppo demo, oppo config --init, the report of a run, and the pages of docs/ followed to the letter."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.cli.main import main
from oppo_megatron.report.run_records import read_runs
from oppo_megatron.report.sections import make_sections, write_report
from tests.support.ppo import Workspace, run_ppo_ranks
from tests.support.runs import parse, write_run
from tests.support.transcripts import CTRL_C, DOCS, follow, masked, steps, user_environment
from tests.unit.test_report import PARTS, cells, notes, section

Capture = pytest.CaptureFixture[str]
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
        left = {path.name for path in (demo / name).iterdir()}
        assert {"config.yaml", "metrics.jsonl", "trace.json", "summary.json", "weights"} <= left


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


def test_a_second_start_reuses_everything(demo: Path, capfd: Capture) -> None:
    before, report = made_at(demo), json.loads((demo / "demo.json").read_text())
    assert main(["demo", "--quick", "--out", str(demo)]) == 0
    assert made_at(demo) == before and json.loads((demo / "demo.json").read_text()) == report
    output = capfd.readouterr().out
    assert output.count("reused") == len(STAGES) and "speed-up" in output and "held-out accuracy after" in output


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


@pytest.mark.long
def test_an_algorithm_without_a_critic_takes_the_same_start(demo: Path, tmp_path: Path, capfd: Capture) -> None:
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
        [*OPPO, "demo", "--quick", "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not (tmp_path / "sft" / "stage.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 130, output + errors
    assert "continues from there" in output and "Traceback" not in errors
    assert json.loads((tmp_path / "tokenizer" / "stage.json").read_text())["finished"] is True
    assert json.loads((tmp_path / "sft" / "stage.json").read_text())["finished"] is False


def test_missing_configurations_are_one_clear_message(tmp_path: Path, capsys: Capture) -> None:
    assert main(["demo", "--out", str(tmp_path / "out"), "--configs", str(tmp_path)]) == 2
    assert "name their folder with --configs" in capsys.readouterr().err and not (tmp_path / "out").exists()


SHORT = {"sft": ["steps=2", "batch_size=4"], "train": [
    "steps=2", "rollout.batch_size=4", "rollout.max_response_tokens=16", "overlap.delta={initial: 2, max: 2}",
    "placement.mode=single", "evaluation.data.max_rows=4",
]}  # fmt: skip


def test_the_commands_that_it_prints_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "--init", "arithmetic"]) == 0
    told = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line)[1:] for line in told[told.index("next:") + 1 :]]
    assert [words[0] for words in commands] == ["data", "sft", "validate", "train", "train"]
    for words in commands:
        assert main([*words, *SHORT.get(words[0], [])]) == 0, words
    steps = [json.loads(line)["step"] for line in Path("runs/ppo/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2] and Path("runs/ppo/weights/actor/model.safetensors").is_file()


STEPS = 4


@pytest.mark.long
def test_a_real_run_has_every_part(workspace: Workspace, tmp_path: Path) -> None:
    delta = {"rule": "eq4", "initial": 4, "max": 4, "window": 1}
    overlaps = {"overlap.intra": True, "overlap.inter": True, "overlap.delta": delta}
    config = workspace.config("oppo", placement={"mode": "disaggregated"}, steps=STEPS, **overlaps)
    run_ppo_ranks(config)
    runs = [config["run_dir"], write_run(tmp_path / "made", STEPS)]
    (path,) = write_report(runs, tmp_path / "out", pictures=False)
    page = parse(path.read_text())
    assert [part.attributes["id"] for part in page.all("section")] == PARTS
    assert notes(page).keys() == {"heldout"}, "it ran without held-out rows; all else is there"
    assert len(page.all("article")) >= 12
    records = read_runs(runs)
    charts = {chart.name: chart for part in make_sections(records) for chart in part.charts}
    assert {len(line.xs) for name in ("reward-steps", "kl", "delta", "lengths") for line in charts[name].lines} == {STEPS}
    waiting = cells(section(page, "timeline"))
    assert {row.split(" ")[-1] for row in waiting if row.startswith(f"{records[0].name},")} >= {
        "actor", "critic", "reference", "reward",
    }  # fmt: skip


TUTORIAL, HH = DOCS / "tutorial.md", DOCS / "hh.md"
OTHER_ENGINE = "engine/bin/"
"""An environment with CTranslate2 next to the dialogues; OPPO_ENGINE names one."""


def said(line: str) -> str:
    """A policy's answer begins with a space, as HH's answers do; its words differ from machine to machine."""
    return "an answer" if line.startswith(" ") and line.strip() and not line.startswith("  ") else masked(line)


def test_every_command_of_the_tutorial_shows_its_output() -> None:
    assert len(list(steps(TUTORIAL))) >= 12 and all(line for _, shown in steps(TUTORIAL) for line in shown)


def test_hh_goes_the_whole_way() -> None:
    commands = [command for command, _ in steps(HH)]
    words = [tuple(command.split()[:2]) for command in commands]
    way = ["config", "data", "sft", "rm", "train", "report", "eval", "generate"]
    assert [word for word in way if ("oppo", word) in words] == way
    assert any(CTRL_C in shown for _, shown in steps(HH)) and any("--resume" in command for command in commands)
    assert any(command.startswith("python ") for command in commands)
    assert any(command.startswith(OTHER_ENGINE) for command in commands)


@pytest.mark.long
def test_the_tutorial_followed_to_the_letter(tmp_path: Path) -> None:
    environment = user_environment()
    for command, shown in steps(TUTORIAL):
        follow(command, shown, tmp_path, environment)


@pytest.mark.long
def test_hh_followed_to_the_letter(shared_data: Path, tmp_path: Path) -> None:
    dialogues = shared_data / "hh_helpful_train_subset.jsonl"
    if not dialogues.is_file():
        pytest.skip(f"no {dialogues}: put 3000 of HH's helpful pairs there")
    shutil.copy(dialogues, tmp_path / "hh.jsonl")
    engine, environment = os.environ.get("OPPO_ENGINE"), user_environment()
    if engine:
        (tmp_path / "engine").symlink_to(engine)
    for command, shown in steps(HH):
        if engine or not command.startswith(OTHER_ENGINE):
            follow(command, shown, tmp_path, environment, said)
