"""Writes arithmetic solutions in steps with labels: python examples/arithmetic/write_steps.py FILE.jsonl [ROWS]"""

import json
import random
import sys
from itertools import islice
from pathlib import Path

from oppo_megatron.data.generated import Shape, problems, wrong_solution


def write_steps(path: Path, seed: int, count: int, shape: Shape, wrong: float = 0.6) -> None:
    """Write `count` solutions, wrong with probability `wrong`.  The label of a step: all lines up to it are right."""
    rng = random.Random(f"arithmetic steps {seed}")  # noqa: S311  (to be drawn again, not to be secret)
    with path.open("w", encoding="utf-8") as stream:
        for problem in islice(problems(seed, "train", shape), count):
            text = wrong_solution(problem, rng) if rng.random() < wrong else problem.solution
            steps, right = text.split("\n"), problem.solution.split("\n")
            labels = [steps[:end] == right[:end] for end in range(1, len(steps) + 1)]
            stream.write(json.dumps({"prompt": problem.prompt, "completions": steps, "labels": labels}) + "\n")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    write_steps(path, 1, int(sys.argv[2]) if len(sys.argv) > 2 else 6000, Shape())
    print(path)
