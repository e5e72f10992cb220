"""Hooks of `mkdocs build`: generated pages, pages of linked files of the repository, and nothing loaded from other hosts.

`configuration.md` is made from the settings, `mistakes.md` from the messages that `tests/mistakes` gets (`build/mistakes.md`,
which `make docs` writes anew if the code has changed).

A link such as `../examples/gsm8k/ppo.yaml` is right in a checkout.  In the site the file is a page of its own below
`repository/`, shown as it is (Markdown rendered), so that the site is whole without a network.  A link that leads nowhere
is left as it is: mkdocs warns of it, and `--strict` fails.
"""

from __future__ import annotations

import logging
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "repository"
GENERATED = ("configuration.md", "mistakes.md")
MISTAKES = ROOT / "build" / "mistakes.md"
LINK = re.compile(r"(?<!!)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
ELSEWHERE = re.compile(r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//|<link[^>]*\shref=["']?(?:https?:)?//""")
LANGUAGES = {".yaml": "yaml", ".py": "python", ".sh": "bash", ".sbatch": "bash", ".env": "bash", ".json": "json"}
log = logging.getLogger("mkdocs.hooks.repository")


def on_config(config: Any, **_: Any) -> Any:
    """Give the pages that `nav` does not name a place at its end."""
    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))
    if others := sorted(path.name for path in Path(config.docs_dir).glob("*.md") if path.name not in named):
        config.nav.append({"More": others})
    return config


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the generated pages, a page for each file of the repository that a page links to, and for those that these link to."""
    for name, text in zip(GENERATED, (_configuration(), _mistakes()), strict=True):
        files.append(File.generated(config, name, content=text))
    waiting = [place for file in files.documentation_pages() for place in _leads_to(_repository_path(file), file.content_string)]
    while waiting:
        place = waiting.pop()
        if files.get_file_from_path(page_of(place)) is None:
            text = _page(place)
            files.append(File.generated(config, page_of(place), content=text, inclusion=InclusionLevel.NOT_IN_NAV))
            if place.endswith(".md"):
                waiting += _leads_to(place, text)
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Turn links to files of the repository into links to their pages."""
    here = page.file.src_uri
    home = _repository_path(page.file)

    def target(link: re.Match[str]) -> str:
        place = _resolved(home, link["path"])
        found = place.removeprefix("docs/") if place.startswith("docs/") else page_of(place)
        if files.get_file_from_path(found) is None:
            return link[0]
        return f"]({posixpath.relpath(found, posixpath.dirname(here) or '.')}{link['anchor'] or ''})"

    parts, end = [], 0
    for code in CODE.finditer(markdown):  # links within code are text
        parts += [LINK.sub(target, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(target, markdown[end:])])


def on_post_build(config: Any, **_: Any) -> None:
    """Warn of every page that loads a script, style, picture or frame from another host."""
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        if found := ELSEWHERE.search(path.read_text(encoding="utf-8")):
            log.warning("%s loads from elsewhere: %s", path.relative_to(config.site_dir), found[0])


def _configuration() -> str:
    sys.path.insert(0, str(ROOT))
    from tools.reference import render_reference

    return render_reference()


def _mistakes() -> str:
    """Return the page about mistakes.  It takes a minute to make, so it is kept until `make docs` makes it anew."""
    if not MISTAKES.is_file():
        command = [sys.executable, "-m", "tests.mistakes.page"]
        text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout  # noqa: S603
        MISTAKES.parent.mkdir(exist_ok=True)
        MISTAKES.write_text(text[text.index("# Mistakes") :], encoding="utf-8")
    return MISTAKES.read_text(encoding="utf-8")


def page_of(place: str) -> str:
    """The page of a file of the repository: `examples/a.yaml` -> `repository/examples/a.yaml.md`."""
    return f"{FOLDER}/{place}" if place.endswith(".md") else f"{FOLDER}/{place}.md"


def _leads_to(home: str, text: str) -> Iterator[str]:
    """Files outside docs/ that the Markdown text at `home` links to."""
    for link in LINK.finditer(CODE.sub("", text)):
        place = _resolved(home, link["path"])
        if not place.startswith(("docs/", "..", "/")) and (ROOT / place).exists():
            yield place


def _repository_path(file: File) -> str:
    if file.src_uri.startswith(f"{FOLDER}/"):
        return file.src_uri.removeprefix(f"{FOLDER}/")
    return f"docs/{file.src_uri}"


def _resolved(home: str, link: str) -> str:
    """A link of the file `home` as a path from the repository's root; of a folder with a README, that README."""
    place = posixpath.normpath(posixpath.join(posixpath.dirname(home), link))
    return f"{place}/README.md" if (ROOT / place / "README.md").is_file() else place


def _page(place: str) -> str:
    """Markdown that shows a file, or lists a folder."""
    path = ROOT / place
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir() if child.is_file() and not child.name.startswith("."))
        folder = posixpath.basename(place)
        return f"# {place}\n\n" + "\n".join(f"- [{name}]({folder}/{name})" for name in names) + "\n"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return f"# {place}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n````\n"
