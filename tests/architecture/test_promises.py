"""tests/promises.md names tests that exist, with the tiers that their marks give them, and counts its rows rightly."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "tests" / "promises.md"
NONE = "**none**"
BREAK = "<br>"
ROW = re.compile(r"^\| (?P<promise>.+) \| (?P<tests>.+) \| (?P<tiers>.*?) ?\|$")
NAME = re.compile(r"`(tests/[\w/]+\.py)::(\w+(?:::\w+)?)`")
COUNTS = re.compile(r"^Promises: (\d+), guarded: (\d+), unguarded: (\d+)\.$", re.MULTILINE)
LISTS = (ast.List, ast.Tuple)


@dataclass(frozen=True)
class Promise:
    """A row; `tiers` are one for all its tests, or one for each."""

    text: str
    tests: tuple[str, ...]
    tiers: tuple[str, ...]


def promises(page: str) -> list[Promise]:
    found = []
    for line in page.splitlines():
        if not line.startswith("|") or line.startswith(("| promise |", "|---")):
            continue
        row = ROW.match(line)
        assert row is not None, f"no row of three cells: {line}"
        tests = () if row["tests"] == NONE else tuple(row["tests"].split(BREAK))
        found.append(Promise(row["promise"], tests, tuple(row["tiers"].split(BREAK)) if row["tiers"] else ()))
    return found


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def marks(node: ast.expr) -> Iterator[str]:
    """Names of the marks that an expression is made of, but for those that parametrize gives to some cases only."""
    parts = node.elts if isinstance(node, LISTS) else [node]
    for part in parts:
        call = part.func if isinstance(part, ast.Call) else part
        name = ast.unparse(call).removeprefix("pytest.").removeprefix("mark.")
        yield name
        if name == "parametrize" and isinstance(part, ast.Call):
            yield from marks_of_all_cases(part)


def marks_of_all_cases(call: ast.Call) -> Iterator[str]:
    cases = call.args[1] if len(call.args) > 1 else None
    if not isinstance(cases, LISTS) or not cases.elts:
        return
    found = [
        {mark for key in case.keywords if key.arg == "marks" for mark in marks(key.value)}
        if isinstance(case, ast.Call) and ast.unparse(case.func) == "pytest.param"
        else set()
        for case in cases.elts
    ]
    yield from set.intersection(*found)


def module_marks(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["pytestmark"]:
            yield from marks(node.value)


def find_marks(file: Path, name: str) -> set[str] | None:
    """Marks of a test, those of its class and its file included; None where there is no such test."""
    body, found = tree_of(file).body, set(module_marks(tree_of(file)))
    *classes, function = name.split("::")
    kinds: list[tuple[type[ast.AST], ...]] = [(ast.ClassDef,)] * len(classes)
    kinds.append((ast.FunctionDef, ast.AsyncFunctionDef))
    for part, kind in zip((*classes, function), kinds, strict=True):
        node = next((each for each in body if isinstance(each, kind) and getattr(each, "name", "") == part), None)
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        body, found = node.body, found | {mark for each in node.decorator_list for mark in marks(each)}
    return found if function.startswith("test_") else None


@cache
def checked_rooms() -> re.Pattern[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.search(r"^PURE := tests/architecture .*tests/unit/test_, .*?_\*\.py,\s+([\w ]+?)\)+$", text, re.MULTILINE)
    assert found is not None, "the Makefile's PURE is of another form; mend this test"
    return re.compile(rf"tests/(architecture/|unit/test_({'|'.join(found[1].split())})_)")


def tier(file: str, found: set[str]) -> str:
    if file.startswith("tests/gpu/") or "gpu" in found:
        return "gpu"
    if file.startswith(("tests/slurm/", "tests/gpulibs/")):
        return file.split("/")[1]
    if "long" in found:
        return "long"
    return "check" if checked_rooms().match(file) and "slow" not in found else "test"


def problems(page: str) -> list[str]:
    rows, wrong = promises(page), []
    for row in rows:
        right = []
        for test in row.tests:
            named = NAME.fullmatch(test)
            file = ROOT / named[1] if named else None
            if named is None or file is None or not file.is_file() or (found := find_marks(file, named[2])) is None:
                wrong.append(f"{row.text}: there is no test {test}")
                continue
            right.append(tier(named[1], found))
        expected = tuple(right) if len(set(right)) > 1 else tuple(right[:1])
        if len(right) == len(row.tests) and row.tiers != expected:
            wrong.append(f"{row.text}: tier {BREAK.join(row.tiers)!r}, but the marks say {BREAK.join(expected)!r}")
    texts = [row.text for row in rows]
    wrong += [f"{text}: stands there twice" for text in sorted({text for text in texts if texts.count(text) > 1})]
    guarded = sum(bool(row.tests) for row in rows)
    counts = (str(len(rows)), str(guarded), str(len(rows) - guarded))
    if (said := COUNTS.findall(page)) != [counts]:
        wrong.append(f"the last line says {said}, but the rows are {counts}")
    return wrong


def test_the_page_names_tests_that_exist_with_their_tiers_and_counts_them() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(promises(page)) > 60
    found = problems(page)
    assert not found, "\n".join(found)


HERE = "tests/architecture/test_promises.py::test_each_fault_of_a_page_is_found"
PLAIN = "tests/e2e/test_resume.py::test_resume_in_another_layout"
SOME_LONG = "tests/gloo/test_training.py::test_steps_equal_plain_torch"
LONG = "tests/e2e/test_demo.py::test_the_tutorial_followed_to_the_letter"
MODULE_SLOW = "tests/e2e/test_demo.py::test_figures"
GPU = "tests/gpu/test_cuda.py::test_draws_never_leave_the_support"
GPULIBS = "tests/gpulibs/test_gpu_libraries.py::test_attention_through_flash_attn_is_that_of_gathered_keys"
SLURM = "tests/slurm/test_preemption.py::test_a_job_is_told_to_stop_requeued_and_finishes_as_if_nothing_had_been"


@pytest.mark.parametrize(
    ("tests", "tiers", "counts", "says"),
    [
        ([HERE], ["check"], (1, 1, 0), None),
        ([PLAIN, SOME_LONG, MODULE_SLOW], ["test"], (1, 1, 0), None),
        ([HERE, LONG, GPU, SLURM, GPULIBS], ["check", "long", "gpu", "slurm", "gpulibs"], (1, 1, 0), None),
        ([], [], (1, 0, 1), None),
        ([HERE + "_not"], ["check"], (1, 1, 0), "there is no test"),
        (["tests/e2e/test_resume.py::checkpoints"], ["test"], (1, 1, 0), "there is no test"),
        (["tests/e2e/test_absent.py::test_it"], ["test"], (1, 1, 0), "there is no test"),
        (["test_it"], ["test"], (1, 1, 0), "there is no test"),
        ([LONG], ["test"], (1, 1, 0), "the marks say 'long'"),
        ([SOME_LONG], ["long"], (1, 1, 0), "the marks say 'test'"),
        ([PLAIN, LONG], ["long", "test"], (1, 1, 0), "the marks say 'test<br>long'"),
        ([GPU], ["slurm"], (1, 1, 0), "the marks say 'gpu'"),
        ([], ["test"], (1, 0, 1), "the marks say ''"),
        ([HERE], ["check"], (1, 0, 1), "the last line says"),
        ([], [], (2, 1, 1), "the last line says"),
    ],
)
def test_each_fault_of_a_page_is_found(
    tests: list[str], tiers: list[str], counts: tuple[int, int, int], says: str | None
) -> None:
    cells = BREAK.join(f"`{test}`" for test in tests) or NONE
    last = "Promises: {}, guarded: {}, unguarded: {}.".format(*counts)
    page = f"| promise | test | tier |\n|---|---|---|\n| It holds | {cells} | {BREAK.join(tiers)} |\n\n{last}\n"
    found = problems(page)
    assert [says in each for each in found] == [True] if says else found == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def test_it(): pass", set()),
        ("@pytest.mark.slow\n@pytest.mark.long\ndef test_it(): pass", {"slow", "long"}),
        ("@pytest.mark.skipif(True, reason='long')\ndef test_it(): pass", {"skipif"}),
        ("pytestmark = [pytest.mark.gpu, pytest.mark.skipif(True)]\ndef test_it(): pass", {"gpu", "skipif"}),
        ("@pytest.mark.parametrize('a', [1, pytest.param(2, marks=pytest.mark.long)])\ndef test_it(): pass", {"parametrize"}),
        (
            "@pytest.mark.parametrize('a', [pytest.param(1, marks=[pytest.mark.long])])\ndef test_it(): pass",
            {"parametrize", "long"},
        ),
    ],
)  # fmt: skip
def test_marks_are_read_from_the_source(source: str, expected: set[str], tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(f"import pytest\n{source}\n")
    assert find_marks(file, "test_it") == expected
    file = tmp_path / "test_in_a_class.py"
    body = source.replace("\n", "\n    ")
    if not source.startswith("pytestmark"):
        file.write_text(f"@pytest.mark.gpu\nclass TestIt:\n    {body}\n")
        assert find_marks(file, "TestIt::test_it") == expected | {"gpu"} and find_marks(file, "TestIt::test_no") is None
