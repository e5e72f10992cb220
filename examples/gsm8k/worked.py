"""A reward that can be known early: 1 for a right answer without a wrong calculation, 0 from the first wrong calculation on.

    rewards: [{kind: python, entry_point: "examples/gsm8k/worked.py:worked"}]

Solutions of GSM8K note each calculation as `<<48/2=24>>`.  Text after the first line with `####` is ignored.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from oppo_megatron.rewards.verifiers import first_settled, verify

CALCULATION = re.compile(r"<<([^<>=\n]*)=([^<>=\n]*)>>")
MOST_OPERATORS = 50
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def worked(prompt: str, response: str, fields: dict[str, Any]) -> float:
    """Return 1 if the first marked answer equals column `answer` and all calculations before it are right, else 0."""
    return 0.0 if slips(response) else verify("gsm8k_first", response, fields["answer"])


def settled(prompt: str, prefix: str, fields: dict[str, Any]) -> float | None:
    """0 once a calculation has ended wrong, else what the first marked answer is worth once its line has ended."""
    return 0.0 if slips(prefix) else first_settled(prefix, fields["answer"])


worked.settled = settled  # type: ignore[attr-defined]


def slips(text: str) -> bool:
    """True if a calculation before the first mark is wrong or is not a calculation."""
    return not all(is_right(*found.groups()) for found in CALCULATION.finditer(text.partition("####")[0]))


def is_right(calculation: str, result: str) -> bool:
    """True if `48/2` is `24`, rounded to the same digits."""
    stated, found = value(result), value(calculation)
    decimals = len(result.strip().partition(".")[2])
    return stated is not None and found is not None and abs(found - stated) <= Fraction(1, 2 * 10**decimals)


def value(text: str) -> Fraction | None:
    """Evaluate an expression of numbers, `+ - * / //` and brackets; None for anything else."""
    if not re.fullmatch(r"[\d.,+*/() -]*", text) or sum(map(text.count, "+-*/(")) > MOST_OPERATORS:
        return None  # Python's parser calls itself for each operator and bracket
    try:
        return _value(ast.parse(text.strip().replace(",", ""), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return (-1 if isinstance(node.op, ast.USub) else 1) * _value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return Fraction(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError(f"{ast.dump(node)} is no calculation")
