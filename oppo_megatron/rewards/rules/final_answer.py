"""Finds the final answer in a response, after any `</think>` (docs/rewards.md); the first form of a rule that occurs decides."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_CLOSED_THOUGHT = re.compile(r"</think(?:ing)?>")
_THOUGHT = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL)
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_OPEN_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)\Z", re.DOTALL | re.IGNORECASE)
_BETWEEN = re.compile(r"(?:[\s$.,;&、和或及]|\\text\s*\{|\}|\band\b|\bor\b|\\q?quad\b|\\[,;() ])*")
_HASH = re.compile(r"####(.*)")
_HEADING = re.compile(r"####[ *_]{0,4}[^\W\d_]{2,}.*\n(?=\s*\S)")
"""A Markdown heading with text below is not an answer."""
_END_TOKEN = re.compile(r"(?:<\|[^<>|\s]{1,40}\|>|</?s>|<eos>|<end_of_turn>|</think(?:ing)?>)\Z")
"""A response's end token, if the tokenizer writes it as text."""
_LAST_LINE = re.compile(r"\s*A:(.*)")
_STATED = re.compile(
    r"""(?:(?i:\b(?:ans(?:wer(?:\s(?:choice|option|letter))?)?|correct\s(?:choice|option|letter)
            |respuesta|resposta|risposta|réponse|antwort|ответ))|答案|正确选项|答え|정답|\b答(?=:))
        (?i:\s(?:to|of|for)\b[^.\n:=]{0,60}?)?["')*_】\]]{0,3}\s{0,3}
        (?:(?i:is|are|was|will\sbe|would\sbe|should\sbe|must\sbe|equals|es|ist|est|è|é)\b\s?:?|[:=]|[是为為选はは은]\s?:?|(?<=】):?)
        (?i:\s{0,3}(?:most\slikely|likely|probably|definitely|clearly|therefore|thus)\b)?(?:[*_]{1,3}(?=\s))?
      | (?:故|应|本题|因此,?|所以,?)选择?:?
      | (?i:final\s+answer)[*_\s]{0,4}(?=\n)""",
    re.VERBOSE,
)
_DISPLAY = re.compile(r"[\s*_]{0,8}(\$\$.+?\$\$|\\\[.+?\\\])", re.DOTALL)
MAX_CHARACTERS = 2000
"""A longer answer is a runaway response."""
_REST = re.compile(r"\s*([^\n]{0,2000})")

_ASCII = str.maketrans(
    {0xFF01 + i: chr(0x21 + i) for i in range(94)}
    | {"\u3000": " ", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "。": ".", "、": ",", "\u2212": "-", "“": '"', "”": '"'}
)
_PAIRS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"),
          ('"', '"'), ("'", "'"), ("「", "」"))  # fmt: skip
_LABEL = re.compile(
    r"(?:\\(?:text|math)?(?:bf|rm)?\s*\{\s*\(?([A-J])[).]\s*(?:\}|(?=[^{}]*\}))|\(([A-J])\)(?=[\s~\\])|([A-J])[.)](?=\s))"
    r"(?:\s|~|\\[ ,;:]|\\q?quad\b)*(?=\S)"
)
_WRAPPED = re.compile(
    r"(?:\\(?:(?:text)?color\s*\{\w+\}|text|mbox|hbox|boldsymbol|bf|rm|(?:text|math)(?:bf|rm|it|normal|sf))\s*)?\{(.*)\}",
    re.DOTALL,
)


def texts(response: str, forms: Sequence[str]) -> tuple[str, list[str]]:
    """The first of `forms` that occurs, or the last, and its texts."""
    text = shown(response)
    for form in forms:
        found = _FORMS[form](text)
        if found:
            return form, found
    return forms[-1], []


def shown(response: str) -> str:
    """Text after any thoughts, with full-width characters as ASCII."""
    response = response.translate(_ASCII)
    while end_token := _END_TOKEN.search(response := response.rstrip(), max(0, len(response) - 48)):
        response = response[: end_token.start()]
    end = _CLOSED_THOUGHT.search(response)
    after = _THOUGHT.sub("", response[end.end() :]) if end else ""
    return after if after.strip() else response


def last_group(response: str) -> str | None:
    """The last marked answer, with any separated from it only by commas, spaces or words such as `and`."""
    text = shown(response)
    marks = _marks(text)
    if not marks:
        return None
    group, begin = [marks[-1][0]], marks[-1][1]
    for content, start, end in reversed(marks[:-1]):
        if not _BETWEEN.fullmatch(text[end:begin]):
            break
        group, begin = ([content, *group] if content not in group else group), start
    return ", ".join(group)


def bare(text: str) -> str:
    r"""Strip spaces, full stop, `$`, `\(`, quotes, `**`, braces, `\text{}`."""
    if len(text) > 2 * MAX_CHARACTERS:
        return text
    while True:
        text = text.strip().rstrip(".,;:").lstrip(":").strip()
        inner = next((inner for left, right in _PAIRS if (inner := _within(text, left, right)) is not None), None)
        if inner is None and (wrapped := _WRAPPED.fullmatch(text)) and closing(wrapped[1] + "}", 0) == len(wrapped[1]):
            inner = wrapped[1]
        if inner is None:
            return text
        text = inner


def labelled(text: str) -> tuple[str | None, str]:
    r"""A multiple-choice letter and the answer after it: `\textbf{(B)}\ 12`, `(B) 12`, `B. 12`."""
    label = _LABEL.match(text)
    return (label[1] or label[2] or label[3], text[label.end() :]) if label else (None, text)


def closing(text: str, begin: int) -> int | None:
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[begin:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return begin + brace.start()
    return None


def _within(text: str, left: str, right: str) -> str | None:
    inner = text[len(left) : -len(right)]
    if not (text.startswith(left) and text.endswith(right) and inner.strip()) or text.endswith("\\" + right):
        return None
    return None if left in inner.replace("\\$", "") or right in inner.replace("\\$", "") else inner


def _marks(text: str) -> list[tuple[str, int, int]]:
    found, start = list[tuple[str, int, int]](), 0
    while (box := _BOX.search(text, start)) is not None:
        end = closing(text, box.end())
        if end is None:
            break
        found.append((text[box.end() : end], box.start(), end + 1))
        start = end + 1
    for tag in _TAG.finditer(text):
        if not _BOX.search(tag[1]):
            found.append((tag[1], tag.start(), tag.end()))
    return sorted(found, key=lambda mark: mark[1])


def _marked(text: str) -> list[str]:
    marks = [content for content, _, _ in _marks(text)]
    unclosed = _OPEN_TAG.search(text)  # if the run stops at the closing tag, the text lacks it
    if unclosed and not _BOX.search(unclosed[1]):
        marks.append(unclosed[1])
    return marks


def _hashed(text: str) -> list[str]:
    lines = text.strip().splitlines()
    last_line = _LAST_LINE.fullmatch(lines[-1]) if lines else None
    if last_line:
        return [last_line[1]]
    marks = list(_HASH.finditer(text))
    headed = marks and _HEADING.match(text, marks[-1].start())
    return [] if headed else [mark[1].rpartition("####")[2] for mark in marks]


def _stated(text: str) -> list[str]:
    found = []
    for statement in _STATED.finditer(text):
        rest = _DISPLAY.match(text, statement.end()) or _REST.match(text, statement.end())
        if rest and rest[1]:
            found.append(rest[1])
    return found


_FORMS: dict[str, Callable[[str], list[str]]] = {
    "marked": _marked,
    "hashed": _hashed,
    "stated": _stated,
    "last line": lambda text: text.strip().splitlines()[-1:],
}
