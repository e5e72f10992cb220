"""Renders messages by a chat template in a separate, limited process."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import product
from typing import Any

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.nesting import read_json

PROCESS = "oppo_megatron.data.template_process"
RENDER_S = 5
"""Processor time per rendering; published templates take milliseconds."""
LONGEST_S = 120.0
"""Longest wait for an answer."""
RESERVED = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"})
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning; templates read the first, gpt-oss's template the second."""
NOTHING = ("null", "None", "undefined")
"""Words that a template may write for missing content."""
PROBE = "a message of plain text"
SHOWN_CHARACTERS = 500


class NoChatTemplateError(ConfigError): ...


class ChatTemplate:
    """`choose` returns the template with or without tools, or None. `symbols`: special tokens."""

    def __init__(
        self, config: TokenizerConfig, choose: Callable[[bool], str | None], symbols: Mapping[str, Any], render_s: int = RENDER_S
    ):
        self._config, self._choose, self._symbols = config, choose, dict(symbols)
        self._moment = (config.date or datetime.now()).isoformat()
        self._process = _TemplateProcess(render_s)
        self._reads: dict[str, frozenset[str]] = {}
        self._takes_parts: dict[str, bool] = {}

    def reads(self, with_tools: bool = False) -> frozenset[str]:
        template = self._template(with_tools)
        if template not in self._reads:
            found = frozenset(self._ask({"template": template})["reads"])
            self._reads[template] = found - RESERVED - self._symbols.keys()
        return self._reads[template]

    def require_arguments(self) -> None:
        """Raise ConfigError for arguments that the template does not read."""
        if not (given := self._config.template_arguments):
            return
        known = self.reads() | self.reads(with_tools=True) | self._symbols.keys()
        if unread := sorted(given.keys() - known):
            raise ConfigError(
                f"tokenizer.template_arguments has {', '.join(unread)}, which the chat template does not read (it reads: "
                f"{', '.join(sorted(known - self._symbols.keys())) or 'nothing but the messages'}); correct or remove it"
            )

    def render(
        self, messages: Sequence[dict[str, Any]], *, generation_prompt: bool = True, variables: Mapping[str, Any] | None = None
    ) -> str:
        """`generation_prompt`: up to the assistant's turn. Raises ConfigError, or DataError if the template refuses them."""
        given = {**self._config.template_arguments, **(variables or {})}
        template = self._template(bool(given.get("tools")))
        if template not in self._takes_parts:
            parts = [{"type": "text", "text": PROBE}]
            self._takes_parts[template] = not self._shows_probe(template, PROBE) and self._shows_probe(template, parts)
        refusals, texts, in_parts = [], [], self._takes_parts[template]
        has_calls = any(message.get("tool_calls") for message in messages)
        contents: Sequence[dict[str, Any]] = ({}, {"content": None}, {"content": ""}) if has_calls else ({},)
        for as_object, empty in product((True, False) if has_calls else (True,), contents):  # forms that templates expect
            variant = [_prepared(message, in_parts, as_object, empty) for message in messages]
            try:
                texts.append(self._rendered(template, variant, generation_prompt, given))
            except DataError as refusal:
                refusals.append(refusal)
        if not texts:
            raise refusals[0]
        called = {name for message in messages for name in called_functions(message.get("tool_calls")) if name}

        def shown(text: str) -> tuple[int, int]:
            return sum(map(text.count, called)), -sum(map(text.count, NOTHING))

        return max(texts, key=shown)

    def _template(self, with_tools: bool) -> str:
        template = self._choose(with_tools)
        if template is None:
            raise NoChatTemplateError(
                f"the data holds chat messages, and the tokenizer at {self._config.path} has no chat template; set "
                "tokenizer.chat_template to a Jinja template over `messages`, or read columns of text (data.format=columns)"
            )
        if "{" not in template:
            said = f"the chat template is {template!r:.60}, which writes no message"
            raise ConfigError(f"{said}; set tokenizer.chat_template to a Jinja template itself, not to the name of its file")
        return template

    def _shows_probe(self, template: str, content: Any) -> bool:
        try:
            return PROBE in self._rendered(template, [{"role": "user", "content": content}], True, {})
        except DataError:
            return False

    def _rendered(self, template: str, messages: list[dict[str, Any]], prompted: bool, given: Mapping[str, Any]) -> str:
        variables = {"tools": None, "documents": None, **self._symbols, **given}
        variables |= {"messages": messages, "add_generation_prompt": prompted}
        text = str(self._ask({"template": template, "variables": variables, "moment": self._moment})["text"])
        if bad := re.search("[\0\ud800-\udfff]", text):
            raise DataError(f"the chat template writes {bad[0]!r}, which no tokenizer takes; correct it in the template")
        return text

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._process.ask(request)
        if "error" not in answer:
            return answer
        reason = answer["error"][:SHOWN_CHARACTERS]
        if answer["kind"] == "refusal":
            raise DataError(f"the chat template refuses the messages: {reason}; correct them, or set tokenizer.chat_template")
        if answer["kind"] == "limit":
            remedy = "correct it, or set tokenizer.chat_template to one that does not repeat itself"
            raise ConfigError(f"the chat template was stopped: {reason}; {remedy}")
        name = "the tokenizer's chat template" if self._config.chat_template is None else "tokenizer.chat_template"
        line = dict(enumerate(request["template"].splitlines(), start=1)).get(answer["line"], "").strip()
        raise ConfigError(
            f"{name}, line {answer['line']}: not a Jinja template ({reason}); correct `{line[:SHOWN_CHARACTERS]}`, or set "
            "tokenizer.chat_template"
        )


def called_functions(calls: Any) -> list[str]:
    listed = calls if isinstance(calls, list) else [calls]
    functions = [call.get("function", call) for call in listed if isinstance(call, Mapping)]
    return [str(function.get("name", "")) for function in functions if isinstance(function, Mapping)]


def _prepared(message: Mapping[str, Any], in_parts: bool, as_object: bool, empty: Mapping[str, Any]) -> dict[str, Any]:
    """Drop null keys and copy the reasoning to all its keys; `empty`: content of bare calls."""
    made = {name: value for name, value in message.items() if value is not None}
    if (reasoning := next((made[name] for name in REASONING if name in made), None)) is not None:
        made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
    if isinstance(calls := made.get("tool_calls"), list) and calls:
        made["tool_calls"] = [_with_arguments(call, as_object) for call in calls]
        if not made.get("content"):
            made.pop("content", None)
            made |= empty
    if in_parts and isinstance(made.get("content"), str):
        made["content"] = [{"type": "text", "text": made["content"]}]
    return made


def _with_arguments(call: Any, as_object: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    made = {name: value for name, value in call.items() if value is not None}
    if "function" in made:
        return made | {"function": _with_arguments(made["function"], as_object)}
    arguments = made.get("arguments")
    if isinstance(arguments, Mapping) and not as_object:
        return made | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    if isinstance(arguments, str) and as_object:
        with suppress(ValueError):
            if isinstance(parsed := read_json(arguments), dict):
                return made | {"arguments": parsed}
    return made


class _TemplateProcess:
    """Usable from any thread, started by the first request and restarted after a failure."""

    def __init__(self, render_s: int) -> None:
        self._lock, self._render_s = threading.Lock(), render_s
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # a forked copy of this process starts its own

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        line = json.dumps(request, default=str).encode() + b"\n"
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._start()
            assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
                poller = select.poll()
                poller.register(self._process.stdout, select.POLLIN)
                answer = self._process.stdout.readline() if poller.poll(LONGEST_S * 1000) else b""
            except BrokenPipeError:
                answer = b""
            except BaseException:  # from a signal's handler: a late answer would be taken for the next request's
                self._process.kill()
                self._process = None
                raise
            if answer.endswith(b"\n"):
                return dict(json.loads(answer))
            return {"error": self._end(), "kind": "limit"}

    def _start(self) -> None:
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        process = subprocess.Popen(  # noqa: S603  (this package's own module, and no shell)
            [sys.executable, "-m", PROCESS, str(self._render_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        self._process, self._owner = process, os.getpid()
        weakref.finalize(self, _close, process, self._owner)

    def _end(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            code = None
            self._process.kill()
            self._process.wait()
        self._process = None
        if code is None:
            return f"it took more than {LONGEST_S:g} s for one conversation"
        if code == -signal.SIGXCPU:
            return f"it took more than {self._render_s} s of processor time for one conversation"
        return f"its process ended with exit code {code}"


def _close(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner == os.getpid():
        process.kill()
        process.communicate()
