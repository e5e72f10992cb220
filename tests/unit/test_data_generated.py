"""The generated task: right answers are right, wrong ones wrong, splits apart, lengths long-tailed."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest

from oppo_megatron.data.generated import (
    DatasetSizes,
    Problem,
    Shape,
    is_heldout,
    misreported_solution,
    problems,
    slipped_solution,
    write_dataset,
    wrong_solution,
)
from oppo_megatron.rewards.verifiers import verify

LINE = re.compile(r"(\d+)([+-]\d+)=(\d+)")


def check_work(solution: str) -> list[bool]:
    lines = [LINE.fullmatch(line) for line in solution.split("\n")[:-1]]
    assert all(lines)
    return [int(line[1]) + int(line[2]) == int(line[3]) for line in lines if line]


def percentiles(lengths: list[int]) -> tuple[int, int]:
    lengths = sorted(lengths)
    return lengths[len(lengths) // 2], lengths[int(len(lengths) * 0.99)]


@pytest.fixture(scope="module")
def five_thousand() -> list[Problem]:
    return list(islice(problems(1, "train"), 5000))


def test_the_documented_example() -> None:
    problem = Problem((7, 5, -3))
    assert problem.prompt == "Q: 7+5-3=?\nA:"
    assert problem.solution == "7+5=12\n12-3=9\n#### 9"


def test_solutions_are_right_and_small(five_thousand: list[Problem]) -> None:
    for problem in five_thousand:
        chain = problem.prompt.removeprefix("Q: ").removesuffix("=?\nA:")
        assert re.fullmatch(r"\d+([+-]\d)+", chain)
        value = eval(chain)
        assert all(check_work(problem.solution)) and problem.solution.endswith(f"\n#### {value}")
        assert verify("arithmetic", problem.solution, str(value)) == 1.0
        assert all(0 <= total <= 99 for total in problem.totals)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_lengths_are_long_tailed(seed: int) -> None:
    sample = list(islice(problems(seed, "train"), 5000))
    median, high = percentiles([len(problem.solution) for problem in sample])
    assert high >= 5 * median
    short = sum(problem.num_operations <= 3 for problem in sample)
    assert short > 0.7 * len(sample) and max(problem.num_operations for problem in sample) == 24


def test_wrong_solutions_are_wrong_and_alike(five_thousand: list[Problem]) -> None:
    rng = random.Random(0)
    wrong = [wrong_solution(problem, rng) for problem in five_thousand]
    assert all(verify("arithmetic", text, problem.answer) == 0.0 for text, problem in zip(wrong, five_thousand, strict=True))
    right_length = sum(len(problem.solution) for problem in five_thousand)
    assert 0.85 < sum(map(len, wrong)) / right_length < 1.05
    num_lines = [text.count("\n") - problem.num_operations for text, problem in zip(wrong, five_thousand, strict=True)]
    assert set(num_lines) > {0, -1} and min(num_lines) < -3, "slips and copies, skipped steps, early stops"
    assert any(all(check_work(text)) for text in wrong), "right work, wrong last line or missing steps"


def test_a_slip_is_one_wrong_line_followed_through(five_thousand: list[Problem]) -> None:
    rng = random.Random(0)
    for problem in [*five_thousand[:1000], Problem((99, -9, 9)), Problem((1, -1, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9))]:
        slipped = slipped_solution(problem, rng)
        assert check_work(slipped).count(False) == 1
        lines = slipped.split("\n")
        results = [re.split(r"[+\-=]", line) for line in lines[:-1]]
        assert all(before[-1] == after[0] for before, after in zip(results, results[1:], strict=False))
        assert lines[-1] == f"#### {results[-1][-1]}" and 0 <= int(results[-1][-1]) <= 99


def test_a_misreport_is_right_work_and_the_result_before_the_last(five_thousand: list[Problem]) -> None:
    assert misreported_solution(Problem((7, 5, -3)), random.Random(0)) == "7+5=12\n12-3=9\n#### 12"
    for problem in five_thousand[:1000]:
        text = misreported_solution(problem, random.Random(0))
        assert text.split("\n")[:-1] == problem.solution.split("\n")[:-1]
        assert verify("arithmetic", text, problem.answer) == 0.0


def test_splits_never_meet_and_repeat_by_seed() -> None:
    train = {problem.prompt for seed in (1, 2) for problem in islice(problems(seed, "train"), 3000)}
    heldout = {problem.prompt for seed in (1, 2) for problem in islice(problems(seed, "heldout"), 300)}
    assert not train & heldout
    assert all(map(is_heldout, heldout)) and not any(map(is_heldout, train))
    assert list(islice(problems(5, "train"), 50)) == list(islice(problems(5, "train"), 50))
    assert list(islice(problems(5, "train"), 50)) != list(islice(problems(6, "train"), 50))


def test_shape_is_obeyed() -> None:
    shape = Shape(max_operations=2, scale=1.0, tail=1.0, max_operand=3, largest=7)
    sample = list(islice(problems(1, "train", shape), 500))
    assert {problem.num_operations for problem in sample} == {1, 2}
    assert max(abs(term) for problem in sample for term in problem.terms[1:]) == 3
    assert max(total for problem in sample for total in problem.totals) == 7


def test_written_files(tmp_path: Path) -> None:
    sizes = DatasetSizes(sft=1000, pairs=300, prompts=200, heldout=100)
    paths = write_dataset(tmp_path / "one", 7, sizes, imperfect=0.25)
    again = write_dataset(tmp_path / "two", 7, sizes, imperfect=0.25)
    rows = {name: [json.loads(line) for line in path.read_text().splitlines()] for name, path in paths.items()}
    assert {name: len(values) for name, values in rows.items()} == {"sft": 1000, "pairs": 300, "prompts": 200, "heldout": 100}
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(f"{name}.jsonl" for name in paths)
    assert all(paths[name].read_bytes() == again[name].read_bytes() for name in paths)

    def right(prompt: str, solution: str) -> bool:
        return verify("arithmetic", solution, eval(prompt.removeprefix("Q: ").removesuffix("=?\nA:"))) == 1.0

    num_wrong = sum(not right(row["prompt"], row["completion"]) for row in rows["sft"])
    assert 200 < num_wrong < 300
    assert all(right(row["prompt"], row["chosen"]) and not right(row["prompt"], row["rejected"]) for row in rows["pairs"])
    assert all(right(row["prompt"], f"#### {row['answer']}") for row in rows["prompts"] + rows["heldout"])
    heldout = {row["prompt"] for row in rows["heldout"]}
    assert len(heldout) == 100
    assert not heldout & {row["prompt"] for name in ("sft", "pairs", "prompts") for row in rows[name]}
