"""`oppo eval`: policies beside each other, judged by a rule, a function and a reward model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from oppo_megatron.cli.main import main
from tests.support.hf import save_tiny
from tests.support.ppo import SHAPE
from tests.support.tokenizers import save_byte_level

TEXTS = [f"Q: {a} plus {b}?\nA: the sum is {a + b}." for a in range(20) for b in range(20)]
SIZES = {name: value for name, value in SHAPE.items() if name != "model_type"} | {"vocab_size": 320}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    for name, head, seed in (("before", "lm", 1), ("after", "lm", 2), ("reward", "scalar", 3)):
        save_tiny(folder / name, "qwen2", head, seed=seed, **SIZES)
        save_byte_level(folder / name, TEXTS, 320)
    rows = [{"prompt": text.split("the")[0], "answer": str(number)} for number, text in enumerate(TEXTS[:12])]
    rows[3]["prompt"] += "\u2028"  # which ends a line to `str.splitlines`, and none of a file of JSON
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text("run_dir: run\n")
    (folder / "run" / "weights").symlink_to(folder / "reward")
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def length_of(prompt: str, response: str, fields: object) -> float:
    return float(len(response))


def judge(work: Path, *words: object) -> int:
    return main(["eval", *map(str, words), "--data", str(work / "heldout.jsonl"), "--max-tokens", "12"])


def test_two_policies_by_every_judge(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judges = ("--verifier", "gsm8k", "--function", f"{__name__}:length_of", "--reward-model", work / "run")
    out = tmp_path / "out"
    assert judge(work, work / "before", work / "after", *judges, "--out", out) == 0, capsys.readouterr().err
    table = capsys.readouterr().out
    written = json.loads((out / "eval.json").read_text())["policies"]
    labels = ["gsm8k", "model", f"{__name__}:length_of", "response tokens"]
    assert all(set(policy["metrics"]) == set(labels) for policy in written)
    assert all(any(line.startswith(label) for line in table.splitlines()) for label in labels)
    for place, policy in enumerate(written):
        lines = [json.loads(line) for line in (out / f"responses-{place}.jsonl").open(encoding="utf-8")]
        assert len(lines) == policy["prompts"] == 12
        by_model = policy["metrics"]["model"]
        assert by_model["mean"] == pytest.approx(sum(line["scores"]["model"] for line in lines) / 12)
        assert [line["scores"][labels[2]] for line in lines] == [len(line["response"]) for line in lines]
        assert [line["scores"]["model"] for line in lines] == pytest.approx(by_transformers(work, lines), abs=1e-4)
    difference = written[1]["metrics"]["model"]["mean"] - written[0]["metrics"]["model"]["mean"]
    assert written[1]["difference"]["model"]["mean"] == pytest.approx(difference)


def by_transformers(work: Path, lines: list[dict[str, str]]) -> list[float]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(work / "reward").float().eval()
    tokenizer, scores = AutoTokenizer.from_pretrained(work / "reward"), []
    for line in lines:
        ids = tokenizer(line["prompt"]).input_ids + tokenizer(line["response"]).input_ids
        ids += [tokenizer.eos_token_id] if line["finish_reason"] == "eos" else []
        hidden = model.model(torch.tensor([ids])).last_hidden_state
        scores.append(model.score(hidden)[0, -1, 0].item())
    return scores


def test_rows_that_cannot_be_scored_are_named_and_the_others_judged(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ["1", "many", "$3", None, "4"]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Q: {n}?", "answer": answer}) + "\n" for n, answer in enumerate(answers)))
    words = ["eval", str(work / "before"), "--data", str(data), "--max-tokens", "4", "--samples", "2", "--temperature", "1"]
    assert main([*words, "--verifier", "gsm8k", "--json"]) == 0, capsys.readouterr().err
    told = capsys.readouterr()
    (policy,) = json.loads(told.out)["policies"]
    assert policy["prompts"] == 3 and policy["responses"] == 6
    for row, value in ((1, "'many'"), (3, "None")):
        assert f"row {row} of the data is set aside, because it cannot be scored: reward part 'gsm8k': " in told.err
        assert f"the expected answer {value} has no number" in told.err


def test_a_reward_of_a_file_has_its_sum(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [
        {"kind": "verifier", "name": "gsm8k"},
        {"kind": "python", "weight": 0.5, "entry_point": f"{__name__}:length_of"},
        {"kind": "verifier", "name": "length", "buffer_tokens": 1000, "max_tokens": 1000, "weight": 2.0},
    ]
    (tmp_path / "rewards.yaml").write_text(json.dumps({"rewards": parts}))
    assert judge(work, work / "before", "--rewards", tmp_path / "rewards.yaml", "--json", "--max-prompts", 3) == 0
    (policy,) = json.loads(capsys.readouterr().out)["policies"]
    metrics = policy["metrics"]
    assert metrics["reward"]["mean"] == pytest.approx(
        metrics["gsm8k"]["mean"] + 0.5 * metrics[f"{__name__}:length_of"]["mean"] + 2.0 * metrics["length"]["mean"]
    )
    assert (
        metrics["length"]["mean"] == pytest.approx(-metrics["response tokens"]["mean"] / 1000) and metrics["length"]["mean"] < 0
    )
    assert metrics["reward"]["n"] == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "nothing judges the responses"),
        (["--verifier", "gsm8k", "--answer", "solution"], "no column 'solution'"),
        (["--reward-model", "{work}/after"], "a scalar head is needed"),
        (["--reward-model", "{work}/nowhere"], "nowhere"),
        (["--function", "no.module:here"], "no.module"),
        (["--rewards", "{work}/empty.yaml"], "has no `rewards`"),
        (["--verifier", "gsm8k", "--max-prompts", "0"], "--max-prompts is 0"),
        (["--verifier", "gsm8k", "--out", "{work}"], "not an empty folder"),
        (["{work}/before", "--verifier", "gsm8k"], "given twice"),
        (["--reward-model", "{work}/reward", "--max-tokens", "100000"], "100000"),
    ],
)
def test_mistakes_are_told_before_anything_is_decoded(
    work: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    (work / "empty.yaml").write_text("steps: 3\n")
    data = ["--data", str(work / "heldout.jsonl")]
    assert main(["eval", str(work / "before"), *(word.format(work=work) for word in words), *data]) == 2
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error and "responses, " not in error, error
