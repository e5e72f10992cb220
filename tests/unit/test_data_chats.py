"""Chat templates, rendered as transformers does and within limits; rows of messages through them; the tokens that are trained."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.data import DataConfig, PromptDataConfig, TokenizerConfig
from oppo_megatron.data.chat_template import ChatTemplate, NoChatTemplateError
from oppo_megatron.data.examples import Example, read_completions, read_pairs, read_prompts
from oppo_megatron.data.rows import Quarantine, RowProblems
from oppo_megatron.data.supervised_rows import RowLoader
from oppo_megatron.data.tokenizer import Tokenizer, encode_answers, encode_prompt, load_tokenizer
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.policy.given_prompts import Wording, prompts_of_file
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.token_text import StepEnds
from tests.support.chat_templates import CHATML, FAMILIES, LLAMA2, LLAMA3, LLAMA32, MISTRAL, QWEN3, QWEN25, R1_DISTILL, R1_FIRST
from tests.support.rows import write_rows
from tests.support.tokenizers import CharacterTokenizer, save_byte_level

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
    assert chat_of("{{ messages[0].content }}").render(ASKED) == " What is 2+2? ", "no parts"


def test_date_and_chance_are_the_same_in_all_processes_of_a_run(tmp_path: Path) -> None:
    assert "Today Date: 04 May 2026\n" in chat_of(LLAMA32).render(ASKED)
    assert "Today Date: 1 Jan 2020\n" in chat_of(LLAMA32, template_arguments={"date_string": "1 Jan 2020"}).render(ASKED)
    template = "{{ range(1000) | random }}{{ lipsum() }}{{ ['b', 'a', 'c'] | random }}{{ messages[0].content }}"
    assert chat_of(template).render(ASKED) == chat_of(template).render(ASKED)
    run, starts = tmp_path / "run", [MONDAY, datetime(2026, 5, 5, 0, 0, 1)] * 8
    with ThreadPoolExecutor(16) as pool:
        dates = set(pool.map(lambda now: RunDirectory(run).first_date(now), starts))
    assert len(dates) == 1 and dates <= set(starts), "of the first start"
    assert {RunDirectory(run).first_date(datetime(2027, 1, 1))} == dates


def test_tools_and_reasoning_by_any_name_reach_a_template_and_null_keys_do_not() -> None:
    text = chat_of(QWEN25).render(ASKED, variables={"tools": TOOLS})
    assert '"name": "add"' in text and text.startswith("<|im_start|>system\n# Tools")
    call = {"function": {"name": "add", "arguments": '{"a": 2}'}, "type": "function", "id": None}
    called = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call], "name": None}]
    assert '{"name": "add", "arguments": {"a": 2}}' in chat_of(QWEN25).render(called, generation_prompt=False)
    plain = [{**message, "tool_calls": None} for message in ANSWERED]
    assert chat_of(LLAMA32).render(plain) == chat_of(LLAMA32).render(ANSWERED)
    for name in ("reasoning_content", "reasoning", "thinking"):
        turns = [*ASKED, {"role": "assistant", "content": "4", name: "Two and two."}]
        assert "<think>\nTwo and two.\n</think>\n\n4" in chat_of(QWEN3).render(turns, generation_prompt=False)


def test_calls_are_given_as_the_template_takes_them_and_arguments_as_it_reads_them() -> None:
    """DeepSeek's templates join the arguments to text, and write a turn of its own for content that is not null."""
    joined = (
        "{% for m in messages %}{% if m['tool_calls'] %}{{ '<call>' + m['tool_calls'][0]['function']['arguments'] }}{% endif %}"
        "{% if m['content'] is not none %}{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}{% endfor %}"
    )
    for arguments in ('{"a": 2}', {"a": 2}):
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
        assert chat_of(joined).render([*ASKED, call], generation_prompt=False) == '<user> What is 2+2? <call>{"a": 2}'
        assert "None" not in chat_of(QWEN3).render([*ASKED, call], generation_prompt=False)
    with pytest.raises(DataError, match="can only concatenate"):
        chat_of(joined).render([*ASKED, {**call, "tool_calls": [{"function": {"arguments": [2]}}]}])
    as_json = (  # as LFM2's template writes content that is not text
        "{% for m in messages %}{% set content = m['content'] %}{% if content is not string %}"
        "{% set content = content | tojson %}{% endif %}{{ '<' + m['role'] + '>' + content }}{% endfor %}"
    )
    for content in (None, ""):
        turns = [*ASKED, CALL | {"content": content}]
        assert chat_of(as_json).render(turns, generation_prompt=False) == "<user> What is 2+2? <assistant>"
    chat = chat_of(QWEN3, template_arguments={"enable_thinking": False})
    chat.require_arguments()
    assert chat.render(ASKED).endswith("assistant\n<think>\n\n</think>\n\n")
    assert chat.render(ASKED, variables={"enable_thinking": True}).endswith("assistant\n")  # a row goes first
    assert chat.reads() == {"enable_thinking"} and chat_of(LLAMA32).reads() == {"custom_tools", "date_string", "tools"}
    with pytest.raises(ConfigError, match=r"has enable_thinkin, which the chat template does not read .*enable_thinking\)"):
        chat_of(QWEN3, template_arguments={"enable_thinkin": False}).require_arguments()
    with pytest.raises(NoChatTemplateError):
        chat_of(None, template_arguments={"enable_thinking": False}).require_arguments()


@pytest.mark.parametrize(("template", "reads"), [
    ("{% macro listed(tools) %}{{ tools }}{% endmacro %}{% if tools %}{{ listed(tools) }}{% endif %}", {"tools"}),
    ("{% if tools %}{% set tools = tools | list %}{{ tools }}{% endif %}", {"tools"}),
    ("{% set tools = tools or [] %}{{ tools }}", {"tools"}), ("{% for tool in tools %}{{ tool }}{% endfor %}", {"tools"}),
    ("{% macro told(content) %}{{ content }}{% endmacro %}{% if 1 %}{% set content = 2 %}{% endif %}{{ content }}", set()),
], ids=["parameter of that name", "set after it is read", "set from itself", "loop", "set before it is read"])  # fmt: skip
def test_a_name_is_read_that_the_template_also_sets(template: str, reads: set[str]) -> None:
    """gpt-oss's template has a macro with a parameter `tools`."""
    assert chat_of(template).reads() == reads


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWING = "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
MACRO = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}"


@pytest.mark.parametrize(("template", "said"), [
    (LOOP, "processor time"), (MACRO, "processor time"), ("{{ 9 ** 999999999 }}", "processor time|memory"), (GROWING, "memory"),
    ("{{ 'a' * 10 ** 10 }}", "memory"), ("{{ 'a' | center(10 ** 10) }}", "memory"),
    ("{{ '%9999999999d' | format(1) }}", "memory|limit"), ("{{ 'a' * (2 ** 24 + 1) }}", "16777217 characters"),
])  # fmt: skip
def test_a_template_without_bound_is_stopped(template: str, said: str) -> None:
    config = TokenizerConfig(path=Path("x"), chat_template=template)
    chat = ChatTemplate(config, lambda with_tools: template, SYMBOLS, render_s=1)
    with pytest.raises(ConfigError, match=f"the chat template was stopped: .*({said}).* to one that does not repeat itself"):
        chat.render(ASKED)


@pytest.mark.parametrize(("template", "said"), [
    ("{{ '\\ud800' }}{{ messages[0].content }}", r"writes '\\ud800', which no tokenizer takes; correct it"),
    ("{{ messages[0].content }}\0", r"writes '\\x00'"),
    ("chat.jinja", "is 'chat.jinja', which writes no message; set .* not to the name of its file"),
])  # fmt: skip
def test_a_template_whose_text_cannot_be_read_is_refused(template: str, said: str) -> None:
    with pytest.raises((ConfigError, DataError), match=f"^the chat template {said}"):
        chat_of(template).render(ASKED)


def test_after_a_stop_from_threads_and_after_an_interruption_it_renders_on(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of("{% if messages[0].content == 'bad' %}{{ 'a' * 10 ** 10 }}{% endif %}{{ messages[0].content }}")
    with pytest.raises(ConfigError):
        chat.render([{"role": "user", "content": "bad"}])
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(lambda i: chat.render([{"role": "user", "content": str(i)}]), range(50))
    assert list(texts) == [str(i) for i in range(50)]
    chat = chat_of("{{ messages[0].content }}")
    assert chat.render([{"role": "user", "content": "first"}]) == "first"

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("oppo_megatron.data.chat_template.select.poll", interrupted)
        chat.render([{"role": "user", "content": "second"}])
    assert chat.render([{"role": "user", "content": "third"}]) == "third"


THOUGHT = "<think>Two and two.</think>4"
QUESTION = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}


def read(
    tmp_path: Path, rows: list[dict[str, Any]], template: str, read: Any = read_completions, **settings: Any
) -> tuple[list[Example], Quarantine]:
    path, quarantine, tokenizer = write_rows(tmp_path, *rows), Quarantine(), CharacterTokenizer()
    tokenizer.chat = chat_of(template, **settings)
    problems = RowProblems(quarantine)
    config = PromptDataConfig(path=path, max_prompt_tokens=9999) if read is read_prompts else DataConfig(path=path)
    examples = read(config, tokenizer, problems)
    problems.raise_errors()
    return examples, quarantine


def test_tools_of_a_row_reach_the_template_and_are_not_dropped_in_silence(tmp_path: Path) -> None:
    for tools in (TOOLS, json.dumps(TOOLS)):
        examples, quarantine = read(tmp_path, [{"messages": [QUESTION, CALL], "tools": tools}], QWEN25)
        assert examples[0].prompt.startswith("<|im_start|>system\n# Tools\n<tools>\n{" + '"type": "function"')
        assert '"arguments": {"a": 2}' in examples[0].answers[0]
        assert any("column 'tools' is given to the chat template" in note for note in quarantine.notes)
        prompts, _ = read(tmp_path, [{"prompt": [QUESTION], "tools": tools}], QWEN25, read_prompts)
        assert prompts[0].prompt.startswith("<|im_start|>system\n# Tools")
    _, quarantine = read(tmp_path, [{"messages": [QUESTION, ANSWER], "tools": TOOLS}] * 3, CHATML)
    assert [note for note in quarantine.notes if "'tools' is not shown to the model" in note]
    _, quarantine = read(tmp_path, [{"messages": [QUESTION, ANSWER], "tools": []}], CHATML)
    assert not any("'tools'" in note for note in quarantine.notes)
    with pytest.raises(DataError, match="column 'tools' is text, but not JSON"):
        read(tmp_path, [{"messages": [QUESTION, ANSWER], "tools": "add"}], QWEN25)

    rows = [{"messages": [QUESTION, ANSWER], "tools": nothing} for nothing in ("", " ", "null", "[]")]
    assert {each.prompt for each in read(tmp_path, rows, QWEN25)[0]} == {read(tmp_path, rows, CHATML)[0][0].prompt}
    assert not any("'tools' is not shown" in note for note in read(tmp_path, rows, CHATML)[1].notes)


def test_columns_and_arguments_of_rows_reach_a_template_that_reads_them(tmp_path: Path) -> None:
    examples, quarantine = read(tmp_path, [{"messages": [QUESTION, ANSWER], "documents": "a page"}], CHATML)
    assert len(examples) == 1 and any("'documents' is not shown to the model" in note for note in quarantine.notes)
    rows = [{"prompt": [QUESTION], "date_string": "1 May 1900", "topic": "sums"}]
    examples, quarantine = read(tmp_path, rows, LLAMA32, read_prompts)
    assert "Today Date: 1 May 1900" in examples[0].prompt
    assert [note for note in quarantine.notes if "given to" in note] == [quarantine.notes[-1]]
    rows = [{"prompt": [QUESTION], "chat_template_kwargs": {"enable_thinking": flag}} for flag in (False, True)]
    examples, _ = read(tmp_path, rows, QWEN3, read_prompts, template_arguments={"enable_thinking": False})
    assert [example.prompt.endswith("</think>\n\n") for example in examples] == [True, False]


@pytest.mark.parametrize("template", [R1_DISTILL, R1_FIRST], ids=["opens the thought", "does not"])
def test_a_template_that_drops_the_thought_is_to_be_replaced(tmp_path: Path, template: str) -> None:
    rows = [{"messages": [QUESTION, {"role": "assistant", "content": THOUGHT}]}] * 3
    with pytest.raises(DataError) as refusal:
        read(tmp_path, rows, template)
    assert "leaves out a part of the answer's content" in str(refusal.value) and "[and 2 more rows" in str(refusal.value)
    assert "Set tokenizer.chat_template to a template that renders answers whole: the rows are sound" in str(refusal.value)
    assert "Correct them" not in str(refusal.value)
    examples, _ = read(tmp_path, rows, QWEN3)
    assert "Two and two." in examples[0].answers[0]


@pytest.mark.parametrize("lost", ["reasoning_content", "reasoning", "tool_calls"])
def test_what_is_to_be_learned_is_not_lost(tmp_path: Path, lost: str) -> None:
    answer = CALL if lost == "tool_calls" else {**ANSWER, lost: "Two and two."}
    with pytest.raises(DataError, match=f"leaves out a part of the answer's {lost}"):
        read(tmp_path, [{"messages": [QUESTION, answer]}], CHATML)
    pair = {"prompt": [QUESTION], "chosen": [answer], "rejected": [ANSWER]}
    with pytest.raises(DataError, match=f"leaves out a part of the answer's {lost}"):
        read(tmp_path, [pair], LLAMA3, read_pairs)
    assert len(read(tmp_path, [{"messages": [QUESTION, answer]}], QWEN25 if lost == "tool_calls" else QWEN3)[0]) == 1


def test_a_prompt_that_the_answer_does_not_go_on_from_and_one_that_has_its_words(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the prompt ends with '<think>\\n', but the whole conversation has '4<\|end_of"):
        read(tmp_path, [{"messages": [QUESTION, ANSWER]}], R1_DISTILL)
    with pytest.raises(DataError, match="leaves out a part of the answer's tool_calls"):
        read(tmp_path, [{"messages": [QUESTION, CALL], "tools": TOOLS}], "{{ tools }}" + CHATML)
    with pytest.raises(DataError, match="leaves out a part of the answer's reasoning_content"):
        read(tmp_path, [{"messages": [QUESTION, {**ANSWER, "reasoning_content": "2"}]}], CHATML)


def test_a_template_that_opens_a_thought_names_the_argument_that_does_not(tmp_path: Path) -> None:
    """Nemotron's templates end prompts with a thought, and rows without one have an empty thought."""
    opens = (
        "{% set enable_thinking = enable_thinking | default(true) %}{% for m in messages %}{{ '<' + m['role'] + '>' }}"
        "{{ '<think></think>' if m['role'] == 'assistant' }}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>{{ '\n' if enable_thinking else '</think>' }}{% endif %}"
    )
    rows = [{"messages": [QUESTION, ANSWER]}]
    with pytest.raises(DataError, match=r"tokenizer.template_arguments .* without \(false\)"):
        read(tmp_path, rows, opens)
    examples, _ = read(tmp_path, rows, opens, template_arguments={"enable_thinking": False})
    assert examples[0].prompt.endswith("<assistant><think></think>") and examples[0].answers == ("4",)


def test_what_a_prompt_loses_is_noted_once(tmp_path: Path) -> None:
    named = {**QUESTION, "name": "Zoe"}
    thought = [{"role": "assistant", "content": THOUGHT}, {"role": "user", "content": "3+3?"}]
    _, quarantine = read(tmp_path, [{"prompt": [named, *thought]}] * 2, QWEN3, read_prompts)
    lost = [note for note in quarantine.notes if "leaves it out" in note]
    assert [note.split(" is not")[0] for note in lost] == ["'name' of messages", "text of 'assistant' messages"]
    _, quarantine = read(tmp_path, [{"prompt": [{"role": "system", "content": "Be kind."}, QUESTION]}], R1_FIRST, read_prompts)
    assert any("text of 'system' messages is not shown" in note for note in quarantine.notes)


def test_prompts_of_a_file_get_the_columns_of_their_rows(tmp_path: Path) -> None:
    path, tokenizer, told = write_rows(tmp_path, {"prompt": "2+2?", "tools": TOOLS}), CharacterTokenizer(), list[str]()
    tokenizer.chat = chat_of(QWEN25)
    (asked,) = prompts_of_file(path, None, Wording(as_chat=True), tokenizer, note=told.append)
    assert asked.text.startswith("<|im_start|>system\n# Tools") and "column 'tools' is given to the chat template" in told[-1]
    (asked,) = prompts_of_file(path, None, Wording(), tokenizer, note=told.append)
    assert asked.text == "2+2?"
    tokenizer.chat = chat_of(None)
    with pytest.raises(ConfigError, match="--as-chat put turns into a chat template"):
        prompts_of_file(path, None, Wording(as_chat=True), tokenizer)


TEXTS = ["Question: two plus two? Answer: four", "[INST] hello there [/INST] Hello friend", "Sum: 4 and 17.\nThen: 21"] * 20


def sentencepiece(folder: Path, kind: str) -> Path:
    """A model that puts a space before each text, as Llama 2's does."""
    from sentencepiece import SentencePieceTrainer

    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(folder / "tokenizer"), vocab_size=310, model_type=kind, pad_id=3,
        byte_fallback=True, minloglevel=2, remove_extra_whitespaces=False, user_defined_symbols=["\n"], hard_vocab_limit=False,
    )  # fmt: skip
    return folder / "tokenizer.model"


def fast(folder: Path, kind: str) -> Path:
    """`llama`: pieces with a space put before the first; `words`: BERT's; both put their own tokens around each text."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    specials = ["<unk>", "<s>", "</s>"]
    if kind == "llama":
        made = Fast(models.BPE(unk_token="<unk>", byte_fallback=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=90, special_tokens=specials, show_progress=False))
    else:
        made = Fast(models.WordPiece(unk_token="<unk>"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
        made.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials, show_progress=False))
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 1), ("</s>", 2)])
    whole = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    whole.save_pretrained(str(folder))
    return folder


def byte_level(folder: Path, kind: str) -> Path:
    """Tokens that hold ends of words, spaces and beginnings."""
    return save_byte_level(folder, TEXTS, 290, over_words=True, bos_token="<|turn|>")


KINDS = {"bpe": sentencepiece, "unigram": sentencepiece, "llama": fast, "words": fast, "bytes": byte_level}


def made_tokenizer(folder: Path, kind: str, template: str | None = None) -> Tokenizer:
    return load_tokenizer(TokenizerConfig(path=KINDS[kind](folder, kind), chat_template=template))


def load_row(tmp_path: Path, loader: Any, tokenizer: Tokenizer, row: dict[str, Any], *more: Any) -> Any:
    quarantine = Quarantine()
    return loader(RowLoader(DataConfig(path=write_rows(tmp_path, row)), tokenizer, 900, quarantine), *more)[0], quarantine


@pytest.mark.parametrize("template", [LLAMA2, MISTRAL, LLAMA3, CHATML], ids=["llama2", "mistral", "llama3", "chatml"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_has_the_tokens_of_its_text(tmp_path: Path, kind: str, template: str) -> None:
    tokenizer = made_tokenizer(tmp_path, kind, template)
    turns = [{"role": "user", "content": "two plus two?"}, {"role": "assistant", "content": "four"}]
    whole = encode_prompt(tokenizer, tokenizer.chat.render(turns, generation_prompt=False))
    row, quarantine = load_row(tmp_path, RowLoader.completions, tokenizer, {"messages": turns})
    trained = [*row.prompt, *row.completion]
    assert trained[: len(whole)] == whole[: len(trained)] and len(trained) >= len(whole) - 1  # a line break after EOS may go
    assert trained[len(whole) :] in ([], [tokenizer.eos_id])
    assert trained[-1] == tokenizer.eos_id and trained.count(tokenizer.eos_id) == 1
    meets = row.prompt != encode_prompt(tokenizer, tokenizer.chat.render(turns[:1]))
    assert any("one token joins the end of the prompt" in note for note in quarantine.notes) == meets
    assert "four" in quarantine.first["completion"]


MEETING = [("Answer:", " four"), ("Sum: ", "4 and 17."), ("two Ques", "tion: two"), ("hello", "there")]


@pytest.mark.parametrize(("prompt", "answer"), MEETING)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_meet_anywhere_have_the_tokens_of_the_whole(tmp_path: Path, kind: str, prompt: str, answer: str) -> None:
    tokenizer = made_tokenizer(tmp_path, kind)
    eos, other = tokenizer.eos_id, answer + " and Then"
    wholes = [[*encode_prompt(tokenizer, prompt + text), eos] for text in (answer, other)]
    row, quarantine = load_row(tmp_path, RowLoader.completions, tokenizer, {"prompt": prompt, "completion": answer})
    assert [*row.prompt, *row.completion] == wholes[0]
    meets = row.prompt != encode_prompt(tokenizer, prompt)
    assert any("one token joins the end of the prompt" in note for note in quarantine.notes) == meets
    for loader in (RowLoader.pairs, RowLoader.unequal_pairs):
        pair, _ = load_row(tmp_path, loader, tokenizer, {"prompt": prompt, "chosen": answer, "rejected": other})
        assert [[*pair.prompt, *each] for each in (pair.chosen, pair.rejected)] == wholes
    marked = [{"prompt": prompt, "completion": text, "label": text == answer} for text in (answer, other)]
    rows = RowLoader(DataConfig(path=write_rows(tmp_path, *marked)), tokenizer, 900, Quarantine()).marked()
    assert [[*each.prompt, *each.completion] for each in rows] == wholes


@pytest.mark.parametrize("kind", KINDS)
def test_steps_end_where_a_policy_writes_their_ends_and_an_answer_begins_after_the_prompt(tmp_path: Path, kind: str) -> None:
    tokenizer, separator = made_tokenizer(tmp_path, kind), "\n" if kind in ("bpe", "unigram", "bytes") else "."
    steps = ["Sum: 4 and 17", "Then: 21"]
    given = {"prompt": "Question:", "completions": [" two plus two", *steps], "labels": [1, 0, 1]}
    row, _ = load_row(tmp_path, RowLoader.steps, tokenizer, given, separator)
    whole = encode_prompt(tokenizer, "Question:" + separator.join(given["completions"]))
    assert [*row.prompt, *row.completion] == [*whole, tokenizer.eos_id]
    assert row.ends == StepEnds(separator, tokenizer.decode).of(row.completion) and len(row.ends) == 3
    prompt, tokens = encode_answers(tokenizer, "Answer:", [" four"])
    text = tokenizer.decode(tokens)  # with the space in front, which sentencepiece drops from a text that stands alone
    assert text.endswith("four") and (kind not in ("bpe", "unigram") or text == " four")
    assert encode_prompt(tokenizer, tokenizer.decode(prompt).strip() + text) == [*prompt, *tokens]
