"""Stages of the demo: what is reused, what is made again, and what is never removed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from oppo_megatron.cli.demo import RECORD, Stage
from oppo_megatron.errors import ConfigError


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
        """Make what is not finished; the names of what was made."""
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
