"""Stages of a chain whose finished parts are reused: each has a directory with a file that describes its content."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oppo_megatron.errors import ConfigError
from oppo_megatron.nesting import read_json

RECORD = "stage.json"


@dataclass(frozen=True)
class Stage:
    """One part of a chain.  `make` fills `directory` and returns an exit code, 0 when it is done.  The content
    depends on `settings` (plain JSON) and on the stages in `after`.

        missing --start--> started --finish--> finished
           ^                  |                   |  settings changed, or an earlier stage was made again
           +------------------+-------------------+

    Only a finished stage of the same settings, made from the same inputs, is reused.
    """

    name: str
    title: str
    directory: Path
    settings: Mapping[str, Any]
    make: Callable[[], int]
    after: Sequence[Stage] = ()

    @property
    def record(self) -> dict[str, Any] | None:
        """Return the content of the stage file; None if the directory is not a stage."""
        path = self.directory / RECORD
        if not path.is_file():
            return None
        try:
            record = read_json(path.read_text(encoding="utf-8"))
        except ValueError:
            return {}
        return record if isinstance(record, dict) else {}

    @property
    def identity(self) -> str | None:
        """An id that is new each time the stage is made."""
        return (self.record or {}).get("identity")

    @property
    def finished(self) -> bool:
        """True if the directory's content can be reused."""
        record = self.record or {}
        return bool(record.get("finished")) and {key: record.get(key) for key in ("settings", "after")} == self._key()

    def run(self) -> int:
        """Make the stage, from an empty directory, and return the exit code of `make`.

        Raises ConfigError if the directory holds something else.
        """
        if self.directory.exists():
            if self.record is None and any(self.directory.iterdir()):
                raise ConfigError(
                    f"{self.directory} has no {RECORD}, so this command did not write it and will not remove it; "
                    "choose another --out, or move it away"
                )
            shutil.rmtree(self.directory)
        self.directory.mkdir(parents=True)
        record = {"stage": self.name, "identity": uuid.uuid4().hex, **self._key()}
        self._write({**record, "finished": False})
        code = self.make()
        if code == 0:
            self._write({**record, "finished": True})
        return code

    def _key(self) -> dict[str, Any]:
        text = json.dumps(self.settings, sort_keys=True, default=str)
        return {
            "settings": hashlib.sha256(text.encode()).hexdigest()[:16],
            "after": {stage.name: stage.identity for stage in self.after},
        }

    def _write(self, record: Mapping[str, Any]) -> None:
        partial = self.directory / f"{RECORD}.partial"
        partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.directory / RECORD)
