"""Wraps the prose of Markdown files to 100 columns: `python docs/tools/wrap.py README.md docs/install.md ...`.

Paragraphs, list items and the text of `!!!` blocks are wrapped.  Tables, code, headings, HTML, link definitions and
pictures stay as they are.  Inline code, short links and the addresses of long links are never broken, so a page renders
as it did.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

WIDTH = 100
FENCE = re.compile(r"\s*(```|~~~)")
ITEM = re.compile(r"(?P<indent> *)(?P<marker>[-+*]|\d+[.)]) +(?=\S)")
ALONE = re.compile(r"\s*!?\[[^\]]*\]\([^)\s]*\)(\{[^}]*\})?\s*$")
UNTOUCHED = re.compile(r"\s*(\||#{1,6} |<|>|\[[^\]]+\]: |!!! |\?\?\? |-{3,}\s*$|={3,}\s*$)")
HARD_BREAK = re.compile(r"(  |\\)$")
WORD = re.compile(  # inline code, short links and the addresses of long ones stay whole
    r"(?:(?<!`)(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)|!?\[[^]`]{,40}\]\([^)]*\)|\]\([^)]*\)|\S)+"
)
NOT_FIRST = re.compile(r"([-+*]|\d+[.)])$|[#<>|=]|---|!!!|\?\?\?|```|~~~")  # would begin a list, a heading, a table ...


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Runs of lines: ("prose", lines of one paragraph or list item) or ("as is", lines)."""
    prose: list[str] = []
    fence, blank, admonition, listed = "", True, False, False
    for line in text.splitlines():
        found = FENCE.match(line)
        inside, begins = bool(fence), bool(found)
        if found and (not fence or found[1] == fence):
            fence = "" if fence else found[1]
        indented = line.startswith("    ")
        if line.strip() and not indented and blank:
            admonition = line.startswith(("!!! ", "??? "))
            listed = bool(ITEM.match(line))
        code = indented and not (prose or admonition or (listed and ITEM.match(line)))
        as_is = code or not line.strip() or bool(UNTOUCHED.match(line))
        as_is = as_is or inside or begins or bool(ALONE.match(line))
        if prose and (as_is or ITEM.match(line)):
            yield "prose", prose
            prose = []
        if as_is:
            yield "as is", [line]
        else:
            prose.append(line)
            if HARD_BREAK.search(line):
                yield "prose", prose
                prose = []
        blank = not line.strip()
    if prose:
        yield "prose", prose


def words(paragraph: str) -> list[str]:
    """What may stand on a line of its own; a word that would mean something else there stays behind the one before it."""
    found: list[str] = []
    for match in WORD.finditer(paragraph):
        word = match[0]
        if found and NOT_FIRST.match(word):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def wrapped(lines: list[str], width: int = WIDTH) -> list[str]:
    first = ITEM.match(lines[0])
    lead = first[0] if first else lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    indent = " " * len(lead)
    end = HARD_BREAK.search(lines[-1])
    text = " ".join(line.strip() for line in [lines[0][len(lead) :], *lines[1:]])
    done, current = [], ""
    for word in words(text):
        if current and len(lead if not done else indent) + len(current) + 1 + len(word) > width:
            done.append(current)
            current = word
        else:
            current = f"{current} {word}".lstrip()
    done.append(current)
    if end and end[1] == "  ":
        done[-1] += "  "
    return [(lead if number == 0 else indent) + line for number, line in enumerate(done)]


def wrap(text: str, width: int = WIDTH) -> str:
    lines = [line for kind, lines in blocks(text) for line in (wrapped(lines, width) if kind == "prose" else lines)]
    return "\n".join(lines) + "\n"


def too_long(text: str, width: int = WIDTH) -> Iterator[tuple[int, str]]:
    """Number and text of each line of prose that is longer, though it could be broken."""
    number = 0
    for kind, lines in blocks(text):
        for line in lines:
            number += 1
            if kind == "prose" and len(line) > width:
                first = ITEM.match(line)
                if len(words(line[len(first[0]) if first else 0 :])) > 1:
                    yield number, line


if __name__ == "__main__":
    only_check, names = sys.argv[1:2] == ["--check"], [name for name in sys.argv[1:] if name != "--check"]
    wide = []
    for name in names:
        path = Path(name)
        text = path.read_text(encoding="utf-8")
        if only_check:
            wide += [f"{name}:{line}: {found}" for line, found in too_long(text)]
        else:
            path.write_text(wrap(text), encoding="utf-8")
    if wide:
        sys.exit("\n".join([*wide, f"prose has at most {WIDTH} columns; run python docs/tools/wrap.py on the page"]))
