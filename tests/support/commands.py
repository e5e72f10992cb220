"""A working directory in which a command is given."""

from __future__ import annotations

from pathlib import Path

import pytest


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch, config: str) -> Path:
    """Change to `folder`, outside any launcher, with a tokenizer's folder, a row, and the configuration; return its path."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "COLUMNS", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(folder)
    (folder / "tok").mkdir()
    (folder / "rows.jsonl").write_text('{"question": "1+1", "prompt": "1+1", "answer": "2"}\n')
    path = folder / "c.yaml"
    path.write_text(config)
    return path
