"""Rule `math`: mathematical equality by math-verify.  `grade` runs in a process of its own: SymPy may hang or fill memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from oppo_megatron.errors import ConfigError, RewardError

ENTRY_POINT = f"{__name__}:grade"
ANSWER = "answer"
"""The one field that `grade` reads."""


def require_library() -> None:
    """Raise ConfigError if the functions of math-verify that are used cannot be imported."""
    try:
        from math_verify import parse, verify  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"rule math needs math-verify, which cannot be imported here ({error}); pip install 'oppo-megatron[math]'"
        ) from error


def expected_text(value: Any) -> str:
    """A row's answer column as text: a number, an expression in LaTeX or plain, or a solution with its answer in a box.

    Raises `RewardError` where there is nothing to compare with.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    if isinstance(value, str) and any(character.isalnum() for character in value):
        return value
    raise RewardError(
        f"the expected answer {value!r} is no mathematics; give a number, an expression, or `\\boxed{{...}}`"
    )


def grade(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """1.0 if the response's final answer equals the expected one, else 0.0; NaN where the library reads no expected answer."""
    from math_verify import parse, verify

    # The process is under a limit of its own; what the library would use instead is a signal, and tells of it at each call.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    expected = parse(_delimited(fields[ANSWER]), parsing_timeout=None)
    if not expected:
        return math.nan
    return float(verify(expected, parse(response, parsing_timeout=None), timeout_seconds=None))


def _delimited(expected: str) -> str:
    r"""The library takes an expression for LaTeX only within `$` or a box."""
    return expected if any(mark in expected for mark in ("$", r"\boxed", r"\(", r"\[")) else rf"\boxed{{{expected}}}"
