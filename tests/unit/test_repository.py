"""The Makefile, the Dockerfile, local launch scripts and the first hour on a GPU node, as far as they go here."""

import ast
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu_node import pack
from oppo_megatron.cli.main import parse_arguments
from tests.docker.run_lines import EFFECTS, LEFT_OUT, instructions
from tests.support.processes import python_path, wait_for

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
    text = make(fresh, "-n", f"PYTHON={sys.executable}", target)
    found = [text.find(step) for step in steps]
    assert found == sorted(found) and found[0] >= 0, text
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
    asked = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=0", "--timeout=20", "-d", tmp_path]
    if subprocess.run([*asked, "einops"], capture_output=True, check=False).returncode:
        pytest.skip("pip reaches no package index from here")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    make(clone, f"PYTHON={sys.executable}", ".venv/.installed", ".venv/.installed-test")
    python, shown = clone / ".venv" / "bin" / "python", clone / ".venv" / "bin" / "oppo"
    subprocess.run([python, "-c", "import megatron.core, transformers, pytest, xdist, mypy, mkdocs"], check=True)
    helped = subprocess.run([shown, "demo", "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "usage: oppo demo" in helped.stdout and make(clone, "-n", "demo") == ".venv/bin/oppo demo\n"


INSTALL = "pip install --no-cache-dir --no-deps /opt/oppo-megatron"
LINES = list(instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")))


def of(stage: str, name: str) -> list[str]:
    return [rest for each, instruction, rest in LINES if (each, instruction) == (stage, name)]


def ignored(name: str) -> bool:
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    parts = Path(name).parts
    return any(fnmatch(part, pattern.removeprefix("**/")) for part in parts for pattern in patterns)


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
    assert installs == [INSTALL] and of("gpu", "RUN")[-1] == "oppo validate"
    assert "autoremove" not in str(LINES) and "PIP_CONSTRAINT" not in str(LINES)


def test_the_cpu_stage_tests_what_it_copied_and_every_run_line_is_known() -> None:
    assert of("cpu", "FROM") == ["python:3.12-slim AS cpu"] and of("gpu", "FROM") == ["nvcr.io/nvidia/nemo:26.02 AS gpu"]
    assert LINES[-1][0] == "gpu", "the last stage is what `docker build` without --target makes"
    names = [(name, rest) for stage, name, rest in LINES if stage == "cpu"]
    assert names.index(("USER", "10001")) < names.index(("RUN", "make test"))
    assert ("COPY", "--chown=10001 . .") in names and set(EFFECTS) == {"cpu", "gpu"}
    left_out = [part for _, name, rest in LINES if name == "RUN" for part in rest.split(" && ") if part.startswith(LEFT_OUT)]
    assert left_out == ["make test", INSTALL, "oppo validate"]


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed (the extra `test` brings it on x86-64 Linux)")
    found = subprocess.run([hadolint, "--no-color", "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_what_is_copied_makes_a_whole_wheel(tmp_path: Path) -> None:
    files = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(files, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: nothing says which files there are")
    context, wanted = tmp_path / "context", set()
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


LOCAL = ROOT / "launch" / "local"
COMMAND = """#!/usr/bin/env bash
echo "$@" >> calls
code=$(sed -n "$(wc -l < calls)p" codes)
[[ $code != wait ]] || { trap 'exit 75' TERM USR1; touch waiting; while true; do sleep 0.05; done; }
exit "$code"
"""


def begin(folder: Path, codes: list[str], **variables: str) -> subprocess.Popen[str]:
    (folder / "oppo").write_text(COMMAND)
    (folder / "oppo").chmod(0o755)
    (folder / "codes").write_text("\n".join(codes) + "\n")
    environment = {**os.environ, "REQUEUE_PAUSE_S": "0.1", **variables}
    command = [str(LOCAL / "requeue.sh"), "./oppo", "train", "c.yaml", "steps=3"]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize(
    ("codes", "code", "starts"), [(["75", "75", "0"], 0, 3), (["0"], 0, 1), (["75", "2"], 2, 2), (["75"] * 9, 75, 4)]
)
def test_75_and_nothing_else_is_started_again_and_not_for_ever(tmp_path: Path, codes: list[str], code: int, starts: int) -> None:
    loop = begin(tmp_path, codes, MAX_REQUEUES="3")
    _, said = loop.communicate(timeout=120)
    assert loop.returncode == code, said
    assert (tmp_path / "calls").read_text() == "train c.yaml steps=3\n" + ("train c.yaml steps=3 --resume\n" * (starts - 1))
    assert said.count("starting again") == starts - 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_loop_stops_both(tmp_path: Path, number: signal.Signals) -> None:
    loop = begin(tmp_path, ["75", "wait", "0"])
    wait_for((tmp_path / "waiting").exists, 120)
    loop.send_signal(number)
    assert loop.wait(120) == 75 and len((tmp_path / "calls").read_text().splitlines()) == 2


RUN = ["2", "train", "c.yaml", "--resume"]
ONE_NODE = "--standalone --nproc-per-node 2 --no-python oppo train c.yaml --resume"


def started(folder: Path, launchers: list[str], *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    for name in launchers:
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*"\n')
        (folder / name).chmod(0o755)
    command, environment = (
        ["/bin/bash", str(LOCAL / "torchrun.sh"), *arguments],
        {"PATH": f"{folder}:/usr/bin:/bin", **environment},
    )
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=False)


@pytest.mark.parametrize(("launchers", "restarts", "expected"), [
    (["torchrun"], {}, f"torchrun {ONE_NODE}"), (["torchrun", "ft_launcher"], {}, f"torchrun {ONE_NODE}"),
    (["torchrun"], {"MAX_RESTARTS": "3"}, f"torchrun --max-restarts 3 {ONE_NODE}"),
    (["torchrun", "ft_launcher"], {"MAX_RESTARTS": "3"},
        f"ft_launcher --ignore-missing-fault-tol-cfg --max-restarts 3 {ONE_NODE}"),
])  # fmt: skip
def test_which_launcher_is_used(tmp_path: Path, launchers: list[str], restarts: dict[str, str], expected: str) -> None:
    assert started(tmp_path, launchers, *RUN, **restarts).stdout == expected + "\n"


def test_several_machines_and_help(tmp_path: Path) -> None:
    line = started(tmp_path, ["torchrun"], *RUN, NNODES="2", NODE_RANK="1", MASTER_ADDR="node0").stdout
    assert "--nnodes 2 --node-rank 1 --master-addr node0 --master-port 29500 --rdzv-conf timeout=300" in line
    failed = started(tmp_path, ["torchrun"], *RUN, NNODES="2")
    assert failed.returncode and "the number of this machine, from 0" in failed.stderr
    shown = started(tmp_path, [], "--help")
    assert shown.returncode == 0 and "MAX_RESTARTS=N" in shown.stdout and "All ranks together" in shown.stdout
    assert started(tmp_path, []).returncode == 1


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


def test_every_test_that_it_runs_and_every_function_that_it_imports_exists() -> None:
    named = re.findall(r"'(test_[a-z_]+(?:\[[^']*\])?)'", FIRST)
    there = set(collected(importlib.import_module("tests.gpu.test_cuda")))
    left = {each.partition("[")[0] for each in there} - {each.partition("[")[0] for each in named}
    assert left == {"test_every_part_of_the_benchmark_gives_its_figures"} and not set(named) - there  # `oppo bench gpu` is that
    ours = [
        (node.module, alias.name)
        for node in ast.walk(ast.Module([part for source in SOURCES for part in ast.parse(source).body], []))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("oppo_megatron", "tests"))
        for alias in node.names
    ]
    assert len(ours) > 20 and len(HERE_DOCUMENTS) == 3
    for module, name in ours:
        assert hasattr(importlib.import_module(str(module)), name), f"{module} has no {name}"
    commands = re.findall(r"-m oppo_megatron (.*?)(?: *\|\||;|$)", FIRST.replace("\\\n", " "), re.MULTILINE)
    words = [re.sub(r'"\$\(\([^"]*"', "600", command).replace('"', "").split() for command in commands]
    assert [each[0] for each in words] == ["validate", "train", "bench", "bench"]
    for each in words:
        assert parse_arguments(each).command == each[0]


def test_the_pack_holds_what_is_asked_for_and_what_these_ask_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads the wheels' own requirements, markers for the image; only wheels whose versions an image lacks."""
    asks = {
        "megatron-core": ["torch", "numpy<3", "extra-only; extra == 'dev'"],
        "pydantic": ["pydantic-core==2.5", "old; python_version < '3.11'"], "pydantic-core": ["typing-extensions>=4"],
        "omegaconf": ["PyYAML>=5"],
    }  # fmt: skip
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
    told = make(ROOT, "-n", "gpu-test", "PYTHON=the-nodes-python")
    assert "the-nodes-python -m pytest" in told and ".venv" not in told and "pip" not in told


def test_another_python_gets_an_environment_of_its_own(fresh: Path) -> None:
    told = make(fresh, "-n", "test-python", f"PYTHON={sys.executable}")
    found = [told.find(f"build/{Path(sys.executable).name}{step}") for step in (" ||", "/bin/oppo demo", "/bin/oppo validate")]
    assert found == sorted(found) and found[0] >= 0 and "-c constraints.txt" in told and " .venv" not in told, told


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
