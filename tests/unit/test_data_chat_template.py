"""Chat templates: as transformers renders them, at the date of the run, with tools and arguments, and within limits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.data.chat_template import ChatTemplate, NoChatTemplateError
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.rundir.directory import RunDirectory
from tests.support.chat_templates import FAMILIES, GEMMA_PARTS, LLAMA32, QWEN3, QWEN25

SYMBOLS = {"bos_token": "<s>", "eos_token": "</s>"}
MONDAY = datetime(2026, 5, 4, 23, 59, 59)
ASKED = [{"role": "user", "content": " What is 2+2? "}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "Four."}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def chat_of(template: str | None, **settings: Any) -> ChatTemplate:
    config = TokenizerConfig(path=Path("x"), chat_template=template, **settings).dated(MONDAY)
    return ChatTemplate(config, lambda with_tools: template, SYMBOLS)


@pytest.mark.parametrize("family", FAMILIES)
def test_published_forms_are_rendered_as_transformers_renders_them(family: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    given = {"enable_thinking": False, "date_string": "1 Jan 2020"}
    chat = chat_of(FAMILIES[family])
    for messages, prompted in ((ASKED, True), (ANSWERED, False), ([*ANSWERED, *ASKED], True)):
        for variables in ({"date_string": "1 Jan 2020"}, given):
            shown = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
            texts, _ = render_jinja_template(
                conversations=[shown if family == "gemma parts" else messages], chat_template=FAMILIES[family],
                add_generation_prompt=prompted, **SYMBOLS, **variables,
            )  # fmt: skip
            assert chat.render(messages, generation_prompt=prompted, variables=variables) == texts[0]


def test_only_a_template_that_reads_parts_alone_gets_parts() -> None:
    assert "What is 2+2?" in chat_of(GEMMA_PARTS).render(ASKED)
    assert chat_of("{{ messages[0].content }}").render(ASKED) == " What is 2+2? "


def test_the_date_is_the_configured_one() -> None:
    assert "Today Date: 04 May 2026\n" in chat_of(LLAMA32).render(ASKED)
    assert "Today Date: 1 Jan 2020\n" in chat_of(LLAMA32, template_arguments={"date_string": "1 Jan 2020"}).render(ASKED)


def test_nothing_depends_on_the_process() -> None:
    template = "{{ range(1000) | random }}{{ lipsum() }}{{ ['b', 'a', 'c'] | random }}{{ messages[0].content }}"
    assert chat_of(template).render(ASKED) == chat_of(template).render(ASKED)


def test_all_processes_of_a_run_directory_have_the_date_of_the_first_start(tmp_path: Path) -> None:
    run = tmp_path / "run"
    starts = [MONDAY, datetime(2026, 5, 5, 0, 0, 1)] * 8
    with ThreadPoolExecutor(16) as pool:
        dates = set(pool.map(lambda now: RunDirectory(run).first_date(now), starts))
    assert len(dates) == 1 and dates <= set(starts)
    assert {RunDirectory(run).first_date(datetime(2027, 1, 1))} == dates


def test_tools_reach_a_template_and_null_keys_do_not() -> None:
    text = chat_of(QWEN25).render(ASKED, variables={"tools": TOOLS})
    assert '"name": "add"' in text and text.startswith("<|im_start|>system\n# Tools")
    call = {"function": {"name": "add", "arguments": '{"a": 2}'}, "type": "function", "id": None}
    called = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call], "name": None}]
    assert '{"name": "add", "arguments": {"a": 2}}' in chat_of(QWEN25).render(called, generation_prompt=False)
    plain = [{**message, "tool_calls": None} for message in ANSWERED]
    assert chat_of(LLAMA32).render(plain) == chat_of(LLAMA32).render(ANSWERED)


@pytest.mark.parametrize("arguments", ['{"a": 2}', {"a": 2}], ids=["JSON", "object"])
def test_calls_are_given_as_the_template_takes_them(arguments: Any) -> None:
    """DeepSeek's templates join the arguments to text, and write a turn of its own for content that is not null."""
    joined = (
        "{% for m in messages %}{% if m['tool_calls'] %}{{ '<call>' + m['tool_calls'][0]['function']['arguments'] }}{% endif %}"
        "{% if m['content'] is not none %}{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}{% endfor %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
    assert chat_of(joined).render([*ASKED, call], generation_prompt=False) == '<user> What is 2+2? <call>{"a": 2}'
    with pytest.raises(DataError, match="can only concatenate"):
        chat_of(joined).render([*ASKED, {**call, "tool_calls": [{"function": {"arguments": [2]}}]}])
    assert "None" not in chat_of(QWEN3).render([*ASKED, call], generation_prompt=False)


def test_reasoning_is_known_by_all_its_names() -> None:
    texts = {
        chat_of(QWEN3).render([*ASKED, {"role": "assistant", "content": "4", name: "Two and two."}], generation_prompt=False)
        for name in ("reasoning_content", "reasoning", "thinking")
    }
    assert len(texts) == 1 and "<think>\nTwo and two.\n</think>\n\n4" in texts.pop()


def test_arguments_are_those_that_the_template_reads() -> None:
    chat = chat_of(QWEN3, template_arguments={"enable_thinking": False})
    chat.require_arguments()
    assert chat.render(ASKED).endswith("assistant\n<think>\n\n</think>\n\n")
    assert chat.render(ASKED, variables={"enable_thinking": True}).endswith("assistant\n")  # a row goes first
    assert chat.reads() == {"enable_thinking"}
    assert chat_of(LLAMA32).reads() == {"custom_tools", "date_string", "tools"}
    with pytest.raises(ConfigError, match=r"has enable_thinkin, which the chat template does not read .*enable_thinking\)"):
        chat_of(QWEN3, template_arguments={"enable_thinkin": False}).require_arguments()
    with pytest.raises(NoChatTemplateError):
        chat_of(None, template_arguments={"enable_thinking": False}).require_arguments()


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        ("{% macro listed(tools) %}{{ tools }}{% endmacro %}{% if tools %}{{ listed(tools) }}{% endif %}", {"tools"}),
        ("{% if tools %}{% set tools = tools | list %}{{ tools }}{% endif %}", {"tools"}),
        ("{% set tools = tools or [] %}{{ tools }}", {"tools"}),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", {"tools"}),
        ("{% macro told(content) %}{{ content }}{% endmacro %}{% if 1 %}{% set content = 2 %}{% endif %}{{ content }}", set()),
    ],
    ids=["parameter of that name", "set after it is read", "set from itself", "loop", "set before it is read"],
)
def test_a_name_is_read_that_the_template_also_sets(template: str, reads: set[str]) -> None:
    """gpt-oss's template has a macro with a parameter `tools`."""
    assert chat_of(template).reads() == reads


@pytest.mark.parametrize("content", [None, ""])
def test_a_message_of_calls_alone_gets_no_content_that_nobody_has_written(content: str | None) -> None:
    """LFM2's template writes content that is not text as JSON."""
    as_json = (
        "{% for m in messages %}{% set content = m['content'] %}{% if content is not string %}"
        "{% set content = content | tojson %}{% endif %}{{ '<' + m['role'] + '>' + content }}{% endfor %}"
    )
    call = {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
    assert chat_of(as_json).render([*ASKED, call], generation_prompt=False) == "<user> What is 2+2? <assistant>"


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWING = "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
MACRO = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LOOP, "processor time"), (MACRO, "processor time"), ("{{ 9 ** 999999999 }}", "processor time|memory"),
        (GROWING, "memory"), ("{{ 'a' * 10 ** 10 }}", "memory"), ("{{ 'a' | center(10 ** 10) }}", "memory"),
        ("{{ '%9999999999d' | format(1) }}", "memory|limit"), ("{{ 'a' * (2 ** 24 + 1) }}", "16777217 characters"),
    ],
)  # fmt: skip
def test_a_template_without_bound_is_stopped(template: str, said: str) -> None:
    config = TokenizerConfig(path=Path("x"), chat_template=template)
    chat = ChatTemplate(config, lambda with_tools: template, SYMBOLS, render_s=1)
    with pytest.raises(ConfigError, match=f"the chat template was stopped: .*({said}).* to one that does not repeat itself"):
        chat.render(ASKED)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ '\\ud800' }}{{ messages[0].content }}", r"writes '\\ud800', which no tokenizer takes; correct it"),
        ("{{ messages[0].content }}\0", r"writes '\\x00'"),
        ("chat.jinja", "is 'chat.jinja', which writes no message; set .* not to the name of its file"),
    ],
)
def test_a_template_whose_text_cannot_be_read_is_refused(template: str, said: str) -> None:
    with pytest.raises((ConfigError, DataError), match=f"^the chat template {said}"):
        chat_of(template).render(ASKED)


def test_after_a_stop_and_from_threads_it_renders_on() -> None:
    chat = chat_of("{% if messages[0].content == 'bad' %}{{ 'a' * 10 ** 10 }}{% endif %}{{ messages[0].content }}")
    with pytest.raises(ConfigError):
        chat.render([{"role": "user", "content": "bad"}])
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(lambda i: chat.render([{"role": "user", "content": str(i)}]), range(50))
    assert list(texts) == [str(i) for i in range(50)]


def test_an_interrupted_rendering_is_no_answer_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of("{{ messages[0].content }}")
    assert chat.render([{"role": "user", "content": "first"}]) == "first"

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("oppo_megatron.data.chat_template.select.poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            chat.render([{"role": "user", "content": "second"}])
    assert chat.render([{"role": "user", "content": "third"}]) == "third"
