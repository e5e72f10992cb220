from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from oppo_megatron.config.derived import batch_rows, max_context, members
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import round_placements, training_placements
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.actions import Action, Op, Schedule
from oppo_megatron.schedule.checking.checker import Fault
from oppo_megatron.schedule.checking.timeline import COMPUTE, Span, Timeline, simulate
from oppo_megatron.schedule.links import GLOO, Transport
from oppo_megatron.schedule.plan import cache_slots, delta_rule, new_planner, plan_step, round_generator
from oppo_megatron.schedule.planning.planner import PlannedRound, RoundPlanner
from oppo_megatron.schedule.rounds import KVBudget, Round, Site
from oppo_megatron.schedule.weaving.components import add_communication
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.generators import GENERATORS


@dataclass(frozen=True)
class Preview:
    """`clock`: decode steps at the end. `changed`: ranks reordered because held sends would deadlock."""

    round: Round
    clock: int
    num_rounds: int
    site: Site
    schedule: Schedule
    budgets: Mapping[str, Sequence[KVBudget]]
    generator: str
    assumed: tuple[str, ...]
    changed: tuple[int, ...] = ()


def preview(
    config: TrainConfig, number: int, *, prompt_tokens: int | None = None, generator: str | None = None,
    costs: Costs | None = None, transport: Transport = GLOO,
) -> Preview:  # fmt: skip
    """Plan round `number` (from 1). Raises ConfigError if it does not exist, ScheduleError if a run would refuse it."""
    length = prompt_tokens if prompt_tokens is not None else max(1, config.data.max_prompt_tokens // 2)
    if not 1 <= length <= config.data.max_prompt_tokens:
        raise ConfigError(
            f"prompts of {length} tokens: they have 1 to data.max_prompt_tokens = {config.data.max_prompt_tokens}; "
            "give a number of these"
        )
    site = Site.of(round_placements(config), training_placements(config))
    chosen = generator or round_generator(config.overlap, site)
    rounds = _rounds(config, site, chosen, length, costs, transport)
    if not 1 <= number <= len(rounds):
        raise ConfigError(f"round {number}: the first step has rounds 1 to {len(rounds)}; ask for one of these")
    planned, clock = rounds[number - 1], sum(each.round.steps for each in rounds[:number])
    budgets = {
        role: [KVBudget(cache_slots(config, role, placement), max_context(config))] * placement.dp
        for role, placement in site.placements.items()
    }
    free = planned.schedule
    if transport.holds:
        free = _rounds(config, site, chosen, length, costs, transport.free)[number - 1].schedule
    changed = tuple(rank for rank in site.ranks if free.of(rank) != planned.schedule.of(rank))
    schedule = planned.schedule.shifted(planned.round.index - 1)
    return Preview(planned.round, clock, len(rounds), site, schedule, budgets, chosen, _assumed(config, site, length), changed)


def _rounds(
    config: TrainConfig, site: Site, generator: str, prompt_tokens: int, costs: Costs | None, transport: Transport
) -> list[PlannedRound]:
    most = config.rollout.max_response_tokens
    planner = new_planner(config, site, generator, lambda _: most, costs=costs, transport=transport)
    return [*first_step(config, planner, prompt_tokens)]


def least_s(round_: Round, site: Site, timeline: Timeline, costs: Costs) -> tuple[float, float]:
    """Lower bounds: seconds of the actor alone, and of the busiest rank."""
    alone = replace(round_, prefill={role: work for role, work in round_.prefill.items() if role == "actor"})
    schedule = add_communication(GENERATORS["sequential"](alone, site, costs), alone, site)
    return simulate(schedule, alone, site, costs).makespan_s, max(map(timeline.busy_s, timeline.spans), default=0.0)


def first_step(config: TrainConfig, planner: RoundPlanner, prompt_tokens: int) -> Iterator[PlannedRound]:
    """Yield rounds until the batch is scored; they also end when prompts may enter."""
    prompt, chunk, clock = (0,) * prompt_tokens, config.overlap.chunk_tokens, 0
    period = config.overlap.admission_period
    rows = batch_rows(config)
    rollouts = [Rollout(Prompt(number, number, "", prompt), number) for number in range(_in_flight(config))]
    stream, number = plan_step(config).stream, 1
    while sum(rollout.finished for rollout in rollouts) < rows:
        active = [rollout for rollout in rollouts if not rollout.finished]
        steps = chunk if period is None else min(chunk, period - clock % period)
        planned = planner.plan(number, active, rollouts if stream else [], steps, list)
        yield planned
        clock += planned.round.steps
        _grow(rollouts, planned.round, number, config.rollout.max_response_tokens)
        planner.actor.record(active)
        number += 1
    batch = [rollout for rollout in rollouts if rollout.finished][:rows]
    while any(book.owes(batch) for book in planner.scorers.values()):
        yield planner.plan(number, [], batch, chunk, list)
        number += 1


def _grow(rollouts: Sequence[Rollout], round_: Round, clock: int, most: int) -> None:
    for growth in (growth for replica in round_.decode for batch in replica for growth in batch):
        rollout = rollouts[growth.seq_id]
        rollout.tokens.extend([0] * growth.new)
        if len(rollout.tokens) == most:
            rollout.finish_clock, rollout.finish_reason = clock, "length"


def _in_flight(config: TrainConfig) -> int:
    return batch_rows(config) + delta_rule(config.overlap).initial * members(config).size


def _assumed(config: TrainConfig, site: Site, prompt_tokens: int) -> tuple[str, ...]:
    batch, delta, dp = config.rollout.batch_size, delta_rule(config.overlap).initial, site.placements["actor"].dp
    each = members(config)
    groups = f" groups of {each.trained}" * (each.trained > 1) + ", and a greedy one for each prompt" * each.greedy
    unfiltered = ("no filter (every group is kept)",) if config.filter is not None else ()
    return (
        f"{_in_flight(config)} sequences (rollout.batch_size {batch} + delta {delta}{groups}) over {dp} "
        f"{'replica' if dp == 1 else 'replicas'} of the actor",
        *unfiltered,
        f"prompts of {prompt_tokens} tokens",
        f"responses of {config.rollout.max_response_tokens} tokens (none ends sooner)",
        f"chunks of {config.overlap.chunk_tokens}",
    )


if TYPE_CHECKING:
    from matplotlib.axes import Axes

LETTERS = {"actor": "P", "reference": "F", "critic": "C", "reward": "R"}
"""Prefill of each role; its score is the small letter."""

IDLE, FILL, FAILED = ".", "-", "!"
MIN_COLUMNS = 10


def render(timeline: Timeline, width: int = 100, faults: Sequence[Fault] = ()) -> str:
    """Return the grid of ranks and time; `!` marks faults and stuck ranks."""
    labels = {rank: f"rank {rank:{len(str(max(timeline.spans)))}} |" for rank in sorted(timeline.spans)}
    shares = {rank: f"| {timeline.bubble(rank):4.0%} idle" for rank in labels}
    room = max(len(labels[rank]) + len(shares[rank]) for rank in labels)
    columns = max(MIN_COLUMNS, width - room)
    lines = [f"{'':{len(next(iter(labels.values())))}}0{milliseconds(timeline.makespan_s):>{columns - 1}}"]
    for rank, label in labels.items():
        row = _row(timeline.spans[rank], timeline.makespan_s, columns)
        for at_s in failing_times(timeline, faults, rank):
            row[_column(at_s, timeline.makespan_s, columns)] = FAILED
        lines.append(label + "".join(row) + shares[rank])
    failed = any(FAILED in line for line in lines)
    return "\n".join([*lines, *_legend(timeline, width, failed)]) + "\n"


def failing_times(timeline: Timeline, faults: Sequence[Fault], rank: int) -> list[float]:
    spans = timeline.spans.get(rank, ())
    end_s = spans[-1].end_s if spans else 0.0
    positions = {fault.position for fault in faults if fault.rank == rank}
    times = [span.start_s for span in spans if span.position in positions]
    if rank in timeline.stuck or any(position >= len(spans) for position in positions):
        times.append(end_s)
    return times


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def letter(action: Action) -> str:
    if action.op is Op.DECODE:
        return "D"
    if action.op is Op.SAMPLE:
        return "s"
    known = LETTERS.get(action.role, "X")
    return known if action.op is Op.PREFILL else known.lower()


def _column(at_s: float, makespan_s: float, columns: int) -> int:
    return min(columns - 1, int(at_s / makespan_s * columns)) if makespan_s else 0


def _row(spans: Sequence[Span], makespan_s: float, columns: int) -> list[str]:
    if not makespan_s:
        return [IDLE] * columns
    busy, most = [0.0] * columns, [0.0] * columns
    shown: list[Span | None] = [None] * columns
    cell_s = makespan_s / columns
    for span in spans:
        if span.action.op not in COMPUTE:
            continue
        for column in range(_column(span.start_s, makespan_s, columns), _column(span.end_s, makespan_s, columns) + 1):
            part = min(span.end_s, (column + 1) * cell_s) - max(span.start_s, column * cell_s)
            busy[column] += part
            if part > most[column]:
                most[column], shown[column] = part, span
    cells = [span if busy[i] >= cell_s / 2 else None for i, span in enumerate(shown)]
    return [_cell(cells, column) for column in range(columns)]


def _cell(cells: Sequence[Span | None], column: int) -> str:
    span = cells[column]
    if span is None:
        return IDLE
    first = column
    while first > 0 and cells[first - 1] is span:
        first -= 1
    length = next((i for i in range(column, len(cells)) if cells[i] is not span), len(cells)) - first
    number = str(span.action.micro_batch)
    text = letter(span.action) + (number if len(number) < length else "")
    return text[column - first] if column - first < len(text) else FILL


def _legend(timeline: Timeline, width: int, failed: bool) -> list[str]:
    words = {}
    for spans in timeline.spans.values():
        for action in (span.action for span in spans if span.action.op in COMPUTE):
            scored = action.op in (Op.PREFILL, Op.SCORE)
            words[letter(action)] = f"{action.op.value} {action.role}" if scored else action.op.value
    entries = [f"{key} {text}" for key, text in sorted(words.items())]
    entries += [f"{IDLE} idle", "digits: micro-batch"] + ([f"{FAILED} fault"] if failed else [])
    lines = [""]
    for entry in entries:
        joined = f"{lines[-1]}, {entry}" if lines[-1] else entry
        if len(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(entry)
    return lines


# Okabe and Ito's palette, distinct for any kind of colour vision.
COLOURS = {
    "decode": "#0072B2",
    "sample": "#56B4E9",
    "prefill actor": "#999999",
    "prefill reference": "#009E73",
    "prefill critic": "#E69F00",
    "prefill reward": "#CC79A7",
}
SCORE_ALPHA = 0.5
OTHER_COLOUR, FAULT_COLOUR = "#666666", "#D50000"
DPI, LANE_HEIGHT = 150, 0.8
MIN_LABEL_SHARE = 0.012  # of the width: below it a bar has no room for its micro-batch
MAX_FAULT_LABELS = 8


def draw(timeline: Timeline, out_png: str | Path, faults: Sequence[Fault] = (), title: str = "") -> None:
    """Write the grid as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14.0, 1.6 + 0.55 * len(timeline.spans)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _bars(axes, timeline)
    _failures(axes, timeline, faults)
    ranks = sorted(timeline.spans)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}\n{timeline.bubble(rank):.0%} idle" for rank in ranks], fontsize=8)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(0.0, 1e3 * timeline.makespan_s or 1.0)
    axes.set_xlabel("predicted milliseconds")
    axes.set_title(title, fontsize=10, loc="left")
    legend = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda entry: str(entry[1]))
    handles, labels = [handle for handle, _ in legend], [label for _, label in legend]
    axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    figure.savefig(out_png)


def colour(action: Action) -> str:
    return COLOURS.get(_kind(action), OTHER_COLOUR)


def _kind(action: Action) -> str:
    return f"prefill {action.role}" if action.op in (Op.PREFILL, Op.SCORE) else action.op.value


def _bars(axes: Axes, timeline: Timeline) -> None:
    kinds: set[tuple[str, bool]] = set()
    for lane, rank in enumerate(sorted(timeline.spans)):
        bars: dict[tuple[str, bool], list[tuple[float, float]]] = defaultdict(list)
        colours = {}
        for span in timeline.spans[rank]:
            if span.action.op not in COMPUTE:
                continue
            kind = _kind(span.action), span.action.op is Op.SCORE
            colours[kind] = colour(span.action)
            start_ms, length_ms = 1e3 * span.start_s, 1e3 * (span.end_s - span.start_s)
            bars[kind].append((start_ms, length_ms))
            if length_ms >= MIN_LABEL_SHARE * 1e3 * timeline.makespan_s and span.action.op is not Op.SCORE:
                text = str(span.action.micro_batch)
                axes.text(start_ms + length_ms / 2, lane, text, ha="center", va="center", fontsize=7, color="white")
        for kind, pieces in bars.items():
            name, scored = kind
            label = None if kind in kinds else name.replace("prefill", "score" if scored else "prefill")
            axes.broken_barh(
                pieces,
                (lane - LANE_HEIGHT / 2, LANE_HEIGHT),
                color=colours[kind],
                alpha=SCORE_ALPHA if scored else 1.0,
                edgecolor="white",
                linewidth=0.4,
                label=label,
            )
            kinds.add(kind)


def _failures(axes: Axes, timeline: Timeline, faults: Sequence[Fault]) -> None:
    from matplotlib.patches import Rectangle

    width_ms = max(0.012 * 1e3 * timeline.makespan_s, 0.01)
    named = 0
    for lane, rank in enumerate(sorted(timeline.spans)):
        times = failing_times(timeline, faults, rank)
        for at_s in times:
            left_ms = min(1e3 * at_s, max(0.0, 1e3 * timeline.makespan_s - width_ms))
            corner = left_ms, lane - LANE_HEIGHT / 2
            axes.add_patch(Rectangle(corner, width_ms, LANE_HEIGHT, fill=False, edgecolor=FAULT_COLOUR, linewidth=2.0))
        if times and named < MAX_FAULT_LABELS:
            named += 1
            at_s = times[-1] if rank in timeline.stuck else times[0]
            side = "right" if at_s > timeline.makespan_s / 2 else "left"
            if rank in timeline.stuck:
                text = f"stuck at {timeline.stuck[rank].action}"
            else:
                fault = next(fault for fault in faults if fault.rank == rank)
                text = fault.kind.value if fault.action is None else f"{fault.kind.value}: {fault.action}"
            corner = 1e3 * at_s, lane - LANE_HEIGHT / 2
            axes.annotate(text, corner, color=FAULT_COLOUR, fontsize=7, va="bottom", ha=side)
