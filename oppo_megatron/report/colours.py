"""The colours of the report, on paper and in the dark: one name a meaning, the same in every chart."""

from __future__ import annotations

# Okabe and Ito's palette, made to be told apart with any kind of colour vision.
RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
SPAN_COLOURS = {
    "prefill": "#56B4E9",
    "decode": "#0072B2",
    "send": "#CC79A7",
    "score": "#E69F00",
    "experience": "#F0E442",
    "update": "#009E73",
    "evaluate": "#D55E00",
    "wait": "#DDDDDD",
    "wait_scores": "#DDDDDD",
    "wait_tokens": "#DDDDDD",
    "wait_update": "#DDDDDD",
}
OTHER_COLOUR = "#666666"

RUN_COLOURS_DARK = ("#56B4E9", "#E98A45", "#2FC49B", "#E3A3C6", "#F0B73C", "#9AD0F0", "#F2F2F2")

# name -> (on white, on black)
COLOURS: dict[str, tuple[str, str]] = {
    **{f"run{i}": pair for i, pair in enumerate(zip(RUN_COLOURS, RUN_COLOURS_DARK, strict=True))},
    "prefill": (SPAN_COLOURS["prefill"], "#7CC7EE"),
    "decode": (SPAN_COLOURS["decode"], "#3D9BD6"),
    "score": (SPAN_COLOURS["score"], "#E6A42E"),
    "update": (SPAN_COLOURS["update"], "#1FAE87"),
    "critic": ("#7FCDB6", "#77C9B1"),
    "send": (SPAN_COLOURS["send"], "#D894BC"),
    "evaluate": (SPAN_COLOURS["evaluate"], "#E98A45"),
    "idle": ("#D5D5D5", "#484C54"),
    "other": (OTHER_COLOUR, "#9A9A9A"),
}


def run_colour(number: int) -> str:
    """The colour of the run, or lane, of this number; they come round."""
    return f"run{number % len(RUN_COLOURS)}"


def css_variables() -> str:
    """`--c-NAME` for every colour, for light and for dark."""
    light = "".join(f"--c-{name}:{pair[0]};" for name, pair in COLOURS.items())
    dark = "".join(f"--c-{name}:{pair[1]};" for name, pair in COLOURS.items())
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
