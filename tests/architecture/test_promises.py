"""tests/promises.md names tests that exist, with their tiers; settings are few, and pages have at most 100 columns."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from oppo_megatron.config.base import Section
from oppo_megatron.config.describe import COMMANDS, settings_in

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "tests" / "promises.md"
NONE = "**none**"
BREAK = "<br>"
ROW = re.compile(r"^\| (?P<promise>.+) \| (?P<tests>.+) \| (?P<tiers>.*?) ?\|$")
NAME = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
COUNTS = re.compile(r"^Promises: (\d+), guarded: (\d+), unguarded: (\d+)\.$", re.MULTILINE)
LISTS = (ast.List, ast.Tuple)


class Promise(NamedTuple):
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
    for part in node.elts if isinstance(node, LISTS) else [node]:
        name = ast.unparse(part.func if isinstance(part, ast.Call) else part).removeprefix("pytest.").removeprefix("mark.")
        yield name
        if name == "parametrize" and isinstance(part, ast.Call):
            yield from marks_of_all_cases(part)


def marks_of_all_cases(call: ast.Call) -> Iterator[str]:
    cases = call.args[1] if len(call.args) > 1 else None
    if not isinstance(cases, LISTS) or not cases.elts:
        return
    keywords = [case.keywords if isinstance(case, ast.Call) else [] for case in cases.elts]
    found = [{mark for key in keys if key.arg == "marks" for mark in marks(key.value)} for keys in keywords]
    yield from set.intersection(*found)


def module_marks(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["pytestmark"]:
            yield from marks(node.value)


def find_marks(file: Path, name: str) -> set[str] | None:
    """Return the marks of a test and its file, or None if it does not exist."""
    tree, kinds = tree_of(file), (ast.FunctionDef, ast.AsyncFunctionDef)
    node = next((each for each in tree.body if isinstance(each, kinds) and each.name == name), None)
    if node is None or not name.startswith("test_"):
        return None
    return {*module_marks(tree), *(mark for each in node.decorator_list for mark in marks(each))}


@cache
def checked_rooms() -> re.Pattern[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.search(r"^PURE := tests/architecture .*tests/unit/test_, .*?_\*\.py,\s+([\w ]+?)\)+$", text, re.MULTILINE)
    assert found is not None, "the Makefile's PURE is of another form; mend this test"
    return re.compile(rf"tests/(architecture/|unit/test_({'|'.join(found[1].split())})_)")


def tier(file: str, found: set[str]) -> str:
    if file.startswith("tests/gpu/") or "gpu" in found:
        return "gpu"
    if file.startswith(("tests/slurm/", "tests/gpulibs/", "tests/lmeval/")):
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


@pytest.mark.parametrize(("tests", "tiers", "counts", "says"), [
    ([HERE], ["check"], (1, 1, 0), None), ([PLAIN, SOME_LONG, MODULE_SLOW], ["test"], (1, 1, 0), None),
    ([HERE, LONG, GPU, SLURM, GPULIBS], ["check", "long", "gpu", "slurm", "gpulibs"], (1, 1, 0), None),
    ([], [], (1, 0, 1), None), ([HERE + "_not"], ["check"], (1, 1, 0), "there is no test"),
    (["tests/e2e/test_resume.py::checkpoints"], ["test"], (1, 1, 0), "there is no test"),
    (["tests/e2e/test_absent.py::test_it"], ["test"], (1, 1, 0), "there is no test"),
    (["test_it"], ["test"], (1, 1, 0), "there is no test"), ([LONG], ["test"], (1, 1, 0), "the marks say 'long'"),
    ([SOME_LONG], ["long"], (1, 1, 0), "the marks say 'test'"),
    ([PLAIN, LONG], ["long", "test"], (1, 1, 0), "the marks say 'test<br>long'"),
    ([GPU], ["slurm"], (1, 1, 0), "the marks say 'gpu'"), ([], ["test"], (1, 0, 1), "the marks say ''"),
    ([HERE], ["check"], (1, 0, 1), "the last line says"), ([], [], (2, 1, 1), "the last line says"),
])  # fmt: skip
def test_each_fault_of_a_page_is_found(tests: list[str], tiers: list[str], counts: tuple[int, ...], says: str | None) -> None:
    cells = BREAK.join(f"`{test}`" for test in tests) or NONE
    last = "Promises: {}, guarded: {}, unguarded: {}.".format(*counts)
    found = problems(f"| promise | test | tier |\n|---|---|---|\n| It holds | {cells} | {BREAK.join(tiers)} |\n\n{last}\n")
    assert [says in each for each in found] == [True] if says else found == []


@pytest.mark.parametrize(("source", "expected"), [
    ("@pytest.mark.slow\n@pytest.mark.long\ndef test_it(): pass", {"slow", "long"}),
    ("pytestmark = [pytest.mark.gpu, pytest.mark.skipif(True, reason='long')]\ndef test_it(): pass", {"gpu", "skipif"}),
    ("@pytest.mark.parametrize('a', [1, pytest.param(2, marks=pytest.mark.long)])\ndef test_it(): pass", {"parametrize"}),
    ("@pytest.mark.parametrize('a', [pytest.param(1, marks=[mark.long])])\ndef test_it(): pass", {"parametrize", "long"}),
])  # fmt: skip
def test_marks_are_read_from_the_source(source: str, expected: set[str], tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(f"import pytest\n{source}\n")
    assert find_marks(file, "test_it") == expected


def settings_with_a_default() -> dict[type[Section], list[str]]:
    """The optional settings of each section class, without those that it inherits."""
    found: dict[type[Section], list[str]] = {}
    pending = list(Section.__subclasses__())
    while pending:
        section = pending.pop()
        pending += section.__subclasses__()
        if section.__module__.startswith("oppo_megatron.config"):
            inherited = {name for base in section.__bases__ if issubclass(base, Section) for name in base.model_fields}
            own = {name: field for name, field in section.model_fields.items() if name not in inherited}
            found[section] = [name for name, field in own.items() if not field.is_required()]
    return found


MOST = {"train": 163, "sft": 68, "rm": 69, "dpo": 78, "serve": 41}


def optional_settings(command: str) -> set[tuple[type[Section], str]]:
    """The optional settings of a command's sections; a section used in several places counts once."""
    with_default, pending = settings_with_a_default(), [COMMANDS[command]]
    reached: set[tuple[type[Section], str]] = set()
    seen: set[type[Section]] = set()
    while pending:
        section = pending.pop()
        seen.add(section)
        pending += {each.section for each in settings_in(section) if each.section is not None} - seen
        owned = [(owner, name) for owner in section.__mro__ for name in with_default.get(owner, ())]
        reached |= {(owner, name) for owner, name in owned if not section.model_fields[name].is_required()}
    return reached


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_no_more_settings_than_it_reads(command: str) -> None:
    assert len(optional_settings(command)) <= MOST[command]
    assert sum(map(len, settings_with_a_default().values())) <= 192


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wrap", ROOT / "docs" / "tools" / "wrap.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prose_has_at_most_100_columns_and_the_readme_is_short() -> None:
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in PAGES}
    wide = [f"{name}:{line}: {words}" for name, text in texts.items() for line, words in tool().too_long(text)]
    assert not wide, "run python docs/tools/wrap.py on these pages\n" + "\n".join(wide)
    assert len(texts[Path("README.md")].splitlines()) <= 120


def test_wrapping_leaves_code_tables_and_links_as_they_are() -> None:
    link = f"[{'text ' * 12}of a link](docs/a_page_with_a_long_name.md#{'anchor-' * 5})"
    text = "\n".join([
        "# " + "heading " * 20, "", "word " * 40 + f"`{'code ' * 12}` {link}", "",
        "- item " + "word " * 30, "  more", "    - nested " + "word " * 30, "", "| " + "cell " * 30 + " |", "",
        "    indented " + "code " * 30, "", "```", "fenced " * 30, "```", "", "!!! note", "    " + "word " * 40, "",
        "before " * 13 + "12. not an item, - nor this, # nor a heading", "",
    ])  # fmt: skip
    wrap = tool().wrap
    lines = wrap(text).splitlines()
    kept = [line for line in text.splitlines() if line.startswith(("#", "|", "    indented", "fenced", "!!!"))]
    assert [line for line in lines if line in kept] == kept
    assert max(len(line) for line in lines if line not in kept) <= 100
    assert wrap(text).split() == text.split() and wrap(wrap(text)) == wrap(text)
    assert f"`{'code ' * 12}`" in wrap(text) and link[link.index("](") :] in wrap(text)
    assert all(line.startswith("    ") for line in lines[lines.index("!!! note") + 1 : lines.index("!!! note") + 3])
    assert not any(line.startswith(("12.", "- nor", "# nor")) for line in lines)
    assert list(tool().too_long(text)) and not list(tool().too_long(wrap(text)))
