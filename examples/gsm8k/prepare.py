"""Split GSM8K for the chain: part of the train set is held out; nothing that the reward model or the test set knows is kept.

    prepare.py DATA_DIR OUT_DIR NUM_HELDOUT

Writes OUT_DIR/{train,heldout,pairs}.jsonl.  Needs the standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

TRAIN, TEST, PAIRS = "gsm8k_train.jsonl", "gsm8k_test.jsonl", "gsm8k_preference_pairs.jsonl"
PAIR_COLUMNS = ("question", "chosen", "rejected")

Row = dict[str, str]


def main(data_dir: Path, out_dir: Path, num_heldout: int) -> None:
    """Read the three files, leave out train questions that the others hold, and write the three parts."""
    train, test, pairs = (read_rows(data_dir / name) for name in (TRAIN, TEST, PAIRS))
    seen = {row["question"] for row in [*test, *pairs]}
    kept = [row for row in train if row["question"] not in seen]
    if len(kept) <= num_heldout:
        sys.exit(f"{data_dir / TRAIN}: {len(kept)} rows are of use, but {num_heldout} are held out; more are needed")
    write_rows(out_dir / "heldout.jsonl", kept[-num_heldout:])
    write_rows(out_dir / "pairs.jsonl", ({name: row[name] for name in PAIR_COLUMNS} for row in pairs))
    write_rows(out_dir / "train.jsonl", kept[:-num_heldout])
    print(
        f"{out_dir}: {len(kept) - num_heldout} rows to train on, {num_heldout} held out, {len(pairs)} pairs; "
        f"{len(train) - len(kept)} train questions left out because the test set or a pair has them"
    )


def read_rows(path: Path) -> list[Row]:
    """Return the objects of a JSONL file, each with a question.  Exits if a line is something else."""
    needed = PAIR_COLUMNS if path.name == PAIRS else ("question", "answer")
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                sys.exit(f"{path}:{number}: not JSON ({error}); correct the line or fetch the file again")
            lacking = [name for name in needed if not isinstance(row, dict) or not isinstance(row.get(name), str)]
            if lacking:
                sys.exit(f"{path}:{number}: no text in {', '.join(lacking)}; each row needs {', '.join(needed)}")
            rows.append(row)
    return rows


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write a JSONL file that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
