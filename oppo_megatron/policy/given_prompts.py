"""Prompts from the command line, a file or a conversation in the terminal, as text and tokens.  No torch."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from oppo_megatron.config.data import PromptDataConfig
from oppo_megatron.data.chat_template import NoChatTemplateError
from oppo_megatron.data.prompts import load_prompts
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.tokenizer import Tokenizer, encode_prompt
from oppo_megatron.data.values import Conversations
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.records import Prompt

WITHOUT_LIMIT = 2**40  # tokens; the limit of a prompt depends on its response


@dataclass(frozen=True)
class Wording:
    """Text around a prompt: `template` at `{prompt}`, or the chat template."""

    template: str = "{prompt}"
    as_chat: bool = False
    system: str | None = None


def opening(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def prompts_of_texts(texts: Iterable[str], wording: Wording, tokenizer: Tokenizer) -> list[Prompt]:
    """Render texts as prompts, not yet numbered.  Raises ConfigError without a chat template."""
    worded = [_worded(text, wording, tokenizer) for text in texts]
    return [Prompt(-1, row, text, tuple(encode_prompt(tokenizer, text))) for row, text in enumerate(worded)]


def prompts_of_file(
    path: Path, column: str | None, wording: Wording, tokenizer: Tokenizer, most: int | None = None,
    note: Callable[[str], None] = lambda line: None, progress: Callable[[str], None] = lambda line: None,
) -> list[Prompt]:  # fmt: skip
    """At most `most` prompts, per line (`.txt`) or row; `note`: findings, `progress`: rows."""
    if path.suffix == ".txt":
        return prompts_of_texts(_lines(path)[:most], wording, tokenizer)
    config = PromptDataConfig(
        path=path,
        columns={} if column is None else {"prompt": column},
        prompt_template="{prompt}" if wording.as_chat else wording.template,
        max_prompt_tokens=WITHOUT_LIMIT,
        max_rows=most,
    )
    quarantine = Quarantine(progress=progress)
    prompts = load_prompts(config, tokenizer, quarantine=quarantine)
    if wording.system is not None and prompts.chats:
        raise ConfigError(
            f"--system is given, but rows of {path} hold messages, which are rendered as they are; write a system message into "
            "them, and drop --system"
        )
    conversations = Conversations(tokenizer.chat, (), quarantine.note)

    def worded(row: Prompt) -> Prompt:
        if row.row in prompts.chats or not wording.as_chat:
            return row
        text = _worded(row.text, wording, tokenizer, lambda: conversations.variables(row.fields, str(path)))
        return replace(row, text=text, tokens=tuple(encode_prompt(tokenizer, text)))

    found = [worded(row) for row in prompts.rows]
    list(map(note, quarantine.notes))
    return found


def within(prompts: Sequence[Prompt], most_tokens: int | None) -> list[Prompt]:
    """Prompts of at most `most_tokens` tokens.  Raises DataError if none is left."""
    kept = [each for each in prompts if most_tokens is None or len(each.tokens) <= most_tokens]
    if prompts and not kept:
        least = min(len(each.tokens) for each in prompts)
        raise DataError(
            f"all {len(prompts)} prompts have more than {most_tokens} tokens (the least: {least}); raise --max-prompt-tokens"
        )
    return kept


def numbered(prompts: Sequence[Prompt], samples: int, max_length: int, max_tokens: int, *, of_file: bool) -> list[Prompt]:
    """Repeat prompts `samples` times, numbered.  Raises DataError for one without tokens or room for `max_tokens`."""
    room = max_length - max_tokens
    remedy = f"leave such rows out (--max-prompt-tokens {room})" if of_file and room > 0 else "shorten it"
    for each in prompts:
        if not each.tokens:
            raise DataError(f"prompt {each.row} ({each.text!r}) has no token; give it some text")
        require_room(f"prompt {each.row}", len(each.tokens), max_length, max_tokens, remedy)
    repeated = (each for each in prompts for _ in range(samples))
    return [replace(each, seq_id=number) for number, each in enumerate(repeated)]


def require_room(what: str, num_tokens: int, max_length: int, max_tokens: int, remedy: str = "shorten it") -> None:
    if num_tokens + max_tokens > max_length:
        raise DataError(
            f"{what} has {num_tokens} tokens, which with {max_tokens} of a response (--max-tokens) are more than {max_length}; "
            f"{remedy}, or lower --max-tokens; --context raises this limit, up to the model's own"
        )


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not at U+2028 and similar characters, which a prompt may hold
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    found = [line for line in lines if line.strip()]
    if not found:
        raise DataError(f"{path} has only blank lines; write a prompt on each line")
    return found


def _worded(text: str, wording: Wording, tokenizer: Tokenizer, variables: Callable[[], Mapping[str, Any]] = dict) -> str:
    if wording.as_chat:
        try:
            return tokenizer.chat.render([*opening(wording.system), {"role": "user", "content": text}], variables=variables())
        except NoChatTemplateError as error:
            raise ConfigError(
                "--chat and --as-chat put turns into a chat template, and the policy's tokenizer has none; give one with "
                "--chat-template, or leave the option out"
            ) from error
    return wording.template.replace("{prompt}", text)


Messages = list[dict[str, Any]]
RESET = "/reset"
HELP = f"{RESET} starts a new chat, Ctrl-C ends an answer, Ctrl-D ends the chat"


def converse(system: str | None, read: Callable[[], str | None], answer: Callable[[Messages], str]) -> None:
    """Answer until `read` returns None.  A turn without room for an answer (DataError) is dropped."""
    messages = opening(system)
    while (line := read()) is not None:
        if line.strip() == RESET:
            messages = opening(system)
        elif line.strip():
            asked = [*messages, {"role": "user", "content": line}]
            try:
                text = answer(asked)
            except DataError as error:
                print(f"{error} ({RESET} starts a new chat)", file=sys.stderr, flush=True)
                continue
            messages = [*asked, {"role": "assistant", "content": text}]


@contextmanager
def open_lines(source: str | None) -> Iterator[Callable[[], str | None]]:
    """Yield a reader of a line of standard input, or of `source`; None at the end."""
    with nullcontext(sys.stdin) if source is None else open(source, encoding="utf-8") as stream:
        yield lambda: _line(stream)


def parent_input() -> str:
    """Path of this process's standard input for a child process."""
    return f"/proc/{os.getpid()}/fd/0"


def _line(stream: TextIO) -> str | None:
    if stream is sys.stdin and stream.isatty():  # with the terminal's line editing, if Python has it
        try:
            return input("> ")
        except EOFError:
            print(flush=True)
            return None
    if stream.isatty():
        print("> ", end="", flush=True)
    line = stream.readline()
    return line.rstrip("\n") if line else None


@contextmanager
def until_interrupted() -> Iterator[Callable[[], bool]]:
    """Yield a function that reports Ctrl-C, which then raises nothing; main thread only."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.set())
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
