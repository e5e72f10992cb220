"""Generated data: random prompts, and arithmetic problems with worked solutions: chains of sums, a partial result per line.

Every partial result is in 0..99.  Lengths follow a Pareto law, so they have the long tail of real responses.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Literal

from oppo_megatron.data.tokenizer import train_sentencepiece

LARGEST = 99
NUM_PROMPTS = 1024
VOCAB_SIZE = 262  # of a tokenizer of single characters over digits, bytes included
HELDOUT_BYTES = 26  # of 256: about a tenth of all problems


@dataclass(frozen=True, slots=True)
class Shape:
    """P(operations >= k) = (scale / k) ** tail, cut at `max_operations`."""

    max_operations: int = 24
    scale: float = 1.5
    tail: float = 1.5
    max_operand: int = 9
    largest: int = LARGEST  # of the first term and every partial result; at most LARGEST


@dataclass(frozen=True, slots=True)
class Problem:
    """The first term, then signed terms (7+5-3 is `(7, 5, -3)`)."""

    terms: tuple[int, ...]

    @property
    def num_operations(self) -> int:
        return len(self.terms) - 1

    @property
    def prompt(self) -> str:
        chain = "".join(f"{term:+d}" for term in self.terms[1:])
        return f"Q: {self.terms[0]}{chain}=?\nA:"

    @property
    def totals(self) -> list[int]:
        return list(accumulate(self.terms))

    @property
    def answer(self) -> int:
        return sum(self.terms)

    @property
    def solution(self) -> str:
        return _worked(self.totals, self.terms, self.answer)


def _worked(totals: list[int], terms: tuple[int, ...], answer: int) -> str:
    lines = [f"{totals[i]}{terms[i + 1]:+d}={totals[i + 1]}" for i in range(len(terms) - 1)]
    return "\n".join([*lines, f"#### {answer}"])


def is_heldout(prompt: str) -> bool:
    """True if a hash puts a prompt in the held-out split, so no seed mixes the splits."""
    return hashlib.sha256(prompt.encode()).digest()[0] < HELDOUT_BYTES


def problems(seed: int, split: Literal["train", "heldout"], shape: Shape = Shape()) -> Iterator[Problem]:
    """Yield problems of one split without end."""
    rng = random.Random(f"arithmetic {split} {seed}")  # noqa: S311  (to be drawn again, not to be secret)
    while True:
        pareto = shape.scale * (1.0 - rng.random()) ** (-1.0 / shape.tail)
        total = rng.randint(1, shape.largest)
        terms = [total]
        for _ in range(max(1, min(int(pareto), shape.max_operations))):
            operand = rng.randint(1, shape.max_operand)
            terms.append(rng.choice([term for term in (operand, -operand) if 0 <= total + term <= shape.largest]))
            total += terms[-1]
        problem = Problem(tuple(terms))
        if is_heldout(problem.prompt) == (split == "heldout"):
            yield problem


def wrong_solution(problem: Problem, rng: random.Random) -> str:
    """One slip carried through, or a wrong last line, a missing step or an early stop."""
    kind = rng.choices(("slip", "copy", "skip", "stop"), weights=(60, 15, 15, 10))[0]
    terms, totals = problem.terms, problem.totals
    if kind == "copy":
        answer = problem.answer
        near = {totals[-2], int(str(answer)[::-1]), answer - 1, answer + 1, answer - 10, answer + 10}
        wrong = rng.choice(sorted(value for value in near if 0 <= value <= LARGEST and value != answer))
        return _worked(totals, terms, wrong)
    if kind == "skip" and problem.num_operations > 1:
        step = rng.randrange(1, len(terms))
        shorter = Problem(terms[:step] + terms[step + 1 :])
        if all(0 <= total <= LARGEST for total in shorter.totals):
            return shorter.solution
    if kind == "stop" and problem.num_operations > 1:
        shorter = Problem(terms[: rng.randrange(2, len(terms))])
        if shorter.answer != problem.answer:
            return shorter.solution
    return slipped_solution(problem, rng)


def misreported_solution(problem: Problem, rng: random.Random) -> str:
    """A correct solution with its second to last result as the answer."""
    return _worked(problem.totals, problem.terms, problem.totals[-2])


def slipped_solution(problem: Problem, rng: random.Random) -> str:
    """A solution with one partial result off by 1, 2 or 10, carried through."""
    totals = problem.totals
    slips = [
        (step, error)
        for step in range(1, len(totals))
        for error in (-10, -2, -1, 1, 2, 10)
        if all(0 <= total + error <= LARGEST for total in totals[step:])
    ]
    step, error = rng.choice(slips)  # never empty: the last result can always be off by one
    slipped = totals[:step] + [total + error for total in totals[step:]]
    return _worked(slipped, problem.terms, slipped[-1])


@dataclass(frozen=True, slots=True)
class DatasetSizes:
    sft: int = 6000
    pairs: int = 4000
    prompts: int = 4000
    heldout: int = 200


def write_dataset(
    directory: Path, seed: int, sizes: DatasetSizes = DatasetSizes(), *, imperfect: float = 0.3,
    flaw: Callable[[Problem, random.Random], str] = slipped_solution, shape: Shape = Shape(),
) -> dict[str, Path]:  # fmt: skip
    """Write sft, pairs, prompts and (distinct, unused) heldout.jsonl. `imperfect`: fraction of completions by `flaw`."""
    rng = random.Random(f"arithmetic answers {seed}")  # noqa: S311  (to be drawn again, not to be secret)
    train = problems(seed, "train", shape)

    def sft(problem: Problem) -> dict[str, Any]:
        completion = flaw(problem, rng) if rng.random() < imperfect else problem.solution
        return {"prompt": problem.prompt, "completion": completion}

    def pair(problem: Problem) -> dict[str, Any]:
        return {"prompt": problem.prompt, "chosen": problem.solution, "rejected": wrong_solution(problem, rng)}

    def question(problem: Problem) -> dict[str, Any]:
        return {"prompt": problem.prompt, "answer": str(problem.answer)}

    heldout: dict[Problem, None] = {}
    for problem in problems(seed, "heldout", shape) if sizes.heldout else ():
        heldout[problem] = None
        if len(heldout) == sizes.heldout:
            break
    files: dict[str, Iterable[dict[str, Any]]] = {
        "sft": map(sft, islice(train, sizes.sft)),
        "pairs": map(pair, islice(train, sizes.pairs)),
        "prompts": map(question, islice(train, sizes.prompts)),
        "heldout": map(question, heldout),
    }
    return {name: _write_jsonl(directory / f"{name}.jsonl", rows) for name, rows in files.items()}


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8", newline="\n") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    os.replace(partial, path)
    return path


def write_random_prompts(directory: Path, prompt_tokens: int) -> tuple[Path, Path]:
    """Write a digit tokenizer and `NUM_PROMPTS` prompts of `prompt_tokens` digits; return both paths."""
    rng = random.Random(1)  # noqa: S311  (to be drawn again, not to be secret)
    prompts = ["".join(rng.choices("0123456789", k=prompt_tokens)) for _ in range(NUM_PROMPTS)]
    tokenizer = directory / "tokenizer.model"
    train_sentencepiece([*prompts, "0123456789"], tokenizer, VOCAB_SIZE, model_type="char")
    return tokenizer, _write_jsonl(directory / "prompts.jsonl", ({"prompt": prompt} for prompt in prompts))
