"""Runs one configuration with one setting changed from run to run, and compares the runs.

    python -m benchmarks.sweeps KIND CONFIG.yaml [a.b=c ...] --prompt-tokens 64 --steps 20 --repeats 3

kinds:
  chunk    fixed chunk sizes and the adaptive tuner (the paper's Figure 7b)
  delta    fixed deltas and the rules that move delta (the paper's Figure 7a)
  fork     a prompt's cache computed once for its group, or by every response, for several lengths of prompts
  weave    colocated pipeline stages: sequential, unwoven and woven rounds, every action traced
  rewards  every mode of the loop under a rule, a reward model and a process reward model
  scaling  ranks, model size, response limit or batch, in plain PPO and with both overlaps

README.md in this folder explains the columns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.common import numbers, run_script, whole_numbers
from benchmarks.scaling import AXES, Args, Configs, scaling_configs, scaling_result, updated
from oppo_megatron.bench.figures import Lines, figures, speedups, steady
from oppo_megatron.bench.suite import COLUMNS as OVERLAP_COLUMNS
from oppo_megatron.bench.suite import Run, Runs, all_lines, compare, known_modes, require_same_work, work_figures, work_lines
from oppo_megatron.cli.bench import add_resume_argument, add_run_arguments, chosen, load_base, names, new_suite
from oppo_megatron.cli.parser import counts
from oppo_megatron.config.derived import MODES, longest_chunk, switched
from oppo_megatron.config.model import RoleConfig
from oppo_megatron.config.rewards import RewardPart
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.delta_controllers import RULES
from oppo_megatron.errors import ConfigError, ScheduleError
from oppo_megatron.layout.placements import named_roles
from oppo_megatron.report.comparison import format_table
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.trace import Span, read_trace
from oppo_megatron.schedule.actions import Op, parse_action

ADAPTIVE = "adaptive"
MOVING_RULES = tuple(rule for rule in RULES if rule != "fixed")
REWARD_RULES = {"eq4", "algorithm1"}
REWARDS = ("verifier", "model", "process")
WEAVES: dict[str, dict[str, Any]] = {
    "sequential": {"intra": False},
    "unwoven": {"intra": True, "schedule": "intra"},
    "woven": {"intra": True, "schedule": "woven"},
}
WORKING = {Op.DECODE, Op.SAMPLE, Op.PREFILL, Op.SCORE}


class Kind(NamedTuple):
    """A sweep: `configs` makes the runs by name, `summarise` the results (`results`: rows) and the lines below the table."""

    columns: Mapping[str, str]
    configs: Callable[[Args], Configs]
    summarise: Callable[[Configs, Runs], tuple[dict[str, Any], list[str]]]


def require_scorers(config: TrainConfig, so: str) -> None:
    """Raise ConfigError if no model scores responses."""
    if len(named_roles(config)) == 1:
        raise ConfigError(
            f"algorithm.preset {config.algorithm.preset} with ppo.kl.mode {config.ppo.kl.mode} and these rewards has no "
            f"reference, critic or reward model, so {so}; give a configuration with one of them"
        )


# --- chunk


def chunk_configs(args: Args) -> Configs:
    config = load_base(args)
    if not config.overlap.intra:
        raise ConfigError("overlap.intra is false: the chunk size has no effect without streamed scoring; set it to true")
    require_scorers(config, "the chunk size has no effect")
    longest = config.rollout.max_response_tokens
    fitting = [size for size in args.sizes if size <= longest]
    if not fitting:
        raise ConfigError(f"--sizes {', '.join(map(str, args.sizes))}: none is within rollout.max_response_tokens {longest}")
    own = config.overlap.chunk_sizes
    chunks: dict[str, int | list[int]] = {str(size): size for size in fitting}
    chunks[ADAPTIVE] = own if len(own) > 1 else list(dict.fromkeys([*own, 16, 32, 64]))
    return {name: updated(config, "overlap", chunk=chunk) for name, chunk in chunks.items()}


def chunk_result(configs: Configs, runs: Runs) -> tuple[dict[str, Any], list[str]]:
    rows = [{"chunk": name, **figures(all_lines(turns))} for name, turns in runs.items()]
    best = min(row["step_s"] for row in rows if row["chunk"] != ADAPTIVE)
    for row in rows:
        row["over_best"] = row["step_s"] / best
    found = tuned(configs[ADAPTIVE], runs)
    if "percent" not in found:
        return {"results": rows, ADAPTIVE: found}, [
            f"the tuner settles in step {found['first_settled_step']}, after the end of the runs; give more --steps"
        ]
    settled = ", ".join(map(str, found["settled_on"]))
    line = (
        f"the tuner settled on {settled}; from step {found['first_settled_step']} on it took {found['settled_step_s']:.2f} "
        f"s/step, {found['percent']:+.1f} % of the best fixed size, {found['best_fixed']} ({found['best_fixed_step_s']:.2f})"
    )
    if found["choice_percent"] is not None:
        line += f"; the fixed run of that size: {found['choice_percent']:+.1f} %"
    return {"results": rows, ADAPTIVE: found}, [line]


def first_settled_step(sizes: Sequence[int], longest: int) -> int:
    count = len({min(size, longest) for size in sizes})
    return 2 + count if count > 1 else 1


def tuned(config: TrainConfig, runs: Runs) -> dict[str, Any]:
    """Return what the tuner settled on in each run, and how far its settled steps are from the best fixed size, in percent.

    Fixed sizes count by the same steps: a batch does not depend on the chunk, so they did the same work.  `choice_percent` is the
    distance of the fixed run of the chosen size; None if the repeats chose several sizes, or one that was not run.
    """
    first = first_settled_step(config.overlap.chunk_sizes, longest_chunk(config))
    adaptive = [run for run in runs[ADAPTIVE] if len(run.lines) >= first]
    sizes = [run.lines[first - 1]["chunk_tokens"] for run in adaptive]
    found = {"first_settled_step": first, "settled_on": sizes}
    fixed = {name: _seconds(turns, first) for name, turns in runs.items() if name != ADAPTIVE}
    if not adaptive or not all(fixed.values()):
        return found
    best = min(fixed, key=lambda name: fixed[name] or 0.0)
    best_s, own_s = fixed[best] or 0.0, _seconds(adaptive, first) or 0.0
    choices = {str(size) for size in sizes}
    choice_s = fixed.get(choices.pop()) if len(choices) == 1 else None
    return {
        **found, "settled_step_s": own_s, "fixed_step_s": fixed, "best_fixed": int(best), "best_fixed_step_s": best_s,
        "percent": 100 * (own_s / best_s - 1),
        "choice_percent": None if choice_s is None else 100 * (choice_s / best_s - 1),
    }  # fmt: skip


def _seconds(runs: Sequence[Run], first: int) -> float | None:
    """Return the median over runs of the mean seconds of the steps from `first` on."""
    means = [fmean(line["step_s"] for line in run.lines[first - 1 :]) for run in runs if len(run.lines) >= first]
    return median(means) if means else None


# --- delta


def delta_configs(args: Args) -> Configs:
    config = load_base(args)
    if not config.overlap.inter:
        raise ConfigError("overlap.inter is false, so delta is 0 by any rule; set overlap.inter=true")
    delta = config.overlap.delta
    rules = chosen("--rules", args.rules or [rule for rule in MOVING_RULES if rule != "eq4_literal"], MOVING_RULES)
    changes: dict[str, dict[str, Any]] = {
        f"fixed-{size}": {"rule": "fixed", "initial": size, "max": max(size, delta.max)} for size in args.fixed
    }
    changes |= {rule: {"rule": rule} for rule in rules}
    return {name: updated(config, "overlap", delta=delta.model_copy(update=own)) for name, own in changes.items()}


def delta_result(configs: Configs, runs: Runs) -> tuple[dict[str, Any], list[str]]:
    rows = [delta_row(name, all_lines(turns)) for name, turns in runs.items()]
    plain = next((row for row in rows if row["delta"] == "fixed-0"), None)
    for row in rows:
        row |= speedups(row, plain, "speedup")
    steps = len(next(iter(runs.values()))[0].lines)
    needed = 2 * next(iter(configs.values())).overlap.delta.window
    if steps > needed or not REWARD_RULES & runs.keys():
        return {"results": rows}, []
    return {"results": rows}, [
        f"{steps} steps are too few for a rule based on rewards: it waits for 2 x overlap.delta.window = {needed} steps; give "
        "more --steps, or a smaller window"
    ]


def mean_of(lines: Lines, name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return fmean(values) if values else None


def delta_row(name: str, runs: Sequence[Lines]) -> dict[str, Any]:
    """Return the figures of a rule; all but the times are means over the steps after the first.

    `length_gap`: tokens that trained responses lack against submitted ones (carried rollouts included);
    `gap_percent`: the same as a share; `waste_percent`: share of the decode batch that ran empty; `ess`: effective sample size of
    the batch before the update, as a share of its tokens.
    """
    lines = steady(runs)
    stale, waste, gap = (mean_of(lines, key) for key in ("stale_token_fraction", "tail_waste", "length_gap"))
    return {
        "delta": name, **figures(runs), "delta_mean": mean_of(lines, "delta"),
        "delta_last": [run[-1]["delta"] for run in runs], "carried": mean_of(lines, "carried"),
        "stale_percent": None if stale is None else 100 * stale, "waste_percent": None if waste is None else 100 * waste,
        "gap_percent": None if gap is None else 100 * gap,
        "length_gap": fmean(line["submitted_len_mean"] - line["trained_len_mean"] for line in lines),
        "ess": mean_of(lines, "ess"), "reward": mean_of(lines, "reward_mean"),
    }  # fmt: skip


# --- fork


def fork_configs(args: Args) -> Configs:
    bases = {
        tokens: load_base(Args(**vars(args) | {"prompt_tokens": tokens}), inputs=f"inputs-{tokens}") for tokens in args.prompts
    }
    if next(iter(bases.values())).rollout.group_size == 1:
        raise ConfigError("rollout.group_size is 1, so no cache is forked; give rollout.group_size=8, or a preset of groups")
    kinds = {"forked": [], "apart": ["fork"]}
    return {
        f"{tokens}/{kind}": updated(base, "overlap", without=without)
        for tokens, base in bases.items()
        for kind, without in kinds.items()
    }


def fork_result(configs: Configs, runs: Runs) -> tuple[dict[str, Any], list[str]]:
    """Tokens are means over all steps: the first step also prefills what later steps carry."""
    rows: dict[str, dict[str, Any]] = {}
    for name, turns in runs.items():
        tokens, kind = name.split("/")
        seconds = [line["step_s"] for line in steady(all_lines(turns))]
        lines = [line for run in turns for line in run.lines]
        rows[name] = {
            "prompt_tokens": int(tokens), "fork": "yes" if kind == "forked" else "no",
            "min_step_s": min(seconds), "max_step_s": max(seconds),
            **{key: fmean(line[key] for line in lines) for key in ("prefilled_tokens", "forked_tokens")},
            **figures(all_lines(turns)),
        }  # fmt: skip
    for row in rows.values():
        row |= speedups(row, rows.get(f"{row['prompt_tokens']}/apart"), "speedup")
    return {"results": list(rows.values())}, []


# --- weave


def weave_configs(args: Args) -> Configs:
    config = load_base(args)
    require_scorers(config, "no scoring can be woven into the decoding")
    traced = updated(config, "logging", trace="actions")
    return {mode: updated(traced, "overlap", **WEAVES[mode]) for mode in chosen("--modes", args.modes, list(WEAVES))}


def weave_result(configs: Configs, runs: Runs) -> tuple[dict[str, Any], list[str]]:
    rows = [
        {"mode": mode, **figures(all_lines(turns)), **weave_figures([run.path for run in turns])} for mode, turns in runs.items()
    ]
    plain = next((row for row in rows if row["mode"] == "sequential"), None)
    for row in rows:
        row |= speedups(row, plain, "speedup")
    return {"results": rows}, []


def weave_figures(runs: Sequence[Path]) -> dict[str, Any]:
    """Return medians over steps: seconds of the rounds, and the idle share of ranks (the bubble)."""
    steps = [step for run in runs for step in _weave_steps(read_trace(RunDirectory(run).trace))]
    return {
        "rounds_s": median(step["rounds_s"] for step in steps),
        "bubble_percent": 100 * median(step["bubble"] for step in steps),
        "bubble_by_rank": [100 * median(step["idle"][rank] for step in steps) for rank in sorted(steps[0]["idle"])],
    }


def _weave_steps(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Return for each steady step the seconds from its first to its last action, and the idle shares."""
    by_step: dict[int, dict[int, list[Span]]] = {}
    for span in spans:
        if _operation(span) is not None:
            by_step.setdefault(span.step, {}).setdefault(span.rank, []).append(span)
    steps = []
    for _, ranks in sorted(by_step.items()):
        start = min(span.start for own in ranks.values() for span in own)
        window = max(span.end for own in ranks.values() for span in own) - start
        idle = {
            rank: 1 - sum(span.end - span.start for span in own if _operation(span) in WORKING) / window
            for rank, own in ranks.items()
        }
        steps.append({"rounds_s": window, "bubble": fmean(idle.values()), "idle": idle})
    return steps[1:] or steps


def _operation(span: Span) -> Op | None:
    """Return the operation of an action; None for a span of the loop, such as an update."""
    try:
        return parse_action(span.rank, span.name).op
    except ScheduleError:
        return None


# --- rewards


def reward_configs(args: Args) -> Configs:
    config = load_base(args)
    modes = [mode for mode in chosen("--modes", args.modes, list(MODES)) if mode in known_modes(config)]
    return {
        f"{reward}/pair/{mode}": switched(rewarded(config, reward), mode)
        for reward in chosen("--rewards", args.rewards, REWARDS)
        for mode in modes
    }


def rewarded(config: TrainConfig, reward: str) -> TrainConfig:
    """Return the configuration with one kind of reward alone.

    verifier: its own rules, else the length of the response.  model, process: its own reward model, else one of the actor's
    shape.
    """
    if reward == "verifier":
        rules = [part for part in config.rewards if not part.reads_model]
        length = RewardPart(kind="verifier", name="length", buffer_tokens=config.rollout.max_response_tokens)
        return config.model_copy(update={"rewards": rules or [length], "reward": None})
    kind: Any = reward
    actor = config.actor
    init = actor.init if actor.checkpoint is None else actor.checkpoint / "config.json"
    like = RoleConfig(init=init, dtype=actor.dtype)
    return config.model_copy(update={"rewards": [RewardPart(kind=kind)], "reward": config.reward or like})


def reward_result(configs: Configs, runs: Runs) -> tuple[dict[str, Any], list[str]]:
    rewards = dict.fromkeys(name.split("/")[0] for name in runs)

    def of(reward: str, named: Mapping[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(f"{reward}/"): each for name, each in named.items() if name.startswith(f"{reward}/")}

    found = {reward: compare(of(reward, configs), of(reward, runs)) for reward in rewards}
    rows = [{"reward": reward, **row} for reward, each in found.items() for row in each["results"]]
    return {"results": rows, "rewards": found}, []


KINDS = {
    "chunk": Kind(
        {
            "chunk": "chunk", "s/step": "step_s", "decode": "decode_s", "exp. scoring": "score_exposed_s",
            "%": "score_exposed_percent", "tokens/s": "tokens_per_s", "total s": "total_s", "x best fixed": "over_best",
        }, chunk_configs, chunk_result,
    ),
    "delta": Kind(
        {
            "delta": "delta", "mean": "delta_mean", "last": "delta_last", "s/step": "step_s", "total s": "total_s",
            "x delta 0": "speedup_total_s", "tokens/s": "tokens_per_s", "carried": "carried", "stale %": "stale_percent",
            "waste %": "waste_percent", "gap %": "gap_percent", "length gap": "length_gap", "ess": "ess", "reward": "reward",
        }, delta_configs, delta_result,
    ),
    "fork": Kind(
        {
            "prompt tokens": "prompt_tokens", "fork": "fork", "s/step": "step_s", "min": "min_step_s", "max": "max_step_s",
            "decode": "decode_s", "exp. scoring": "score_exposed_s", "train": "train_s", "prefilled": "prefilled_tokens",
            "forked": "forked_tokens", "total s": "total_s", "x apart": "speedup_step_s", "x apart (run)": "speedup_total_s",
        }, fork_configs, fork_result,
    ),
    "weave": Kind(
        {
            "mode": "mode", "rounds s": "rounds_s", "bubble %": "bubble_percent", "s/step": "step_s",
            "tokens/s": "tokens_per_s", "x seq": "speedup_step_s", "total s": "total_s", "bubble % by rank": "bubble_by_rank",
        }, weave_configs, weave_result,
    ),
    "rewards": Kind({"reward": "reward", **OVERLAP_COLUMNS}, reward_configs, reward_result),
    "scaling": Kind(
        {
            "axis": "axis", "value": "value", "M params": "million_parameters", "ranks": "ranks",
            "tokens/step": "tokens_per_step", "sequential s/step": "sequential_step_s", "full s/step": "full_step_s",
            "x": "speedup", "growth seq": "sequential_growth", "growth full": "full_growth",
        }, scaling_configs, scaling_result,
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, metavar="KIND")
    add_run_arguments(parser, "sweeps")
    add_resume_argument(parser)
    parser.set_defaults(out=None)
    parser.add_argument("--sizes", type=counts, default=[8, 16, 32, 64, 128], metavar="N,N", help="chunk: fixed sizes")
    parser.add_argument("--fixed", type=whole_numbers, default=[0, 4, 8], metavar="N,N", help="delta: fixed deltas")
    parser.add_argument("--rules", type=names, metavar="A,B", help="delta: rules; default: those in use")
    parser.add_argument("--prompts", type=counts, default=[64, 256, 1024], metavar="N,N", help="fork: tokens of prompts")
    parser.add_argument("--modes", type=names, metavar="A,B", help="weave, rewards: default all")
    parser.add_argument("--rewards", type=names, metavar="A,B", help=f"rewards: of {', '.join(REWARDS)}; default all")
    parser.add_argument("--axis", choices=(*AXES, "all"), default="all", help="scaling: default all")
    parser.add_argument("--ranks", type=counts, metavar="N,N", help="scaling: default powers of two up to the cores")
    parser.add_argument("--factors", type=numbers, default=[0.5, 1.0, 2.0], metavar="F,F", help="scaling: other axes")


def measure(args: Args) -> int:
    args.out, args.figures = args.out or Path("runs/bench") / args.kind, f"{args.kind}.json"
    kind = KINDS[args.kind]
    configs = kind.configs(args)
    suite = new_suite(args)
    runs = suite.run(configs)
    result, lines = kind.summarise(configs, runs)
    result = work_figures(runs) | result
    base = next(iter(configs.values()))
    path = suite.write(args.kind, base, result, runs)
    print(format_table(kind.columns, result["results"]))
    print(*([] if args.kind == "scaling" else work_lines(result)), *lines, f"figures: {path}", sep="\n")
    require_same_work(base, result)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("benchmarks.sweeps", __doc__, add_arguments, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
