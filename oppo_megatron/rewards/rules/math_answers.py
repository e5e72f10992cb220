"""Rule `math`: the final answer equals the expected one mathematically.

Numbers, words and structures are compared here, else by math-verify; in a process, as SymPy may hang or fill memory.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.rewards.rules.final_answer import MAX_CHARACTERS, bare, labelled, last_group, shown, texts
from oppo_megatron.rewards.rules.numbers import OTHER_WORDS, parse_number, read_number, same_number

ENTRY_POINT = "oppo_megatron.rewards.rules.math_process:grade"
ANSWER = "answer"
"""The only field that `grade` reads."""
PROBE = "\\boxed{12345.5}"
"""Response that tries an expected answer if only the library can compare it."""

_ASSIGNED = re.compile(r"(?<![<>!\\:=])=(?!=)")
_AND = re.compile(r"\s*,?\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*")
_WORD = re.compile(r"[A-Za-z][A-Za-z' -]{2,}|no", re.IGNORECASE)
_BASE = re.compile(r"([0-9A-Fa-f]+)_\{?(?:\\text\{)?(\d+|[a-z]+)\}*")
_MATRIX = re.compile(
    r"[(\[]?\s*\\begin\{([bpBvV]?matrix|array)\}(?:\{[lcr|]*\})?(.*?)(?:\\\\\s*)?\\end\{\1\}\s*[)\]]?", re.DOTALL
)
_LEADING = re.compile(
    r"\A(?:\\approx|\\sim|[≈~=]|\b(?:equal to|approximately|about|exactly|therefore|thus|hence)\b,?|(?:ans|result)[:.])\s*",
    re.IGNORECASE,
)
_BECAUSE = re.compile(
    r",?\s\b(?:because|since|as|which|so|I hope)\b.*|(?<![\d\s])\.\s.*|(?<=\d)\.\s+(?=[A-Z]).*"
    r"|[,;]\s+(?=[A-Za-z]{2,}\s+[a-z]{2,}).*",
    re.DOTALL,
)
_FORMULA = r"(?:\$\$.{1,2000}?\$\$|(?<![\\$])\$(?:[^$\n]|\\\$){1,2000}?(?<!\\)\$|\\\(.{1,2000}?\\\)|\\\[.{1,2000}?\\\])"
_FORMULAS = re.compile(rf"({_FORMULA})(?:\s*(?:,|;|,?\s*\b(?:and|or)\b)\s*{_FORMULA})*", re.DOTALL)
_TEXT = re.compile(r"\\(?:text|mbox|(?:text|math)(?:bf|rm|it|normal))\s*\{([^{}]*)\}")
_FONT = re.compile(r"\\(?:bf|rm|it|displaystyle|textstyle)(?![A-Za-z])")
_SOLUTIONS = re.compile(r"(?:\b[A-Za-z](?:_?\d)? ?= ?[^\s=,;]{1,40}(?:\s?,?\s(?:and|or)\s|,\s|\Z)){2,}\Z")
_PROSE = re.compile(r"[\u4e00-\u9fff]|[^\W\d_]{2,}\s+(?:[^\W\d_]\s+)?[^\W\d_]{2,}")
_NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'*\s*(?:\([^=]*\))?|\([A-Za-z, ]*\)|[A-Za-z ]+")
_TAIL = re.compile(r"(?:\s+[A-Za-z]+){0,4}|\s*\\?%")
_CLOSE = re.compile(
    r""".*?(?:=|:|≈|→|\b(?:is|are|was|be|equals?|gets?|got|obtains?|has|have|had|gives?|makes?|earns?|takes?|needs?|paid|pays?|spends?|spent|saves?|requires?|totals?|total\sof|costs?|therefore|thus|hence|so)\b,?(?:\s(?:him|her|them|it))?
        |(?<!不)[是为有得要共了花剩即])
        \s*((?:[-+]\s?)?[$€£]?\d[^:;=?]*)""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
_BRIEF = re.compile(
    r"[^A-Za-z]*(?:[A-Za-z]+[^A-Za-z]*){0,3}|[^A-Za-z]*(?:(?!(?:so|but|if|not|and|or|I)\b)[A-Za-z']+[ .!]*){0,10}", re.IGNORECASE
)
"""A number and a few words, or more words of one clause."""
_LATEX = tuple((re.compile(pattern), latex) for pattern, latex in (
    (r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"), (r"√\s*\(([^()]*)\)|√\s*(\w+)", r"\\sqrt{\1\2}"),
    (r"\*\*", "^"), (r"\^\s*\(?(-?\d{2,})\)?", r"^{\1}"), ("²", "^2"), ("³", "^3"),
    (r"π|(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "), (r"∞|(?<![\\A-Za-z])(?:oo|inf(?:inity)?)(?![A-Za-z])", r"\\infty "),
    (r"\\varnothing", r"\\emptyset "),
    (r"\b[Aa]ll reals?(?: numbers)?\b", r"\\mathbb{R}"),
    ("×", r"\\times "), ("÷", "/"), ("·", r"\\cdot "), ("≤", r"\\le "), ("≥", r"\\ge "), ("≠", r"\\ne "),
    (r"(?<![\\A-Za-z])(sin|cos|tan|ln|log|exp)(?![A-Za-z])", r"\\\1 "), (r"\\(?:,|;|!|:|quad\b)", " "),
))  # fmt: skip
"""Plain text as LaTeX."""

_COMMANDS = "[dt]?frac|sqrt|pi|times|cdot|text|mbox|left|right|[lg]eq?|neq?|[lg]t|cup|infty|pm|circ|begin|end|q?quad|alpha|theta"
_PLAIN = re.compile(
    rf"""(?:[A-Za-z\s.,;:'()\[\]{{}}=+*/<>&-]|[0-9]{{1,15}}(?![0-9])|\\(?:{_COMMANDS})(?![A-Za-z])|\\[\\{{}}%$,;!\ ]
        |_(?:\w|\{{\w{{1,3}}\}})|\^(?:-?[0-9]|[A-Za-z]|\{{-?[0-9]{{1,2}}\}}|\{{[A-Za-z]\}}|\{{?\\circ\}}?)(?!\s*[0-9^]))*""",
    re.VERBOSE,
)
"""No functions, factorials, absolute values, sums, integrals, and exponents that are more than a number or a letter."""
_ORDER = re.compile(r"[<>]|\\(?:[lg]|n)eq?(?![A-Za-z])|\\[lg]t(?![A-Za-z])")


def require_library() -> None:
    try:
        from math_verify import parse, verify  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"rule math needs math-verify, which cannot be imported here ({error}); pip install 'oppo-megatron[math]'"
        ) from error


def expected_text(value: Any) -> str:
    """Raises `RewardError` if nothing can be compared."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**MAX_CHARACTERS:
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        text = _expected(value)
        if any(character.isalnum() for character in text) and len(text) <= MAX_CHARACTERS:
            return text
    raise RewardError(f"the expected answer {value!r:.200} is not mathematics; give a number, an expression, or `\\boxed{{...}}`")


def needs_library(fields: Mapping[str, Any]) -> bool:
    """True if an expected answer is neither a number nor words."""
    text = _tidy(fields[ANSWER])
    return read_number(text) is None and _words(text) is None


def may_take_long(fields: Mapping[str, Any]) -> bool:
    """True if SymPy reads an expected answer that is not surely a matter of milliseconds: plain, short, and of low degree."""
    if not needs_library(fields):
        return False
    latex = _latex(_tidy(fields[ANSWER]))
    if len(latex) > 60 or not _PLAIN.fullmatch(latex) or latex.count("sqrt") > 2:
        return True
    power = math.prod(int(number) for number in re.findall(r"\^\{?-?([0-9]+)", latex))
    symbols = set(re.findall("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", latex)))
    expanded = re.search(r"[)}\]]\s*\^", latex) and (power > 12 or len(symbols) > 4)
    solved = _ORDER.search(latex) and re.search(r"\^|sqrt|frac", latex)
    return bool(power > 100 or expanded or solved or (r"\cup" in latex and symbols))


def grade(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """1.0 if equal, else 0.0; NaN for a bare `PROBE` if the library cannot read the expected answer."""
    try:
        given = found_answer(response)
        score = float(given is not None and equal(fields[ANSWER], given))
        tried = response == PROBE and not prompt
        return math.nan if tried and not _parsed(_latex(_tidy(fields[ANSWER]))) else score
    except Exception:  # a text that no reader copes with, as brackets nested without end, is a wrong answer
        return 0.0


def found_answer(response: str) -> str | None:
    marked = last_group(response)
    if marked is not None and not (_PROSE.search(marked) and re.search(r"\d", marked)):
        return marked
    form, found = texts(response, ["marked", "stated", "hashed", "last line"])
    found = [marked] if marked is not None else found
    if form in ("marked", "hashed"):
        found = texts(found[-1], ["stated"])[1] or found
    if form == "last line":
        return _closing(response)
    if form == "stated":
        readable = (text for text in reversed(found[-64:]) if re.search(r"[\d$\\∞π√]|^\W*\w{1,2}\W*$", text))
        found = [next(readable, found[-1])]
    cut = _cut(found[-1])
    return _closing(cut) or cut if _PROSE.search(cut) and _words(_tidy(cut)) is None and read_number(cut) is None else cut


def equal(expected: str, given: str) -> bool:
    """True if mathematically equal. If only one side is an equation with a variable, compare last sides."""
    (letter, expected), (label, given) = labelled(_tidy(expected)), labelled(_tidy(given))
    if letter and (label or re.fullmatch("[A-J]", given)) or label and re.fullmatch("[A-J]", expected):
        return (letter or expected) == (label or given)
    if not given or len(given) > MAX_CHARACTERS:
        return False
    if (number := read_number(given)) is not None and (wanted := read_number(expected)) is not None:
        return same_number(wanted, number) or bool(_equal_parts(expected, given))
    words = [_words(text) for text in (expected, given)]
    if words[0] is not None and (words[1] is not None or given.isalpha()):
        return words[0] == words[1]
    if _written(expected) == _written(given):
        return True
    bases = [_BASE.fullmatch(text) for text in (expected, given)]
    if all(bases) or (bases[0] and given.isalnum()) or (bases[1] and expected.isalnum()):
        digits = [base[1] if base else text for base, text in zip(bases, (expected, given), strict=True)]
        return digits[0] == digits[1] and (not all(bases) or bases[0][2] == bases[1][2])  # type: ignore[index]
    sides = [_ASSIGNED.split(text) for text in (expected, given)]
    named = len(sides[0]) == 1 or _NAME.fullmatch(sides[0][0].strip())
    if named and (len(sides[0]) > 1) != (len(sides[1]) > 1) and all(len(_split(text)) == 1 for text in (expected, given)):
        return equal(sides[0][-1], sides[1][-1])
    structured = _equal_parts(expected, given)
    if structured is not None:
        return structured
    comma = re.fullmatch(r"([-+]?(?:\d{1,3}(?:\.\d{3})+|\d+)),(\d+)", given)
    if comma and (wanted := read_number(expected)) is not None:  # a decimal comma
        return wanted.value == parse_number(f"{comma[1].replace('.', '')}.{comma[2]}")
    return _equal_by_library(expected, given)


def _expected(text: str) -> str:
    marked = last_group(text)
    if marked is not None:
        return marked
    found = texts(text, ["hashed", "stated"])[1]
    return _cut(found[-1]) if found else _cut(text) if text.lstrip().startswith("$") else text.strip()


def _cut(text: str) -> str:
    text = _BECAUSE.sub("", text.replace("**", ""))
    formulas = _FORMULAS.match(text.lstrip(" :*_"))
    return _elements(formulas[0]) + formulas.string[formulas.end() :] if formulas else text


def _elements(formulas: str) -> str:
    return ", ".join(bare(each) for each in re.findall(_FORMULA, formulas, re.DOTALL))


def _closing(response: str) -> str | None:
    """The answer at the end of a response, unmarked and unstated."""
    text = shown(response).strip()
    last = None
    for last in _FORMULAS.finditer(text):  # noqa: B007  (the last one is wanted)
        pass
    if last and "\n\n" not in text[last.end() :] and _TAIL.fullmatch(text[last.end() :].rstrip(" .*\n")):
        answer, rest = _elements(last[0]), text[last.end() :]
        return answer if parse_number(answer) is None and parse_number(answer + rest) is None else answer + rest
    line = text.splitlines()[-1].replace("**", "") if text else ""
    if not line.startswith("#") and (not _PROSE.search(line) or not re.search(r"\d|\s", line)):
        return line
    sentence = re.split(r"(?<=[A-Za-z)])\.\s+|(?<=\d)\.\s+(?=[A-Z])|[!?]\s|,(?=[\u4e00-\u9fff])", line.rstrip(" ."))[-1]
    found = _CLOSE.fullmatch(sentence)
    if solutions := _SOLUTIONS.search(sentence):
        return solutions[0]
    return found[1] if found and _BRIEF.fullmatch(found[1]) else None


def _tidy(text: str) -> str:
    text = re.sub(
        r"\\(?:left|right)(?![A-Za-z])", "", _FONT.sub("", text).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    )
    text = _LEADING.sub("", bare(re.sub(r"^\s*[A-Za-z]\s*\\in(?![A-Za-z])", "", bare(text))), count=1) if text else text
    while text.startswith("(") and text.endswith(")") and len(_split(text[1:-1])) == 1 and _balanced(text[1:-1]):
        text = bare(text[1:-1])
    return text.strip()


def _written(text: str) -> str:
    return re.sub(r"(?<!\d) +| +(?!\d)", "", _TEXT.sub(r"\1", text))


def _words(text: str) -> str | None:
    return " ".join(text.lower().replace("-", " ").split()) if _WORD.fullmatch(text) else None


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if depth < 0:
            return False
    return True


def _split(text: str) -> list[str]:
    text = _AND.sub(",", text)
    if re.search(r"[,;]\s", text):
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    parts, depth, begin = list[str](), 0, 0
    for place, character in enumerate(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if character in ",;" and depth == 0 and text[place - 1 : place] != "\\":
            parts.append(text[begin:place])
            begin = place + 1
    return [part.strip() for part in (*parts, text[begin:]) if part.strip()]


def _parts(text: str) -> tuple[str, list[str]] | None:
    """Kind (brackets, `set`, `list` or matrix form) and elements."""
    matrix = _MATRIX.fullmatch(text)
    if matrix and "\\begin" not in matrix[2]:
        rows = [row.split("&") for row in re.split(r"\\\\", matrix[2])]
        kind = "determinant" if matrix[1][0] in "vV" else "matrix"
        return f"{kind} {[len(row) for row in rows]}", [cell for row in rows for cell in row]
    if text.startswith(r"\{") and text.endswith(r"\}") and _balanced(text[2:-2]):
        return "set", _split(text[2:-2])
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _balanced(text[1:-1]) and len(inner := _split(text[1:-1])) > 1:
        return text[0] + text[-1], inner
    elements = _split(text)
    return ("list", elements) if len(elements) > 1 else None


def _equal_parts(expected: str, given: str) -> bool | None:
    """True if elements are equal, in any order for sets and lists; None unless both are structures."""
    wanted, found = _parts(expected), _parts(given)
    if wanted is None or found is None:
        return None
    kinds = {wanted[0], found[0]}
    if kinds <= {"set", "list"} and len(wanted[1]) < len(found[1]):
        found = found[0], list(dict.fromkeys(element.replace(" ", "") for element in found[1]))
    if len(wanted[1]) != len(found[1]) or not (len(kinds) == 1 or kinds in ({"set", "list"}, {"()", "list"})):
        return False
    if not kinds <= {"set", "list"}:
        return all(equal(*pair) for pair in zip(wanted[1], found[1], strict=True))
    left = list(found[1])
    for element in wanted[1]:
        match = next((place for place, other in enumerate(left) if equal(element, other)), None)
        if match is None:
            return False
        left.pop(match)
    return True


def _equal_by_library(expected: str, given: str) -> bool:
    from math_verify import verify

    texts = (_latex(expected), _latex(given))
    other, given_words = ({word.lower() for each in _TEXT.findall(text) for word in OTHER_WORDS.findall(each)} for text in texts)
    if other != given_words:  # the library leaves out plain text
        return False
    gold, answer = (_parsed(text) for text in texts)
    if not gold or not answer:
        return texts[0].replace(" ", "") == texts[1].replace(" ", "")
    places = _places([*gold, *answer])
    return bool(
        verify(
            gold, answer, float_rounding=places, numeric_precision=places + 9, timeout_seconds=None, allow_set_relation_comp=True
        )
    )


def _parsed(latex: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    # The process has its own time limit; the library's is a signal, and it logs that at each call.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return list(parse(f"${latex}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None))


def _latex(text: str) -> str:
    for pattern, latex in _LATEX:
        text = pattern.sub(latex, text)
    return text.replace("$", "")


def _places(values: list[Any]) -> int:
    """Decimal places to compare: six after the smallest number's first digit."""
    smallest = 1.0
    for value in values:
        try:
            size = abs(complex(value))
        except Exception:  # noqa: S112  (sympy raises whatever it likes)
            continue
        smallest = min(smallest, size or 1.0)
    return 6 - math.floor(math.log10(smallest)) if smallest > 0 else 6
