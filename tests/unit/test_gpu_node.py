"""The kit for the first minutes on a GPU node: all its names are in the code, its pack is complete, it runs without a GPU."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu_node import pack
from oppo_megatron.cli.main import parse_arguments
from tests.support.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "benchmarks" / "gpu_node"
FIRST = (KIT / "first.sh").read_text(encoding="utf-8")
HERE_DOCUMENTS = re.findall(r"<<'PY'[^\n]*\n(.*?)\nPY\n", FIRST, re.DOTALL)
SOURCES = [(KIT / name).read_text(encoding="utf-8") for name in pack.SCRIPTS if name.endswith(".py")] + HERE_DOCUMENTS


def collected(module: ModuleType) -> Iterator[str]:
    for name, test in vars(module).items():
        marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
        if name.startswith("test_"):
            ids = ["-".join(map(str, values)) for values in product(*(mark.args[1] for mark in marks))]
            yield from (f"{name}[{each}]" if each else name for each in ids)


def test_every_test_that_it_runs_exists() -> None:
    named = re.findall(r"'(test_[a-z_]+(?:\[[^']*\])?)'", FIRST)
    assert len(named) == 9 and not set(named) - set(collected(importlib.import_module("tests.gpu.test_cuda")))


def test_every_function_that_it_imports_exists() -> None:
    assert len(HERE_DOCUMENTS) == 3
    ours = [
        (node.module, alias.name)
        for node in ast.walk(ast.Module([part for source in SOURCES for part in ast.parse(source).body], []))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("oppo_megatron", "tests"))
        for alias in node.names
    ]
    assert len(ours) > 20
    for module, name in ours:
        assert hasattr(importlib.import_module(str(module)), name), f"{module} has no {name}"


def test_every_command_that_it_calls_is_one() -> None:
    commands = re.findall(r"-m oppo_megatron (.*?)(?: *\|\||;|$)", FIRST.replace("\\\n", " "), re.MULTILINE)
    words = [re.sub(r'"\$\(\([^"]*"', "600", command).replace('"', "").split() for command in commands]
    assert [each[0] for each in words] == ["validate", "train", "bench", "bench"]
    for each in words:
        assert parse_arguments(each).command == each[0]


def test_the_pack_holds_what_is_asked_for_and_what_these_ask_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads the wheels' own requirements, markers for the image; only wheels whose versions an image lacks."""
    asks = {
        "megatron-core": ["torch", "numpy<3", "extra-only; extra == 'dev'"],
        "pydantic": ["pydantic-core==2.5", "old; python_version < '3.11'"],
        "pydantic-core": ["typing-extensions>=4"],
        "omegaconf": ["PyYAML>=5"],
    }
    found: list[str] = []

    def download(needed: Requirement, python: str, machine: str) -> Path:
        found.append(str(needed))
        wheel = tmp_path / f"{needed.name}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("x.dist-info/METADATA", "".join(f"Requires-Dist: {each}\n" for each in asks.get(needed.name, [])))
        return wheel

    monkeypatch.setattr(pack, "download", download)
    pack.collect(dict.fromkeys(pack.IMAGE), "3.12", "x86_64")
    names = [Requirement(each).name for each in found]
    assert sorted(names) == ["megatron-core", "omegaconf", "pydantic", "pydantic-core", "typing-extensions"]
    assert "pydantic-core==2.5" in found
    image = dict(pack.frozen("numpy==1.20\ntorch @ file:///torch.whl\n-e .\n# note\ntyping_extensions==4.9.0\n"))
    assert image == {"numpy": "1.20", "torch": None, "typing-extensions": "4.9.0"}
    found.clear()
    pack.collect(dict.fromkeys(pack.IMAGE) | image, "3.12", "x86_64")
    assert {"numpy>=1.26"} <= set(found) and not {"torch", "typing-extensions>=4"} & set(found)


def test_the_tests_for_a_gpu_need_no_environment_of_their_own() -> None:
    told = subprocess.run(
        ["make", "-n", "gpu-test", "PYTHON=the-nodes-python"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "the-nodes-python -m pytest" in told.stdout and ".venv" not in told.stdout and "pip" not in told.stdout


@pytest.mark.long
def test_without_a_gpu_every_part_runs_and_leaves_its_figures(tmp_path: Path) -> None:
    for folder in ("oppo_megatron", "tests", "benchmarks"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / ".kit").mkdir()
    for name in pack.SCRIPTS:
        shutil.copy(KIT / name, tmp_path / ".kit")
    out = tmp_path / "out"
    environment = os.environ | {"OUT": str(out), "PYTHON": sys.executable, "FIRST_S": "1080", "PYTHONPATH": python_path()}
    done = subprocess.run(["bash", ".kit/first.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout
    summary = json.loads((out / "summary.json").read_text())
    steps = [step["step"] for step in summary["steps"]]
    assert summary["device"] == "cpu" and summary["failed"] == [], (out / "first.log").read_text()[-8000:]
    assert steps == ["wheels", "imports", "machine", "tests-1", "train", "bench", "trace", "attend", "tests-2"]
    assert {"decode", "update"} <= set(summary["figures"]) and len((out / "train.jsonl").read_text().splitlines()) == 3
    assert (out / "traces.tar.gz").stat().st_size > 1000
