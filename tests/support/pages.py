"""Read HTML as a browser's parser would name its parts, and open it in a real browser where there is one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

VOID = {"meta", "link", "br", "hr", "img", "input"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """The elements below of this tag with these attributes, in the order of the page."""
        found = []
        for child in self.children:
            if child.tag == tag and all(child.attributes.get(key) == value for key, value in attributes.items()):
                found.append(child)
            found += child.all(tag, **attributes)
        return found

    def text(self) -> str:
        return " ".join([*self.texts, *(child.text() for child in self.children)])


class _Parser(HTMLParser):
    """Fails on a tag that is not closed, or closed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.path = [Element("page", {})]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {key: value or "" for key, value in attributes})
        self.path[-1].children.append(element)
        if tag not in VOID:
            self.path.append(element)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.path[-1].children.append(Element(tag, {key: value or "" for key, value in attributes}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.path.pop().tag == tag, f"</{tag}> closes another element"

    def handle_data(self, text: str) -> None:
        if text.strip():
            self.path[-1].texts.append(text)


def parse(html: str) -> Element:
    parser = _Parser()
    parser.feed(html)
    parser.close()
    assert len(parser.path) == 1, f"{[element.tag for element in parser.path[1:]]} are not closed"
    return parser.path[0]


def embedded(page: Element, name: str) -> Any:
    """The data that the page's script gets."""
    (element,) = page.all("script", id=f"data-{name}")
    return json.loads("".join(element.texts))


def browser() -> str:
    """A Chromium's path; the test is skipped where there is none."""
    named = os.environ.get("OPPO_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not found:
        pytest.skip("no Chromium: install it (Debian: apt-get install chromium) or name one in OPPO_CHROMIUM")
    return found


def opened(page: Path, script: str, tmp_path: Path) -> tuple[Element, list[str]]:
    """The page's elements after a real browser has run its script and then `script`; and the errors of both."""
    errors = "<script>window.failed=[];addEventListener('error',e=>failed.push(e.message))</script>"
    report = "document.body.append(Object.assign(document.createElement('p'),{id:'failed',textContent:JSON.stringify(failed)}))"
    html = page.read_text().replace("<head>", f"<head>{errors}", 1)
    place = html.rindex("</body>")
    copy = tmp_path / "opened.html"
    copy.write_text(f"{html[:place]}<script>{{{script}}}</script><script>{report}</script>{html[place:]}")
    command = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1280,2000", "--virtual-time-budget=2000", "--dump-dom", copy.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    dom = parse(done.stdout)
    (failed,) = dom.all("p", id="failed")
    return dom, json.loads(failed.text())
