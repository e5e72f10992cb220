"""`oppo plan schedule`: draw every rank's actions in a round, with the predicted time and the checker's verdict."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from oppo_megatron.cli.parser import add_config_arguments

if TYPE_CHECKING:
    from oppo_megatron.config.run import TrainConfig
    from oppo_megatron.schedule.actions import Schedule
    from oppo_megatron.schedule.checking.checker import Fault
    from oppo_megatron.schedule.checking.timeline import Timeline
    from oppo_megatron.schedule.checking.transport import Transport
    from oppo_megatron.schedule.preview import Preview
    from oppo_megatron.schedule.weaving.costs import Costs

HELP = "draw and check what every rank does in a round"
EXIT_FAULT = 2
WITHOUT_TERMINAL = (100, 24)
GENERATORS = ("sequential", "intra", "woven")
TRANSPORTS = ("gloo", "nccl", "nccl-one-queue", "nccl-cold")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--round", type=int, default=2, metavar="N", help="round of the first step, from 1 (default 2)")
    parser.add_argument("--out", type=Path, metavar="GRID.png", help="draw the grid into this file, too")
    parser.add_argument("--text", action="store_true", help="print the schedule's text form")
    parser.add_argument("--generator", choices=GENERATORS, help="default: the one that the configuration asks for")
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="length of all prompts (default: half of the longest)"
    )
    parser.add_argument("--costs", type=Path, metavar="COSTS.json", help="seconds of the actions (default: built in)")
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        help="whose rules the round has to keep (default: by runtime.device, auto as cuda)",
    )
    parser.add_argument(
        "--from", type=Path, dest="source", metavar="SCHEDULE.txt", help="check and draw this text of the round instead"
    )


def run(args: argparse.Namespace) -> int:
    from typing import cast

    from oppo_megatron.cli.run import load_settings, placed, unplaced
    from oppo_megatron.layout.placements import role_placements
    from oppo_megatron.schedule.checking.checker import check_timeline
    from oppo_megatron.schedule.checking.timeline import simulate
    from oppo_megatron.schedule.preview import preview
    from oppo_megatron.schedule.weaving.costs import Costs, read_costs

    _check_out(args.out)
    settings = load_settings("train", args.config, args.overrides, inputs=False, models=False)
    config = cast("TrainConfig | None", placed(settings, measure=False))
    if config is None:
        print("\n".join([*unplaced(settings), "to draw one of them, add its placement, as in placement.mode=single"]))
        return 0
    costs: Costs = read_costs(args.costs, role_placements(config)) if args.costs else Costs()
    transport = _transport(args.transport, config)
    shown = preview(
        config,
        args.round,
        prompt_tokens=args.prompt_tokens,
        generator=args.generator,
        costs=costs,
        transport=_planned_by(transport, args),
    )
    schedule = _read(args.source) if args.source else shown.schedule
    timeline = simulate(schedule, shown.round, shown.site, costs, transport)
    faults = check_timeline(schedule, shown.round, shown.site, shown.budgets, timeline)
    if args.text:
        print(schedule.text())
    title = _title(shown, args)
    print("\n".join([title, *_facts(shown, timeline, costs, transport, args), *_filtered(shown, config)]))
    _draw(timeline, faults, title, args.out)
    return _verdict(faults)


def _check_out(path: Path | None) -> None:
    """Check the output before planning: matplotlib would write another file name or format."""
    from oppo_megatron.errors import ConfigError

    if path is not None and path.suffix != ".png":
        raise ConfigError(f"--out {path}: the grid is drawn as PNG; name a file that ends in .png")


def _transport(name: str | None, config: TrainConfig) -> Transport:
    """Return the transport that is named, or the run's.  Without torch, the device of `runtime.device: auto` is unknown."""
    from oppo_megatron.layout.placements import role_placements
    from oppo_megatron.schedule.checking.transport import TRANSPORTS as BY_NAME
    from oppo_megatron.schedule.checking.transport import transport_of
    from oppo_megatron.schedule.links import most_streams
    from oppo_megatron.schedule.rounds import Site

    if name:
        return BY_NAME[name]
    return transport_of(config.runtime.device, os.environ, most_streams(Site(role_placements(config))))


def _planned_by(transport: Transport, args: argparse.Namespace) -> Transport:
    """Plan by the transport's rules, as a run does; an order named by the user is drawn unchanged, with its violations."""
    from oppo_megatron.schedule.checking.transport import GLOO

    named = args.generator is not None or args.source is not None
    return GLOO if named or not transport.made else transport


def _read(path: Path) -> Schedule:
    from oppo_megatron.errors import ScheduleError
    from oppo_megatron.schedule.actions import parse_schedule

    try:
        return parse_schedule(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path}: {error}; write it as UTF-8") from error
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error


def _title(shown: Preview, args: argparse.Namespace) -> str:
    from oppo_megatron.layout.layouts import format_ranks

    origin = str(args.source) if args.source else shown.generator
    instead = f"; changed on ranks {format_ranks(shown.changed)} for held sends" if shown.changed else ""
    return f"round {args.round} of {shown.num_rounds} of the first step, {origin}{instead}"


def _facts(
    shown: Preview, timeline: Timeline, costs: Costs, transport: Transport, args: argparse.Namespace
) -> list[str]:
    work = [f"{shown.round.steps} decode steps" if shown.round.steps else "no decoding"]
    counts = {role: sum(map(len, replicas)) for role, replicas in shown.round.prefill.items()}
    work += [f"{role} {count}" for role, count in counts.items() if count]
    seconds = f"{'stuck after' if timeline.stuck else 'predicted:'} {timeline.makespan_s:.4f} s"
    origin = f"costs of {args.costs}" if args.costs else "built-in costs"
    return [
        "assumed:",
        *(f"  {what}" for what in (*shown.assumed, origin, f"messages over {transport.name}")),
        f"work: {work[0]}{'; prefill micro-batches: ' if work[1:] else ''}{', '.join(work[1:])}",
        *_forks(shown),
        f"{seconds}, bubble share {timeline.bubble():.1%} (of each rank: beside the grid)",
        *([] if timeline.stuck else [_least(shown, timeline, costs)]),
    ]


def _forks(shown: Preview) -> list[str]:
    """Return a note on prompt tokens that prefills skip because responses to one prompt fork its cache."""
    forks = {role: [fork for own in replicas for fork in own] for role, replicas in shown.round.forks.items()}
    told = (f"{role} {len(own)} ({sum(fork.tokens for fork in own)} tokens)" for role, own in forks.items())
    return [f"forks, instead of prefills: {', '.join(told)}"] if forks else []


def _filtered(shown: Preview, config: TrainConfig) -> list[str]:
    """Return a note on group filters, which the drawn round does not apply."""
    from oppo_megatron.train.inputs import verdict_clock

    clock, ended, steps = verdict_clock(config), shown.clock, shown.round.steps
    if clock is None:
        return []
    late = f", {clock.lag} of them later" if clock.lag else ""
    what = f"in this round (decode steps {ended - steps + 1} to {ended})" if steps else f"by decode step {ended}"
    return [
        f"a filter, which is not drawn, judges at multiples of {clock.period} decode steps{late}:",
        f"  a response that ends {what} is judged at step {clock.due(ended)}",
        "  a group that it drops is read no further, and a new prompt takes its places; the round after prefills it",
        "  a batch is complete only where it judges",
    ]


def _least(shown: Preview, timeline: Timeline, costs: Costs) -> str:
    from oppo_megatron.schedule.preview import least_s

    path_s, busy_s = least_s(shown.round, shown.site, timeline, costs)
    ratio = timeline.makespan_s / max(path_s, busy_s)
    return (
        f"{ratio:.2f} times the larger of decoding alone ({path_s:.4f} s) and the busiest rank's work ({busy_s:.4f} s)"
    )


def _draw(timeline: Timeline, faults: list[Fault], title: str, out: Path | None) -> None:
    from oppo_megatron.schedule.drawing import draw, render

    print("\n" + render(timeline, shutil.get_terminal_size(WITHOUT_TERMINAL).columns, faults))
    if out is not None:
        draw(timeline, out, faults, title)
        print(f"wrote {out}")


def _verdict(faults: list[Fault]) -> int:
    if not faults:
        print("OK: the checker finds no fault")
        return 0
    print(f"the checker finds {'1 fault' if len(faults) == 1 else f'{len(faults)} faults'}:")
    print("\n".join(f"  - {fault}" for fault in faults))
    return EXIT_FAULT
