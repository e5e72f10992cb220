"""`benchmarks/groups.py`: what a group of gloo takes, as docs/scale.md says, and what the groups of a run take by that."""

from __future__ import annotations

from benchmarks.groups import measured, reckoned


def test_threads_files_and_store_operations_of_a_group() -> None:
    found = measured(2, 4)
    assert (found["threads"], found["files"], found["operations"]) == (3, 5, 5), "3, n + 3, 2 n + 1"
    assert found["other_operations"] == 0 and found["made_ms"] > 0 and found["used_ms"] > 0


def test_what_the_groups_of_a_run_take() -> None:
    """By hand, where a group takes a thread, a file for each of its ranks, and an operation in all."""
    lines = [{"ranks": n, "threads": 1.0, "files": float(n), "operations": 1.0} for n in (2, 8)]
    rows = list(reckoned(lines, [8]))
    assert [row["mode"] for row in rows] == ["disaggregated", "colocated"]
    for row in rows:
        assert row["threads"] == row["operations"] == row["groups"]
        assert 2 * 8 < row["files"] < row["groups"] * 8, "the world's and the checkpoints' group have all ranks"
        assert row["all_operations"] <= 8 * row["groups"]
