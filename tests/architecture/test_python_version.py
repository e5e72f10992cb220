"""Python 3.10 is new enough: what is promised, how the tools are set, and every file read as 3.10 reads it."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("oppo_megatron", "tests", "benchmarks", "docs", "examples", "launch")
OLDEST = (3, 10)


def sources() -> list[Path]:
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(found) > 400
    return [*found, ROOT / "setup.py"]


def test_the_tools_are_set_to_the_oldest_python() -> None:
    """ruff and mypy find what a newer Python has: syntax, and by typeshed the names of its library."""
    settings, dotted = (ROOT / "pyproject.toml").read_text(encoding="utf-8"), ".".join(map(str, OLDEST))
    for name, value in {
        "requires-python": f">={dotted}",
        "target-version": f"py{dotted.replace('.', '')}",
        "python_version": dotted,
    }.items():
        assert re.findall(rf'^{name} = "(.*)"$', settings, re.MULTILINE) == [value], name
    assert f"sys.version_info < {OLDEST}" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"Python {dotted} or newer" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_file_has_the_syntax_of_the_oldest_python() -> None:
    for path in sources():
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=OLDEST)


@pytest.mark.slow
def test_newer_names_of_the_library_are_errors_of_lint(tmp_path: Path) -> None:
    newer = tmp_path / "newer.py"
    newer.write_text("from datetime import UTC\nimport tomllib\nfrom enum import StrEnum\n")
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path)]
    shown = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, str(newer)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert [line.split(":")[1:3] for line in shown.stdout.splitlines() if ": error:" in line] == [
        ["1", " error"], ["2", " error"], ["3", " error"],
    ], shown  # fmt: skip


LOOK = '''
"""What is wrong with files here, by the interpreter that runs this: a line each."""
import ast, functools, importlib, json, sys

paths, library = json.load(sys.stdin)

@functools.cache
def looked_up(module, names):
    try:
        found = importlib.import_module(module)
    except ImportError:
        return [module]
    return [f"{module}.{name}" for name in names if name != "*" and not hasattr(found, name) and missing(f"{module}.{name}")]

def missing(module):
    try:
        importlib.import_module(module)
    except ImportError:
        return True
    return False

def guarded(tree):
    """Imports that a file can do without."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) or (isinstance(node, ast.If) and "version_info" in ast.unparse(node.test)):
            yield from (id(each) for part in node.body for each in ast.walk(part))

for path in paths:
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        compile(text, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        print(f"{path}: {error}")
        continue
    tree, modules, asked = ast.parse(text), {}, []
    left_out = set(guarded(tree))
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            modules.update((each.asname or each.name, each.name) for each in node.names if each.asname or "." not in each.name)
            asked += [(each.name, ()) for each in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            asked.append((node.module, tuple(each.name for each in node.names)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            asked.append((modules[node.value.id], (node.attr,)))
    for module, names in asked:
        if module.partition(".")[0] in library:
            for name in looked_up(module, names):
                print(f"{path}: {name} is not in Python {sys.version_info[0]}.{sys.version_info[1]}")
'''


def python_310() -> str:
    named = [os.environ.get("OPPO_PYTHON310"), shutil.which("python3.10")]
    of_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob("3.10.*/bin/python3.10"))
    for each in filter(None, [*named, *map(str, of_pyenv)]):
        asked = [each, "-c", f"import sys; sys.exit(sys.version_info[:2] != {OLDEST})"]
        if subprocess.run(asked, capture_output=True, check=False).returncode == 0:
            return each
    pytest.skip("no Python 3.10 is here: install python3.10, or name one in OPPO_PYTHON310")


def wrong_in(paths: list[Path], python: str) -> list[str]:
    told = json.dumps([[str(path) for path in paths], sorted(sys.stdlib_module_names)])
    shown = subprocess.run([python, "-c", LOOK], input=told, capture_output=True, text=True, check=True)
    return shown.stdout.splitlines()


@pytest.mark.slow
def test_a_real_python_310_compiles_every_file_and_has_what_it_imports_of_the_library(tmp_path: Path) -> None:
    python = python_310()
    newer = tmp_path / "newer.py"
    newer.write_text("import tomllib, asyncio\nfrom datetime import UTC\nasyncio.timeout(1)\n")
    assert [line.split(": ")[1].split()[0] for line in wrong_in([newer], python)] == [
        "tomllib", "datetime.UTC", "asyncio.timeout",
    ]  # fmt: skip
    assert wrong_in(sources(), python) == []
