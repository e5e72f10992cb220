"""Nesting is counted before a parser meets it: what is refused does not depend on how deep the caller's stack is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.load import load_config
from oppo_megatron.config.model import ModelConfig
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.data.chat_template import ChatTemplate
from oppo_megatron.data.files import file_rows
from oppo_megatron.errors import CheckpointError, ConfigError, DataError, RewardError
from oppo_megatron.modeldir.headers import read_hf_config, tokenizer_vocab_size, weight_files
from oppo_megatron.modeldir.vocabularies import model_eos_ids
from oppo_megatron.nesting import DEEPEST, DEEPEST_YAML, read_json, read_strict_json, read_yaml
from oppo_megatron.rewards.protocol import Request, read_answer
from oppo_megatron.rundir.metrics_log import read_metrics
from oppo_megatron.serving.app import Refusal, read_message
from oppo_megatron.train.saving.schema import PPO_STATE, read_state

ROOT = Path(__file__).resolve().parents[2]
STACK = 450
"""Calls around the reader: half of what Python allows."""


def below(calls: int, action: Callable[[], Any]) -> Any:
    return action() if calls == 0 else below(calls - 1, action)


def nested(levels: int, opening: str = "[", closing: str = "]") -> str:
    return opening * levels + closing * levels


def in_mappings(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def block_yaml(levels: int) -> str:
    return "".join(f"{'  ' * i}a:\n" for i in range(levels))


def anchors_yaml(levels: int) -> str:
    return "a0: &a0 []\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, levels - 1))


@pytest.mark.parametrize("calls", [0, STACK])
@pytest.mark.parametrize("text", [nested, in_mappings, lambda n: '["[[[",' + nested(n - 1) + "]"])
def test_json(text: Callable[[int], str], calls: int) -> None:
    assert below(calls, lambda: read_json(text(DEEPEST))) == json.loads(text(DEEPEST))
    for levels in (DEEPEST + 1, 400, 20_000):
        for form in (text(levels), text(levels).encode(), text(levels).encode("utf-16")):
            with pytest.raises(DataError, match="nested deeper than 100"):
                below(calls, lambda form=form: read_json(form))
    assert read_json(json.dumps(["[" * 500, '\\"[{' * 500, [1] * 500])) and read_json(f"[{'[],' * 5000}1]")


@pytest.mark.parametrize("calls", [0, STACK])
@pytest.mark.parametrize("text", [nested, in_mappings, block_yaml, anchors_yaml, lambda n: "- " * n])
def test_yaml(text: Callable[[int], str], calls: int) -> None:
    assert below(calls, lambda: read_yaml(text(DEEPEST_YAML))) == yaml.safe_load(text(DEEPEST_YAML))
    for levels in (DEEPEST_YAML + 1, 2_000):
        with pytest.raises(DataError, match=r"line \d+ is nested too deeply"):
            below(calls, lambda levels=levels: read_yaml(text(levels)))


TEMPLATES: dict[str, Callable[[int], str]] = {
    "brackets": lambda n: "{{ " + "(" * n + "1" + ")" * n + " }}",
    "lists": lambda n: "{{ " + nested(n) + " }}",
    "calls": lambda n: "{{ " + "dict(a=" * n + "1" + ")" * n + " }}",
    "filters": lambda n: "{{ 1" + "|string" * n + " }}",
    "attributes": lambda n: "{{ 1" + ".real" * n + " }}",
    "items": lambda n: "{{ [1]" + "[0:]" * n + " }}",
    "sums": lambda n: "{{ 1" + " + 1" * n + " }}",
    "not": lambda n: "{{ " + "not " * n + "1 }}",
    "choices": lambda n: "{{ " + "1 if a else " * n + "1 }}",
    "if": lambda n: "{% if a %}" * n + "{% endif %}" * n,
    "else": lambda n: "{% if a %}{% else %}" * n + "{% endif %}" * n,
    "for": lambda n: "{%- for x in [1] %}" * n + "{% endfor %}" * n,
    "macros": lambda n: "{% macro m() %}" * n + "{% endmacro %}" * n,
    "set": lambda n: "{% set x %}" * n + "{% endset %}" * n,
    "open": lambda n: "{{ " + "(" * n + "]",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates(name: str) -> None:
    def actions(levels: int) -> list[Callable[[], Any]]:
        chat = ChatTemplate(TokenizerConfig(path=Path("t")), lambda with_tools: TEMPLATES[name](levels), {})
        return [chat.reads, lambda: chat.render([{"role": "user", "content": "a"}])]

    for action in actions(10) if name != "open" else ():
        action()
    for action in [*actions(3000), *actions(20_000)]:
        with pytest.raises(ConfigError, match=r"line 1: not a Jinja template .*(nest it less deeply|unexpected '\]')"):
            action()


def first_fault(path: Path) -> str:
    try:
        return next(str(row) for _, row in file_rows(path) if isinstance(row, DataError))
    except DataError as error:
        return str(error)


def refused(calls: int, action: Callable[[], Any], *errors: type[Exception]) -> str:
    with pytest.raises(errors) as caught:
        below(calls, action)
    return str(caught.value)


@pytest.mark.parametrize("calls", [0, STACK])
def test_every_reader_counts(tmp_path: Path, calls: int) -> None:
    deep = '{"weight_map": ' + nested(3_000) + "}"
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", "state.json"):
        (tmp_path / name).write_text(deep)
    model = ModelConfig(checkpoint=tmp_path)
    for reader in (
        lambda: read_hf_config(model),
        lambda: model_eos_ids(tmp_path),
        lambda: weight_files(tmp_path),
        lambda: tokenizer_vocab_size(tmp_path),
    ):
        assert "nested deeper than 100" in refused(calls, reader, CheckpointError)
    assert refused(calls, lambda: read_state(tmp_path / "state.json", PPO_STATE), CheckpointError)
    for name, text in (
        ("lines.jsonl", deep + "\n{}\n"),
        ("whole.json", "{\n" + f'"a": {deep}}}\n'),
        ("array.json", f"[\n{deep}]"),
    ):
        (tmp_path / name).write_text(text)
        assert "nested deeper than 100" in below(calls, lambda name=name: first_fault(tmp_path / name))
    (tmp_path / "metrics.jsonl").write_text(deep + "\n{}\n")
    assert "nested" in refused(calls, lambda: read_metrics(tmp_path / "metrics.jsonl"), DataError)
    assert "nested" in refused(calls, lambda: read_answer(deep.encode(), [1]), RewardError)
    assert "nested" in refused(calls, lambda: read_message(Request, deep.encode(), "scores"), Refusal)
    assert "nested" in refused(calls, lambda: read_strict_json(deep), DataError)


@pytest.mark.parametrize(
    "override",
    ["a=" + nested(500), ".".join(["a"] * 500) + "=1", "a" + "[0]" * 500 + "=1", "seed=${oc.create:" + nested(500) + "}"],
)
def test_overrides_are_counted(tmp_path: Path, override: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("seed: 1\n")
    assert "cannot be applied" in refused(0, lambda: load_config(TrainSettings, path, [override]), ConfigError)


def test_references_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("".join(f"a{i}: ${{a{i + 1}}}\n" for i in range(400)) + "a400: 1\n")
    assert "400 different references" in refused(0, lambda: load_config(TrainSettings, path), ConfigError)
    path.write_text("a: " + "${" * 300 + "b" + "}" * 300)
    assert "nested 300 brackets deep" in refused(0, lambda: load_config(TrainSettings, path), ConfigError)


def test_nobody_waits_for_the_end_of_the_stack() -> None:
    sources = [*ROOT.glob("oppo_megatron/**/*.py"), *ROOT.glob("examples/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    found = [path for path in sources if re.search(r"RecursionError|setrecursionlimit", path.read_text())]
    found = [path for path in found if path.stem != "template_process"]  # whose stack is its own
    assert len(sources) > 300 and not found
