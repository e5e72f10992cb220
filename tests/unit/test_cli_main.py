"""The command line: exit codes, messages, dry runs, `validate`, `tokenizer`; what the documentation shows is what it takes."""

import argparse
import importlib
import json
import queue
import re
import runpy
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from oppo_megatron import clock
from oppo_megatron.cli import launch, validate
from oppo_megatron.cli import main as cli
from oppo_megatron.cli.main import COMMANDS, Command, main, parse_arguments
from oppo_megatron.config.load import dump_config, load_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.rundir.directory import RunDirectory
from tests.support.commands import LEAST, enter, refused, shown
from tests.support.transcripts import follow, masked, steps, user_environment

CONFIG = LEAST + "placement: {actor: {tp: 2}, scorer: {tp: 1, pp: 2}}\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter(tmp_path, monkeypatch, CONFIG)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert len(COMMANDS) <= 16 and all(command.name in out for command in COMMANDS)
    assert all(command.help in " ".join(out.split()) for command in COMMANDS)


def test_wrong_arguments_end_with_2(config: Path) -> None:
    for arguments in ([], ["trian"], ["train"], ["train", str(config), "--nope"], ["watch"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2


@pytest.mark.parametrize("command", [
    "train CONFIG --debug", "launch slurm CONFIG --debug", "launch --debug slurm CONFIG", "bench overlap --debug CONFIG",
])  # fmt: skip
def test_an_error_is_a_message_and_with_debug_a_traceback(config: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    words = command.replace("CONFIG", str(config)).split()
    for given, traced in ((words, True), ([word for word in words if word != "--debug"], False)):
        assert main([*given, "sead=3"]) == 2
        captured = capsys.readouterr()
        assert "did you mean `seed`?" in captured.err and ("Traceback" in captured.err) == traced
        assert captured.out == "" and not Path("run").exists()


def test_a_path_that_cannot_be_used_is_a_message(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "tokenizer", "rows.jsonl", "--out", str(config / "x.model"), "--vocab-size", "300"]
    err = refused(capsys, *arguments)
    assert f"{config}: File exists" in err and "name another path" in err
    with pytest.raises(FileExistsError):
        main([*arguments, "--debug"])


@pytest.mark.parametrize(("arguments", "least"), [
    ("convert a b --as reward --fresh-head-seed=-1", 0), ("convert a b --max-shard-mb=0", 1), ("train c --max-restarts=-1", 0),
    ("plan simulate c --steps=0", 1), ("launch slurm c --max-restarts=-1", 0), ("launch slurm c --gpus-per-node=0", 1),
    ("launch slurm c --ranks-per-node=-5", 1),
])  # fmt: skip
def test_counts_have_a_least_value(capsys: pytest.CaptureFixture[str], arguments: str, least: int) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    given = arguments.rpartition("=")[2]
    assert end.value.code == 2 and f"'{given}' is not a whole number of at least {least}" in capsys.readouterr().err


def test_interrupt_ends_with_130(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("oppo_megatron.cli.run.load_settings", interrupted)
    assert main(["train", str(config)]) == 130


def test_dry_run_shows_configuration_and_ranks(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "train", config, "seed=5", "--dry-run", "overlap.delta.max=6")
    assert "seed: 5" in out and "max: 6" in out
    table = out[out.index("Memory of each rank") :].splitlines()
    assert max(map(len, table)) <= 120
    rows = [line.split() for line in table]
    # 2 layers of 20,480 shared and 128 whole weights, 2 x 16,384 of embedding and head, a norm: 4 bytes each
    assert ["0", "actor", "1/2", "1/1", "1/1", "1-2", "0.28"] == next(row for row in rows if row[:2] == ["0", "actor"])[:7]
    assert [row[1:6] for row in rows if row[0] in ("0", "1")][:2] == [
        ["actor", "1/2", "1/1", "1/1", "1-2"],
        ["actor", "2/2", "1/1", "1/1", "1-2"],
    ]
    assert ["2", "all"] in [row[:2] for row in rows]
    assert ["reference", "1/1", "2/2", "1/1", "2"] in [row[:5] for row in rows]
    assert ["critic", "1/1", "1/2", "1/1", "1"] in [row[:5] for row in rows]
    assert ["0-1", "actor", "8", "8-14", "14", "14", "1", "8", "8", "4096", "16-20", "-"] in rows
    assert ["2-3", "reference", "8", "8-14", "14", "14", "-", "-", "-", "4096", "16-20", "4096"] in rows
    assert not Path("run").exists()


def test_eight_colocated_ranks_fit_a_screen(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = "placement={mode: colocated, actor: {tp: 2, pp: 2, dp: 2}, scorer: {tp: 4, pp: 1, dp: 2}}"
    table = shown(capsys, "validate", "--skip-data", config, layout, "actor.train={tp: 1, dp: 4}").splitlines()[:-1]
    assert max(map(len, table)) <= 120 and len(table) < 60
    cells = [line.split() for line in table]
    ranks = [row for row in cells if row[1:2] == ["all"]]
    assert [row[0] for row in ranks] == [str(rank) for rank in range(8)]
    roles = cells[cells.index(ranks[0]) + 1 : cells.index(ranks[1])]
    assert [row[0] for row in roles] == ["actor", "actor.train", "reference", "critic"]
    for column in (-10, -9, -8, -6, -5, -4, -3):  # weights, copy, packed, gradients, Adam, KV cache and buffers add up
        parts = [float(row[column].replace("-", "0")) for row in roles]
        assert float(ranks[0][column]) == pytest.approx(sum(parts), abs=0.03)
    for column in (-7, -2):  # of kernels and activations the largest counts
        assert float(ranks[0][column]) == max(float(row[column].replace("-", "0")) for row in roles)


def test_a_run_that_has_ended_is_no_error_for_who_resumes_it(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = load_config(TrainConfig, config, [])
    run = RunDirectory(settings.run_dir)
    dump_config(settings, run.config)
    run.summary.write_text("{}")
    assert main(["train", str(config), "--resume"]) == 0
    assert "holds this very run, and it has ended" in capsys.readouterr().err
    for arguments in ((), ("--resume", "seed=99")):
        assert "holds a finished run" in refused(capsys, "train", config, *arguments)


def test_wrong_number_of_ranks(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    err = refused(capsys, "train", config, "--dry-run")
    assert "[rank 1]" in err and "started 3 ranks, but the configuration places its roles on 4" in err
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["train", str(config), "--dry-run"]) == 0


@pytest.mark.parametrize("command", [["validate"], ["train", "--dry-run"], ["train"], ["plan", "schedule"]])
def test_a_length_trace_is_read_first(config: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    Path("lengths.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,5\nx,1,nan\n")
    err = refused(capsys, *command, config, "rollout.forced_lengths=lengths.csv", "ppo.minibatches=3")
    assert "2 problems" in err and "ppo.minibatches 3 does not divide" in err
    assert "rollout.forced_lengths: 1 row cannot be used" in err
    assert "lengths.csv:3: `GeneratedTokens` is 'nan', but must be a whole number" in err and not Path("run").exists()


def test_validate_finds_the_kind(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("lengths.csv").write_text("kind,tokens,requests\noutput,5,2\n")
    assert "`oppo train`" in shown(capsys, "validate", "--skip-data", config, "rollout.forced_lengths=lengths.csv")
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    init = json.dumps({"model_type": "qwen2", **sizes})
    config.write_text(
        f"run_dir: r\ntokenizer: {{path: tok}}\ndata: {{path: rows.jsonl}}\nmax_tokens: 64\nmodel: {{init: {init}}}\n"
    )
    for row, kind in (({"completion": "2"}, "sft"), ({"chosen": "2"}, "rm")):
        Path("rows.jsonl").write_text(json.dumps(row))
        assert f"`oppo {kind}`" in shown(capsys, "validate", "--skip-data", config)
    assert main(["validate", "--skip-data", str(config), "--kind", "train"]) == 2


def test_tokenizer_reads_columns_and_names_bad_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    texts = [{"prompt": f"what is {n} plus {n}?", "completion": f"it is {2 * n}", "id": n} for n in range(40)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts))
    out = tmp_path / "new" / "t.model"
    arguments = ["data", "tokenizer", str(rows), "--out", str(out), "--vocab-size", "285"]
    assert main([*arguments, "--columns", "prompt,completion"]) == 0
    assert out.is_file() and "from 80 texts" in capsys.readouterr().out
    assert f"{rows}:1: column 'answer' is missing" in refused(capsys, *arguments, "--columns", "prompt,answer")
    rows.write_text('{"prompt": "a"}\nnot json\n')
    err = refused(capsys, *arguments)
    assert f"{rows}:2: not JSON" in err and "bad_rows" not in err, "this command has no such setting"
    assert main(["data", "tokenizer", str(rows), "--out", "x.spm", "--vocab-size", "285"]) == 2
    assert main(["data", "tokenizer", str(rows), "--out", "x.model", "--vocab-size", "0"]) == 2


def test_validate_without_a_file_shows_this_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "validate")
    for word in ("python", "torch:", "megatron-core:", "transformer-engine:", "gloo", "usable cores", "features that are off"):
        assert word in out
    monkeypatch.setattr(validate, "version_of", lambda package: None)
    assert main(["validate"]) == 1
    out = capsys.readouterr().out
    assert "not ready: needed are torch>=" in out and "pydantic>=2, which is absent" in out
    assert "ruff" not in out, "an extra's"


@pytest.mark.parametrize("core", ["0.12.0", "0.20.0"])
def test_validate_without_a_file_names_an_untested_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], core: str
) -> None:
    versions = {"megatron-core": core, "torch": "2.11.0a0+nv26.02", "transformers": validate.PRESENT}
    real = validate.version_of
    monkeypatch.setattr(validate, "version_of", lambda each: versions.get(each.distribution) or real(each))
    assert main(["validate"]) == 1
    out = capsys.readouterr().out
    assert f"megatron-core<0.20,>=0.16.1, but {core} is installed" in out
    assert "needed are megatron-core" in out, "and nothing else"


def test_only_the_chosen_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    real = cli.importlib.import_module
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: imported.append(name) or real(name))
    with pytest.raises(SystemExit):
        main(["sft", "--help"])
    assert imported == ["oppo_megatron.cli.run"]


def test_imports_that_take_long_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    told, real = queue.SimpleQueue[str](), cli.importlib.import_module
    monkeypatch.setattr(clock, "TELL_S", 0.01)
    monkeypatch.setattr(launch, "to_stderr", told.put)
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: told.get(timeout=60) and told.get(timeout=60) and real(name))
    parse_arguments(["report", "run"])


def test_an_interrupt_awaits_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "slow_module.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    for _ in range(3):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(0.03)\n"
        "except KeyboardInterrupt as error:\n"
        "    raise RuntimeError('within the import') from error\n"
        "finished = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("oppo_megatron.cli.main.COMMANDS", (Command("slow", "slow_module", "a command"),))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["slow"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert sys.modules["slow_module"].finished is True and capsys.readouterr().err == "oppo: interrupted\n"


ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
WRAPPERS = r"(?:srun|torchrun|exec)\b.*?\s"
SAYS = r"[\w-]+: "  # `oppo train: saved; ...` is output
IN_A_BLOCK = re.compile(rf"^(?:\$ )?(?:{WRAPPERS}|\w+=\S* )*oppo (?!{SAYS})(?P<words>[a-z-].*)$")
INLINE = re.compile(r"`(?:[\w]+=\S* )*oppo (?P<words>[a-z-][^`]*)`")
NOT_WORDS = re.compile(r"\[[^\]]*\.\.\.\]|…|\.\.\.")


def blocks(text: str) -> Iterator[str]:
    fenced, pending = False, ""
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            pending += line.strip()
            if pending.endswith("\\"):
                pending = pending[:-1]
            else:
                yield pending
                pending = ""


def command_lines() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for line in blocks(page.read_text(encoding="utf-8")):
            if found := IN_A_BLOCK.match(line):
                yield str(page.relative_to(ROOT)), found["words"]


def inline_commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for found in INLINE.finditer(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)):
            yield str(page.relative_to(ROOT)), found["words"]


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    options = set(parser._option_string_actions) | {"--debug", "--version"}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                options |= options_of(inner)
    return options


@pytest.mark.parametrize(("page", "line"), sorted(set(command_lines())))
def test_a_command_line_is_taken(page: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        args = parse_arguments(shlex.split(NOT_WORDS.sub("", re.split(r"\s[|>]\s|&&|;\s", line)[0]), comments=True))
    except SystemExit as end:
        assert end.code == 0, f"{page}: oppo {line}\n{capsys.readouterr().err}"
        return
    for override in getattr(args, "overrides", []):
        assert "=" in override, f"{page}: oppo {line}: {override!r} is no setting"


def test_inline_commands_and_their_options_exist() -> None:
    assert len(list(command_lines())) > 40 and len(list(inline_commands())) > 60
    modules = {command.name: command.module for command in COMMANDS}
    wrong = []
    for page, line in inline_commands():
        name, *rest = line.split()
        if name.startswith("-"):
            continue
        if name not in modules:
            wrong.append(f"{page}: oppo {line}")
            continue
        parser = argparse.ArgumentParser()
        importlib.import_module(modules[name]).add_arguments(parser)
        known = options_of(parser)
        options = [word.partition("=")[0] for word in rest if word.startswith("--")]
        wrong += [f"{page}: oppo {line}: {option}" for option in options if option not in known]
    assert not wrong, "\n".join(wrong)


def test_links_lead_to_files() -> None:
    """Checks a checkout's links; anchors and the site's own are mkdocs' to check (`make docs`)."""
    wrong = []
    for page in PAGES:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", text):
            if not (page.parent / target).exists() and target not in ("configuration.md", "mistakes.md"):  # generated
                wrong.append(f"{page.relative_to(ROOT)}: {target}")
    assert not wrong, "\n".join(wrong)


def test_the_pictures_are_what_their_scripts_draw() -> None:
    for name, draw in runpy.run_path(str(ROOT / "docs" / "tools" / "draw_concepts.py"))["PICTURES"].items():
        drawn = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
        assert drawn == draw(), f"{name}: run python docs/tools/draw_concepts.py"
        ElementTree.fromstring(drawn)
    # docs/tools/draw_measurements.py draws it; fonts differ by matplotlib's version, so its text is compared.
    figures = json.loads((ROOT / "docs" / "images" / "overlap.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")
    drawn = (ROOT / "docs" / "images" / "overlap.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(drawn)
    for mode, seconds in figures["seconds_a_step"].items():
        ratio = figures["x_sequential"][mode]
        assert re.search(rf"^\| (Xeon)? ?\| {re.escape(mode)} \| {seconds:.2f} \|.* {ratio:.2f} \| ", page, re.MULTILINE), mode
        assert f"{seconds:.2f} s  ({ratio:.2f}x)" in drawn


PAGE = """
```console
$ cat > a.txt <<'END'
$HOME
END
$ cat a.txt
...
text
```
Not a command: `$ ls`.
"""
WAITS = "trap 'echo saved; exit 75' INT; echo step 1; while true; do sleep 0.05; done"


def test_commands_and_what_is_shown_below_them_but_for_numbers_and_times(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert list(steps(page)) == [("cat > a.txt <<'END'\n$HOME\nEND", []), ("cat a.txt", ["text"])]
    one = masked("ppo 13/30  ETA 36s  reward -0.420  tok/s 1.2k  checkpoint step-000013-clock-00001148")
    assert one == masked("ppo 5/30  reward +0.1  tok/s 900  checkpoint step-000005")
    assert one != masked("ppo 5/30  reward +0.1  tok/s 900  checkpoint steps-000005")


def test_ctrl_c_is_pressed_when_the_line_above_it_has_come(tmp_path: Path) -> None:
    follow(WAITS, ["step 7", "^C", "saved"], tmp_path, user_environment())


@pytest.mark.parametrize(("command", "shown"), [
    ("echo a; echo b", ["b", "a"]), ("echo a; exit 3", ["a"]), (WAITS, ["step 1", "^C", "lost"]),
])  # fmt: skip
def test_what_a_page_says_and_a_command_does_not_is_an_error(command: str, shown: list[str], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="does not show, in this order: |ended with 3"):
        follow(command, shown, tmp_path, user_environment())
