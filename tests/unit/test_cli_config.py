"""`oppo config`, `oppo validate` of rows and services, and `oppo plan simulate`."""

import json
from pathlib import Path

import pytest
import yaml

from oppo_megatron import Costs, Round, Schedule, Site, intra
from oppo_megatron.cli.main import main
from oppo_megatron.config.describe import COMMANDS, all_settings
from oppo_megatron.config.load import load_config
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.report.run_records import read_run
from oppo_megatron.report.timeline import utilization
from tests.support.commands import SHAPE, refused, shown, work_in
from tests.support.ppo import Workspace

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


def test_a_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "config", "--explain", "runtime.timeout_s")
    commands = "oppo train, oppo sft, oppo rm, oppo dpo, oppo serve"
    assert out.splitlines()[0] == f"runtime.timeout_s  ({commands})"
    for line in ("value:   number, > 0", "unit:    s", "default: 1800.0", "time limit of a message or collective"):
        assert line in out
    assert "`eq4`, `algorithm1`" in shown(capsys, "config", "--explain", "overlap.delta.rule")
    out = shown(capsys, "config", "--explain", "overlap.delta")
    assert "overlap.delta.window" in out and "4 prompts" in out and "value:   section" in out
    assert "rewards[].entry_point" in shown(capsys, "config", "--explain", "rewards")
    out = shown(capsys, "config", "--explain", "rewards.kind")
    assert out.count("rewards[].kind") == 1 and "(oppo train, oppo serve)" in out
    both = shown(capsys, "config", "--explain", "reward")
    assert "reward  (oppo train)" in both and "reward  (oppo serve)" in both
    assert "serve" not in shown(capsys, "config", "--explain", "reward", "--kind", "train").partition("\n")[0]


def test_an_unknown_key_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean `overlap.delta.max`" in refused(capsys, "config", "--explain", "overlap.delta.maxx")
    assert "`actor.optimizer.lr`" in refused(capsys, "config", "--explain", "lr")
    assert "oppo config --list" in refused(capsys, "config", "--explain", "qqqqqq")
    assert "give CONFIG.yaml, --explain KEY, --list or --init" in refused(capsys, "config")


def test_a_file_is_printed_resolved_and_its_values_are_shown(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "here:    8\n" in shown(capsys, "config", config, "--explain", "rollout.batch_size")
    assert "here:    12\n" in shown(capsys, "config", config, "rollout.batch_size=12", "--explain", "rollout.batch_size")
    assert "here:    0.5\n" in shown(capsys, "config", config, "--explain", "rewards.1.weight")
    assert "here:    [1.0, 0.5]\n" in shown(capsys, "config", config, "--explain", "rewards.weight")
    assert "here:    null\n" in shown(capsys, "config", config, "--explain", "rewards.7.weight")
    assert "here:    null\n" in shown(capsys, "config", config, "--explain", "evaluation.data.path")
    Path("whole.yaml").write_text(shown(capsys, "config", config, "seed=7"))
    whole = load_config(TrainSettings, "whole.yaml")
    assert whole == load_config(TrainSettings, config, ["seed=7"]) and whole.seed == 7
    assert "did you mean `seed`" in refused(capsys, "config", config, "sead=7")


def test_the_list_has_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "config", "--list")
    listed = {line.split()[0] for line in out.splitlines() if line.startswith("  ")}
    assert listed == {each.key for kind in COMMANDS.values() for each in all_settings(kind) if each.section is None}
    assert "oppo sft:" not in shown(capsys, "config", "--list", "--kind", "train")
    assert max(map(len, out.splitlines())) <= 140


ROWS = (
    rb'{"prompt": "1+1=", "answer": "2", "completion": "it is 2"}',
    rb'{"prompt": "1+1=", "answer": "2", "completion": "it is 2"}', rb'{"prompt": "caf\ud83d", "answer": "2", "completion": "x"}',
    b'{"prompt": "\xe9", "answer": "2", "completion": "x"}',
    rb'{"prompt": "2+2=", "answer": "no number", "completion": "it is 4"}',
    rb'{"prompt": "1+2+3+4+5+6+7+8+9+1+2+3+4+5+6=", "answer": "9", "completion": "it is 4"}',
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work_in(tmp_path, monkeypatch, vocabulary=True)
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(ROWS))
    shape = json.dumps(SHAPE)
    (tmp_path / "train.yaml").write_text(
        "run_dir: run\ntokenizer: {path: t.model}\nplacement: {mode: single}\n"
        f"data: {{path: rows.jsonl, max_prompt_tokens: 20}}\nactor: {{init: {shape}}}\ncritic: {{init: {shape}}}\n"
        "rewards: [{kind: verifier, name: arithmetic}]\nrollout: {batch_size: 8, max_response_tokens: 20}\n"
    )
    (tmp_path / "sft.yaml").write_text(
        f"run_dir: run\ntokenizer: {{path: t.model}}\ndata: {{path: rows.jsonl}}\nmodel: {{init: {shape}}}\nmax_tokens: 64\n"
    )
    return tmp_path


def test_every_bad_row_is_named_or_set_aside_and_duplicates_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "validate", "train.yaml")
    assert "4 rows cannot be used" in err and [n for n in range(1, 7) if f"rows.jsonl:{n}:" in err] == [3, 4, 5, 6]
    assert "data.bad_rows=quarantine and data.long_rows=quarantine" in err
    assert main(["validate", "train.yaml", "--skip-data"]) == 0
    large = ("validate", "train.yaml", "--skip-data", "actor.init.intermediate_size=99999998")
    assert "GiB of memory" in refused(capsys, *large) and main([*large, "--elsewhere"]) == 0
    out = shown(capsys, "validate", "train.yaml", "data.bad_rows=quarantine", "data.long_rows=truncate")
    assert "data: 3 prompts, 1 of them duplicates, 1 cut at max_prompt_tokens; 3 rows set aside\n" in out
    assert "  rows.jsonl:3: column 'prompt' is not text: half of a surrogate pair at character 3\n" in out
    assert not (folder / "run").exists()


def test_rows_of_supervised_training_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "rows.jsonl:4: not UTF-8" in refused(capsys, "validate", "sft.yaml")
    aside = ("validate", "sft.yaml", "data.bad_rows=quarantine")
    assert "data: 4 rows, 1 of them duplicates; 2 rows set aside\n" in shown(capsys, *aside)
    held_out = "evaluation={data: {path: rows.jsonl, bad_rows: quarantine}}"
    said = "4 rows, 1 of them duplicates; 2 rows set aside; 4 rows held out, 4 of them measured; 2 more of the held-out files"
    assert f"data: {said} set aside\n" in shown(capsys, *aside, held_out)


def test_services_too(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SERVE_TOKEN", raising=False)
    shape = json.dumps(SHAPE)
    (folder / "serve.yaml").write_text(
        "rewards: [{kind: model}, {kind: verifier, name: gsm8k, weight: 0.5}]\n"
        f"reward: {{init: {shape}}}\ntokenizer: {{path: t.model}}\nmax_tokens: 64\n"
    )
    (folder / "scorer.yaml").write_text(f"reward: {{init: {shape}}}\n")
    out = shown(capsys, "validate", "serve.yaml")
    assert "listens on 127.0.0.1, port 8900, without a token\nrewards: model x 1, gsm8k x 0.5\n" in out
    assert "valid configuration for `oppo serve`" in out
    assert "valid configuration for `oppo serve`" in shown(capsys, "validate", "scorer.yaml")
    assert "others can reach" in refused(capsys, "validate", "scorer.yaml", "host=0.0.0.0")
    assert "SERVE_TOKEN is not set" in refused(capsys, "validate", "serve.yaml", "host=0.0.0.0", "token_env=SERVE_TOKEN")
    unknown = "rewards=[{kind: model}, {kind: python, entry_point: 'no_module:f'}]"
    assert "cannot be imported" in refused(capsys, "validate", "serve.yaml", unknown)
    monkeypatch.setenv("SERVE_TOKEN", "a-token-of-enough-characters")
    monkeypatch.syspath_prepend(folder)
    (folder / "spy.py").write_text("import os\nassert 'SERVE_TOKEN' not in os.environ, 'seen'\ndef f(*_): return 0.0\n")
    spy = "rewards=[{kind: model}, {kind: python, entry_point: 'spy:f', isolate: true}]"
    assert "spy:f" in shown(capsys, "validate", "serve.yaml", spy, "token_env=SERVE_TOKEN")
    assert "seen" in refused(capsys, "validate", "serve.yaml", spy), "a token that is not named is no secret"
    assert "the tokenizer gives ids up to 299" in refused(capsys, "validate", "serve.yaml", "reward.init.vocab_size=9")
    assert "`nowhere` does not exist" in refused(capsys, "validate", "serve.yaml", "reward={checkpoint: nowhere, init: null}")


SIMULATE, LENGTHS = ("plan", "simulate"), ("--lognormal", "8,0.8")
OWN_SCHEDULE = ("placement={mode: colocated, actor: {pp: 2}}", f"overlap.schedule={__name__}:plain")


def plain(round: Round, site: Site, costs: Costs) -> Schedule:
    made = intra(round, site, costs)
    return Schedule({rank: made.of(rank) for rank in site.ranks})


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = Workspace.create(tmp_path_factory.mktemp("simulate"))
    overlap = {"intra": True, "inter": True, "chunk": 8, "delta": {"rule": "fixed", "initial": 3, "max": 8}}
    tree = workspace.config("run", placement={"mode": "disaggregated"}, steps=6, overlap=overlap)
    (workspace.root / "c.yaml").write_text(yaml.safe_dump(tree))
    return workspace.root / "c.yaml"


def test_it_writes_what_a_run_writes(simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    printed = shown(capsys, *SIMULATE, simulated, "--steps", "4", *LENGTHS, "--out", out)
    assert "updates: assumed" in printed and "built-in lines, of no machine" in printed
    record = read_run(out)
    assert [line["step"] for line in record.lines] == [1, 2, 3, 4]
    assert record.summary["steps"] == 4 and record.kind == "train" and not record.no_spans
    assert {span.step for span in record.spans} == {1, 2, 3}
    assert {span.name for span in record.spans} >= {"decode", "score", "update", "wait_scores"}
    assert sum(record.summary["deferred"].values()) == 4 * 6
    documented = Path("docs/metrics.md").read_text()
    assert all(f"`{name}`" in documented for line in record.lines for name in line)
    assert {row["rank"] for row in utilization([out])} == {0, 1}
    assert main(["report", str(out)]) == 0 and (out / "report" / "index.html").exists()
    assert "finished" in refused(capsys, *SIMULATE, simulated, "--steps", "4", *LENGTHS, "--out", out)


def test_a_sweep_has_a_run_for_each_value_and_mode(simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    sweep = ("--modes", "sequential,full", "--sweep", "overlap.delta.initial=0,4")
    assert "x first" in shown(capsys, *SIMULATE, simulated, "--steps", "3", *LENGTHS, *sweep, "--out", out)
    runs = json.loads((out / "sweep.json").read_text())["runs"]
    assert [run["run"] for run in runs] == [
        f"{mode} overlap.delta.initial={delta}" for mode in ("sequential", "full") for delta in (0, 4)
    ]
    assert [run["delta"] for run in runs] == [0, 0, 0, 4] and runs[0]["step_s"] == runs[1]["step_s"]
    assert all((out / run["folder"] / "summary.json").exists() for run in runs)


def test_seconds_of_a_cluster(simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("nodes: 1\ngpus_per_node: 2\ngpu: h100\n")
    arguments = (*SIMULATE, simulated, "--steps", "2", *LENGTHS, "--cluster", cluster)
    assert "the laws of 1 x 2 h100" in shown(capsys, *arguments)
    cluster.write_text("nodes: 1\ngpus_per_node: 1\ngpu: h100\n")
    assert "has 2 ranks, but the cluster 1" in refused(capsys, *arguments)


def test_a_calibrated_run_takes_what_the_run_took(simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    costs = {"decode": [0.002, 1e-4], "prefill": {r: [0.003, 1e-4] for r in ("actor", "reference", "critic", "reward")}}
    (run / "costs.json").write_text(json.dumps(costs))
    lines = [{
        "step": step, "train_s": 1.0 + 0.01 * tokens + 0.25, "reallocate_s": 0.25, "critic_update_s": 0.5, "planning_s": 0.3,
        "prompt_len_mean": 5.2, "trained_len_mean": tokens / 6, "tokens": 60, "running_mean": 6.0, "chunk_tokens": 8,
        "reward_mean": 1.0, "ess": 1.0,
    } for step, tokens in enumerate([60, 60, 72, 84], start=1)]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = (*SIMULATE, simulated, "--steps", "3", *LENGTHS, "--calibrate", run)
    told = shown(capsys, *arguments, "--out", out)
    assert f"3 steps of {run}" in told and "built-in" not in told and "prompts of 5 tokens" in told
    for line in read_run(out).lines:
        assert line["reallocate_s"] == 0.25 and line["critic_update_s"] == pytest.approx(0.5)
        assert line["train_s"] == pytest.approx(1.25 + 0.01 * 6 * line["trained_len_mean"], rel=1e-6)
    (run / "costs.json").unlink()
    assert "no costs.json" in refused(capsys, *arguments)
    (run / "metrics.jsonl").write_text("")
    assert "no step of the run was trained" in refused(capsys, *arguments)


@pytest.mark.parametrize(("arguments", "said"), [
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
])  # fmt: skip
def test_what_is_refused(simulated: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(capsys, *SIMULATE, simulated, *arguments)


def test_costs_of_another_layout_are_refused(simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    line = [0.002, 1e-4]
    arguments = (*SIMULATE, simulated, "--steps", "2", *LENGTHS, "--costs", path)
    path.write_text(json.dumps({"decode": [line, line]}))
    assert "decode is of 2 stages, but the role has pp 1" in refused(capsys, *arguments)
    path.write_text(json.dumps({"prefill": {"actor": line, "judge": line}}))
    err = refused(capsys, *arguments)
    assert "prefill of judge, a role that the configuration does not have" in err and "no prefill of critic" in err
    path.write_text(json.dumps({"decode": line, "default_prefill": line}))
    shown(capsys, *arguments)


def test_a_trace_has_its_lengths(simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / "out"
    trace.write_text("GeneratedTokens\n" + "20\n" * 100)
    told = shown(capsys, *SIMULATE, simulated, "--steps", "8", "--trace", trace, "--out", out)
    assert {line["trained_len_max"] for line in read_run(out).lines} == {40}, "its 99th percentile is the limit"
    assert "the run has 6 steps; as more are asked for, its prompts do not end" in told
