"""A mistake loses nothing, shows no traceback, and is answered by a remedy that works when it is followed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from oppo_megatron.cli.main import main
from tests.mistakes.files import DATA, RUNS, TOKENIZERS, WEIGHTS, YAML
from tests.mistakes.mistake import Mistake
from tests.mistakes.project import build, fingerprints
from tests.mistakes.settings import SETTINGS
from tests.mistakes.usage import COMMANDS, ENVIRONMENT, FUNCTIONS

MISTAKES = (*SETTINGS, *YAML, *WEIGHTS, *TOKENIZERS, *DATA, *RUNS, *COMMANDS, *FUNCTIONS, *ENVIRONMENT)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    build(folder)
    return folder


@pytest.fixture
def project(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    shutil.copytree(template, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for name in [*os.environ]:
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
    return folder


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_answered_by_a_remedy_that_works(
    mistake: Mistake, project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for edit in mistake.spoils:
        edit(project)
    before = fingerprints(project)
    with monkeypatch.context() as patch:
        for name, value in mistake.variables.items():
            patch.setenv(name, value)
        code = typed(mistake.typed)
    answer = capfd.readouterr().err
    assert code == 2, f"exit code {code}: {answer}"
    assert "Traceback" not in answer and "Error(" not in answer
    assert len(answer.splitlines()) <= 20, f"more than anyone reads:\n{answer}"
    for words in mistake.says:
        assert words in answer, f"{words!r} is not in: {answer}"
    after = fingerprints(project)
    assert {name: after.get(name) for name in before} == before, "a file was lost or changed"
    for edit in mistake.mends:
        edit(project)
    code = typed(mistake.then)
    assert code == 0, f"the remedy does not work: {capfd.readouterr().err}"


def test_there_are_a_hundred_of_them() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 100


def typed(arguments: Sequence[str]) -> int:
    """Exit code of `oppo ARGUMENTS`, in this process; modules of the project are forgotten, as a new process has none."""
    sys.modules.pop("my_rewards", None)
    try:
        return main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)
