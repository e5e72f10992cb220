"""`oppo demo`: its presets' stages and configurations, and which stages are reused, made again, or never removed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from oppo_megatron.cli.demo import CONFIGS, OUT, RECORD, RUNS, Stage, comparison, difference, find_configs, folder_of, plan
from oppo_megatron.config.algorithm import PRESETS
from oppo_megatron.config.load import load_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import named_roles, world_size
from oppo_megatron.preflight.validate import train_problems

ROOT = Path(__file__).resolve().parents[2]
FIGURES = {
    "step_s": 0.5, "scoring_hidden": None, "reward_first": 0.4, "reward_last": 0.8, "deferred": {"0": 9, "1": 1},
    "accuracy_before": 0.25, "accuracy_after": 0.625, "error_before": 0.01, "error_after": 0.015,
}  # fmt: skip


def trained(stage: Stage) -> TrainConfig:
    assert isinstance(stage.make, functools.partial)
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
        file, out = folder / f"{name}.yaml", folder_of(OUT, name)
        own, stage = load_config(TrainConfig, file), plan(out, folder, 1, False, name)[-1]
        theirs = trained(stage)
        if name == "dapo":
            theirs = theirs.model_copy(update={"placement": own.placement})
        assert own == theirs


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


@pytest.mark.parametrize(
    ("after", "error", "said"),
    [
        (0.625, 0.015, "+0.0% ± 2.1%, which is noise"),
        (0.666, 0.015, "+4.1% ± 2.1%, which is noise"),
        (0.669, 0.015, "+4.4% ± 2.1%"),
        (0.581, 0.015, "-4.4% ± 2.1%"),
        (0.9, None, "+27.5%"),
    ],
)
def test_a_difference_of_two_accuracies_says_when_it_is_noise(after: float, error: float | None, said: str) -> None:
    other = FIGURES | {"accuracy_after": after, "error_after": error}
    assert difference(FIGURES, other) == said
    assert f" {said}\n" in comparison({"sequential": FIGURES, "oppo": other}, 1.0, "ppo")


class Chain:
    """first -> second -> third; `made` lists what ran."""

    def __init__(self, root: Path):
        self.root = root
        self.made: list[str] = []
        self.settings = {"first": 1, "second": 1, "third": 1}
        self.fail: Callable[[], int] | None = None

    def stages(self) -> list[Stage]:
        stages: list[Stage] = []
        for name in ("first", "second", "third"):
            stages.append(Stage(name, name, self.root / name, {"value": self.settings[name]}, self._maker(name), stages[-1:]))
        return stages

    def _maker(self, name: str) -> Callable[[], int]:
        def make() -> int:
            self.made.append(name)
            (self.root / name / "product").write_text(name)
            return self.fail() if self.fail and name == "second" else 0

        return make

    def run(self) -> list[str]:
        self.made = []
        for stage in self.stages():
            if not stage.finished and stage.run():
                break
        return self.made


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    chain = Chain(tmp_path)
    assert chain.run() == ["first", "second", "third"]
    return chain


def test_finished_stages_are_reused_and_changed_ones_made_again_with_all_after_them(chain: Chain) -> None:
    assert chain.run() == []
    chain.settings["second"] = 2
    assert chain.run() == ["second", "third"]
    assert chain.run() == []


@pytest.mark.parametrize(("name", "remade"), [("first", 3), ("second", 2), ("third", 1)])
def test_a_removed_stage_is_made_again_with_all_after_it(chain: Chain, name: str, remade: int) -> None:
    for file in (chain.root / name).iterdir():
        file.unlink()
    (chain.root / name).rmdir()
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
    if error is None:
        assert chain.run() == ["first", "second"], "what comes after a failed stage is not made"
    else:
        with pytest.raises(error):
            chain.run()
    chain.fail = None
    assert chain.run() == ["second", "third"]
    assert not (tmp_path / "second" / "half").exists()


def test_a_damaged_record_is_no_finished_stage(chain: Chain) -> None:
    (chain.root / "third" / RECORD).write_text('{"finished": tr')
    assert chain.run() == ["third"]
    assert json.loads((chain.root / "third" / RECORD).read_text())["finished"] is True


def test_a_directory_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"first has no stage\.json.*choose another --out"):
        Chain(tmp_path).run()
    assert (tmp_path / "first" / "thesis.txt").read_text() == "years of work"
