"""The process of `ChatTemplate`: python -m oppo_megatron.data.template_process SECONDS; a JSON line in, a JSON line out.

    request   {"template": Jinja text, "variables": {...}, "moment": time that `strftime_now` prints}, or without variables
    answer    {"text": ...}, or {"reads": names}, or {"error": reason, "kind": syntax | refusal | limit, "line": number}

Templates have transformers' filters, tags and functions.  A rendering does not depend on machine or time.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from oppo_megatron.processes import allow_processor_time, limit_resource

MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 24


class Generation(Extension):
    """`{% generation %}`, which marks the assistant's words and changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Namespace(jinja2.utils.Namespace):
    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _require_public(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have {name!r}: rename it")


def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """A function, because the class itself would lead a template into Python."""
    return dict(*args, **kwargs)


def raise_exception(reason: str) -> None:
    raise jinja2.TemplateError(reason)


def to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
)
ENVIRONMENT.filters["tojson"] = to_json
ENVIRONMENT.globals.update(raise_exception=raise_exception, dict=make_dict, namespace=Namespace, strftime_now=None)


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    try:
        return ENVIRONMENT.from_string(template)
    except (RecursionError, SyntaxError) as error:  # of Python's compiler, which bounds the nesting
        remedy = "nest it less deeply: set a variable to a part of it, or make that a macro"
        raise jinja2.TemplateSyntaxError(f"Python cannot compile it ({type(error).__name__}: {error}); {remedy}", 1) from error


def _read_names(text: str) -> set[str]:
    """Names that a caller may give: not those set first, unless tested (`x is defined`)."""
    _compiled(text)  # refuses what cannot be rendered
    template = ENVIRONMENT.parse(text)
    found = meta.find_undeclared_variables(template) - ENVIRONMENT.globals.keys()
    begun: dict[str, bool] = {}
    for node in _names(template):
        begun.setdefault(node.name, node.ctx == "store")
    own = {name for name, is_set in begun.items() if is_set}
    tests: list[Any] = [test.node for test in template.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    tests += [filtered.node for filtered in template.find_all(nodes.Filter) if filtered.name in ("default", "d")]
    return found - own | found & {node.name for node in tests if isinstance(node, nodes.Name)}


def _names(node: nodes.Node, parameters: frozenset[str] = frozenset()) -> Iterator[nodes.Name]:
    """Names in evaluation order, without macro parameters."""
    if isinstance(node, nodes.Name) and node.name not in parameters:
        yield node
    if isinstance(node, nodes.Macro):
        parameters |= {parameter.name for parameter in node.args}
    children = list(node.iter_child_nodes())
    for child in reversed(children) if isinstance(node, nodes.Assign) else children:
        yield from _names(child, parameters)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if "variables" not in request:
            return {"reads": sorted(_read_names(request["template"]))}
        random.seed(0)  # of the filter `random` and of `lipsum`
        moment = datetime.fromisoformat(request["moment"])
        text = _compiled(request["template"]).render(request["variables"], strftime_now=moment.strftime)
        if len(text) > MAX_CHARACTERS:
            return {"error": f"it wrote {len(text)} characters for one conversation", "kind": "limit"}
        return {"text": text}
    except jinja2.TemplateSyntaxError as error:
        return {"error": error.message, "kind": "syntax", "line": error.lineno}
    except jinja2.TemplateError as error:
        return {"error": str(error), "kind": "refusal"}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory for one conversation", "kind": "limit"}
    except Exception as error:  # a template may make any mistake of Python's
        return {"error": f"{type(error).__name__}: {error}", "kind": "refusal"}


def main(render_s: int) -> None:
    """Answer stdin's requests; one that exceeds its processor time ends the process."""
    limit_resource(resource.RLIMIT_CORE, 0)
    limit_resource(resource.RLIMIT_AS, MEMORY_BYTES)
    for line in sys.stdin.buffer:
        allow_processor_time(render_s)
        sys.stdout.buffer.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
