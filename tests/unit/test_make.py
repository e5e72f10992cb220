"""`make demo` and `make test` on a machine that has nothing but Python, git and make."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READ = ("Makefile", "pyproject.toml", "setup.py", "constraints.txt", "tests/aligner")


def make(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["make", "--no-print-directory", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    for name in READ:
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(ROOT / name, target) if (ROOT / name).is_dir() else shutil.copy(ROOT / name, target)
    return tmp_path


def places(text: str, *steps: str) -> list[int]:
    assert all(step in text for step in steps), text
    return [text.index(step) for step in steps]


@pytest.mark.parametrize(
    ("target", "steps"),
    [
        ("demo", ("-m venv .venv", "install -c constraints.txt -e .", ".venv/bin/oppo demo")),
        ("check", ("-m venv .venv", "install -c constraints.txt -e '.[test,docs]'", ".venv/bin/ruff", "-m pytest")),
        (
            "test",
            (
                "-m venv .venv", "install -c constraints.txt -e '.[test,docs]'", ".venv/bin/ruff", "mkdocs build",
                "venv --without-pip .venv-aligner", "tests/aligner/requirements-nodeps.txt", "'megatron-core==0.19.2'",
                "pytest -W ignore tests/aligner", "-m pytest -n", "OPPO_CORE=0.19.2 PYTHONPATH=",
            ),
        ),
    ],
)  # fmt: skip
def test_what_is_needed_is_installed_first_and_only_once(fresh: Path, target: str, steps: tuple[str, ...]) -> None:
    found = places(make(fresh, "-n", f"PYTHON={sys.executable}", target), *steps)
    assert found == sorted(found)
    (fresh / ".venv" / "bin").mkdir(parents=True)
    for name in ("bin/python", ".installed", ".installed-test"):
        (fresh / ".venv" / name).touch()
    assert "constraints.txt" not in make(fresh, "-n", target)


def test_an_older_python_is_refused(fresh: Path, tmp_path: Path) -> None:
    old = tmp_path / "python-of-old"
    old.write_text("#!/bin/sh\ncase $1 in --version) echo Python 3.9.2;; *) exit 1;; esac\n")
    old.chmod(0o755)
    done = subprocess.run(["make", f"PYTHON={old}", "demo"], cwd=fresh, capture_output=True, text=True, check=False)
    assert done.returncode and f"Python 3.10 or newer is needed; {old} is Python 3.9.2" in done.stdout


@pytest.mark.long
def test_a_clone_installs_itself(tmp_path: Path) -> None:
    asked = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=0", "--timeout=20", "-d",
        tmp_path, "einops",
    ]  # fmt: skip
    if subprocess.run(asked, capture_output=True, check=False).returncode:
        pytest.skip("pip reaches no package index from here")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    make(clone, f"PYTHON={sys.executable}", ".venv/.installed", ".venv/.installed-test")
    python, shown = clone / ".venv" / "bin" / "python", clone / ".venv" / "bin" / "oppo"
    subprocess.run([python, "-c", "import megatron.core, transformers, pytest, xdist, mypy, mkdocs"], check=True)
    helped = subprocess.run([shown, "demo", "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "usage: oppo demo" in helped.stdout
    assert make(clone, "-n", "demo") == ".venv/bin/oppo demo\n"
