"""`oppo plan simulate`: its output and files, and what it refuses before anything is played."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from oppo_megatron import Costs, Round, Schedule, Site, intra
from oppo_megatron.cli.main import main
from oppo_megatron.report.run_records import read_run
from oppo_megatron.report.timeline import utilization
from tests.support.ppo import Workspace

LENGTHS = ("--lognormal", "8,0.8")
OWN_SCHEDULE = ("placement={mode: colocated, actor: {pp: 2}}", f"overlap.schedule={__name__}:plain")


def plain(round: Round, site: Site, costs: Costs) -> Schedule:
    made = intra(round, site, costs)
    return Schedule({rank: made.of(rank) for rank in site.ranks})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = Workspace.create(tmp_path_factory.mktemp("simulate"))
    overlap = {"intra": True, "inter": True, "chunk": 8}
    overlap["delta"] = {"rule": "fixed", "initial": 3, "max": 8}
    tree = workspace.config("run", placement={"mode": "disaggregated"}, steps=6, overlap=overlap)
    path = workspace.root / "c.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["plan", "simulate", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_it_writes_what_a_run_writes(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["plan", "simulate", str(config), "--steps", "4", *LENGTHS, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "updates: assumed" in printed and "built-in lines, of no machine" in printed
    record = read_run(out)
    assert [line["step"] for line in record.lines] == [1, 2, 3, 4] and record.summary is not None
    assert record.summary["steps"] == 4 and record.kind == "train" and not record.no_spans
    assert {span.step for span in record.spans} == {1, 2, 3}
    assert {span.name for span in record.spans} >= {"decode", "score", "update", "wait_scores"}
    assert sum(record.summary["deferred"].values()) == 4 * 6
    documented = Path("docs/metrics.md").read_text()
    assert all(f"`{name}`" in documented for line in record.lines for name in line)
    assert {row["rank"] for row in utilization([out])} == {0, 1}
    assert main(["report", str(out)]) == 0 and (out / "report" / "index.html").exists()
    assert "finished" in refused(capsys, config, "--steps", "4", *LENGTHS, "--out", out)


def test_a_sweep_has_a_run_for_each_value_in_each_mode(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    sweep = ("--modes", "sequential,full", "--sweep", "overlap.delta.initial=0,4")
    assert main(["plan", "simulate", str(config), "--steps", "3", *LENGTHS, *sweep, "--out", str(out)]) == 0
    runs = json.loads((out / "sweep.json").read_text())["runs"]
    assert [run["run"] for run in runs] == [
        f"{mode} overlap.delta.initial={delta}" for mode in ("sequential", "full") for delta in (0, 4)
    ]
    assert [run["delta"] for run in runs] == [0, 0, 0, 4] and runs[0]["step_s"] == runs[1]["step_s"]
    assert all((out / run["folder"] / "summary.json").exists() for run in runs)
    assert "x first" in capsys.readouterr().out


def test_seconds_of_a_cluster(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("nodes: 1\ngpus_per_node: 2\ngpu: h100\n")
    assert main(["plan", "simulate", str(config), "--steps", "2", *LENGTHS, "--cluster", str(cluster)]) == 0
    assert "the laws of 1 x 2 h100" in capsys.readouterr().out
    cluster.write_text("nodes: 1\ngpus_per_node: 1\ngpu: h100\n")
    assert "has 2 ranks, but the cluster 1" in refused(capsys, config, "--steps", "2", *LENGTHS, "--cluster", cluster)


def test_a_calibrated_run_takes_what_the_run_took(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    costs = {"decode": [0.002, 1e-4], "prefill": {r: [0.003, 1e-4] for r in ("actor", "reference", "critic", "reward")}}
    (run / "costs.json").write_text(json.dumps(costs))
    lines = [
        {"step": step, "train_s": 1.0 + 0.01 * tokens + 0.25, "reallocate_s": 0.25, "critic_update_s": 0.5, "planning_s": 0.3,
         "prompt_len_mean": 5.2, "trained_len_mean": tokens / 6,
         "tokens": 60, "running_mean": 6.0, "chunk_tokens": 8, "reward_mean": 1.0, "ess": 1.0}
        for step, tokens in enumerate([60, 60, 72, 84], start=1)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["plan", "simulate", str(config), "--steps", "3", *LENGTHS, "--calibrate", str(run), "--out", str(out)]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert f"3 steps of {run}" in told and "built-in" not in told and "prompts of 5 tokens" in told
    for line in read_run(out).lines:
        assert line["reallocate_s"] == 0.25 and line["critic_update_s"] == pytest.approx(0.5)
        assert line["train_s"] == pytest.approx(1.25 + 0.01 * 6 * line["trained_len_mean"], rel=1e-6)
    (run / "costs.json").unlink()
    assert "no costs.json" in refused(capsys, *arguments[2:-2])
    (run / "metrics.jsonl").write_text("")
    assert "no step of the run was trained" in refused(capsys, *arguments[2:-2])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--steps", "2"), "give --lognormal MEDIAN,SIGMA, --trace FILE, or rollout.forced_lengths"),
        (("--steps", "2", "--lognormal", "400,1"), "rollout.max_response_tokens is 40, which would cut them"),
        (("--steps", "2", *LENGTHS, "--modes", "sequential,fast"), "--modes fast: not a mode; the modes are sequential, intra"),
        (("--steps", "2", *LENGTHS, "--sweep", "overlap.epsilon=1,2"), "overlap.epsilon"),
        (("--steps", "2", *LENGTHS, "--sweep", "overlap.delta.initial"), "give a setting and its values"),
        (("--steps", "2", *LENGTHS, "--sweep", "steps=2,2"), "given twice"),
        (("--steps", "2", *LENGTHS, "--sweep", "steps=2", "--sweep", "steps=3"), "swept twice"),
        (("--steps", "2", *LENGTHS, "--prompt-tokens", "97"), "1 to data.max_prompt_tokens = 96"),
        (("--steps", "2", *LENGTHS, "--calibrate", "nowhere"), "metrics.jsonl is missing"),
        (("--steps", "2", *LENGTHS, *OWN_SCHEDULE), "gives an order without times"),
    ],
)
def test_what_is_refused(config: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(capsys, config, *arguments)


def test_costs_of_another_layout_are_refused(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    line = [0.002, 1e-4]
    arguments = (config, "--steps", "2", *LENGTHS, "--costs", path)
    path.write_text(json.dumps({"decode": [line, line]}))
    assert "decode is of 2 stages, but the role has pp 1" in refused(capsys, *arguments)
    path.write_text(json.dumps({"prefill": {"actor": line, "judge": line}}))
    err = refused(capsys, *arguments)
    assert "prefill of judge, a role that the configuration does not have" in err and "no prefill of critic" in err
    path.write_text(json.dumps({"decode": line, "default_prefill": line}))
    assert main(["plan", "simulate", *map(str, arguments)]) == 0


def test_a_trace_has_its_lengths(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / "out"
    trace.write_text("GeneratedTokens\n" + "20\n" * 100)
    assert main(["plan", "simulate", str(config), "--steps", "8", "--trace", str(trace), "--out", str(out)]) == 0
    assert {line["trained_len_max"] for line in read_run(out).lines} == {40}, "its 99th percentile is the limit"
    assert "the run has 6 steps; as more are asked for, its prompts do not end" in capsys.readouterr().out
