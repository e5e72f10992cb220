"""The Dockerfile: what it is made from, who it runs as, and that what it copies installs with every file it needs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.docker.run_lines import EFFECTS, LEFT_OUT, instructions

ROOT = Path(__file__).resolve().parents[2]
INSTALL = "pip install --no-cache-dir --no-deps /opt/oppo-megatron"
LINES = list(instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")))


def of(stage: str, name: str) -> list[str]:
    return [rest for each, instruction, rest in LINES if (each, instruction) == (stage, name)]


def ignored(name: str) -> bool:
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    parts = Path(name).parts
    return any(fnmatch(part, pattern.removeprefix("**/")) for part in parts for pattern in patterns)


def test_stages_and_their_bases() -> None:
    assert of("cpu", "FROM") == ["python:3.12-slim AS cpu"]
    assert of("gpu", "FROM") == ["nvcr.io/nvidia/nemo:26.02 AS gpu"]
    assert LINES[-1][0] == "gpu", "the last stage is what `docker build` without --target makes"


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_nobody_runs_as_root_and_health_is_what_validate_says(stage: str) -> None:
    assert of(stage, "USER") == ["10001"]
    names = [name for each, name, _ in LINES if each == stage]
    assert names.index("USER") < names.index("HEALTHCHECK") < names.index("CMD")
    assert "useradd --create-home --uid 10001 oppo" in " ".join(of(stage, "RUN"))
    (check,) = of(stage, "HEALTHCHECK")
    assert json.loads(check.partition("CMD ")[2]) == ["oppo", "validate"]


def test_the_image_keeps_its_own_torch() -> None:
    installs = [part for rest in of("gpu", "RUN") for part in rest.split(" && ") if "install" in part and "pip" in part]
    assert installs == [INSTALL]
    assert of("gpu", "RUN")[-1] == "oppo validate"
    assert "autoremove" not in str(LINES) and "PIP_CONSTRAINT" not in str(LINES)


def test_the_cpu_stage_tests_what_it_copied_and_every_run_line_is_known() -> None:
    names = [(name, rest) for stage, name, rest in LINES if stage == "cpu"]
    assert names.index(("USER", "10001")) < names.index(("RUN", "make test"))
    assert ("COPY", "--chown=10001 . .") in names
    assert set(EFFECTS) == {"cpu", "gpu"}
    left_out = [part for _, name, rest in LINES if name == "RUN" for part in rest.split(" && ") if part.startswith(LEFT_OUT)]
    assert left_out == ["make test", INSTALL, "oppo validate"]


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed (the extra `test` brings it on x86-64 Linux)")
    found = subprocess.run([hadolint, "--no-color", "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_what_is_copied_makes_a_whole_wheel(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: nothing says which files there are")
    context = tmp_path / "context"
    wanted = set()
    for name in listed.stdout.splitlines():
        if name.startswith(("oppo_megatron/", "launch/slurm/", "pyproject", "setup", "README")) and not ignored(name):
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, context / name, follow_symlinks=False)
            wanted |= {name} if name.startswith("oppo_megatron/") else set()
    build = "import setuptools.build_meta as build, sys; print(build.build_wheel(sys.argv[1]))"
    made = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=context, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(tmp_path / made.stdout.split()[-1]) as wheel:
        names = set(wheel.namelist())
        (points,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "oppo = oppo_megatron.cli.main:main" in wheel.read(points).decode()
        assert wheel.read("oppo_megatron/cli/slurm/files/job.sh") == (ROOT / "launch/slurm/job.sh").read_bytes()
    assert wanted <= names, sorted(wanted - names)
    assert {"oppo_megatron/cli/init/files/gsm8k.yaml", "oppo_megatron/cli/slurm/files/train.sbatch"} <= names
