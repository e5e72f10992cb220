"""Prose of README.md, CONTRIBUTING.md and docs/ has at most 100 columns; `python docs/tools/wrap.py FILE` wraps it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
)


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wrap", ROOT / "docs" / "tools" / "wrap.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", PAGES)
def test_prose_has_at_most_100_columns(name: str) -> None:
    wide = [f"{name}:{line}: {text}" for line, text in tool().too_long((ROOT / name).read_text(encoding="utf-8"))]
    assert not wide, f"run python docs/tools/wrap.py {name}\n" + "\n".join(wide)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_wrapping_leaves_code_tables_and_links_as_they_are() -> None:
    link = f"[{'text ' * 12}of a link](docs/a_page_with_a_long_name.md#{'anchor-' * 5})"
    text = "\n".join([
        "# " + "heading " * 20, "", "word " * 40 + f"`{'code ' * 12}` {link}", "",
        "- item " + "word " * 30, "  more", "    - nested " + "word " * 30, "", "| " + "cell " * 30 + " |", "",
        "    indented " + "code " * 30, "", "```", "fenced " * 30, "```", "", "!!! note", "    " + "word " * 40, "",
        "before " * 13 + "12. not an item, - nor this, # nor a heading", "",
    ])  # fmt: skip
    wrap = tool().wrap
    lines = wrap(text).splitlines()
    kept = [line for line in text.splitlines() if line.startswith(("#", "|", "    indented", "fenced", "!!!"))]
    assert [line for line in lines if line in kept] == kept
    assert max(len(line) for line in lines if line not in kept) <= 100
    assert wrap(text).split() == text.split() and wrap(wrap(text)) == wrap(text)
    assert f"`{'code ' * 12}`" in wrap(text) and link[link.index("](") :] in wrap(text)
    assert all(line.startswith("    ") for line in lines[lines.index("!!! note") + 1 : lines.index("!!! note") + 3])
    assert not any(line.startswith(("12.", "- nor", "# nor")) for line in lines)
    assert list(tool().too_long(text)) and not list(tool().too_long(wrap(text)))
