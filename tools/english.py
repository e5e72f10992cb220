"""Check the English of docstrings, comments, messages and documents against a table of patterns.

`python tools/english.py` prints every sentence that a pattern matches beyond the number allowed, and exits with 1.
`--count` prints the number of matches per pattern and room, `--show NAME` all of one pattern, `--under PATH` those of one room.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CODE = ("oppo_megatron", "benchmarks", "tools", "examples")
DOCUMENTS = ("docs/*.md", "README.md", "CONTRIBUTING.md", "benchmarks/**/*.md", "examples/**/*.md")
PERSONS = r"(it|there|they|that|nothing|none|no|an?|the|one|its|some|this|all|memory|nobody|another|any|each|he|who)"

UNITS = "(second|token|line|row|prompt|response|rollout|step|rank|run)s?"


@dataclass(frozen=True)
class Pattern:
    """A habit to avoid: a regular expression for sentences (docstrings only, if `docstrings`), and how many may remain."""

    name: str
    wrong: str
    better: str
    allowed: int
    docstrings: bool = False


PATTERNS = (
    Pattern("starts-what", r"^What (?!.*\?)", 'a docstring begins with a verb or a noun: "Return ..."', 0, docstrings=True),
    Pattern("starts-of", r"^Of ", "put the subject first", 0),
    Pattern("starts-those", r"^(That|Those) (of|that|which|at|for|in|by|with|whose)\b", "repeat the noun", 0),
    Pattern("starts-whether", r"^Whether ", '"True if ..."', 0, docstrings=True),
    Pattern("starts-where", r"^(Whoever|Who) (?!.*\?)|^Where [^,.]*, ", '"If ..." or "When ..."', 0),
    Pattern("where", rf"\bwhere {PERSONS}\b", '"if" or "when"; "where" is for places', 0),
    Pattern("which", r"\b(of|in|by|with) which\b", "write two sentences", 3),
    Pattern("that-of", r"\b(that|those) of\b", "repeat the noun", 1),
    Pattern("so-many", r"\bso (many|few)\b(?! (that|as)\b)", '"n", "at most n", "a given number of"', 0),
    Pattern("is-no", r"\b(is|are|was|were|be) no (?!(more|longer|less|such|need|way|other|room)\b)[a-z]", '"is not a ..."', 0),
    Pattern("for-clause", r", for (it|they|there|he|she|what|nothing|no one) ", '"because"', 0),
    Pattern("told", r"\b(told|tells?)\b", "the exact verb: report, distinguish, know, log", 0),
    Pattern("goes-on", r"\b(goes|go|went|going|gone) on\b", '"continue"', 0),
    Pattern("stands", r"\b(stands|stood)\b", '"is"', 0),
    Pattern("behind", r"\b[Bb]ehind\b", '"after"', 0),
    Pattern("beside", r"\b[Bb]eside\b", '"next to" or "in addition to"', 0),
    Pattern("alike", r"\b[Aa]like\b", '"the same", "both"', 0),
    Pattern("unit", rf"\b([Ss]econds|{UNITS}|bytes|MiB|nats|ms|stages|%|[0-9] s) an? ({UNITS}|round|batch)\b", '"per step"', 0),
    Pattern("and-rank", r"\ban? second and rank\b", '"per second per rank"', 0),
    Pattern("archaic", r"\b(anew|lest|thereby|therein|whereof|hence)\b", "the usual word", 1),
)


ANY = re.compile("|".join(pattern.wrong for pattern in PATTERNS))


def sentences(text: str) -> Iterator[str]:
    """Sentences of running text, without code blocks, tables' borders and inline code."""
    text = re.sub(r"^(?: {4}|\t).*$|`[^`\n]*`", " CODE ", text, flags=re.M)
    for sentence in re.split(r"(?<=[.:;?!])\s+(?=[A-Z])|\n\s*\n|\n\s*[-*|#]", text):
        yield re.sub(r"\s+", " ", sentence).strip(" |*#-")


def texts(path: Path) -> Iterator[tuple[int, bool, str]]:
    """(line, whether it is a docstring, text) of the docstrings, comments and messages of a Python file, or of a document."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        line = 1
        for paragraph in re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), source, flags=re.S).split("\n\n"):
            yield line, False, paragraph
            line += paragraph.count("\n") + 2
        return
    nodes = list(ast.walk(ast.parse(source)))
    standing = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (id(node) in standing or node.value.count(" ") > 2):
            yield node.lineno, id(node) in standing, re.sub(r"\n +", "\n", node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], False, token.string.lstrip("# ")


def matches(root: Path, under: str) -> Iterator[tuple[Pattern, str, int, str]]:
    """(pattern, file, line, sentence) for every match below `root`, in files whose path begins with `under`."""
    files = [file for room in CODE for file in sorted((root / room).rglob("*.py"))]
    files += [file for place in DOCUMENTS for file in sorted(root.glob(place))]
    for file in files:
        if file.resolve() == Path(__file__).resolve() or not str(file.relative_to(root)).startswith(under):
            continue
        for line, is_docstring, text in texts(file):
            for sentence in filter(ANY.search, sentences(text)):
                for pattern in PATTERNS:
                    if (is_docstring or not pattern.docstrings) and re.search(pattern.wrong, sentence):
                        yield pattern, str(file.relative_to(root)), line, sentence


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true", help="print the number of matches per pattern, and per room")
    parser.add_argument("--show", metavar="NAME", help="print all matches of this pattern")
    parser.add_argument("--under", metavar="PATH", default="", help="only files whose path begins so")
    arguments = parser.parse_args()
    found = list(matches(Path(__file__).resolve().parents[1], arguments.under))
    number = collections.Counter(pattern.name for pattern, *_ in found)
    if arguments.count:
        rooms = collections.Counter("/".join(file.split("/")[:2]) for _, file, *_ in found)
        print("\n".join(f"{count:6d} {name}" for name, count in [*number.most_common(), *rooms.most_common()]))
        return 0
    failed = False
    for pattern in PATTERNS:
        wanted = arguments.under or number[pattern.name] > pattern.allowed
        if arguments.show == pattern.name or (arguments.show is None and wanted):
            for _, file, line, sentence in (match for match in found if match[0] is pattern):
                print(f"{file}:{line}: {sentence:.160}")
                failed = True
            if number[pattern.name]:
                print(f"{pattern.name}: {number[pattern.name]} matches, {pattern.allowed} allowed; better: {pattern.better}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
