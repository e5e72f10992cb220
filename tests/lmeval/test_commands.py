"""`oppo eval --tasks`, and tasks during training: before and after side by side, continued calls, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: make test-lmeval")

import torch
import yaml
from safetensors.torch import load_file

from oppo_megatron.cli.main import main
from tests.lmeval.data import write_data, write_policy
from tests.support.commands import refused, shown, work_in
from tests.support.ppo import SHAPE, Workspace
from tests.support.ranks import run_ranks

TASKS = ("arc_easy@2", "gsm8k@1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("tasks") / "data")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies")
    for seed, name in enumerate(("before", "after")):
        write_policy(folder / name, seed)
    return folder


@pytest.fixture
def command(policies: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    work_in(policies, monkeypatch)
    return ["eval", "before", "after", "--task-data", str(data), "--tasks"]


def test_two_policies_are_in_one_table_with_errors_and_an_interrupted_call_goes_on(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    table = shown(capsys, *command, *TASKS, "--max-prompts", "8", "--out", out).splitlines()
    assert table[0].split() == ["before", "after", "minus", "before"]
    rows = [line.split("  ")[0] for line in table[1:]]
    metrics = ["arc_easy@2 acc", "arc_easy@2 acc_norm"]
    assert rows == [*metrics, "gsm8k@1 exact_match strict-match", "gsm8k@1 exact_match flexible-extract"]
    record = json.loads((out / "eval.json").read_text())
    first, second = record["policies"]
    for name in metrics:
        before, after = ([result_of(out, place, name)["documents"][str(i)] for i in range(8)] for place in (0, 1))
        mean, error = statistics(before)
        assert first["metrics"][name] == pytest.approx({"mean": mean, "error": error, "n": 8})
        mean, error = statistics([b - a for a, b in zip(before, after, strict=True)])
        assert second["difference"][name] == pytest.approx({"mean": mean, "error": error, "n": 8})
    files = sorted(path.name for path in out.iterdir())
    lost = out / "gsm8k@1-1.json"
    lost.unlink()
    times = {name: (out / name).stat().st_mtime_ns for name in files if name.endswith(("-0.json", "@2-1.json"))}
    assert json.loads(shown(capsys, *command, *TASKS, "--max-prompts", "8", "--out", out, "--json")) == record
    assert sorted(path.name for path in out.iterdir()) == files
    assert times == {name: (out / name).stat().st_mtime_ns for name in times}, "tasks that were measured are not measured again"
    message = refused(capsys, *command, *TASKS, "--max-prompts", "9", "--out", out)
    assert str(out / "settings.json") in message and "another --out" in message


def result_of(out: Path, place: int, name: str) -> Any:
    task, metric = name.split(" ", 1)
    return json.loads((out / f"{task}-{place}.json").read_text())["metrics"][metric]


def statistics(values: list[float]) -> tuple[float, float]:
    found = torch.tensor(values, dtype=torch.float64)
    return float(found.mean()), float(found.std() / len(values) ** 0.5)


def test_what_cannot_be_measured_is_refused_at_once_with_the_remedy(
    command: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("arc_esy", "gsm8k", "mmlu", "arc_easy@40", "piqa", "gsm8k@five", "gsm8k@-1")
    message = refused(capsys, *command, *names)  # without a network
    assert "6 problems" in message and "arc_esy is unknown; did you mean `arc_easy`?" in message
    assert "mmlu is a group" in message and "30 examples for 40 shots" in message
    assert "task gsm8k@five has no number of examples after @; write it as gsm8k@5" in message
    assert "task piqa: its data set cannot be read" in message and f"into {data}/piqa" in message
    other = tmp_path / "data"
    (other / "gsm8k").mkdir(parents=True)
    (other / "gsm8k" / "test.jsonl").write_bytes((data / "gsm8k" / "test.jsonl").read_bytes())
    (other / "arc_easy").mkdir()
    (other / "arc_easy" / "testing.jsonl").write_bytes((data / "arc_easy" / "test.jsonl").read_bytes())
    (other / "truthfulqa_mc2").mkdir()
    (other / "truthfulqa_mc2" / "validation.jsonl").write_text('{"question": "A cat?"}\n{"question": \n')
    words = ["eval", "before", "--task-data", str(other), "--tasks"]
    message = refused(capsys, *words, "gsm8k", "arc_easy", "truthfulqa_mc2")
    assert "JSON" in message and f"into {other}/truthfulqa_mc2" in message, "the fault of the row"
    assert "'train'" in message and f"{other}/gsm8k" in message, "the examples are missing"
    assert "Empty 'data_files'" in message and f"into {other}/arc_easy" in message, "nothing is fetched in its place"
    message = refused(capsys, *words, "gsm8k", "--verifier", "gsm8k", "--temperature", "1", "--out", other, "-n", "2")
    assert "--verifier and --temperature and -n given with --tasks" in message and f"--out {other} is there already" in message
    assert "without --tasks" in refused(capsys, *words[:-1], "--data", "x.jsonl", "--verifier", "gsm8k")
    assert "give one of them" in refused(capsys, *words, "gsm8k", "--data", "x.jsonl")
    assert "does not exist" in refused(capsys, "eval", "before", "--tasks", "gsm8k", "--task-data", "nowhere")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.create(tmp_path_factory.mktemp("workspace"))


def config(workspace: Workspace, name: str, tasks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    init = {**SHAPE, "max_position_embeddings": 1200}
    heldout = {"path": str(workspace.root / "data" / "heldout.jsonl"), "max_prompt_tokens": 1000, "max_rows": 7}
    judges = [{"kind": "verifier", "name": "arithmetic"}]
    return workspace.config(
        name, steps=1, **{f"{role}.init": init for role in ("actor", "critic", "reward")},
        **{"rollout.max_response_tokens": 20, **changes},
        evaluation={"data": heldout, "every_steps": 1, "metrics": judges, **tasks},
    )  # fmt: skip


def test_tasks_are_held_out_figures_of_a_run(
    workspace: Workspace, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work_in(tmp_path, monkeypatch)
    tasks = {"tasks": list(TASKS), "task_data": str(data)}
    path, run = tmp_path / "run.yaml", workspace.root / "runs" / "one"
    path.write_text(yaml.safe_dump(config(workspace, "one", tasks, early_stop={"metric": "arc_easy@2", "patience": 5})))
    assert main(["train", str(path)]) == 0
    capsys.readouterr()
    heldout = json.loads((run / "summary.json").read_text())["heldout"]
    names = ["accuracy", "response_tokens", "truncated", *TASKS]
    assert list(heldout) == ["0", "1"] and all(
        list(heldout[step][kind]) == names for step in heldout for kind in ("mean", "error")
    )
    record = json.loads(shown(capsys, "eval", run, "--task-data", data, "--tasks", *TASKS, "--max-prompts", "7", "--json"))
    (after,) = (policy["metrics"] for policy in record["policies"])
    for task, metric in zip(TASKS, ("acc_norm", "exact_match strict-match"), strict=True):
        assert (heldout["1"]["mean"][task], heldout["1"]["error"][task]) == pytest.approx(
            (after[f"{task} {metric}"]["mean"], after[f"{task} {metric}"]["error"])
        )
    assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 0
    assert "arc_easy@2" in "".join(page.read_text() for page in (tmp_path / "report").glob("*.html"))


def test_a_run_measures_alike_in_other_layouts_and_trains_as_without_tasks(workspace: Workspace, data: Path) -> None:
    tasks = {"tasks": list(TASKS), "task_data": str(data)}
    parts = {"mode": "disaggregated", "actor": {"pp": 2}}
    cases: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
        "alone": (1, tasks, {}), "plain": (1, {}, {}), "apart": (3, tasks, {"placement": parts}),
    }  # fmt: skip
    runs = {}
    for name, (ranks, measured, changes) in cases.items():
        runs[name] = Path(config(workspace, name, measured, **changes)["run_dir"])
        run_ranks(ranks, "tests.e2e.jobs:train", config=config(workspace, name, measured, **changes))
    alone, apart = (json.loads((runs[name] / "summary.json").read_text())["heldout"]["0"] for name in ("alone", "apart"))
    for task in TASKS:
        assert apart["mean"][task] == pytest.approx(alone["mean"][task])
        assert apart["error"][task] == pytest.approx(alone["error"][task])
    ours, theirs = (load_file(runs[name] / "weights" / "actor" / "model.safetensors") for name in ("alone", "plain"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
