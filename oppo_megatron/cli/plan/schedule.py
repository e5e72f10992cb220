"""`oppo plan schedule`: draw every rank's actions in a round, with the predicted time and the checker's verdict."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import cast

from oppo_megatron.cli.load import load_settings
from oppo_megatron.cli.measure import describe_options, resolve_placement
from oppo_megatron.cli.parser import add_config_arguments
from oppo_megatron.config.model import format_ranks
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError, ScheduleError
from oppo_megatron.layout.placements import round_placements
from oppo_megatron.schedule.actions import Schedule, parse_schedule
from oppo_megatron.schedule.checking.caches import listed
from oppo_megatron.schedule.checking.checker import check_timeline
from oppo_megatron.schedule.checking.timeline import Timeline, simulate
from oppo_megatron.schedule.links import GLOO, TRANSPORTS, Transport, most_streams, transport_of
from oppo_megatron.schedule.preview import Preview, draw, least_s, preview, render
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.schedule.weaving.costs import Costs, read_costs
from oppo_megatron.schedule.weaving.generators import GENERATORS
from oppo_megatron.train.inputs import verdict_clock

HELP = "draw and check what every rank does in a round"
EXIT_FAULT = 2
WITHOUT_TERMINAL = (100, 24)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--round", type=int, default=2, metavar="N", help="round of the first step, from 1 (default 2)")
    parser.add_argument("--out", type=Path, metavar="GRID.png", help="draw the grid into this file, too")
    parser.add_argument("--text", action="store_true", help="print the schedule's text form")
    parser.add_argument("--generator", choices=GENERATORS, help="default: the one that the configuration asks for")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="length of all prompts (default: half of the longest)")
    parser.add_argument("--costs", type=Path, metavar="COSTS.json", help="seconds of the actions (default: built in)")
    parser.add_argument(
        "--transport", choices=TRANSPORTS, help="whose rules the round has to keep (default: by runtime.device, auto as cuda)"
    )
    parser.add_argument(
        "--from", type=Path, dest="source", metavar="SCHEDULE.txt", help="check and draw this text of the round instead"
    )


def run(args: argparse.Namespace) -> int:
    if args.out is not None and args.out.suffix != ".png":  # matplotlib would write another file name or format
        raise ConfigError(f"--out {args.out}: the grid is drawn as PNG; name a file that ends in .png")
    settings = load_settings("train", args.config, args.overrides, inputs=False, models=False)
    config = cast("TrainConfig | None", resolve_placement(settings, measure=False))
    if config is None:
        print("\n".join([*describe_options(settings), "to draw one of them, add its placement, as in placement.mode=single"]))
        return 0
    placements = round_placements(config)
    costs = read_costs(args.costs, placements) if args.costs else Costs()
    if args.transport:
        transport = TRANSPORTS[args.transport]
    else:  # without torch, the device of `runtime.device: auto` is unknown
        transport = transport_of(config.runtime.device, os.environ, most_streams(Site(placements)))
    # Draw an order named by the user unchanged; otherwise plan by the transport's rules, as in a run.
    planned_by = GLOO if args.generator or args.source or not transport.made else transport
    shown = preview(
        config, args.round, prompt_tokens=args.prompt_tokens, generator=args.generator, costs=costs, transport=planned_by
    )
    schedule = _read(args.source) if args.source else shown.schedule
    timeline = simulate(schedule, shown.round, shown.site, costs, transport)
    faults = check_timeline(schedule, shown.round, shown.site, shown.budgets, timeline)
    if args.text:
        print(schedule.text())
    changed = f"; changed on ranks {format_ranks(shown.changed)} for held sends" if shown.changed else ""
    title = f"round {args.round} of {shown.num_rounds} of the first step, {args.source or shown.generator}{changed}"
    print("\n".join([title, *_facts(shown, timeline, costs, transport, args), *_filtered(shown, config)]))
    print("\n" + render(timeline, shutil.get_terminal_size(WITHOUT_TERMINAL).columns, faults))
    if args.out is not None:
        draw(timeline, args.out, faults, title)
        print(f"wrote {args.out}")
    if not faults:
        print("OK: the checker finds no fault")
        return 0
    print(f"the checker finds {'1 fault' if len(faults) == 1 else f'{len(faults)} faults'}:")
    print(listed(faults), end="")
    return EXIT_FAULT


def _read(path: Path) -> Schedule:
    try:
        return parse_schedule(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path}: {error}; write it as UTF-8") from error
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error


def _facts(shown: Preview, timeline: Timeline, costs: Costs, transport: Transport, args: argparse.Namespace) -> list[str]:
    work = [f"{shown.round.steps} decode steps" if shown.round.steps else "no decoding"]
    counts = {role: sum(map(len, replicas)) for role, replicas in shown.round.prefill.items()}
    work += [f"{role} {count}" for role, count in counts.items() if count]
    seconds = f"{'stuck after' if timeline.stuck else 'predicted:'} {timeline.makespan_s:.4f} s"
    origin = f"costs of {args.costs}" if args.costs else "built-in costs"
    forks = {role: [fork for own in replicas for fork in own] for role, replicas in shown.round.forks.items()}
    forked = (f"{role} {len(own)} ({sum(fork.tokens for fork in own)} tokens)" for role, own in forks.items())
    least = []
    if not timeline.stuck:
        path_s, busy_s = least_s(shown.round, shown.site, timeline, costs)
        ratio = timeline.makespan_s / max(path_s, busy_s)
        least = [f"{ratio:.2f} times the larger of decoding alone ({path_s:.4f} s) and the busiest rank's work ({busy_s:.4f} s)"]
    return [
        "assumed:",
        *(f"  {what}" for what in (*shown.assumed, origin, f"messages over {transport.name}")),
        f"work: {work[0]}{'; prefill micro-batches: ' if work[1:] else ''}{', '.join(work[1:])}",
        *([f"forks, instead of prefills: {', '.join(forked)}"] if forks else []),
        f"{seconds}, bubble share {timeline.bubble():.1%} (of each rank: next to the grid)",
        *least,
    ]


def _filtered(shown: Preview, config: TrainConfig) -> list[str]:
    clock, ended, steps = verdict_clock(config), shown.clock, shown.round.steps
    if clock is None:
        return []
    late = f", {clock.lag} of them later" if clock.lag else ""
    what = f"in this round (decode steps {ended - steps + 1} to {ended})" if steps else f"by decode step {ended}"
    return [
        f"a filter, which is not drawn, judges at multiples of {clock.period} decode steps{late}:",
        f"  a response that ends {what} is judged at step {clock.due(ended)}",
        "  a group that it drops is read no further, and a new prompt takes its places; the round after prefills it",
        "  a batch is complete only when it judges",
    ]
