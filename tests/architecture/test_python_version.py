"""Python 3.10 is new enough, and tests reach the package by its public names: both are read from the source."""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("oppo_megatron", "tests", "benchmarks", "docs", "examples", "launch")
OLDEST = (3, 10)


def sources() -> list[Path]:
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(found) > 400
    return [*found, ROOT / "setup.py"]


def test_the_tools_are_set_to_the_oldest_python_whose_syntax_every_file_has() -> None:
    """They find what a newer Python has: ruff syntax, mypy and vermin names of its library."""
    settings, dotted = (ROOT / "pyproject.toml").read_text(encoding="utf-8"), ".".join(map(str, OLDEST))
    set_to = {"requires-python": f">={dotted}", "target-version": f"py{dotted.replace('.', '')}", "python_version": dotted}
    for name, value in set_to.items():
        assert re.findall(rf'^{name} = "(.*)"$', settings, re.MULTILINE) == [value], name
    assert f"sys.version_info < {OLDEST}" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"--target={dotted}-" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"Python {dotted} or newer" in (ROOT / "README.md").read_text(encoding="utf-8")
    for path in sources():
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=OLDEST)


PACKAGE = "oppo_megatron"
PRIVATE = re.compile(r"_[A-Za-z]\w*")
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "object"}
"""Functions whose arguments may name an attribute in a string: Python's, monkeypatch's and `mock.patch.object`."""
OTHERS = {"_actions"}
"""Private members of argparse's parsers that have no public equivalent."""


@functools.lru_cache(maxsize=1)
def walk(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


class Names(NamedTuple):
    own: set[str]
    members: set[str]


def bound(body: Iterable[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        else:
            stored = (each for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
            yield from (each.id for each in stored)


def defined_in(tree: ast.Module) -> Names:
    own, members = set(bound(tree.body)), set[str]()
    for node in walk(tree):
        if isinstance(node, ast.ClassDef):
            members.update(bound(node.body))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            members.add(node.attr)
    return Names({name for name in own if PRIVATE.fullmatch(name)}, {name for name in members if PRIVATE.fullmatch(name)})


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def package_modules(tree: ast.Module) -> set[str]:
    """Dotted paths that may be modules of the package in a file, by the name that it has there."""
    found: set[str] = set()
    for node in walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname or each.name for each in node.names if each.name.partition(".")[0] == PACKAGE}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            found |= {each.asname or each.name for each in node.names}
    return found


def uses(tree: ast.Module, private: Names) -> Iterator[tuple[int, str]]:
    """(line, name) of each use of the package's `private` names, but for those that a class of the file has too."""
    members, modules = private.members - defined_in(tree).members - OTHERS, package_modules(tree)
    for node in walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            parts = [*str(node.module).split("."), *(each.name for each in node.names)]
            yield from ((node.lineno, part) for part in parts if PRIVATE.fullmatch(part))
        elif isinstance(node, ast.Attribute):
            of_module = PRIVATE.fullmatch(node.attr) and ast.unparse(node.value) in modules
            if of_module or (node.attr in members and not is_self(node.value)):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            texts = [each.value for each in node.args if called in BY_NAME and isinstance(each, ast.Constant)]
            yield from ((node.lineno, str(text)) for text in texts if text in private.own | members)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(f"{PACKAGE}."):
            path = re.fullmatch(r"[\w.:]+", node.value)
            if path and any(PRIVATE.fullmatch(part) for part in re.split("[.:]", path[0])):
                yield node.lineno, node.value


def parsed(folder: str) -> Iterator[tuple[Path, ast.Module]]:
    return ((path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted((ROOT / folder).rglob("*.py")))


def test_no_test_reaches_a_private_name() -> None:
    found_in = [defined_in(tree) for _, tree in parsed(PACKAGE)]
    private = Names(set[str]().union(*(each.own for each in found_in)), set[str]().union(*(each.members for each in found_in)))
    assert min(map(len, private)) > 300, "the package has many"
    trees = (each for each in parsed("tests") if each[0] != Path(__file__))
    found = [f"{path.relative_to(ROOT)}:{line}: {name}" for path, tree in trees for line, name in uses(tree, private)]
    assert not found, "test through the public surface, or make the name public:\n" + "\n".join(found)


@pytest.mark.parametrize(("source", "names"), [
    ("from oppo_megatron.mcore.training import Loss, _run", ["_run"]),
    ("import oppo_megatron.mcore.training as t\nt._run()", ["t._run"]),
    ("from oppo_megatron.mcore import training\ntraining._run()", ["training._run"]),
    ("executor._wait(1)\nexecutor.wait(1)", ["executor._wait"]), ("mock.patch.object(Executor, '_wait', slow)", ["_wait"]),
    ("monkeypatch.setattr(journal, '_run', 1)\ngetattr(executor, '_wait')", ["_run", "_wait"]),
    ("mock.patch('oppo_megatron.engine.executor.Executor._wait')", ["oppo_megatron.engine.executor.Executor._wait"]),
    ("place = 'oppo_megatron.engine.executor:Executor._wait'", ["oppo_megatron.engine.executor:Executor._wait"]),
    ("os._exit(1)\nmock.patch.object(os, '_exit')\nimport torch._dynamo\nloop._run()", []),
    ("class Mine:\n    def __init__(self):\n        self._wait = 1\nMine()._wait", []),
    ("print('_wait', oppo.__name__)\nfrom oppo_megatron import __version__", []),
])  # fmt: skip
def test_each_way_to_reach_one_is_found(source: str, names: list[str]) -> None:
    assert [name for _, name in uses(ast.parse(source), Names({"_run"}, {"_wait"}))] == names
