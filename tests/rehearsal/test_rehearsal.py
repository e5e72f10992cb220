"""`make gpu-rehearsal`: whole runs on CUDA tensors that are fake, rank by rank, and defects that such a run has to find."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.bench.gpu import SIZES, GpuBench, GpuWork
from tests.rehearsal.asking import Server
from tests.rehearsal.cases import CASES, PLAIN, PREFERENCES, SYNC_STEPS
from tests.rehearsal.cuda_stub import compiler
from tests.rehearsal.defects import DEFECTS
from tests.rehearsal.waits import EXPECTED

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    **SIZES["0.5B"], "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 512,
}  # fmt: skip
Report = dict[str, Any]
LONG = (
    "experts, tp 2",
    "experts, dp 2, updated as ep 2",
    "updated as pp 2",
    "pairs, dp 2",
    "soft caps, paged",
    "sinks and biased experts, tp 2, dense",
    "sinks and biased experts, dp 2, updated as ep 2",
    "dp 2, updated as tp 2",
    "dp 2, updated as cp 2 in a ring",
    "updated as pp 2, interleaved",
    "remax",
    "kto, tp 2",
    "dpo, cp 2",
    "sft, cp 2 in a ring",
)
"""Beside others much like them these are rehearsed in `make gpu-rehearsal` and `make test-long` alone."""
REHEARSED = [pytest.param(case, marks=pytest.mark.long) if case in LONG else case for case in CASES]
PLANTED = [pytest.param(name, marks=pytest.mark.long) if defect.case in LONG else name for name, defect in DEFECTS.items()]

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++, for torch's hooks of a CUDA device (Debian: g++)")


class Rehearsals(Server):
    def of(self, case: str, defect: str | None = None) -> list[Report]:
        changes = CASES[case].changes | (DEFECTS[defect].changes if defect else {})
        asked = {
            "ranks": CASES[case].ranks,
            "kind": CASES[case].kind,
            "changes": changes,
            "defect": defect,
            "ring": CASES[case].ring,
        }
        reports: list[Report] = self.answer(asked)
        return reports


@pytest.fixture(scope="module")
def rehearsals() -> Iterator[Rehearsals]:
    with closing(Rehearsals("rank", "Peers")) as found:
        yield found


def waits_of(report: Report) -> dict[tuple[str, str, str], int]:
    """The waits of the host in the work of a run, by phase, kind and function; not those while it starts."""
    return {(phase, kind, place): count for phase, kind, place, count in report["waits"] if phase != "start"}


@pytest.mark.parametrize("case", REHEARSED)
def test_nothing_is_wrong(rehearsals: Rehearsals, case: str) -> None:
    """No operation mixes devices, no two ranks make different calls, streams wait for each other, kernels fit."""
    for report in rehearsals.of(case):
        assert report["error"] is None, report["error"]
        assert report["faults"] == {}, report["lines"]
        run, step, of = ("rest", "exchange", PLAIN) if CASES[case].kind == "train" else ("supervised", "update", PREFERENCES)
        assert report["phases"][run] == 1 and report["phases"][step] == of["steps"]


@pytest.mark.parametrize("case", REHEARSED)
def test_the_host_waits_where_it_has_to_and_no_more(rehearsals: Rehearsals, case: str) -> None:
    """A new wait, or more of one, fails here: mend it, or enter it into `waits.py`."""
    for report in rehearsals.of(case):
        for (phase, kind, place), count in waits_of(report).items():
            most, unit = EXPECTED.get((phase, kind, place), (0, phase))
            line = report["lines"][place]
            assert count <= most * report["phases"][unit], f"{phase}: {count} times {kind} in {line} ({place})"


@pytest.mark.long
def test_every_expected_wait_is_one(rehearsals: Rehearsals) -> None:
    found = {wait for case in CASES for report in rehearsals.of(case) for wait in waits_of(report)}
    assert found == EXPECTED.keys()


def test_decoding_is_read_once_in_so_many_steps_while_the_device_computes_the_next(rehearsals: Rehearsals) -> None:
    """Between the windows of a round the device never has nothing to do."""
    for case in ("single", "paged float32", "colocated tp 2"):
        for report in rehearsals.of(case):
            reads = {wait: count for wait, count in waits_of(report).items() if wait[0].startswith("decode")}
            (count,), phases = reads.values(), report["phases"]
            assert reads.keys() == {("decode", "synchronize", "engine/device_decode.py read")}
            assert phases["decode step"] >= 24 and count <= phases["decode step"] // SYNC_STEPS
            assert report["idle"]["decode"] <= phases["decode round"] < count, (count, report["idle"])


@pytest.mark.parametrize("case", REHEARSED)
def test_scoring_waits_nowhere_and_an_update_twice_a_step(rehearsals: Rehearsals, case: str) -> None:
    for report in rehearsals.of(case):
        waits = waits_of(report)
        assert not [wait for wait in waits if wait[0] == "score"]
        steps = report["phases"].get("update", 0)
        reads = sum(count for wait, count in waits.items() if wait[0] == "update" and "experts.py" not in wait[2])
        assert steps <= reads <= 2 * steps
    assert any("update" in report["phases"] for report in rehearsals.of(case))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found(rehearsals: Rehearsals, name: str) -> None:
    """Without the defect `test_nothing_is_wrong` tells none of this, and no wait is in `defects.py`."""
    defect = DEFECTS[name]
    reports = rehearsals.of(defect.case, name)
    found = [str(report["error"]) for report in reports]
    found += [fault for report in reports for fault in report["faults"]]
    found += [f"{phase}: {kind} in {place}" for report in reports for phase, kind, place in waits_of(report)]
    assert any(told in each for told in defect.told.split(" | ") for each in found), found


class BenchHere(GpuBench):
    """`oppo bench gpu` whose parts are done by the process that rehearses; the Python of the tests has no TRL."""

    rehearsals: Rehearsals

    def _process(self, size: str, part: str, command: Sequence[str], seconds: float) -> Iterator[str | None]:
        (report,) = self.rehearsals.answer({"order" if part in ("decode", "overlap") else "config": command[-1]})
        yield report["error"] or ", ".join(report["faults"]) or None


@pytest.mark.long
def test_the_benchmark_of_a_gpu_goes_through(rehearsals: Rehearsals, tmp_path: Path) -> None:
    work = GpuWork(4, 16, 48, median=12.0, chunk_tokens=8, steady_steps=20, delta=2, ppo_steps=2, micro_batch_tokens=256)
    bench = BenchHere(tmp_path, work, 450.0, 80 * 2.0**30, (ROOT / "benchmarks/peers/compare.py", Path(sys.executable)))
    bench.rehearsals, bench.say = rehearsals, lambda _: None
    rows = bench.run({"tiny": TINY})["results"]
    assert json.loads((tmp_path / "gpu.json").read_text())["results"] == rows
    why_not = [row for row in rows if "why_not" in row]
    assert len(why_not) == 1 and "has no TRL" in why_not[0]["why_not"], why_not
    told = [(row["part"], row.get("variant")) for row in rows]
    decoded = ["bandwidth", "as trained", "as trained", "dense cache", "each token read", "transformers generate"]
    assert told == [("decode", each) for each in decoded] + [("overlap", "second stream")] + [
        ("ppo", each) for each in ("sequential", "full", "TRL")
    ]
    assert all(row["tokens_per_s"] > 0 for row in rows if row.get("variant") not in ("bandwidth", "second stream", "TRL"))
    tail = next(row for row in rows if row.get("long_tail"))
    assert tail["graphs"] > 0 and tail["steps"] > 12
    assert all(len(row["steps"]) == work.ppo_steps for row in rows if row["part"] == "ppo" and "why_not" not in row)
