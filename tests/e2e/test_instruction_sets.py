"""Results do not depend on the processor's instructions or on two threads, by which torch, oneDNN and MKL round differently."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETS = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "DEFAULT": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
"""By torch's own name of what ATen then uses; the last one is the least that torch runs on."""
TELLING = [
    "tests/unit/test_algorithms_preferences.py",
    "tests/unit/test_algorithms_losses.py",
    "tests/gloo/test_logprobs.py",
    "tests/gloo/test_training.py::test_steps_equal_plain_torch",
    "tests/parity/test_hf_logits.py::test_logits_equal_transformers",
    "tests/e2e/test_matrix.py",
    "tests/replay",
]


def under(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    return ended.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", [*SETS, "two threads"])
def test_telling_tests_pass(name: str, tmp_path: Path) -> None:
    environment = SETS.get(name, {"OMP_NUM_THREADS": "2"})
    if name in SETS:
        if platform.machine() != "x86_64":
            pytest.skip(f"no such instructions on {platform.machine()}")
        asked = "import torch; print(torch.backends.cpu.get_cpu_capability())"
        assert under(environment, "-c", asked).strip() == name
    pytest_run = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long", f"--basetemp={tmp_path / 'tests'}")
    assert " passed" in under(environment, *pytest_run, *TELLING)
