"""A mistake loses nothing, shows no traceback, and is answered by a remedy that works when it is followed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.mistakes.mistake import Mistake
from tests.mistakes.page import GROUPS, MISTAKES, answered, mistaken, row, typed
from tests.mistakes.project import build, fingerprints

WRITTEN_BY = (3, 11)
"""The version of Python whose words docs/mistakes.md has, where they are Python's."""
PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    build(folder)
    return folder


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_answered_by_a_remedy_that_works(
    mistake: Mistake, template: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    with mistaken(mistake, template, project):
        before = fingerprints(project)
        capfd.readouterr()
        code = answered(mistake)
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
    said = row(mistake, answer, project)
    if sys.version_info[:2] != WRITTEN_BY:  # what Python says itself has other words there
        said = said.rpartition("` |")[0]
    assert any(line.startswith(said) for line in PAGE.read_text().splitlines()), "docs/mistakes.md is not what is said now"


def test_there_are_two_hundred_of_them_and_the_page_has_no_other() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 200
    lines = PAGE.read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) == len(MISTAKES) + len(GROUPS), "rows, and a head for each table"
