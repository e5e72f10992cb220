"""oppo generate and oppo eval, as a user asks them, beside transformers."""

import argparse
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oppo_megatron.cli import generate
from oppo_megatron.cli.main import main
from oppo_megatron.policy import answering, answers
from tests.support.configs import least_config
from tests.support.hf import save_tiny
from tests.support.ppo import SHAPE
from tests.support.tokenizers import save_byte_level

Capture = pytest.CaptureFixture[str]
TEXTS = [f"Q: {a} plus {b}?\nA: the sum is {a + b}." for a in range(20) for b in range(20)]
SIZES = {name: value for name, value in SHAPE.items() if name != "model_type"} | {"vocab_size": 320}
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy") / "export"
    model = save_tiny(directory, "qwen2", seed=3, **SIZES)
    save_byte_level(directory, TEXTS, 320, chat_template=TEMPLATE)
    model.generation_config.eos_token_id = [0, 79]
    model.generation_config.save_pretrained(directory)
    return directory


def ask(capsys: Capture, *words: object) -> str:
    capsys.readouterr()
    assert main(["generate", *map(str, words)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def by_transformers(export: Path, texts: list[str], max_tokens: int) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = (AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export).float().eval())
    found = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")
        out = model.generate(**ids, do_sample=False, max_new_tokens=max_tokens, pad_token_id=0)
        found.append(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return found


def test_greedy_answers_are_those_of_transformers(export: Path, capsys: Capture) -> None:
    texts = [text[: 9 + i] for i, text in enumerate(TEXTS[::60])]
    asked = [word for text in texts for word in ("--prompt", text)]
    found = lines(ask(capsys, export, "--json", "--max-tokens", 30, *asked))
    due = by_transformers(export, texts, 30)
    assert [each["response"] for each in found] == due
    assert [(each["row"], each["prompt"]) for each in found] == list(enumerate(texts))
    assert {each["finish_reason"] for each in found} == {"eos", "length"}
    assert ask(capsys, export, "--max-tokens", 30, "--prompt", texts[0]) == due[0] + "\n", "shown while it grows"
    assert ask(capsys, export, "--max-tokens", 30, *asked[:4]) == f"--- prompt 0\n{due[0]}\n--- prompt 1\n{due[1]}\n"


def test_a_response_has_the_room_that_the_model_has(export: Path, capsys: Capture) -> None:
    prompt = "Q: " + "x" * 240
    (found,) = lines(ask(capsys, export, "--prompt", prompt, "--json", "--stop-id", 319))
    assert found["finish_reason"] in ("eos", "length") and found["tokens"] <= 256 - 240
    assert main(["generate", str(export), "--prompt", prompt * 2]) == 2 and "shorten it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "texts", "ids"),
    [([], ("END",), (7,)), (["--stop-id", "9", "--stop-id", "11"], ("END",), (7, 9, 11)), (["--stop", "Q:"], ("Q:",), (7,))],
)
def test_ids_join_those_of_the_run_and_texts_replace_its_own(
    words: list[str], texts: tuple[str, ...], ids: tuple[int, ...], tmp_path: Path
) -> None:
    """An export has the run's ids among its own, so they end its responses whatever is asked for."""
    parser = argparse.ArgumentParser()
    generate.add_drawing_arguments(parser)
    run = least_config(tmp_path, rollout={"batch_size": 8, "max_response_tokens": 100, "stop": ["END", 7]})
    drawing = generate.drawing_of(parser.parse_args(words), SimpleNamespace(run=run), 8)
    assert (drawing.stop, drawing.stop_token_ids) == (texts, ids)


def test_a_layout_and_a_file_change_nothing(export: Path, capsys: Capture, tmp_path: Path) -> None:
    drawn = ["-n", 3, "--seed", 7, "--top-k", 9, "--max-tokens", 20, "--stop", "1"]
    source = tmp_path / "prompts.txt"
    source.write_text("\n\n".join(TEXTS[:5]).replace("\nA", " A") + "\n")
    ask(capsys, export, "--input", source, "--output", tmp_path / "one.jsonl", *drawn, "--batch", 2)
    ask(capsys, export, "--input", source, "--output", tmp_path / "two.jsonl", *drawn, "--tp", 2)
    found = lines((tmp_path / "one.jsonl").read_text())
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    assert [(each["row"], each["sample"]) for each in found] == [(i, k) for i in range(5) for k in range(3)]
    assert len({each["response"] for each in found if each["row"] == 0}) == 3
    assert all(("1" in each["response"]) == (each["finish_reason"] == "stop") for each in found)


def test_rows_keep_their_columns_and_messages_have_the_template(export: Path, capsys: Capture, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [{"messages": [{"role": "user", "content": "hi"}], "answer": "9"}, {"messages": [{"role": "user", "content": "x"}]}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = lines(ask(capsys, export, "--input", source, "--json", "--max-tokens", 4))
    assert found[0]["prompt"] == "<|turn|>user: hi<|end|>\n<|turn|>assistant:" and found[0]["fields"] == {"answer": "9"}
    as_chat = lines(ask(capsys, export, "--prompt", "hi", "--as-chat", "--json", "--max-tokens", 4))
    assert as_chat[0]["response"] == found[0]["response"] and as_chat[0]["prompt"] == found[0]["prompt"]
    worded = lines(ask(capsys, export, "--prompt", "hi", "--template", "<{prompt}>", "--json", "--max-tokens", 4))
    assert worded[0]["prompt"] == "<hi>"


def test_an_interrupted_file_goes_on(export: Path, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, whole, cut = (tmp_path / name for name in ("in.txt", "whole.jsonl", "cut.jsonl"))
    source.write_text("\n".join(text.replace("\n", " ") for text in TEXTS[:12]))
    words = [export, "--input", source, "--max-tokens", 12, "--temperature", 0.8, "--batch", 3]
    ask(capsys, *words, "--output", whole)
    numbers = itertools.count(1)

    def interrupted(line: str) -> None:
        if next(numbers) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(answering, "ByTime", lambda *_: interrupted)
        assert main(["generate", *map(str, words), "--output", str(cut)]) == 130
    partial = tmp_path / "cut.jsonl.partial"
    assert not cut.exists() and len(partial.read_text().splitlines()) == 1 + 5
    partial.write_text(partial.read_text() + '{"row": 11, "sam')  # a process that was killed
    for changed, told in [
        ([], "add --resume to continue it"),
        (["--resume", "--seed", "3"], "seed was 0, is 3; use those, or remove the file"),
    ]:
        assert main(["generate", *map(str, words), "--output", str(cut), *changed]) == 2 and told in capsys.readouterr().err
    ask(capsys, *words, "--output", cut, "--resume")
    assert cut.read_bytes() == whole.read_bytes() and not partial.exists()
    assert main(["generate", *map(str, words), "--output", str(cut), "--resume"]) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert main(["generate", *map(str, words), "--output", str(cut)]) == 2
    assert "is there already; name another file" in capsys.readouterr().err


def chat(capsys: Capture, monkeypatch: pytest.MonkeyPatch, turns: list[str], *words: object) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{turn}\n" for turn in turns)))
    return ask(capsys, *words)


def test_a_conversation_is_answered_turn_by_turn(export: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [export, "--max-tokens", 8]
    said = chat(capsys, monkeypatch, ["hi", "", "more", "/reset", "hi"], *words, "--chat", "--system", "Be brief.")
    first = lines(ask(capsys, *words, "--prompt", "hi", "--as-chat", "--system", "Be brief.", "--json"))[0]
    turns = [("system", "Be brief."), ("user", "hi"), ("assistant", first["response"]), ("user", "more")]
    second = "".join(f"<|turn|>{role}: {content}<|end|>\n" for role, content in turns) + "<|turn|>assistant:"
    then = lines(ask(capsys, *words, "--prompt", second, "--json"))[0]
    assert said == f"{first['response']}\n{then['response']}\n{first['response']}\n"


def test_ctrl_c_ends_an_answer_and_not_the_chat(export: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    show, interrupts = answers.GrowingText.show, iter([True])

    def interrupted(text: answers.GrowingText, tokens: list[int], last: bool) -> None:
        show(text, tokens, last)
        if next(interrupts, False):
            os.kill(os.getpid(), signal.SIGINT)

    whole = chat(capsys, monkeypatch, ["hi"], export, "--max-tokens", 40, "--chat")
    monkeypatch.setattr(answering.GrowingText, "show", interrupted)
    cut = chat(capsys, monkeypatch, ["hi", "/reset", "hi"], export, "--max-tokens", 40, "--chat").rsplit(whole, 1)[0]
    assert len(cut) < len(whole) and whole.startswith(cut.rstrip("\n"))


@pytest.mark.long
def test_a_conversation_over_two_ranks(export: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "oppo_megatron", "generate", str(export), "--chat", "--max-tokens", "8"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    options: dict[str, Any] = {"input": "hi\nmore\n", "text": True, "capture_output": True, "timeout": 300, "check": True}
    alone, staged = (subprocess.run([*words, *more], env=environment, **options).stdout for more in ([], ["--pp", "2"]))
    assert alone == staged and alone.count("\n") >= 2


def test_a_chat_needs_a_template(export: Path, tmp_path: Path, capsys: Capture) -> None:
    for words in (["--chat"], ["--prompt", "x", "--as-chat"]):
        plain = save_byte_level(tmp_path / "tokenizer", TEXTS, 320)
        assert main(["generate", str(export), "--tokenizer", str(plain), *words]) == 2
        error = capsys.readouterr().err
        assert "tokenizer has none; give one with --chat-template" in error and "data.columns" not in error


@pytest.mark.parametrize(("words", "told"), [
    ([], "nothing is given, but one of --prompt, --input and --chat is needed"),
    (["--prompt", "x", "--chat"], "--prompt and --chat are given, but one of"),
    (["--prompt", ""], "prompt 0 ('') has no token; give it some text"),
    (["--prompt", "x", "-n", "0"], "--samples is 0, but must be at least 1"),
    (["--prompt", "x", "-n", "2", "--greedy"], "2 greedy responses would be the same; drop --samples"),
    (["--prompt", "x", "--greedy", "--top-k", "3"], "--greedy and --top-k exclude each other"),
    (["--prompt", "x", "--temperature", "-1"], "--temperature is -1, but must be 0 (greedy) or more"),
    (["--prompt", "x", "--temperature", "nan"], "--temperature is nan, but must be"),
    (["--prompt", "x", "--top-p", "0"], "--top-p is 0, but must be above 0"),
    (["--prompt", "x", "--stop", "<|end|>"], "give its id in --stop-id: [0]"),
    (["--prompt", "x", "--stop", ""], "--stop is empty"), (["--prompt", "x", "--template", "y"], "has no {prompt}"),
    (["--prompt", "x", "--system", "y"], "add --as-chat"), (["--prompt", "x", "--column", "y"], "--column is of an --input"),
    (["--prompt", "x", "--resume"], "--resume continues an --output"), (["--chat", "--json"], "--chat is shown in the terminal"),
    (["--prompt", "x", "--tp", "3"], "4 attention heads do not"),
    (["--prompt", "x", "--stop-id", "-3"], "--stop-id is -3, but the policy's ids are 0 to"),
    (["--prompt", "x", "--max-tokens", "999"], "--context raises this limit, up to the model's own"),
    (["--prompt", "x", "--context", "9999"], "256"), (["--input", "gone.jsonl"], "does not exist"),
    (["--prompt", "x", "--output", "no/where.jsonl"], "no is not a folder"), (["--prompt", "x", "--tokenizer", "gone"], "gone"),
    (["--prompt", "x", "--chat-template", "{% if", "--as-chat"], "template"),
])  # fmt: skip
def test_mistakes_are_told_before_anything_is_loaded(
    export: Path, words: list[str], told: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "run_rank", None)
    assert main(["generate", str(export), *words]) == 2
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error


def test_prompts_that_are_too_long_are_left_out(export: Path, tmp_path: Path, capsys: Capture) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ["a" * 600, TEXTS[0], "b" * 600, TEXTS[1]]))
    asked = ["generate", str(export), "--input", str(rows), "--json", "--max-tokens", "8"]
    assert main(asked) == 2
    refused = capsys.readouterr().err
    remedy = refused.split("leave such rows out (")[1].split(")")[0]
    assert main([*asked, *remedy.split(), "--max-prompts", "1"]) == 0
    told = capsys.readouterr()
    assert [line["row"] for line in lines(told.out)] == [1]
    assert f"2 of 4 prompts have more than {remedy.split()[1]} tokens and are left out" in told.err
    assert main([*asked, "--max-prompt-tokens", "2"]) == 2
    assert "all 4 prompts have more than 2 tokens" in capsys.readouterr().err
    assert main(["generate", str(export), "--prompt", "a", "--max-prompt-tokens", "2"]) == 2
    assert "--max-prompt-tokens is of an --input" in capsys.readouterr().err


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


def test_two_policies_by_every_judge(work: Path, tmp_path: Path, capsys: Capture) -> None:
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
        assert [line["scores"]["model"] for line in lines] == pytest.approx(scores_by_transformers(work, lines), abs=1e-4)
    difference = written[1]["metrics"]["model"]["mean"] - written[0]["metrics"]["model"]["mean"]
    assert written[1]["difference"]["model"]["mean"] == pytest.approx(difference)


def scores_by_transformers(work: Path, lines: list[dict[str, str]]) -> list[float]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(work / "reward").float().eval()
    tokenizer, scores = AutoTokenizer.from_pretrained(work / "reward"), []
    for line in lines:
        ids = tokenizer(line["prompt"]).input_ids + tokenizer(line["response"]).input_ids
        ids += [tokenizer.eos_token_id] if line["finish_reason"] == "eos" else []
        hidden = model.model(torch.tensor([ids])).last_hidden_state
        scores.append(model.score(hidden)[0, -1, 0].item())
    return scores


def test_rows_that_cannot_be_scored_are_named(work: Path, tmp_path: Path, capsys: Capture) -> None:
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


def test_a_reward_of_a_file_has_its_sum(work: Path, tmp_path: Path, capsys: Capture) -> None:
    parts = [
        {"kind": "verifier", "name": "gsm8k"}, {"kind": "python", "weight": 0.5, "entry_point": f"{__name__}:length_of"},
        {"kind": "verifier", "name": "length", "buffer_tokens": 1000, "max_tokens": 1000, "weight": 2.0},
    ]  # fmt: skip
    (tmp_path / "rewards.yaml").write_text(json.dumps({"rewards": parts}))
    assert judge(work, work / "before", "--rewards", tmp_path / "rewards.yaml", "--json", "--max-prompts", 3) == 0
    (policy,) = json.loads(capsys.readouterr().out)["policies"]
    metrics = policy["metrics"]
    assert metrics["reward"]["mean"] == pytest.approx(
        metrics["gsm8k"]["mean"] + 0.5 * metrics[f"{__name__}:length_of"]["mean"] + 2.0 * metrics["length"]["mean"]
    )
    assert 0 > metrics["length"]["mean"] == pytest.approx(-metrics["response tokens"]["mean"] / 1000)
    assert metrics["reward"]["n"] == 3


@pytest.mark.parametrize(("words", "told"), [
    ([], "nothing judges the responses"), (["--verifier", "gsm8k", "--answer", "solution"], "no column 'solution'"),
    (["--reward-model", "{work}/after"], "a scalar head is needed"), (["--reward-model", "{work}/nowhere"], "nowhere"),
    (["--function", "no.module:here"], "no.module"), (["--rewards", "{work}/empty.yaml"], "has no `rewards`"),
    (["--verifier", "gsm8k", "--max-prompts", "0"], "--max-prompts is 0"),
    (["--verifier", "gsm8k", "--out", "{work}"], "not an empty folder"),
    (["{work}/before", "--verifier", "gsm8k"], "given twice"),
    (["--reward-model", "{work}/reward", "--max-tokens", "100000"], "100000"),
])  # fmt: skip
def test_mistakes_are_told_before_anything_is_decoded(work: Path, capsys: Capture, words: list[str], told: str) -> None:
    (work / "empty.yaml").write_text("steps: 3\n")
    data = ["--data", str(work / "heldout.jsonl")]
    assert main(["eval", str(work / "before"), *(word.format(work=work) for word in words), *data]) == 2
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error and "responses, " not in error, error
