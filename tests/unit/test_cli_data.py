"""`oppo data show`: what it prints is what transformers' template, the trainer's batches and plain counts say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from oppo_megatron.cli.data.show import answer_inputs
from oppo_megatron.cli.main import main
from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.describe import SUPERVISED
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import load_rows
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.train.reference_pass import key_of
from oppo_megatron.train.supervised import task_of
from oppo_megatron.train.supervised_tasks import Preferences
from tests.support.chat_templates import FAMILIES, R1_DISTILL
from tests.support.rows import write_rows
from tests.support.tokenizers import save_byte_level

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for document in documents or [] %}{{ document.text }}{% endfor %}"
    "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% if calm %}{{ 'calm: ' }}{% endif %}{% endif %}"
)
SHAPE = {"vocab_size": 320, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
INIT = {"init": {"model_type": "qwen2", **SHAPE}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
DOCUMENTS = [{"title": "sums", "text": "2+2 is 4"}]
TALK = [
    {"role": "system", "content": "be brief"}, {"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3+3?"}, {"role": "assistant", "content": "It is 6"},
]  # fmt: skip
Run = Callable[..., str]
Read = tuple[str, list[tuple[int, str, str]]]


@pytest.fixture
def show(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def shown(kind: str, rows: list[dict[str, Any]], *arguments: str, template: str = TEMPLATE, **settings: Any) -> str:
        save_byte_level(tmp_path / "tok", [template], vocab_size=320, chat_template=template, bos_token="<|turn|>")
        write_rows(tmp_path, *rows)
        rl = {
            "actor": INIT, "rewards": [{"kind": "verifier", "name": "gsm8k"}], "algorithm": {"preset": "grpo"},
            "rollout": {"batch_size": 4, "group_size": 2, "max_response_tokens": 10}, "data": {"max_prompt_tokens": 4000},
        }  # fmt: skip
        common = {"run_dir": "run", "tokenizer": {"path": "tok"}}
        tree = common | (rl if kind == "train" else {"model": INIT, "max_tokens": 2000, "data": {}, "batch_size": 2}) | settings
        tree["data"] = {"path": "rows.jsonl"} | tree["data"]
        Path("config.yaml").write_text(yaml.safe_dump(tree))
        assert main(["data", "show", "config.yaml", "--kind", kind, *arguments]) == 0
        return capsys.readouterr().out

    return shown


def inputs_of(out: str) -> list[Read]:
    """(name, its tokens with part and mark) of each input printed."""
    found: list[Read] = []
    for line in out.splitlines():
        if line.startswith("  ") and " tokens: " in line:
            found.append((line.split(",")[0].strip(), []))
        elif line.startswith("    ") and line[2:8].strip().isdigit():
            assert int(line[2:8]) == len(found[-1][1])
            found[-1][1].append((int(line[9:16]), line[18:28].strip(), line[29:39].strip()))
    return found


def transformers_tokens(messages: list[dict[str, Any]], **given: Any) -> tuple[list[int], list[int]]:
    """Token ids, and a 1 for each token of an assistant."""
    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained("tok").apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask="add_generation_prompt" not in given, **given
    )
    return list(read["input_ids"]), list(read.get("assistant_masks", []))


def test_turns_of_a_dialogue_are_masked_as_transformers_masks_them(show: Run) -> None:
    row = {"messages": TALK, "tools": TOOLS, "documents": DOCUMENTS}
    reads = inputs_of(show("sft", [row], "--number", "9", data={"turns": "all"}))
    tokens, mask = transformers_tokens(TALK, tools=TOOLS, documents=DOCUMENTS)
    assert [name for name, _ in reads] == ["completion"] * 2 and 0 < sum(mask) < len(mask)
    trained = [0] * len(tokens)
    for _, read in reads:
        assert [token for token, _, _ in read] == tokens[: len(read)]
        assert all((part == "completion") == (mark == "trained") for _, part, mark in read)
        trained = [one or int(mark == "trained") for one, (_, _, mark) in zip(trained, read, strict=False)] + trained[len(read) :]
    assert trained == mask and len(reads[-1][1]) == len(tokens)


def test_pairs_are_masked_answer_by_answer_and_scored_at_their_last_tokens(show: Run) -> None:
    asked, answers = TALK[:2], {"chosen": TALK[2:3], "rejected": [{"role": "assistant", "content": "It is 5, or so"}]}
    row = {"prompt": asked, **answers}
    (wanted, unwanted), pair, scored = (
        inputs_of(show(kind, [row], "--number", "2", **settings))
        for kind, settings in (("dpo", {"dpo": {"loss": "kto"}}), ("dpo", {}), ("rm", {}))
    )
    for number, (name, answer) in enumerate(answers.items()):
        tokens, mask = transformers_tokens([*asked, *answer])
        for read, word in (pair[number], "trained"), ((wanted, unwanted)[number], ("wanted", "unwanted")[number]):
            assert [(token, mark) for token, _, mark in read[1]] == [
                (token, word if one else "masked") for token, one in zip(tokens, mask, strict=True)
            ]
        assert pair[number][0] == scored[number][0] == name
        assert [token for token, _, _ in scored[number][1]] == tokens
        assert [mark for _, _, mark in scored[number][1]] == ["masked"] * (len(tokens) - 1) + ["scored"]


def test_steps_show_their_labels_at_their_ends(show: Run) -> None:
    row = {"prompt": "2+2=", "completions": ["one", "two", "four"], "labels": [1, None, 0.25]}
    ((_, read),) = inputs_of(show("rm", [row], separator="\n"))
    tokenizer = load_tokenizer(TokenizerConfig(path=Path("tok")))
    text = "".join(tokenizer.decode([token]) for token, _, _ in read)
    assert text == "2+2=one\ntwo\nfour" and read[-1][0] == tokenizer.eos_id
    ends = {place: mark for place, (_, _, mark) in enumerate(read) if mark != "masked"}
    first = next(n for n in range(len(read)) if tokenizer.decode([token for token, _, _ in read[: n + 1]]) == "2+2=one\n")
    assert ends == {first: "label 1", len(read) - 1: "label 0.25"}


def test_prompts_are_those_that_the_policy_continues(show: Run) -> None:
    rows = [{"prompt": TALK[:2], "tools": TOOLS, "answer": "#### 4"}, {"prompt": TALK[:4], "answer": "#### 6"}]
    out = show("train", rows, "--row", "1", tokenizer={"path": "tok", "template_arguments": {"calm": True}})
    ((name, read),) = inputs_of(out)
    tokens, _ = transformers_tokens(TALK[:4], add_generation_prompt=True, calm=True)
    assert name == "prompt" and read == [(token, "prompt", "masked") for token in tokens] and "train row 1, rows.jsonl:2" in out
    lengths = [len(transformers_tokens(row["prompt"], add_generation_prompt=True, calm=True, tools=row.get("tools"))[0])
               for row in rows]  # fmt: skip
    total = sum(2 * (length + 10 - 1) for length in lengths)
    assert f"1 optimizer steps of {total} to {total} tokens, {total} in all" in out and "responses of 10 tokens, the most" in out


@pytest.mark.parametrize("family", FAMILIES)
def test_columns_and_arguments_reach_published_templates_as_they_do_in_transformers(show: Run, family: str) -> None:
    """With a template that opens a thought, rows without one are refused, which tests of chats prove."""
    messages = [message for message in TALK[1:3] if message["role"] == "user" or FAMILIES[family] != R1_DISTILL]
    given: dict[str, Any] = {"qwen3": {"enable_thinking": False}, "llama32": {"date_string": "1 Jan 2020"}}.get(family, {})
    row = {"messages": messages, "tools": TOOLS, "documents": DOCUMENTS, "answer": "#### 4"}
    settings = {"template": FAMILIES[family], "tokenizer": {"path": "tok", "template_arguments": given}}
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    shown = parts if family == "gemma parts" else messages
    ((_, prompt),) = inputs_of(show("train", [row], **settings))
    columns = {"tools": TOOLS, "documents": DOCUMENTS, **given}
    assert [token for token, _, _ in prompt] == transformers_tokens(shown[:1], add_generation_prompt=True, **columns)[0]
    if len(messages) > 1:
        ((_, read),) = inputs_of(show("sft", [{**row, "answer": ""}], **settings))
        whole = transformers_tokens(shown, add_generation_prompt=False, **columns)[0]
        assert [token for token, _, _ in read][:-1] == whole[: len(read) - 1], "an EOS may be added"
        assert [mark for _, _, mark in read] == ["masked"] * len(prompt) + ["trained"] * (len(read) - len(prompt))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}), "rm": ("rm", {}), "prm": ("rm", {"separator": "\n"}), "dpo": ("dpo", {}),
    "kto": ("dpo", {"dpo": {"loss": "kto"}}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rows_are_shown_as_the_batches_of_training_hold_them(tmp_path: Path, case: str) -> None:
    kind, settings = CASES[case]
    answers = {"completion": "a"} if case == "sft" else {"chosen": "bb", "rejected": "c", "completions": "s", "labels": 1}
    rows = [
        {"prompt": f"{'ask' * n}: "} | {name: [text, text] if name in ("completions", "labels") else text * n
                                        for name, text in answers.items()}
        for n in range(1, 8)
    ]  # fmt: skip
    save_byte_level(tmp_path / "tok", ["ask"])
    common = {"run_dir": tmp_path / "run", "tokenizer": {"path": tmp_path / "tok"}, "model": INIT}
    config = SUPERVISED[kind].model_validate(common | settings | {"data": {"path": write_rows(tmp_path, *rows)}})
    task, read = task_of(config), load_rows(config, config.data, load_tokenizer(config.tokenizer), Quarantine())
    shown = [answer_inputs(task, row) for row in read]
    if isinstance(task, Preferences):
        task.reference = {key_of(*answer): 0.0 for row in read for answer in task.answers(row)}
    batches = task.micro_batches(read, 30, torch.device("cpu"))
    assert len(batches) > 2 and sorted(i for batch in batches for i in batch.index) == list(range(len(read)))
    predicts = int(task.head == "lm")
    for batch in batches:
        start, places = 0, list[int]()
        for each, length in zip((each for i in batch.index for each in shown[i]), batch.lengths, strict=True):
            tokens = list(each.tokens)
            assert batch.tokens_T[start : start + length].tolist() == tokens[: len(tokens) - predicts]
            own = [start + place - predicts for place in sorted(each.marks)]
            if predicts:
                targets = batch.targets_R[torch.isin(batch.rows_R, torch.tensor(own))].tolist()
                assert targets == [tokens[place] for place in sorted(each.marks)]
            start, places = start + length, places + own
        assert places == batch.rows_R.tolist()


def test_lengths_by_file_and_the_steps_of_an_epoch(show: Run, tmp_path: Path) -> None:
    def rows(lengths: list[int]) -> list[dict[str, str]]:
        return [{"prompt": "p", "completion": "x" * length} for length in lengths]

    sizes = {"a": [3, 5, 8, 13, 21, 40, 70], "b": [1, 2, 4, 9, 60]}
    for name, lengths in sizes.items():
        write_rows(tmp_path, *rows(lengths)).rename(tmp_path / f"{name}.jsonl")
    files = ["a.jsonl", {"path": "b.jsonl", "weight": 2}]
    settings: dict[str, Any] = {"max_tokens": 50, "runtime": {"micro_batch_tokens": 60}, "batch_size": 4}
    for policy, usable, aside, cut in ("quarantine", 50, "1", "0"), ("truncate", 999, "0", "1"):
        out = show("sft", [{"prompt": "p"}], data={"path": files, "long_rows": policy}, **settings)
        table = {line.split()[1]: line.split() for line in out.splitlines() if line.startswith("train  ")}
        kept = {name: [min(length + 1, 49) for length in own if length + 2 <= usable] for name, own in sizes.items()}
        total = sum(kept["a"]) + 2 * sum(kept["b"])
        for name, weight in ("a", 1), ("b", 2):
            middle, long = (int(np.quantile(kept[name], q, method="inverted_cdf")) for q in (0.5, 0.9))
            share = f"{weight * sum(kept[name]) / total:.2f}"
            expected = [len(kept[name]), weight, aside, cut, middle, long, max(kept[name]), share]
            assert table[f"{name}.jsonl"][2:] == list(map(str, expected))
        num_rows = len(kept["a"]) + 2 * len(kept["b"])
        assert f"an epoch: {-(-num_rows // 4)} optimizer steps" in out and f" {total} in all" in out


def test_held_out_rows_have_no_weights(show: Run, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n:02}", "completion": "b"} for n in range(16)]
    for name, own in ("a", rows[:8]), ("b", rows[8:]):
        write_rows(tmp_path, *own).rename(tmp_path / f"{name}.jsonl")
    files = ["a.jsonl", {"path": "b.jsonl", "weight": 2}]
    out = show("sft", rows, evaluation={"fraction": 0.5}, data={"path": files})
    table = {(split, file): cells for split, file, *cells in (line.split() for line in out.splitlines() if ".jsonl  " in line)}
    held = [table["heldout", f"{name}.jsonl"] for name in "ab"]
    assert table["train", "b.jsonl"][1] == "2" and len(table) == 4
    assert [cells[1] for cells in held] == ["1", "1"], "all rows are equally long"
    assert [cells[-1] for cells in held] == [f"{int(cells[0]) / 8:.2f}" for cells in held]


def test_rows_that_are_not_there_are_refused(show: Run, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "a", "completion": "b"}] * 4
    show("sft", rows)
    assert main(["data", "show", "config.yaml", "--row", "4"]) == 2
    assert "--row is 4, but the split train has 4 usable rows, numbered from 0" in capsys.readouterr().err
    assert main(["data", "show", "config.yaml", "--split", "heldout"]) == 2
    assert "the split heldout has 0 usable rows" in capsys.readouterr().err
    held = show("sft", [{"prompt": f"{n}", "completion": "b"} for n in range(8)], "--split", "heldout",
                evaluation={"fraction": 0.25})  # fmt: skip
    assert "heldout row 0" in held and json.loads(held.splitlines()[2].split()[-1].replace("'", '"')) in map(str, range(8))
    Path("serve.yaml").write_text("rewards: []\n")
    assert main(["data", "show", "serve.yaml"]) == 2
    assert "reads no rows" in capsys.readouterr().err
