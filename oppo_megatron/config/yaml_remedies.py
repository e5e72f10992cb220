"""What to do about a configuration file that cannot be read as YAML."""

from __future__ import annotations

import codecs
import shlex
from pathlib import Path

REMEDIES = {
    "'\\t'": "YAML takes no tabs at the beginning of a line: put spaces there",
    "found duplicate key": "the same key is given twice in one section: remove one of the two",
    "could not find expected ':'": "write `key: value`, with a colon and a space; the line may be the one before",
    "mapping values are not allowed here": (
        "a value that holds `: ` is put in quotes; else give the line before its colon and a space, or correct the indentation"
    ),
    "did not find expected '-' indicator": "the entries of a list begin in one column, each with `- `",
    "expected <block end>": "the keys of one section begin in one column: correct the indentation",
    "expected ',' or '": "a bracket or brace is not closed, or a comma is missing: correct it there or in the lines before",
    "while scanning a quoted scalar": "a quotation mark is not closed: add it, there or in the lines before",
    "that cannot start any token": "put the value in quotes",
    "undefined alias": "a value that begins with `*` is put in quotes",
    "special characters are not allowed": "remove the control character there",
}
"""By what the parser says; the first that fits."""


def yaml_remedy(said: str) -> str:
    """The remedy of a fault of syntax."""
    return next((remedy for words, remedy in REMEDIES.items() if words in said), "correct the syntax there")


def encoding_remedy(path: Path) -> str:
    """The command that makes UTF-8 of the file."""
    head = path.read_bytes()[:2]
    encoding = "UTF-16" if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "LATIN1"
    name = shlex.quote(str(path))
    return f"save it as UTF-8: iconv -f {encoding} -t UTF-8 {name} > utf8.yaml"
