"""A run's policy found and asked, in layouts of its own; held-out metrics of a run, and the end that they bring."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

from oppo_megatron.cli.main import main
from oppo_megatron.cluster.world import World
from oppo_megatron.config.model import ParallelConfig, RuntimeConfig
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.stopping import Stopping, StopText
from oppo_megatron.errors import CheckpointError, ConfigError
from oppo_megatron.mcore.model import build_model
from oppo_megatron.mcore.weights.hf_source import open_weights
from oppo_megatron.mcore.weights.hf_weights import export_weights, load_weights
from oppo_megatron.policy.answering import build_place, load_policy
from oppo_megatron.policy.finding import Choice, find_policy, policy_tokenizer, read_run, require_layout
from oppo_megatron.records import Prompt
from tests.support.ppo import Workspace, deep
from tests.support.ranks import run_ranks
from tests.support.tokenizers import save_byte_level

Response = tuple[int, list[int], str | None]


def answers(
    directories: list[Path], texts: list[str], *, parallel: dict[str, int], max_tokens: int, sampling: dict[str, Any],
    num_slots: int = 4, round_steps: int = 7, stop: list[str] | None = None, choice: dict[str, Any] | None = None,
) -> list[list[Response]]:  # fmt: skip
    """Responses (sequence, tokens, reason) of each directory to all prompts, in the order in which they ended."""
    layout, runtime = ParallelConfig(**parallel), RuntimeConfig().with_threads(1)
    place, found = build_place(World(dist.get_rank(), dist.get_world_size(), torch.device("cpu")), layout), []
    for directory in directories:
        policy = find_policy(directory, Choice(**choice or {}))
        tokenizer = policy_tokenizer(policy)
        prompts = [Prompt(i, i, text, tuple(tokenizer.encode(text))) for i, text in enumerate(texts)]
        longest = max(len(prompt.tokens) for prompt in prompts) + max_tokens
        require_layout(policy, layout, longest, tokenizer.vocab_size)
        loaded = load_policy(policy, place, runtime, tokenizer, longest)
        decoder = loaded.decoder(
            Sampling(**sampling),
            Stopping(tokenizer.eos_ids, max_tokens, text=StopText(stop, tokenizer.decode) if stop else None), num_slots=num_slots,
            round_steps=round_steps,
        )  # fmt: skip
        once = [(r.seq_id, r.tokens, r.finish_reason) for r in decoder.decode(prompts)]
        again = [(r.seq_id, r.tokens, r.finish_reason) for r in decoder.decode(iter(prompts))]
        assert once == again, "what was decoded before leaves nothing behind"
        found.append(once)
    return found


def write_drawn(run: Path, directory: Path) -> None:
    settings = read_run(run)
    assert isinstance(settings, TrainSettings)
    shape, source = open_weights(settings.actor, "lm")
    model = build_model(
        shape, build_place(World(0, 1, torch.device("cpu")), ParallelConfig()).groups,
        head="lm", max_length=64, dtype="float32", device=torch.device("cpu"),
    )  # fmt: skip
    load_weights(model, shape, source, head="lm")
    export_weights(model, directory)


MAX_TOKENS = 24
TEXTS = [f"{a} + {b} =" for a in (3, 17) for b in (5, 28, 64)] + ["1"]
GREEDY = {"temperature": 0.0}
LORA = {"rank": 4, "alpha": 16.0}


def trained(workspace: Workspace, name: str, **changes: Any) -> Path:
    config = deep(workspace, name, steps=2, **{"checkpoint.every_steps": 1}, **changes)
    run_ranks(1, "tests.e2e.jobs:train", config=config)
    return Path(config["run_dir"])


@pytest.fixture(scope="module")
def run(workspace: Workspace) -> Path:
    return trained(workspace, "whole")


@pytest.fixture(scope="module")
def adapted(workspace: Workspace) -> Path:
    return trained(workspace, "adapted", **{"actor.lora": LORA})


def ask(directories: list[Path], layout: tuple[int, int, int] = (1, 1, 1), **settings: Any) -> list[list[Response]]:
    settings = {"sampling": GREEDY, "max_tokens": MAX_TOKENS, "texts": TEXTS} | settings
    parallel = dict(zip(("tp", "pp", "dp"), layout, strict=True))
    num_ranks = layout[0] * layout[1] * layout[2]
    found = run_ranks(num_ranks, "tests.e2e.test_policy:answers", directories=directories, parallel=parallel, **settings)
    assert all(other == found[0] for other in found)
    return found[0]


def test_a_run_its_export_and_its_last_checkpoint_say_the_same(run: Path) -> None:
    """Exports' answers against transformers' are in tests/parity."""
    last = run / "checkpoints" / "step-000002"
    places = [run, run / "weights" / "actor", last, run / "checkpoints", last / "models" / "actor"]
    found = ask(places)
    assert all(other == found[0] for other in found[1:])
    reasons = {reason for _, _, reason in found[0]}
    assert reasons <= {"eos", "length"}
    (before,) = ask([run / "checkpoints" / "step-000001"])
    assert sorted(before) != sorted(found[0]), "another step, another policy"


def test_texts_and_several_ids_end_where_transformers_ends_them(workspace: Workspace, run: Path, tmp_path: Path) -> None:
    """Byte-level BPE, so that transformers has the tokenizer too; one id is in the policy's directory alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    export = tmp_path / "export"
    shutil.copytree(run / "weights" / "actor", export, ignore=shutil.ignore_patterns("token*"))
    save_byte_level(export, TEXTS, 280)
    (plain,) = ask([export])
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    texts = [tokenizer.decode(tokens) for _, tokens, _ in plain]
    pairs = [text[i : i + 2] for text in texts for i in range(4, len(text) - 1) if text[i : i + 2].isalnum()]
    stops = sorted({pair for pair in pairs if pair.isascii()}, key=pairs.count)[-8:]
    eos = [tokenizer.eos_token_id, plain[-1][1][3]]
    GenerationConfig(eos_token_id=eos).save_pretrained(export)
    (found,) = ask([export], stop=stops)
    reasons = set()
    for number, tokens, reason in found:
        ids = torch.tensor([tokenizer.encode(TEXTS[number])])
        out = model.generate(
            ids, do_sample=False, max_new_tokens=MAX_TOKENS, eos_token_id=eos, stop_strings=stops, tokenizer=tokenizer,
            pad_token_id=0, attention_mask=torch.ones_like(ids),
        )  # fmt: skip
        assert out[0, ids.shape[1] :].tolist() == tokens
        reasons.add(reason)
    assert {"eos", "stop"} <= reasons


@pytest.mark.parametrize(
    "layout", [pytest.param((2, 1, 1), marks=pytest.mark.long), (1, 2, 1), pytest.param((1, 1, 2), marks=pytest.mark.long)],
    ids=["TP2", "PP2", "DP2"],
)  # fmt: skip
def test_layouts_slots_and_rounds_decode_alike(run: Path, adapted: Path, layout: tuple[int, int, int]) -> None:
    places, sampling = [run, adapted / "checkpoints" / "step-000002"], {"top_k": 6, "seed": 5}
    plain = ask(places, sampling=sampling, num_slots=8, round_steps=64)
    stop = ["5", "3 ", "\n"]
    stopped = ask(places, sampling=sampling, stop=stop)
    assert {reason for answers in stopped for _, _, reason in answers} >= {"stop"}
    for settings in ({}, {"num_slots": 1, "round_steps": 3}):
        found = ask(places, layout, sampling=sampling, **settings)
        assert [sorted(answers) for answers in found] == [sorted(answers) for answers in plain]
        found = ask(places, layout, sampling=sampling, stop=stop, **settings)
        assert [sorted(answers) for answers in found] == [sorted(answers) for answers in stopped]
    assert [i for i, _, _ in plain[0]] != sorted(i for i, _, _ in plain[0]), "in the order in which they end"


def test_adapters_of_an_export_and_a_checkpoint_are_the_same_policy(workspace: Workspace, adapted: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"names no base; give .* \(--base\)"):
        find_policy(adapted)
    base = tmp_path / "base"
    run_ranks(1, "tests.e2e.test_policy:write_drawn", run=adapted, directory=base)
    export, checkpoint = ask([adapted, adapted / "checkpoints" / "step-000002"], choice={"base": base})
    assert export == checkpoint
    (unadapted,) = ask([base], choice={"tokenizer": workspace.root / "tokenizer.model"})
    assert sorted(unadapted) != sorted(export)


def test_what_is_taken_is_told_and_what_is_no_policy_is_refused(run: Path, tmp_path: Path) -> None:
    assert find_policy(run).summary.startswith(f"final weights of the run {run}")
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run, unfinished, ignore=shutil.ignore_patterns("weights"))
    found = find_policy(unfinished)
    assert found.summary == f"checkpoint {unfinished / 'checkpoints' / 'step-000002'}, after 2 steps"
    (unfinished / "checkpoints" / "step-000002" / "rollouts.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"rollouts.jsonl is missing; name another checkpoint"):
        find_policy(unfinished)
    shutil.rmtree(unfinished / "checkpoints")
    with pytest.raises(CheckpointError, match=r"without final weights and without a checkpoint; let it finish"):
        find_policy(unfinished)
    for place in (run / "weights" / "critic", run / "checkpoints" / "step-000002" / "models" / "critic"):
        with pytest.raises(CheckpointError, match=r"reward model or critic generates no text; name the policy"):
            find_policy(place)
    with pytest.raises(CheckpointError, match=r"does not exist; did you mean"):
        find_policy(run.parent / "wole")
    with pytest.raises(CheckpointError, match=r"is a file; a policy is a directory"):
        find_policy(run / "config.yaml")
    for place, remedy in ((tmp_path / "unfinished" / "..", "unfinished`"), (run / "stacks", "name one of these")):
        place.mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match=f"holds no policy: neither a run.*{remedy}"):
            find_policy(place)
    assert find_policy(run, Choice(dtype="bfloat16")).model.dtype == "bfloat16"
    export = Path(shutil.copytree(run / "weights" / "actor", tmp_path / "export"))
    assert find_policy(export).model.dtype == "float32"
    config = export / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    assert find_policy(export).model.dtype == "bfloat16", "as it is stored"


def test_a_tokenizer_lies_with_the_weights_or_is_named(workspace: Workspace, run: Path, tmp_path: Path) -> None:
    assert find_policy(run).tokenizer.path == run / "weights" / "actor"
    assert find_policy(run / "checkpoints").tokenizer.path == workspace.root / "tokenizer.model"
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(run / "weights" / "actor" / name, bare)
    with pytest.raises(ConfigError, match=r"they have no tokenizer; name one with --tokenizer"):
        find_policy(bare)
    assert find_policy(bare, Choice(tokenizer=workspace.root / "tokenizer.model")).tokenizer.path.is_file()
    config = run / "config.yaml"
    written = config.read_text()
    try:
        config.write_text(written.replace("seed: 23", "seed: many"))
        with pytest.raises(ConfigError, match=r"`seed` must be an integer.*copy the folder of its weights away"):
            find_policy(run)
    finally:
        config.write_text(written)


def write_job(workspace: Workspace, folder: Path, **changes: Any) -> Path:
    (folder / "judge.py").write_text("def brevity(prompt, response, fields):\n    return -float(len(response))\n")
    judges = [
        {"kind": "verifier", "name": "arithmetic"}, {"kind": "model"}, {"kind": "python", "entry_point": "judge:brevity"},
        {"kind": "verifier", "name": "length", "buffer_tokens": 10}, {"kind": "verifier", "name": "math"},
    ]  # fmt: skip
    heldout = {"path": str(workspace.root / "data" / "heldout.jsonl"), "max_prompt_tokens": 96, "max_rows": 6}
    job = workspace.config(
        "job", run_dir=str(folder / "run"), steps=4, placement={"mode": "disaggregated"},
        rollout={"batch_size": 4, "max_response_tokens": 10}, overlap={"delta": {"max": 2, "initial": 1}},
        evaluation={"data": heldout, "every_steps": 1, "metrics": judges}, logging={"trace": False},
    )  # fmt: skip
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job | changes))
    return path


def train(path: Path, *words: str) -> str:
    command = [sys.executable, "-m", "oppo_megatron", "train", str(path), *words]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def summary_of(path: Path) -> dict[str, Any]:
    return dict(json.loads((path.parent / "run" / "summary.json").read_text()))


@pytest.mark.long
def test_every_kind_of_judge_is_measured_and_the_run_ends_early(workspace: Workspace, tmp_path: Path) -> None:
    path = write_job(workspace, tmp_path, early_stop={"metric": "min accuracy", "patience": 2})
    told = train(path)
    summary = summary_of(path)
    assert summary["steps"] == 2 and summary["stopped_early"] in told
    assert "best" in summary["stopped_early"] and "at step 0" in summary["stopped_early"]
    metrics = {"accuracy", "model", "judge:brevity", "length", "math", "response_tokens", "truncated"}
    assert summary["heldout"].keys() == {"0", "1", "2"}
    assert all(entry["mean"].keys() == metrics for entry in summary["heldout"].values())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["heldout"] for line in lines] == [summary["heldout"][step]["mean"] for step in ("1", "2")]
    assert (tmp_path / "run" / "weights" / "actor" / "config.json").exists()


@pytest.mark.long
def test_a_resumed_run_goes_on_counting(workspace: Workspace, tmp_path: Path) -> None:
    path = write_job(workspace, tmp_path, early_stop={"metric": "min accuracy", "patience": 3})
    train(path, "steps=2")
    assert summary_of(path)["stopped_early"] is None
    train(path, "steps=6", "--resume")
    summary = summary_of(path)
    assert summary["steps"] == 3 and "step 3" in summary["stopped_early"]
    assert summary["heldout"].keys() == {"0", "1", "2", "3"}


def test_the_step_that_is_best_by_a_held_out_metric_is_kept_and_its_weights_are_written(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))  # for judge.py
    plain = {"placement": {"mode": "single"}, "overlap": {"inter": False, "intra": False}}
    path = write_job(workspace, tmp_path, checkpoint={"keep_best": "judge:brevity", "keep": 1}, **plain)
    assert main(["train", str(path), "evaluation.data.max_rows=4", "actor.optimizer.lr=0.05"]) == 0
    told = capsys.readouterr().out
    summary = summary_of(path)
    values = {int(step): entry["mean"]["judge:brevity"] for step, entry in summary["heldout"].items() if step != "0"}
    for entry in summary["heldout"].values():
        assert entry["mean"]["length"] == pytest.approx(-entry["mean"]["response_tokens"] / 10), "counted in tokens"
    step = max(values, key=lambda n: (values[n], -n))
    assert summary["best"] == {"step": step, "metric": "judge:brevity", "value": values[step]}
    assert f"best step {step}: judge:brevity {values[step]:.4g}" in told
    run = tmp_path / "run"
    kept = {folder.name for folder in (run / "checkpoints").iterdir() if folder.is_dir()}
    assert kept == {f"step-{step:06d}", "step-000004"}
    checkpoint = run / "checkpoints" / f"step-{step:06d}" / "models" / "actor"
    assert main(["convert", str(checkpoint), str(tmp_path / "again")]) == 0
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run / "best" / "actor", tmp_path / "again"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (run / "best" / "critic" / "config.json").exists()
