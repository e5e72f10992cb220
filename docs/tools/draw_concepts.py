"""Draws the pictures of docs/concepts.md and docs/step.md: `python docs/tools/draw_concepts.py` writes docs/images/*.svg.

Each picture is a function that returns the SVG's text; times and lengths in them are made up, and the pages say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "images"
COLOURS = {
    "decode": "#4c9f9a", "score": "#e0a458", "update": "#7a78b8", "idle": "#eceff1", "carried": "#b5d9d6", "frame": "#90a4ae",
}  # fmt: skip
LANE, GAP, LEFT = 30, 10, 110
Block = tuple[float, float, str, str]  # start, length, kind, label


class Canvas:
    """SVG elements on a white page, so that the picture can be read in a dark theme too."""

    def __init__(self, width: int, height: int, title: str):
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="sans-serif" font-size="12" role="img"><title>{escape(title)}</title>'
        )
        self.parts = [f'<rect width="{width}" height="{height}" fill="#ffffff"/>']

    def rect(self, x: float, y: float, width: float, height: float, kind: str, *, dashed: bool = False) -> None:
        line = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{COLOURS[kind]}" '
            f'stroke="#546e7a" stroke-width="0.8"{line}/>'
        )

    def text(self, x: float, y: float, words: str, anchor: str = "start", *, bold: bool = False, size: int = 12) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="#263238"{weight}>{escape(words)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False, arrow: bool = False) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="#37474f" stroke-width="1.2"{dash}/>')
        if arrow:
            side = 1 if x2 > x1 else -1 if x2 < x1 else 0
            points = [(x2, y2), (x2 - 7 * side - (0 if side else 4), y2 - (4 if side else 7 * (1 if y2 > y1 else -1)))]
            points.append((x2 - 7 * side + (0 if side else 4), y2 + (4 if side else -7 * (1 if y2 > y1 else -1))))
            shape = " ".join(f"{x:g},{y:g}" for x, y in points)
            self.parts.append(f'<polygon points="{shape}" fill="#37474f"/>')

    def lane(self, y: float, name: str, blocks: Sequence[Block], scale: float) -> None:
        """A timeline: a name, and blocks from left to right."""
        self.text(LEFT - 10, y + LANE / 2 + 4, name, "end")
        for start, length, kind, label in blocks:
            self.rect(LEFT + start * scale, y, length * scale, LANE, kind)
            self.text(LEFT + (start + length / 2) * scale, y + LANE / 2 + 4, label, "middle", size=11)

    def svg(self) -> str:
        return self.head + "\n" + "\n".join(self.parts) + "\n</svg>\n"


def intra() -> str:
    """One step, with the scorers waiting for whole responses, and with chunks streamed to them."""
    canvas, scale = Canvas(860, 265, "Intra-step overlap"), 7.2
    canvas.text(10, 20, "plain PPO: the scorers wait for the last response, the actor for the scores", bold=True)
    actor = [(0.0, 48.0, "decode", "decode"), (48.0, 24.0, "idle", "waits"), (72.0, 20.0, "update", "update actor")]
    scorers = [
        (0.0, 48.0, "idle", "wait"), (48.0, 24.0, "score", "prefill and score"), (72.0, 18.0, "update", "update critic"),
    ]  # fmt: skip
    canvas.lane(32, "actor", actor, scale)
    canvas.lane(72, "scorers", scorers, scale)
    canvas.text(10, 142, "intra-step overlap: chunks of tokens are prefilled while the next ones are decoded", bold=True)
    chunks = [(12.0 * i, 12.0, "decode", f"chunk {i + 1}") for i in range(4)]
    after = [(48.0, 6.0, "idle", ""), (54.0, 20.0, "update", "update actor"), (74.0, 12.0, "decode", "next step")]
    canvas.lane(154, "actor", [*chunks, *after], scale)
    scored = [(12.0 * (i + 1), 6.0, "score", str(i + 1)) for i in range(4)]
    canvas.lane(194, "scorers", [*scored, (54, 18, "update", "update critic")], scale)
    for i in range(4):
        x = LEFT + 12 * (i + 1) * scale
        canvas.line(x, 154 + LANE, x, 194, arrow=True)
    canvas.text(LEFT, 250, "time →   only the last chunk's scoring (6) is exposed, in place of all of it (24)")
    return canvas.svg()


def inter() -> str:
    """Responses of two steps: those that are unfinished when B are complete go on in the next step."""
    canvas, scale = Canvas(860, 300, "Inter-step overlap"), 5.6
    canvas.text(10, 20, "B = 4 trained responses per step, delta = 2: six are decoded", bold=True)
    first = {"a": 14.0, "b": 22.0, "c": 30.0, "d": 36.0, "e": 60.0, "f": 74.0}
    stop = 36.0
    canvas.text(LEFT, 42, "step 1: ends when 4 have finished")
    canvas.text(LEFT + (stop + 14) * scale, 42, "step 2: e and f go on, four new ones join them")
    for row, (name, length) in enumerate(first.items()):
        y = 54 + row * (LANE - 8 + 6)
        canvas.text(LEFT - 10, y + 15, f"response {name}", "end")
        canvas.rect(LEFT, y, min(length, stop) * scale, LANE - 8, "decode")
        if length > stop:
            canvas.rect(LEFT + (stop + 14) * scale, y, (length - stop) * scale, LANE - 8, "carried")
            canvas.text(LEFT + (stop + 14 + (length - stop) / 2) * scale, y + 15, "carried, trained", "middle", size=11)
        else:
            canvas.text(LEFT + length / 2 * scale, y + 15, "trained", "middle", size=11)
    second = 38.0
    for row, length in enumerate((20.0, 31.0, 45.0, 52.0)):
        drawn = min(length, second)
        canvas.rect(LEFT + (stop + 14) * scale, 54 + row * 28, drawn * scale, LANE - 8, "decode")
        if length <= second:
            canvas.text(LEFT + (stop + 14 + length / 2) * scale, 54 + row * 28 + 15, "trained", "middle", size=11)
    bottom = 54 + 6 * 28
    for end in (stop, stop + 14 + second):
        canvas.line(LEFT + end * scale, 46, LEFT + end * scale, bottom, dashed=True)
    canvas.rect(LEFT + stop * scale + 6, 54, 14 * scale - 12, bottom - 60, "update")
    canvas.text(LEFT + (stop + 7) * scale, 140, "update", "middle", size=11)
    kept = "Carried responses keep their tokens, the log-probs they were drawn with, and the KV of the frozen scorers."
    canvas.text(LEFT, bottom + 22, kept)
    canvas.text(LEFT, bottom + 40, "After max_staleness steps the batch waits for them: none is thrown away.")
    return canvas.svg()


def placements() -> str:
    """Which roles stand on which ranks."""
    canvas = Canvas(860, 230, "Placements")
    scorers = ["reward", "reference", "critic"]
    everything = ["actor", *scorers]
    layouts = (
        ("disaggregated", 10, [("rank 0", ["actor"]), ("rank 1", ["actor"]), ("rank 2", scorers)]),
        ("colocated", 350, [("rank 0", everything), ("rank 1", everything)]),
        ("single", 620, [("rank 0", everything)]),
    )
    for name, x, ranks in layouts:
        canvas.text(x, 22, name, bold=True, size=14)
        for index, (rank, roles) in enumerate(ranks):
            left = x + index * 108
            canvas.rect(left, 34, 98, 138, "idle")
            canvas.text(left + 49, 52, rank, "middle")
            for row, role in enumerate(roles):
                canvas.rect(left + 8, 62 + row * 26, 82, 21, "decode" if role == "actor" else "score")
                canvas.text(left + 49, 77 + row * 26, role, "middle", size=11)
    canvas.text(10, 194, "tokens travel to the scorers in chunks", size=11)
    canvas.text(350, 194, "scoring fills the bubbles of the decode pipeline", size=11)
    canvas.text(620, 194, "one process: no overlap in time", size=11)
    canvas.text(350, 210, "(pp > 1), or runs next to it", size=11)
    return canvas.svg()


def rollout() -> str:
    """The states of a rollout."""
    canvas = Canvas(860, 170, "The life of a rollout")
    boxes = {"waiting": (20, "idle"), "decoding": (210, "decode"), "finished": (430, "score"), "trained": (680, "update")}
    for name, (x, kind) in boxes.items():
        canvas.rect(x, 60, 120, 40, kind)
        canvas.text(x + 60, 85, name, "middle", bold=True)
    for start, end, words in ((140, 210, "first chunk"), (330, 430, "EOS or limit"), (550, 680, "among the first B")):
        canvas.line(start, 80, end, 80, arrow=True)
        canvas.text((start + end) / 2, 72, words, "middle", size=11)
    for x, words in ((80, "deferred"), (270, "deferred: the step ended first"), (490, "deferred: a surplus finisher")):
        canvas.line(x - 30, 100, x - 30, 130)
        canvas.line(x - 30, 130, x + 30, 130)
        canvas.line(x + 30, 130, x + 30, 100, arrow=True)
        canvas.text(x, 147, words, "middle", size=11)
    return canvas.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "concept-intra.svg": intra, "concept-inter.svg": inter, "concept-placements.svg": placements, "step-rollout.svg": rollout,
}  # fmt: skip


if __name__ == "__main__":
    for file, draw in PICTURES.items():
        (IMAGES / file).write_text(draw(), encoding="utf-8")
