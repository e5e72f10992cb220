"""`oppo config --init`: files that are valid but for what the user has yet to supply; `oppo demo`: stages, made or reused."""

from __future__ import annotations

import functools
import json
import runpy
import shlex
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import yaml

from oppo_megatron.cli.demo import CONFIGS, OUT, RECORD, RUNS, Stage, comparison, difference, find_configs, folder_of, plan
from oppo_megatron.cli.init import CASES
from oppo_megatron.cli.main import main, parse_arguments
from oppo_megatron.config.algorithm import PRESETS
from oppo_megatron.config.explain import dotted
from oppo_megatron.config.load import load_config
from oppo_megatron.config.rewards import RewardPart
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.tokenizer import train_sentencepiece
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import named_roles, world_size
from oppo_megatron.preflight.validate import train_problems
from oppo_megatron.rewards.functions import build_reward_functions
from tests.support.commands import SHAPE, TEXTS, refused, shown, work_in

INIT = ("config", "--init")
LONG_SHAPE = SHAPE | {"max_position_embeddings": 8192}
ROW = {
    "prompt": "1+1=", "question": "1+1=", "answer": "2 #### 2", "completion": "2", "chosen": "2", "rejected": "3",
    "completions": ["1+1=2", "2"], "labels": [True, True],
}  # fmt: skip
HH = "\n\nHuman: what is {0}+1?\n\nAssistant:"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work_in(tmp_path, monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def written(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    return shown(capsys, *INIT, *arguments).splitlines()


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
    err = refused(capsys, "validate", said[0].partition(":")[0], "--kind", CASES[case].kind)
    problems = [line for line in err.splitlines() if line.startswith("  - ")]
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
        assert len(text.splitlines()) <= 60 and max(map(len, text.splitlines())) <= 140 and "@" not in text
        assert all(line.find("  # ") in (-1, 31) for line in text.splitlines() if line.startswith("run_dir")), "aligned"
        tree = yaml.safe_load(text)
        assert tree.get("runtime", {}).get("dtype") is None, "the device decides: the same file runs on a GPU and a CPU"
        shape = tree.get("model", {}).pop("init", None)  # a config.json's keys, not ours
        assert (shape is not None) == (case.startswith(("arithmetic", "hh")) and path.name == "sft.yaml")
        for key in every_key(tree):
            assert key.rpartition(".")[2].isdigit() or explained(key), key


def validated(capsys: pytest.CaptureFixture[str], config: str) -> str:
    """What `oppo validate` shows, with small models in the place of those yet to supply."""
    roles = {"model", "actor", "critic", "reward"} & yaml.safe_load(Path(config).read_text()).keys()
    starts = [f"{role}.{key}" for role in roles for key in (f"init={json.dumps(LONG_SHAPE)}", "checkpoint=null")]
    return shown(capsys, "validate", config, *starts, "tokenizer.path=t.model")


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if not case.makes_data])
def test_with_the_files_supplied_it_is_valid(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_sentencepiece(TEXTS, folder / "t.model", 300)
    for name in CASES[case].paths.values():
        Path(name).parent.mkdir(exist_ok=True)
        if name.endswith(".jsonl"):
            row = {name: value for name, value in ROW.items() if CASES[case].kind != "rm" or name != "completion"}
            rows = [row | {"prompt": f"{n}+1=", "question": f"{n}+1="} for n in range(30)]
            Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            Path(name).mkdir()
            (Path(name) / "config.json").write_text(json.dumps(LONG_SHAPE))
    said = written(capsys, case, "--force")
    assert "yet to supply:" not in said
    config = said[0].partition(":")[0]
    if CASES[case].kind == "train":
        assert ("critic" in yaml.safe_load(Path(config).read_text())) == (CASES[case].preset == "ppo")
    assert f"valid configuration for `oppo {CASES[case].kind}`" in validated(capsys, config)


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
    for config in [said[0].partition(":")[0], *(name for name in ("sft.yaml", "rm.yaml") if Path(name).exists())]:
        assert "1 row" in (out := validated(capsys, config)) or "rows set aside" in out


def test_nothing_is_overwritten_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my_reward.py").write_text("mine")
    assert "my_reward.py is there already; --force overwrites" in refused(capsys, *INIT, "hf-actor")
    assert not Path("ppo.yaml").exists() and Path("my_reward.py").read_text() == "mine"
    written(capsys, "hf-actor", "--force")
    assert "def score" in Path("my_reward.py").read_text()
    assert "ppo.yaml is there already" in refused(capsys, *INIT, "gsm8k")
    written(capsys, "gsm8k", "--out", "other.yaml")
    Path("dir.yaml").mkdir()
    assert "dir.yaml is there already; name another" in refused(capsys, *INIT, "gsm8k", "--force", "--out", "dir.yaml")


def test_what_is_named_stands_in_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    said = written(capsys, "reward-model", "--actor", "a b/c: #1", "--reward", "r", "--data", "x/{y}.jsonl", "--out", "n/p.yml")
    tree = yaml.safe_load(Path("n/p.yml").read_text())
    assert tree["actor"]["checkpoint"] == tree["tokenizer"]["path"] == "a b/c: #1"
    assert tree["reward"]["checkpoint"] == "r" and tree["data"]["path"] == "x/{y}.jsonl"
    assert tree["run_dir"] == "n/runs/rlhf" and "oppo train n/p.yml" in section(said, "next:")
    written(capsys, "hh-dpo", "--heldout", "test.jsonl.gz", "--out", "h/dpo.yaml")
    for name in ("sft", "dpo"):
        assert yaml.safe_load(Path(f"h/{name}.yaml").read_text())["evaluation"]["data"]["path"] == "test.jsonl.gz"
    supply = section(written(capsys, "reward-model", "--out=n/q.yml"), "yet to supply:")
    assert "n/models/reward  (critic.checkpoint, reward.checkpoint)" in supply
    written(capsys, "gsm8k", "--data", "in ${HOME}.jsonl")
    assert "here:    in ${HOME}.jsonl" in shown(capsys, "config", "ppo.yaml", "--explain", "data.path")


def test_cases_are_listed_and_wrong_words_explained(capsys: pytest.CaptureFixture[str]) -> None:
    out = "\n".join(written(capsys))
    assert all(case.name in out and case.about in out for case in CASES.values())
    no_place = "--reward: case `gsm8k` has no place for it; it takes --actor, --data, --heldout"
    for words, said in {
        "--init gsm": "did you mean `gsm8k`?", "--init zzzz": "choose one of gsm8k, grpo, dapo, reward-model",
        "--list --force": "--force can only be given with --init", "--init gsm8k --reward=r": no_place,
        "x.yaml --init gsm8k": "--init writes a new file; name it with --out",
        "--init gsm8k --out out.json": "`out.json`, but a configuration ends in .yaml",
    }.items():  # fmt: skip
        assert said in refused(capsys, "config", *words.split())
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
    path = folder / "h" / "my_reward.py"
    score = runpy.run_path(str(path))["score"]
    said = build_reward_functions([RewardPart(kind="python", entry_point=f"{path}:score")]).describe()
    about = "Return 1 if the response contains the row's `answer`, else 0.  This is an example; replace it by your own rule."
    assert len(said) == 1 and said[0].endswith(f": {about}")
    assert score("q", "it is 42", {"answer": 42}) == 1.0 and score("q", "no", {"answer": 42}) == 0.0
    with pytest.raises(KeyError, match="column `answer`, and this row has .*'solution'.*write in my_reward.py"):
        score("q", "word " * 50, {"solution": 42})


ROOT = Path(__file__).resolve().parents[2]
FIGURES = {
    "step_s": 0.5, "scoring_hidden": None, "reward_first": 0.4, "reward_last": 0.8, "deferred": {"0": 9, "1": 1},
    "accuracy_before": 0.25, "accuracy_after": 0.625, "error_before": 0.01, "error_after": 0.015,
}  # fmt: skip


def trained(stage: Stage) -> TrainConfig:
    kind, file, changes = stage.make.args
    assert kind == "train"
    return load_config(TrainConfig, file, changes)


@pytest.mark.parametrize("quick", [False, True], ids=["whole", "quick"])
@pytest.mark.parametrize("algorithm", PRESETS)
def test_the_stages_of_a_preset(algorithm: str, quick: bool, tmp_path: Path) -> None:
    preset, out = PRESETS[algorithm], tmp_path / "demo"
    stages = {stage.name: stage for stage in plan(out, ROOT / CONFIGS, 3, quick, algorithm)}
    assert list(stages) == ["data", "tokenizer", "sft", *(["rm"] if algorithm == "ppo" else []), *RUNS]
    for name, overlaps in RUNS.items():
        assert [stage.name for stage in stages[name].after] == [before for before in stages if before not in RUNS]
        config = trained(stages[name])
        problems = train_problems(config)
        assert problems and all("does not exist" in problem for problem in problems), problems
        assert config.algorithm.preset == algorithm and config.seed == 3 and config.run_dir == out / name
        assert (config.overlap.intra, config.overlap.inter) == (overlaps, overlaps)
        assert config.ppo.kl.mode == preset.kl["mode"]
        assert {name: getattr(config.algorithm, name) for name in preset.choices} == preset.choices
        scorers = ["reference", "critic", "reward"] if algorithm == "ppo" else ["reference"]
        assert [*named_roles(config)] == ["actor", *([] if preset.kl["mode"] == "none" else scorers)]
        assert world_size(config) == 2
        size = {"ppo": 1, "online_dpo": 4}.get(algorithm, 4 if quick else 8)
        assert config.rollout.group_size == size and config.overlap.delta.max > 0


@pytest.mark.parametrize("algorithm", PRESETS)
def test_a_host_with_one_gpu_gets_one_rank(algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo_megatron.cli.demo.has_cuda", lambda: True)
    monkeypatch.setattr("oppo_megatron.cli.demo.cuda_devices", lambda: 1)
    for stage in plan(tmp_path, ROOT / CONFIGS, 3, False, algorithm)[-2:]:
        config = trained(stage)
        assert world_size(config) == 1 and all("does not exist" in problem for problem in train_problems(config))


def test_the_arithmetic_examples_are_what_the_demo_runs() -> None:
    folder = ROOT / CONFIGS
    for name in ("ppo", "grpo", "dapo", "online_dpo"):
        own = load_config(TrainConfig, folder / f"{name}.yaml")
        theirs = trained(plan(folder_of(OUT, name), folder, 1, False, name)[-1])
        assert own == (theirs.model_copy(update={"placement": own.placement}) if name == "dapo" else theirs)


def test_each_algorithm_has_its_own_folder_and_configurations(tmp_path: Path) -> None:
    folders = [folder_of(OUT, name) for name in PRESETS]
    assert folders[0] == Path("runs/demo") and len({*folders}) == len(PRESETS)
    assert folder_of(OUT, "dapo") == Path("runs/demo-dapo")
    for name in ("sft", "grpo"):
        (tmp_path / f"{name}.yaml").touch()
    assert find_configs(tmp_path, "rloo") == tmp_path
    with pytest.raises(ConfigError, match="no sft.yaml, rm.yaml and ppo.yaml in"):
        find_configs(tmp_path)
    (tmp_path / "grpo.yaml").unlink()
    with pytest.raises(ConfigError, match="no sft.yaml and grpo.yaml in .*name their folder with --configs"):
        find_configs(tmp_path, "rloo")


def test_a_table_without_scorers_has_no_row_for_them() -> None:
    text = comparison({name: FIGURES for name in RUNS}, 1.0, "dr_grpo")
    assert text.startswith("DR_GRPO on arithmetic") and "scoring time hidden" not in text
    scored = comparison({name: FIGURES | {"scoring_hidden": 0.5} for name in RUNS}, 1.0, "ppo")
    assert scored.startswith("PPO on arithmetic") and "scoring time hidden" in scored


@pytest.mark.parametrize(("after", "error", "said"), [
    (0.625, 0.015, "+0.0% ± 2.1%, which is noise"), (0.666, 0.015, "+4.1% ± 2.1%, which is noise"),
    (0.669, 0.015, "+4.4% ± 2.1%"), (0.581, 0.015, "-4.4% ± 2.1%"), (0.9, None, "+27.5%"),
])  # fmt: skip
def test_a_difference_of_two_accuracies_says_when_it_is_noise(after: float, error: float | None, said: str) -> None:
    other = FIGURES | {"accuracy_after": after, "error_after": error}
    assert difference(FIGURES, other) == said
    assert f" {said}\n" in comparison({"sequential": FIGURES, "oppo": other}, 1.0, "ppo")


class Chain:
    """first -> second -> third."""

    def __init__(self, root: Path):
        self.root, self.settings = root, {"first": 1, "second": 1, "third": 1}
        self.fail: Callable[[], int] | None = None

    def run(self) -> list[str]:
        """The stages that ran."""
        made: list[str] = []

        def make(name: str) -> int:
            made.append(name)
            (self.root / name / "product").write_text(name)
            return self.fail() if self.fail and name == "second" else 0

        stages: list[Stage] = []
        for name, value in self.settings.items():
            stages.append(Stage(name, name, self.root / name, {"value": value}, functools.partial(make, name), stages[-1:]))
        for stage in stages:
            if not stage.finished and stage.run():
                break
        return made


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    chain = Chain(tmp_path)
    assert chain.run() == ["first", "second", "third"]
    return chain


def test_finished_stages_are_reused_and_changed_ones_made_again_with_all_after_them(chain: Chain) -> None:
    assert chain.run() == []
    chain.settings["second"] = 2
    assert chain.run() == ["second", "third"] and chain.run() == []


@pytest.mark.parametrize(("name", "remade"), [("first", 3), ("second", 2), ("third", 1)])
def test_a_removed_stage_is_made_again_with_all_after_it(chain: Chain, name: str, remade: int) -> None:
    shutil.rmtree(chain.root / name)
    assert chain.run() == ["first", "second", "third"][-remade:]


@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_an_unfinished_stage_starts_from_an_empty_directory(tmp_path: Path, error: type[BaseException] | None) -> None:
    chain = Chain(tmp_path)

    def fail() -> int:
        (tmp_path / "second" / "half").write_text("half")
        if error is not None:
            raise error
        return 1

    chain.fail = fail
    with nullcontext() if error is None else pytest.raises(error):
        assert chain.run() == ["first", "second"], "what comes after a failed stage is not made"
    chain.fail = None
    assert chain.run() == ["second", "third"] and not (tmp_path / "second" / "half").exists()


def test_a_damaged_record_is_no_finished_stage_and_a_directory_of_someone_else_is_left_alone(chain: Chain) -> None:
    record = chain.root / "third" / RECORD
    record.write_text('{"finished": tr')
    assert chain.run() == ["third"] and json.loads(record.read_text())["finished"] is True
    record.unlink()
    (chain.root / "third" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"third has no stage\.json.*choose another --out"):
        chain.run()
    assert (chain.root / "third" / "thesis.txt").read_text() == "years of work"
