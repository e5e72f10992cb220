"""Files of rows, as tests write them."""

import json
from pathlib import Path


def write_rows(path: Path, *rows: object) -> Path:
    """Write a JSON line per row; a folder gets the file `rows.jsonl`."""
    path = path / "rows.jsonl" if path.is_dir() else path
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
