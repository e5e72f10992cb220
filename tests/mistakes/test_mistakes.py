"""A mistake loses nothing, shows no traceback, and is answered by a remedy that works when it is followed."""

from pathlib import Path

import pytest

from tests.mistakes.page import MISTAKES, answered, mistaken, row, typed
from tests.mistakes.project import Mistake, build, fingerprints


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
    assert said.startswith(f"| {mistake.name} | `") and said.endswith(" |") and "\n" not in said, "a row of the page"


def test_there_are_two_hundred_of_them() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 200
