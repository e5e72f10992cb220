r"""Reads a number as people write it, exactly (docs/rewards.md)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from oppo_megatron.rewards.rules.final_answer import bare

MAX_CHARACTERS = 500
"""A longer number is a runaway response; Python refuses to read very long ones."""
SIGNIFICANT = 6
"""Digits a decimal fraction needs to match a number it only approximates, as 0.333333 does."""


def _repeating(found: re.Match[str]) -> str:
    whole, fixed, period = found.groups()
    value = int(whole + fixed + period) - int(whole + fixed or 0)
    return f"{value}/{(10 ** len(period) - 1) * 10 ** len(fixed)}"


_PLAIN: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\(?:[,;:]|!\s*|left\b|right\b|displaystyle\b|quad\b)"), ""),
    (re.compile(r"(\d*)\.(\d*)\\overline\s*\{\s*(\d{1,20})\s*\}"), _repeating),
    (re.compile(r"(?<=\d)\{,\}(?=\d{3})"), ","),
    (re.compile(r"\\(?:text|mbox|(?:text|math)(?:bf|rm|it|normal))\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))(?!\d)"), r" \1\2/\3\4"),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])|[×·]"), "*"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|°"), " degrees "),
    (re.compile(r"\\([%$#&])"), r"\1"),
    (re.compile(r"\\ |~"), " "),
)  # fmt: skip
_NUMBER = re.compile(
    r"""\s*(?P<sign>[-+]?)\s*(?P<money>[$€£¥₹]?)\s*(?P<inner>-?)
        (?P<whole>[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[1-9][0-9]{0,2}(?:[ ][0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))
        (?P<decimals>\.[0-9]+)?
        (?:\s*/\s*(?P<denominator>[0-9]+)|\s+(?P<part>[0-9]+)\s*/\s*(?P<of>[0-9]+)
          |\s*[*x]\s*10\s*\^\s*\{?\s*(?P<power>[-+]?[0-9]{1,3})\s*\}?|[eE](?P<exponent>[-+]?[0-9]{1,3})(?![0-9A-Za-z]))?""",
    re.VERBOSE,
)
# Words after a number that change it, or make it none.
OTHER_WORDS = re.compile(
    r"""\b(?:hundred|thousand|million|billion|trillion|dozen|half|halve|third|fourth|quarter|fifth|tenth|hundredth|thousandth
        |times|plus|minus|over|squared|cubed|or|to|if|unless|not|pi|sqrt|sin|cos|tan|ln|log|exp|infinity|mod|choose|by)s?\b
        |[万萬亿億千百]""",
    re.VERBOSE | re.IGNORECASE,
)
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
          "千": 1000, "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8}  # fmt: skip
_SCALE = re.compile(rf"({'|'.join(SCALES)})(?![A-Za-z])", re.IGNORECASE)
_POWER = re.compile(r"(?<=[A-Za-z])(?:\^\{?[23]\}?|[23](?![0-9])|[²³])|(?<=[A-Za-z])\s?/\s?(?=[A-Za-z])")
_CLOCK = re.compile(r"\A([ap])\.\s?m\b", re.IGNORECASE)
_WORDS = re.compile(r"(?!\(\s*[A-Za-z]\b)[^0-9+*/=^_\\<>|~{}±²³¹¼-¾÷\u0370-\u03ff\u2070-\u209f\u2150-\u220d\u220f-\u22ff]*")
"""No digits, operators, Greek letters or bracketed factors."""
_UNITS = """km kilometer kilometre|m meter metre|cm centimeter centimetre|mm millimeter millimetre|mi mile|ft foot feet
|in inch inche|yd yard|kg kilogram|g gram|mg milligram|lb pound|oz ounce|ton tonne|L l liter litre|ml mL milliliter millilitre
|gal gallon|s sec second|min minute|h hr hour|day|week wk|month|yr year|am|pm|mph|km/h kmh kph|m/s|deg degree|C|F|Hz|Pa
|$ dollar usd USD|€ euro eur|cent ¢|£ gbp|¥ yen yuan 元|₹ rupee|% percent pct"""
UNITS = {name: names.split()[0] for names in _UNITS.replace("\n", "").split("|") for name in names.split()}
"""Unit by each of its names, without plural s."""


@dataclass(frozen=True, slots=True)
class Number:
    """`places`: decimal places of a decimal fraction, which may be rounded; None: exact."""

    value: Fraction
    places: int | None = None
    percent: bool = False
    unit: str | None = None


def parse_number(text: str) -> Fraction | None:
    """None without a number, or if it is part of more (`3+4`, `5 pi`)."""
    number = read_number(text)
    return None if number is None else number.value


def read_number(text: str) -> Number | None:
    text = bare(text.replace("\u2212", "-"))
    if len(text) > MAX_CHARACTERS + 1000:
        return None
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    found = _NUMBER.match(text)
    if found is None or len(found[0]) > MAX_CHARACTERS or (found["sign"] and found["inner"]):
        return None
    rest, scale = bare(_POWER.sub("", text[found.end() :])), 1
    if times := _SCALE.match(rest):
        rest, scale = bare(rest[times.end() :]), SCALES[times[1].lower()]
    rest, after = _CLOCK.sub(r"\1m", rest), text[found.end() : found.end() + 1]
    if not _is_unit(rest, joined=after.isalpha() or after == "("):
        return None
    number = _valued(found, rest)
    return number and replace(number, value=number.value * scale, places=number.places if scale == 1 else None)


def _valued(found: re.Match[str], rest: str) -> Number | None:
    value = Fraction((re.sub("[, ]", "", found["whole"]) or "0") + (found["decimals"] or ""))
    if found["denominator"] is not None or found["of"] is not None:
        if int(found["denominator"] or found["of"]) == 0:
            return None
        value = (
            value / int(found["denominator"]) if found["of"] is None else value + Fraction(int(found["part"]), int(found["of"]))
        )
    power = int(found["power"] or found["exponent"] or 0)
    places = len(found["decimals"]) - 1 - power if found["decimals"] else None
    value = value * Fraction(10) ** power * (-1 if "-" in (found["sign"], found["inner"]) else 1)
    word = re.match(r"[^\W\d_]+(?:/[^\W\d_]+)?|[%$€¢£¥₹]", rest)
    unit = None if word is None else UNITS.get(word[0]) or UNITS.get(word[0].lower().removesuffix("s"))
    return Number(value, places, percent=unit == "%", unit=(unit if word else None) or UNITS.get(found["money"]))


def _is_unit(rest: str, *, joined: bool) -> bool:
    """True if the text after a number does not change it; `joined`: no space between."""
    if not rest:
        return True
    if not _WORDS.fullmatch(rest) or OTHER_WORDS.search(rest):
        return False
    word = re.match(r"[^\W\d_]*", rest)
    name = word[0] if word else ""
    known = name in UNITS or name.lower().removesuffix("s") in UNITS or not name.isascii()
    if re.match(r"-\s|-.?$|-[A-Za-z]{2}$|!", rest) or re.search(r"\s-\s", rest):
        return False
    return known or (not joined and len(name) != 1)


def same_number(expected: Number, given: Number) -> bool:
    """True if equal as written. A percentage equals its value and, from 1 on, its number."""
    if expected.unit and given.unit and expected.unit != given.unit and not (expected.percent or given.percent):
        return False
    if expected.percent == given.percent:
        return close(expected, given)
    share, other = (expected, given) if expected.percent else (given, expected)
    if other.unit is not None:
        return False
    hundredth = Number(share.value / 100, None if share.places is None else share.places + 2)
    return close(other, hundredth) or (abs(share.value) >= 1 and close(other, share))


def close(a: Number, b: Number) -> bool:
    """True if equal, rounded to each other (at least six digits), or different by noise."""
    if a.value == b.value:
        return True
    places = min((each.places for each in (a, b) if each.places is not None), default=None)
    if places is None:
        return False
    size, difference = max(abs(a.value), abs(b.value)), abs(a.value - b.value)
    last = Fraction(10) ** -places
    noise = max(len(str(int(size / Fraction(10) ** -(each.places or 0)))) for each in (a, b)) >= 16 and difference * 10**14 < size
    return noise or (difference < last and size / last >= 10 ** (SIGNIFICANT - 1))
