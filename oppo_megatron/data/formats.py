"""The layout of prompt and answers. Messages are preferred to text, dialogues in `chosen` and `rejected` to a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from oppo_megatron.config.data import KNOWN_NAMES, RowsConfig
from oppo_megatron.data.columns import Table, form_of, is_filled, role_of
from oppo_megatron.data.rows import Row
from oppo_megatron.data.values import ARGUMENTS, FOR_TEMPLATES, is_dialogue
from oppo_megatron.errors import DataError

Wanted = Literal["prompt", "completion", "pair", "steps"]


FORMATS = {
    "columns": ("columns", f"a column of text for the prompt, {', '.join(KNOWN_NAMES['prompt'])}"),
    "alpaca": ("Alpaca", "columns instruction and output, and input if there is one"),
    "sharegpt": ("ShareGPT", "a column conversations with lists of from and value"),
    "messages": ("chat messages", "a column messages with lists of role and content"),
    "hh": ("HH dialogues", "columns chosen and rejected that begin with `Human:` and hold `Assistant:`"),
}
"""Title of each format, and the columns that it needs."""
SPOKEN = ("sharegpt", "messages")
ADDED = ("input", "context")
"""Columns joined to the instruction: Alpaca's and Dolly's."""
SYSTEM = ("system", "system_prompt")
NUM_NAMED = 8
"""Most unread columns that a note names; the others are counted."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of each part.

    `prompt` None: the answers' common beginning. `added`: joined to the prompt. `chat`: a text prompt is a user's turn.
    `completion` None: turns of the prompt's messages. `unread`: unused columns.
    """

    format: str
    prompt: str | None
    added: str | None = None
    system: str | None = None
    chat: bool = False
    completion: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    unread: tuple[str, ...] = ()

    def describe(self, wanted: Wanted, turns: str) -> str:
        if self.prompt is not None:
            parts = [f"prompt from {self.prompt!r}" + (f" and {self.added!r}" if self.added else "")]
            parts[0] += " (as a user's turn of the chat template)" if self.chat and self.format not in SPOKEN else ""
        elif wanted == "completion":
            parts = [f"prompt and answer from {self.chosen or self.completion!r}"]
        else:
            parts = ["prompt from what 'chosen' and 'rejected' begin with"]
        if self.system:
            parts.append(f"system message from {self.system!r}")
        if wanted == "pair":
            parts.append(f"answers from {self.chosen!r} and {self.rejected!r}")
        elif wanted == "completion" and self.completion:
            parts.append(f"completion from {self.completion!r}")
        elif wanted == "completion" and self.prompt is not None:
            parts.append(f"completion from {'its last' if turns == 'last' else 'each'} assistant's turn")
        line = f"rows read as {FORMATS[self.format][0]}: {', '.join(parts)}"
        if not self.unread:
            return line
        more = len(self.unread) - NUM_NAMED
        names = ", ".join(map(repr, self.unread[:NUM_NAMED])) + (f" and {more} more" if more > 0 else "")
        return f"{line}; {'for rewards alone' if wanted == 'prompt' else 'not read'}: {names}"


def recognise(config: RowsConfig, rows: Sequence[Row], wanted: Wanted, used: Sequence[str] = ()) -> Layout:
    """`used`: columns that the caller reads itself. Raises DataError if no layout or two fit."""
    table = Table(rows)
    layout = _layout(config, table, wanted)
    if config.format not in ("auto", layout.format):
        title, needs = FORMATS[config.format]
        names = ", ".join(Counter(name for row in rows for name in row.values))
        raise DataError(
            f"data.format is {config.format}, but the rows of {table.file} are not {title} ({needs}; it has: {names}); "
            "set data.format=auto, or name the columns in data.columns"
        )
    answers = {"pair": [layout.chosen, layout.rejected], "completion": [layout.completion]}.get(wanted, [])
    if layout.prompt is None:
        answers = [layout.chosen, layout.rejected]
    read = {name.partition(".")[0] for name in (layout.prompt, layout.added, layout.system, *answers, *used) if name}
    if layout.chat or layout.format in SPOKEN:
        read |= {*FOR_TEMPLATES, ARGUMENTS}  # the chat template reads them, or it is said that it does not
    filled = dict.fromkeys(name for row in table.sampled for name, value in row.values.items() if is_filled(value))
    return replace(layout, unread=tuple(name for name in filled if name not in read))


def _layout(config: RowsConfig, table: Table, wanted: Wanted) -> Layout:
    find = table.require if wanted == "pair" else table.find
    chosen, rejected = find("chosen", config.columns), find("rejected", config.columns)
    prompt = _prompt_column(config, table, chosen, rejected)
    answer = config.columns.get("completion") if wanted == "completion" else None
    apart = answer or wanted == "steps" or (wanted == "prompt" and rejected is None)
    if prompt is None and (chosen is None or apart or not _holds_prompt(config, table, chosen)):
        prompt = table.require("prompt", config.columns)
    if prompt is None:
        if any(is_dialogue(row.get(chosen)) for row in table.rows):
            return Layout("hh", None, chosen=chosen, rejected=rejected)
        return Layout(table.form(chosen), None, system=table.first(SYSTEM), chosen=chosen, rejected=rejected)

    added = None
    if config.format == "alpaca" or (config.format == "auto" and prompt == "instruction"):
        added = next((name for name in ADDED if any(isinstance(row.get(name), str) for row in table.rows)), None)
    named = "prompt" in config.columns
    form = table.form(prompt)
    if added or (config.format == "alpaca" and (named or prompt == "instruction")):
        form = "alpaca"
    elif config.format == "messages" and named and form == "columns":
        form = "messages"  # text in the named column: a user's turn
    system = table.first(SYSTEM) if config.format != "columns" or form in SPOKEN else None
    answers = [chosen, rejected, table.find("completion", config.columns), *KNOWN_NAMES["completion"]]
    chat = bool(system) or form in SPOKEN or any(table.form(name) in SPOKEN for name in answers)
    completion = _completion_column(config, table, prompt, form, chosen) if wanted == "completion" else None
    return Layout(form, prompt, added, system, chat, completion, chosen, rejected)


def _holds_prompt(config: RowsConfig, table: Table, chosen: str) -> bool:
    if config.format == "hh" or table.form(chosen) in SPOKEN or any(is_dialogue(row.get(chosen)) for row in table.rows):
        return True
    return {*table.usable()} <= {chosen, *KNOWN_NAMES["rejected"], *SYSTEM}


def _prompt_column(config: RowsConfig, table: Table, chosen: str | None, rejected: str | None) -> str | None:
    """None if chosen and rejected hold the prompt."""
    if config.format == "hh":
        return None
    if "prompt" in config.columns:
        return table.find("prompt", config.columns)
    if config.format == "alpaca":
        return table.first(("instruction",))
    names = table.frequent(KNOWN_NAMES["prompt"])
    spoken = [name for name in names if table.form(name) in (SPOKEN if config.format == "auto" else (config.format,))]
    if config.format in SPOKEN or (config.format == "auto" and spoken):
        if len(spoken) < 2:
            return next(iter(spoken), None)
        _only("prompt", spoken, table, _asked)  # of several with the same prompts, the one with answers
        return max(spoken, key=table.share_answered)
    if config.format == "auto" and chosen and rejected:
        begins = [[role_of(dialogue[0]) for dialogue in table.dialogues(name)] for name in (chosen, rejected)]
        if all(len(roles) > roles.count("assistant") * 2 for roles in begins):  # whole conversations
            return None
    texts = [name for name in names if table.form(name) == "columns"]
    found = table.find("prompt", config.columns, texts or None)
    if found in (None, "prompt"):  # its name decides
        return found
    return _only("prompt", [found, *(name for name in texts if name != found)], table)


def _completion_column(config: RowsConfig, table: Table, prompt: str, form: str, chosen: str | None) -> str | None:
    """None if answers are turns of the prompt's messages."""
    if "completion" in config.columns:
        return table.find("completion", config.columns)
    names = [name for name in [*table.frequent(KNOWN_NAMES["completion"]), chosen] if name is not None]
    share = table.share_answered(prompt)
    if form in SPOKEN and (share > 0.5 or (share and not names)):
        if prompt == "prompt" and names and config.format == "auto":
            raise DataError(
                f"{_two_ways(table, 'answer', names[0], 'the last turn of prompt')}; set data.columns.completion={names[0]} or "
                f"data.format={form}"
            )
        return None
    if len(names) > 1 and "answer" in names:  # next to another column it is the short reference
        names.remove("answer")
    if names:
        return _only("completion", names, table)
    try:
        return table.require("completion", config.columns)
    except DataError as error:
        if form not in SPOKEN:
            raise
        raise DataError(f"column {prompt!r} does not end with an assistant's turn, and {error}") from error


def _only(part: str, names: Sequence[str], table: Table, form: Callable[[Any], Any] = lambda value: str(value).strip()) -> str:
    """Return the first column. Raises DataError if another differs from it."""
    for other in names[1:]:
        for row in table.rows:
            one, two = row.get(names[0]), row.get(other)
            if is_filled(one) and is_filled(two) and form(one) != form(two):
                raise DataError(
                    f"{_two_ways(table, part, names[0], other)} (row {row.line} has both, and they differ); set "
                    f"data.columns.{part}={names[0]} or data.columns.{part}={other}"
                )
    return names[0]


def _two_ways(table: Table, part: str, one: str, other: str) -> str:
    return f"{table.file} can be read in two ways: the {part} may be {one} or {other}"


def _asked(messages: Any) -> list[tuple[Any, str]]:
    turns = [] if form_of(messages) == "columns" or isinstance(messages, dict) else list(messages)
    if turns and role_of(turns[-1]) == "assistant":
        turns.pop()
    return [(role_of(turn), str(turn.get("content", turn.get("value"))).strip()) for turn in turns]
