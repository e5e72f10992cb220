"""Every `oppo` command line that the documentation shows is one that `oppo` takes; links and pictures are there."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from oppo_megatron.cli.main import COMMANDS, parse_arguments

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md")),
]  # fmt: skip
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


def words_of(line: str) -> list[str]:
    return shlex.split(NOT_WORDS.sub("", re.split(r"\s[|>]\s|&&|;\s", line)[0]), comments=True)


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    options = set(parser._option_string_actions) | {"--debug", "--version"}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                options |= options_of(inner)
    return options


def test_pages_are_found() -> None:
    assert len(list(command_lines())) > 40 and len(list(inline_commands())) > 60


@pytest.mark.parametrize(("page", "line"), sorted(set(command_lines())))
def test_a_command_line_is_taken(page: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        args = parse_arguments(words_of(line))
    except SystemExit as end:
        assert end.code == 0, f"{page}: oppo {line}\n{capsys.readouterr().err}"
        return
    for override in getattr(args, "overrides", []):
        assert "=" in override, f"{page}: oppo {line}: {override!r} is no setting"


def test_inline_commands_and_their_options_exist() -> None:
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


def test_the_pictures_are_what_their_script_draws() -> None:
    spec = importlib.util.spec_from_file_location("draw_concepts", ROOT / "docs" / "tools" / "draw_concepts.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, draw in script.PICTURES.items():
        drawn = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
        assert drawn == draw(), f"{name}: run python docs/tools/draw_concepts.py"
        ElementTree.fromstring(drawn)


def test_the_picture_of_the_overlaps_has_the_figures_of_its_page() -> None:
    """docs/tools/draw_measurements.py draws it; fonts differ by matplotlib's version, so its text is compared."""
    figures = json.loads((ROOT / "docs" / "images" / "overlap.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")
    drawn = (ROOT / "docs" / "images" / "overlap.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(drawn)
    for mode, seconds in figures["seconds_a_step"].items():
        ratio = figures["x_sequential"][mode]
        assert re.search(rf"^\| (Xeon)? ?\| {re.escape(mode)} \| {seconds:.2f} \|.* {ratio:.2f} \| ", page, re.MULTILINE), mode
        assert f"{seconds:.2f} s  ({ratio:.2f}x)" in drawn
