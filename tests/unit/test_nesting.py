"""Nesting is counted before a parser meets it, and a pipe or a socket in the place of a file is refused without waiting."""

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from oppo_megatron.cli.main import main
from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.load import load_config, read_tree
from oppo_megatron.config.model import ModelConfig
from oppo_megatron.config.paths import check_files, irregular_path
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.data.chat_template import ChatTemplate
from oppo_megatron.data.files import file_rows
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.errors import CheckpointError, ConfigError, DataError, RewardError
from oppo_megatron.modeldir.headers import read_hf_config, tokenizer_vocab_size, weight_files
from oppo_megatron.modeldir.vocabularies import model_eos_ids
from oppo_megatron.nesting import DEEPEST, DEEPEST_YAML, read_json, read_strict_json, read_yaml
from oppo_megatron.rewards.protocol import Request, read_answer
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.metrics_log import read_metrics
from oppo_megatron.serving.app import Refusal, read_message
from oppo_megatron.train.saving.schema import PPO_STATE, read_state
from tests.support.runs import write_run

ROOT = Path(__file__).resolve().parents[2]
STACK = 450
"""Calls around the reader: half of what Python allows."""


def below(calls: int, action: Callable[[], Any]) -> Any:
    return action() if calls == 0 else below(calls - 1, action)


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


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
    "brackets": lambda n: "{{ " + "(" * n + "1" + ")" * n + " }}", "lists": lambda n: "{{ " + nested(n) + " }}",
    "calls": lambda n: "{{ " + "dict(a=" * n + "1" + ")" * n + " }}", "filters": lambda n: "{{ 1" + "|string" * n + " }}",
    "attributes": lambda n: "{{ 1" + ".real" * n + " }}", "items": lambda n: "{{ [1]" + "[0:]" * n + " }}",
    "sums": lambda n: "{{ 1" + " + 1" * n + " }}", "not": lambda n: "{{ " + "not " * n + "1 }}",
    "choices": lambda n: "{{ " + "1 if a else " * n + "1 }}", "if": lambda n: "{% if a %}" * n + "{% endif %}" * n,
    "else": lambda n: "{% if a %}{% else %}" * n + "{% endif %}" * n,
    "for": lambda n: "{%- for x in [1] %}" * n + "{% endfor %}" * n,
    "macros": lambda n: "{% macro m() %}" * n + "{% endmacro %}" * n, "set": lambda n: "{% set x %}" * n + "{% endset %}" * n,
    "open": lambda n: "{{ " + "(" * n + "]",
}  # fmt: skip


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
        lambda: read_hf_config(model), lambda: model_eos_ids(tmp_path), lambda: weight_files(tmp_path),
        lambda: tokenizer_vocab_size(tmp_path),
    ):  # fmt: skip
        assert "nested deeper than 100" in refused(calls, reader, CheckpointError)
    assert refused(calls, lambda: read_state(tmp_path / "state.json", PPO_STATE), CheckpointError)
    for name, text in (
        ("lines.jsonl", deep + "\n{}\n"), ("whole.json", "{\n" + f'"a": {deep}}}\n'), ("array.json", f"[\n{deep}]"),
    ):  # fmt: skip
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
    found = [path for path in found if path.stem not in ("template_process", "code_tests")]  # an own stack; compile()'s limit
    assert len(sources) > 300 and not found


REMEDY = "remove it, or put what the run wrote in its place"


def pipe(path: Path) -> None:
    """A pipe that is held open for writing: to read it waits."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["summary.json", "config.yaml", "hosts.json", "metrics.jsonl", "trace.json"])
@pytest.mark.parametrize("typed", [("report",), ("report", "--watch")], ids="".join)
def test_a_pipe_in_a_run_directory(name: str, typed: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    pipe(tmp_path / "run" / name)
    assert main([*typed, str(tmp_path / "run")]) == 2
    assert f"{tmp_path / 'run' / name}` is a pipe, and not a regular file; {REMEDY}" in capsys.readouterr().err


def test_a_run_does_not_begin_beside_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("summary.json")
        with pytest.raises(ConfigError, match=f"`summary.json` is a socket, .*{REMEDY}"):
            RunDirectory(".").require_own()
    Path("file").touch()
    assert not any(irregular_path("it", Path(name)) for name in ("file", ".", "missing"))
    assert "is a device" in (irregular_path("it", Path(os.devnull)) or "")


def test_a_pipe_as_a_configuration_as_rows_and_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "given"
    pipe(path)
    said = "is a pipe, and not a regular file; write its content to a file, and name that"
    with pytest.raises(ConfigError, match=said):
        read_tree(path)
    with pytest.raises(DataError, match=said):
        list(file_rows(path))
    assert [said in problem for problem in check_files("data.path", path)] == [True]
    for name in ("tokenizer.json", "config.json"):
        pipe(tmp_path / name)
    with pytest.raises(ConfigError, match="tokenizer.json` is a pipe"):
        load_tokenizer(TokenizerConfig(path=tmp_path))
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--to", "megatron"]) == 2
    assert f"config.json` {said}" in capsys.readouterr().err
