"""`oppo config --init`: what it writes is valid but for the files that the user has yet to supply, and it overwrites nothing."""

from __future__ import annotations

import importlib.util
import json
import shlex
from functools import cache
from pathlib import Path

import pytest
import yaml

from oppo_megatron.cli.init import CASES
from oppo_megatron.cli.main import main, parse_arguments
from oppo_megatron.config.explain import dotted
from oppo_megatron.config.rewards import RewardPart
from oppo_megatron.data.tokenizer import train_sentencepiece
from oppo_megatron.rewards.functions import build_reward_functions

LONGEST_CONFIG = 60
SHAPE = {
    "model_type": "qwen2", "vocab_size": 304, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip
ROW = {
    "prompt": "1+1=", "question": "1+1=", "answer": "2 #### 2", "completion": "2", "chosen": "2", "rejected": "3",
    "completions": ["1+1=2", "2"], "labels": [True, True],
}  # fmt: skip
HH = "\n\nHuman: what is {0}+1?\n\nAssistant:"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["config", "--init", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


def written(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["config", "--init", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def section(said: list[str], title: str) -> list[str]:
    lines = said[said.index(title) + 1 :]
    return [line.strip() for line in lines[: next((i for i, x in enumerate(lines) if x[:2] != "  "), len(lines))]]


@cache
def explained(key: str) -> bool:
    return main(["config", "--explain", key]) == 0


def every_key(tree: object, path: tuple[str | int, ...] = ()) -> list[str]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [key for name, value in items for key in (dotted((*path, name)), *every_key(value, (*path, name)))]


@pytest.mark.parametrize("case", CASES)
def test_only_files_are_missing_and_they_are_named(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = written(capsys, case)
    config = said[0].partition(":")[0]
    assert main(["validate", config, "--kind", CASES[case].kind]) == 2
    problems = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  - ")]
    assert problems and all("does not exist" in problem for problem in problems)
    missing = {problem.split("`")[1] for problem in problems}
    supply = set(section(said, "yet to supply:")) if "yet to supply:" in said else set()
    assert {line.partition("  (")[0] for line in supply} == set(CASES[case].paths.values())
    assert missing == {line.partition("  (")[0] for line in supply} | set(CASES[case].made)


@pytest.mark.parametrize("case", CASES)
def test_files_are_short_commented_and_of_known_keys(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    written(capsys, case)
    for path in Path().glob("*.yaml"):
        text = path.read_text()
        assert len(text.splitlines()) <= LONGEST_CONFIG and "@" not in text
        assert max(map(len, text.splitlines())) <= 140
        assert all(line.find("  # ") in (-1, 31) for line in text.splitlines() if line.startswith("run_dir")), "aligned"
        tree = yaml.safe_load(text)
        assert tree.get("runtime", {}).get("dtype") is None, "the device decides: the same file runs on a GPU and a CPU"
        shape = tree.get("model", {}).pop("init", None)  # a config.json's keys, not ours
        assert (shape is not None) == (case.startswith(("arithmetic", "hh")) and path.name == "sft.yaml")
        for key in every_key(tree):
            assert key.rpartition(".")[2].isdigit() or explained(key), key


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if not case.makes_data])
def test_with_the_files_supplied_it_is_valid(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"what is {n} plus {n}? it is {2 * n} = + - * 0123456789" for n in range(60)]
    train_sentencepiece(texts, folder / "t.model", 300)
    for name in CASES[case].paths.values():
        Path(name).parent.mkdir(exist_ok=True)
        if name.endswith(".jsonl"):
            row = {name: value for name, value in ROW.items() if CASES[case].kind != "rm" or name != "completion"}
            rows = [row | {"prompt": f"{n}+1=", "question": f"{n}+1="} for n in range(30)]
            Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            Path(name).mkdir()
            (Path(name) / "config.json").write_text(json.dumps(SHAPE))
    said = written(capsys, case, "--force")
    assert "yet to supply:" not in said
    config = said[0].partition(":")[0]
    shape = [f"{role}.init={json.dumps(SHAPE)}" for role in ("actor", "critic", "reward")]
    none = [f"{role}.checkpoint=null" for role in ("actor", "critic", "reward")]
    if CASES[case].kind != "train":
        shape, none = [f"model.init={json.dumps(SHAPE)}"], ["model.checkpoint=null"]
    else:
        named = yaml.safe_load(Path(config).read_text())
        assert ("critic" in named) == (CASES[case].preset == "ppo")
        shape, none = ([each for each in given if each.partition(".")[0] in named] for given in (shape, none))
    assert main(["validate", config, *shape, *none, "tokenizer.path=t.model"]) == 0, capsys.readouterr().err
    assert f"valid configuration for `oppo {CASES[case].kind}`" in capsys.readouterr().out


@pytest.mark.parametrize("case", ["hh", "hh-dpo", "hh-kto"])
def test_rows_as_hh_has_them_are_valid_in_every_stage(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_sentencepiece([f"Human Assistant what is {n} {n}+1? it" for n in range(60)], folder / "t.model", 300)
    whole = [{"chosen": f"{HH.format(n)} {n}", "rejected": f"{HH.format(n)} it is {n}"} for n in range(30)]
    empty = {"chosen": f"{HH.format(1)}{HH.format(2)} 3", "rejected": f"{HH.format(1)}"}
    same = {"chosen": f"{HH.format(1)} 2", "rejected": f"{HH.format(1)} 2"}
    unanswered = {"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: b"}
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in [*whole, empty, same, unanswered]))
    said = written(capsys, case, "--data", "a.jsonl", "--heldout", "b.jsonl")
    model = json.dumps(SHAPE)
    for config in [said[0].partition(":")[0], *(name for name in ("sft.yaml", "rm.yaml") if Path(name).exists())]:
        tree = yaml.safe_load(Path(config).read_text())
        roles = [role for role in ("model", "actor", "critic", "reward") if role in tree]
        starts = [f"{role}.{key}" for role in roles for key in (f"init={model}", "checkpoint=null")]
        assert main(["validate", config, *starts, "tokenizer.path=t.model"]) == 0, capsys.readouterr().err
        assert "1 row" in (out := capsys.readouterr().out) or "rows set aside" in out


def test_nothing_is_overwritten_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my_reward.py").write_text("mine")
    assert "my_reward.py is there already; --force overwrites" in refused(capsys, "hf-actor")
    assert not Path("ppo.yaml").exists() and Path("my_reward.py").read_text() == "mine"
    written(capsys, "hf-actor", "--force")
    assert "def score" in Path("my_reward.py").read_text()
    assert "ppo.yaml is there already" in refused(capsys, "gsm8k")
    written(capsys, "gsm8k", "--out", "other.yaml")
    Path("dir.yaml").mkdir()
    assert "dir.yaml is there already; name another" in refused(capsys, "gsm8k", "--force", "--out", "dir.yaml")


def test_what_is_named_stands_in_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    said = written(capsys, "reward-model", "--actor", "a b/c: #1", "--reward", "r", "--data", "x/{y}.jsonl", "--out", "n/p.yml")
    tree = yaml.safe_load(Path("n/p.yml").read_text())
    assert tree["actor"]["checkpoint"] == tree["tokenizer"]["path"] == "a b/c: #1"
    assert tree["reward"]["checkpoint"] == "r" and tree["data"]["path"] == "x/{y}.jsonl"
    assert tree["run_dir"] == "n/runs/rlhf"
    assert "oppo train n/p.yml" in section(said, "next:")
    written(capsys, "hh-dpo", "--heldout", "test.jsonl.gz", "--out", "h/dpo.yaml")
    for name in ("sft", "dpo"):
        assert yaml.safe_load(Path(f"h/{name}.yaml").read_text())["evaluation"]["data"]["path"] == "test.jsonl.gz"
    supply = section(written(capsys, "reward-model", "--out=n/q.yml"), "yet to supply:")
    assert "n/models/reward  (critic.checkpoint, reward.checkpoint)" in supply
    written(capsys, "gsm8k", "--data", "in ${HOME}.jsonl")
    assert main(["config", "ppo.yaml", "--explain", "data.path"]) == 0
    assert "here:    in ${HOME}.jsonl" in capsys.readouterr().out


def test_cases_are_listed_and_wrong_words_explained(capsys: pytest.CaptureFixture[str]) -> None:
    out = "\n".join(written(capsys))
    assert all(case.name in out and case.about in out for case in CASES.values())
    assert "did you mean `gsm8k`?" in refused(capsys, "gsm")
    assert "choose one of gsm8k, grpo, dapo, reward-model" in refused(capsys, "zzzz")
    assert main(["config", "--list", "--force"]) == 2
    assert "--force can only be given with --init" in capsys.readouterr().err
    assert main(["config", "x.yaml", "--init", "gsm8k"]) == 2
    assert "--init writes a new file; name it with --out" in capsys.readouterr().err
    assert "--reward: case `gsm8k` has no place for it; it takes --actor, --data, --heldout" in refused(
        capsys, "gsm8k", "--reward=r"
    )
    assert "`out.json`, but a configuration ends in .yaml" in refused(capsys, "gsm8k", "--out", "out.json")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("out", ["ppo.yaml", "with space/ppo.yaml"])
@pytest.mark.parametrize("case", CASES)
def test_the_next_commands_can_be_given(case: str, out: str, capsys: pytest.CaptureFixture[str]) -> None:
    for line in section(written(capsys, case, "--out", out), "next:"):
        words = shlex.split(line)
        if words[0] == "export":
            assert words == ["export", f"PYTHONPATH={'with space/' if ' ' in out else '.'}"]
        else:
            assert words[0] == "oppo" and parse_arguments(words[1:]).command == words[1]


def test_the_reward_function_is_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(capsys, "hf-actor", "--out", "h/ppo.yaml")
    spec = importlib.util.spec_from_file_location("my_reward", folder / "h" / "my_reward.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    said = build_reward_functions([RewardPart(kind="python", entry_point=f"{module.__file__}:score")]).describe()
    about = "Return 1 if the response contains the row's `answer`, else 0.  This is an example; replace it by your own rule."
    assert len(said) == 1 and said[0].endswith(f": {about}")
    assert module.score("q", "it is 42", {"answer": 42}) == 1.0 and module.score("q", "no", {"answer": 42}) == 0.0
    with pytest.raises(KeyError, match="column `answer`, and this row has .*'solution'.*write in my_reward.py"):
        module.score("q", "word " * 50, {"solution": 42})
