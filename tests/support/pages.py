"""Read HTML into elements."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

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
