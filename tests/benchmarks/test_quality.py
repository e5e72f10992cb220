"""`benchmarks.quality`: the problems against their texts, the table by hand, and the smallest run."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quality
from oppo_megatron.rewards.verifiers import verify


def test_the_answer_of_a_problem_is_that_of_its_text() -> None:
    rng, lengths = random.Random(0), set()
    for _ in range(300):
        row = quality.problem(rng)
        start, *events, question = row["question"].split(". ")
        total = int(re.findall(r"\d+", start)[0])
        for event in events:
            (number,) = re.findall(r"\d+", event)
            total += -int(number) if re.search(r"gives away|loses|sells|throws|breaks|lends", event) else int(number)
        *steps, last = row["answer"].split("\n")
        for step in steps:
            left, right = step.split("=")
            a, sign, b = re.fullmatch(r"(\d+)([-+])(\d+)", left).groups()  # type: ignore[union-attr]
            assert {"+": int(a) + int(b), "-": int(a) - int(b)}[sign] == int(right) <= 20
        assert last == f"#### {total}" and verify("gsm8k", row["answer"], str(total)) == 1.0 and question.startswith("How many")
        lengths.add(len(steps))
    assert lengths == {2, 3}


def run(algorithm: str, overlap: str, seed: int, after: float) -> dict[str, Any]:
    means = {"before": 0.2, "after": after, "gain": after - 0.2}
    about = {"algorithm": algorithm, "overlap": overlap, "seed": seed, "means": means}
    return about | {"heldout": {0: 0.2, 2: after}, "reward": [after - 0.1, after]}


def test_the_table_has_means_standard_errors_and_differences_of_the_same_seed() -> None:
    runs = [run("grpo", "off", 1, 0.4), run("grpo", "off", 2, 0.6), run("grpo", "on", 2, 0.7), run("grpo", "on", 3, 0.2)]
    rows = {row["runs"]: row for row in quality.table(runs)}
    assert [rows[name]["seeds"] for name in ("grpo off", "grpo on", "grpo on - off", "ppo off")] == [2, 2, 1, 0]
    off, pairs = rows["grpo off"], rows["grpo on - off"]
    assert (off["after"], off["after_se"], off["gain"]) == pytest.approx((0.5, 0.1, 0.3)), "sd 0.1414 over the root of 2"
    assert pairs["after"] == pytest.approx(0.1) and pairs["after_se"] is None, "seed 2 alone has both"
    faint, line = list(quality.curves(runs))[:2]
    assert faint.style == "faint" and list(faint.xs) == [1, 2] and list(line.xs) == [0, 2]
    assert line.ys == pytest.approx([0.2, 0.5]) and line.errors == pytest.approx([0.0, 0.1])


def test_unknown_runs_and_a_folder_without_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quality.main(["--out", str(tmp_path), "--runs", "dapo-on-1"]) == 2
    assert "names dapo-on-1; choose from ppo-off-1" in capsys.readouterr().err
    assert quality.main(["--out", str(tmp_path), "--table"]) == 2
    assert "no finished run" in capsys.readouterr().err


@pytest.mark.long
def test_the_smallest_run_trains_is_reused_and_is_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--out", str(tmp_path), "--size", "quick", "--runs", "ppo-on-2"]
    assert quality.main(command) == 0
    made = (tmp_path / "ppo-on-2" / "summary.json").stat().st_mtime_ns
    assert quality.main([*command, "--table"]) == quality.main(command) == 0
    assert (tmp_path / "ppo-on-2" / "summary.json").stat().st_mtime_ns == made
    assert "ppo on" in capsys.readouterr().out and (tmp_path / "quality.png").is_file()
    (found,) = json.loads((tmp_path / "quality.json").read_text())["runs"].values()
    assert list(found["heldout"]) == ["0", "1", "2"] and len(found["reward"]) == 2
