"""`make gpu-rehearsal`: whole runs on CUDA tensors that are fake, rank by rank, and defects that such a run has to find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rehearsal.cases import CASES, PLAIN
from tests.rehearsal.cuda_stub import compiler
from tests.rehearsal.defects import DEFECTS
from tests.rehearsal.waits import EXPECTED

ROOT = Path(__file__).resolve().parents[2]
Report = dict[str, Any]

pytestmark = pytest.mark.skipif(
    compiler() is None, reason="needs g++, for torch's hooks of a CUDA device (Debian: g++)"
)


class Rehearsals:
    """A process that rehearses; what it reports of a case is kept."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.server"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip
        self._kept: dict[tuple[str, str | None], list[Report]] = {}

    def of(self, case: str, defect: str | None = None) -> list[Report]:
        """A report of each rank."""
        if (case, defect) not in self._kept:
            self._kept[case, defect] = self._ask(case, defect)
        return self._kept[case, defect]

    def _ask(self, case: str, defect: str | None) -> list[Report]:
        changes = CASES[case].changes | (DEFECTS[defect].changes if defect else {})
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = {"ranks": CASES[case].ranks, "changes": changes, "defect": defect}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        reports: list[Report] = json.loads(self._process.stdout.readline())
        return reports

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def rehearsals() -> Iterator[Rehearsals]:
    found = Rehearsals()
    yield found
    found.close()


def waits_of(report: Report) -> dict[tuple[str, str, str], int]:
    """The waits of the host in the work of a run, by phase, kind and function; not those while it starts."""
    return {(phase, kind, place): count for phase, kind, place, count in report["waits"] if phase != "start"}


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_wrong(rehearsals: Rehearsals, case: str) -> None:
    """No operation mixes devices, no two ranks make different calls, streams wait for each other, kernels fit."""
    for report in rehearsals.of(case):
        assert report["error"] is None, report["error"]
        assert report["faults"] == {}, report["lines"]
        assert report["phases"]["rest"] == 1 and report["phases"]["exchange"] == PLAIN["steps"]


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_where_it_has_to_and_no_more(rehearsals: Rehearsals, case: str) -> None:
    """A new wait, or more of one, fails here: mend it, or enter it into `waits.py`."""
    for report in rehearsals.of(case):
        for (phase, kind, place), count in waits_of(report).items():
            most, unit = EXPECTED.get((phase, kind, place), (0, phase))
            line = report["lines"][place]
            assert count <= most * report["phases"][unit], f"{phase}: {count} times {kind} in {line} ({place})"


def test_every_expected_wait_is_one(rehearsals: Rehearsals) -> None:
    found = {wait for case in CASES for report in rehearsals.of(case) for wait in waits_of(report)}
    assert found == EXPECTED.keys()


def test_decoding_is_read_once_in_so_many_steps(rehearsals: Rehearsals) -> None:
    for case in ("single", "paged float32", "colocated tp 2"):
        for report in rehearsals.of(case):
            steps = report["phases"]["decode step"]
            reads = {wait: count for wait, count in waits_of(report).items() if wait[0].startswith("decode")}
            expected = {("decode", "read", "engine/device_decode.py read"): steps // PLAIN["runtime.decode_sync_steps"]}
            assert steps >= 24 and reads == expected, reads


@pytest.mark.parametrize("case", CASES)
def test_scoring_waits_nowhere_and_an_update_twice_a_step(rehearsals: Rehearsals, case: str) -> None:
    for report in rehearsals.of(case):
        waits = waits_of(report)
        assert not [wait for wait in waits if wait[0] == "score"]
        steps = report["phases"]["update"]
        reads = sum(count for wait, count in waits.items() if wait[0] == "update")
        assert 0 < steps <= reads <= 2 * steps


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(rehearsals: Rehearsals, name: str) -> None:
    """Without it none of this is told: `test_nothing_is_wrong`, and no wait is in `defects.py`."""
    defect = DEFECTS[name]
    reports = rehearsals.of(defect.case, name)
    found = [str(report["error"]) for report in reports]
    found += [fault for report in reports for fault in report["faults"]]
    found += [f"{phase}: {kind} in {place}" for report in reports for phase, kind, place in waits_of(report)]
    assert any(defect.told in each for each in found), found
