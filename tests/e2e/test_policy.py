"""A run's policy found and asked: final weights, checkpoints, adapters, Megatron directories, in layouts of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from oppo_megatron.errors import CheckpointError, ConfigError
from oppo_megatron.policy.finding import Choice, find_policy
from tests.e2e.jobs_policy import Response
from tests.support.layouts import deep
from tests.support.ppo import Workspace
from tests.support.ranks import run_ranks
from tests.support.tokenizers import save_byte_level

MAX_TOKENS = 24
TEXTS = [f"{a} + {b} =" for a in (3, 17) for b in (5, 28, 64)] + ["", "1"][1:]
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
    found = run_ranks(num_ranks, "tests.e2e.jobs_policy:answers", directories=directories, parallel=parallel, **settings)
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
    "layout",
    [pytest.param((2, 1, 1), marks=pytest.mark.long), (1, 2, 1), pytest.param((1, 1, 2), marks=pytest.mark.long)],
    ids=["TP2", "PP2", "DP2"],
)
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


def test_adapters_of_an_export_and_of_a_checkpoint_are_the_same_policy(
    workspace: Workspace, adapted: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"names no base; give .* \(--base\)"):
        find_policy(adapted)
    base = tmp_path / "base"
    run_ranks(1, "tests.e2e.jobs_policy:write_drawn", run=adapted, directory=base)
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
    with pytest.raises(CheckpointError, match=r"without final weights and without a checkpoint; let it come to its end"):
        find_policy(unfinished)
    for place in (run / "weights" / "critic", run / "checkpoints" / "step-000002" / "models" / "critic"):
        with pytest.raises(CheckpointError, match=r"reward model or critic says nothing; name the policy"):
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


def test_the_types_in_which_weights_are_stored(tmp_path: Path, run: Path) -> None:
    export = tmp_path / "export"
    shutil.copytree(run / "weights" / "actor", export)
    assert find_policy(export).model.dtype == "float32"
    config = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert find_policy(export).model.dtype == "bfloat16"
