"""A request to a policy, and the output of its responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from oppo_megatron.config.model import ParallelConfig, RuntimeConfig
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.policy.finding import Policy
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.rundir.directory import write_text
from oppo_megatron.rundir.metrics_log import iter_json_lines
from oppo_megatron.token_text import INCOMPLETE, Decode


@dataclass(frozen=True)
class Drawing:
    """Sampling settings (temperature 0: greedy), further ids that end responses."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Terminal:
    """Standard output, or a JSON line per response."""

    as_json: bool = False


@dataclass(frozen=True)
class OutputFile:
    """A JSONL file (of tasks a folder: NAME.json each); `settings`: all that responses depend on."""

    path: Path
    settings: dict[str, Any]
    resume: bool = False


@dataclass(frozen=True)
class Conversation:
    """Turns from `source` (None: standard input)."""

    system: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Request:
    """`prompts` have `seq_id` = place * `samples` + sample.  `max_length`: of prompt and response.  `num_slots`: per replica."""

    policy: Policy
    parallel: ParallelConfig
    runtime: RuntimeConfig
    drawing: Drawing
    prompts: tuple[Prompt, ...]
    samples: int
    num_slots: int
    max_length: int
    to: Terminal | OutputFile | Conversation
    about_prompts: str = ""


def settings_of(policy: Policy, drawing: Drawing, samples: int) -> dict[str, Any]:
    return {
        "policy": str(policy.model.checkpoint or policy.directory),
        "dtype": policy.model.dtype,
        "samples": samples,
        "date": str(policy.tokenizer.date),
        **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(drawing).items()},
    }


class GrowingText:
    """Prints a growing response by complete characters."""

    def __init__(self, decode: Decode, out: TextIO):
        self._decode, self._out, self._shown = decode, out, ""

    def show(self, tokens: Sequence[int], last: bool) -> None:
        text = self._decode(tokens)
        ready = text if last else text.rstrip(INCOMPLETE)
        self._out.write(ready[len(self._shown) :])
        self._out.flush()
        self._shown = max(self._shown, ready, key=len)


def answer_of(rollout: Rollout, samples: int, decode: Decode) -> dict[str, Any]:
    prompt = rollout.prompt
    return {
        "row": prompt.row,
        "sample": prompt.seq_id % samples,
        "prompt": prompt.text,
        "response": decode(rollout.tokens),
        "finish_reason": rollout.finish_reason,
        "tokens": len(rollout.tokens),
        "fields": prompt.fields,
    }


def partial_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def require_output(to: OutputFile) -> bool:
    """True if work is left.  Raises ConfigError if a file would be lost or has other settings."""
    partial = partial_path(to.path)
    if to.path.exists():
        if to.resume:
            return False
        raise ConfigError(f"--output {to.path} is there already; name another file, or remove it")
    if not to.path.parent.is_dir():
        raise ConfigError(f"--output {to.path}: {to.path.parent} is not a folder; make it, or name another")
    if not partial.exists():
        return True
    if not to.resume:
        raise ConfigError(f"{partial} holds the responses of an interrupted call; add --resume to continue it, or remove it")
    then = {"date": to.settings.get("date"), **_read(partial)[0]}  # earlier versions wrote none
    changed = [
        f"{name} was {then.get(name)!r}, is {to.settings.get(name)!r}"
        for name in sorted({*then, *to.settings})
        if then.get(name) != to.settings.get(name)
    ]
    if changed:
        raise ConfigError(f"{partial} was begun with other settings: {'; '.join(changed)}; use those, or remove the file")
    return True


def first_date(path: Path) -> datetime | None:
    """Date of chat templates in an interrupted call for this output."""
    partial = partial_path(path)
    try:
        return datetime.fromisoformat(_read(partial)[0]["date"]) if partial.is_file() else None
    except (KeyError, TypeError, ValueError):
        return None


class ResponseFile:
    """A JSONL file in prompt order; incomplete output is next to it."""

    def __init__(self, to: OutputFile, prompts: Sequence[Prompt], samples: int, decode: Decode):
        self._to, self._samples, self._decode = to, samples, decode
        self._prompts = {(prompt.row, prompt.seq_id % samples): prompt for prompt in prompts}
        self._done: dict[tuple[int, int], str] = {}
        partial = partial_path(to.path)
        for answer in _read(partial)[1:] if partial.exists() else ():
            key: Any = answer.get("row"), answer.get("sample")
            if key not in self._prompts or self._prompts[key].text != answer.get("prompt"):
                raise DataError(
                    f"{partial} has a response to another prompt than row {key[0]} of --input is now; give the file "
                    "that it was begun with, or remove it"
                )
            self._done[key] = json.dumps(answer, ensure_ascii=False)

    @property
    def left(self) -> list[Prompt]:
        return [prompt for key, prompt in self._prompts.items() if key not in self._done]

    def __len__(self) -> int:
        return len(self._done)

    @contextmanager
    def writing(self) -> Iterator[Callable[[Rollout], None]]:
        """Yield a function that takes responses; a normal end completes the file."""
        partial = partial_path(self._to.path)
        try:
            with partial.open("w", encoding="utf-8") as file:
                lines = [json.dumps(self._to.settings), *self._done.values()]
                file.write("".join(f"{line}\n" for line in lines))

                def write(rollout: Rollout) -> None:
                    line = json.dumps(answer_of(rollout, self._samples, self._decode), ensure_ascii=False, default=str)
                    file.write(line + "\n")
                    file.flush()
                    self._done[rollout.prompt.row, rollout.seq_id % self._samples] = line

                yield write
            write_text(self._to.path, "".join(f"{self._done[key]}\n" for key in self._prompts))
            partial.unlink()
        except OSError as error:
            if error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror or str(error), str(partial)) from error


def _read(partial: Path) -> list[dict[str, Any]]:
    """Settings and responses; the last line may be partial."""
    return list(iter_json_lines(partial)) or [{}]
