"""TRL's trainer of PPO or GRPO and ours on the same work, run by run in turn, and one table of both.

README.md in this folder describes the comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import run_script
from benchmarks.peers import outcome
from benchmarks.peers.hf_generate import measure_generate, require_cuda
from benchmarks.peers.outcome import Ours
from benchmarks.peers.settings import ALGORITHMS, require_same_work
from benchmarks.peers.work import build_work, export_models
from oppo_megatron.bench.figures import Lines, describe_machine
from oppo_megatron.bench.suite import MODES, PLACEMENTS, BenchError, Suite, placed, switched
from oppo_megatron.cli.bench import add_run_arguments, chosen, count, load_base, names, new_suite
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.cores import usable_cores
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import decodes_and_scores, role_placements, world_size
from oppo_megatron.preflight.validate import train_problems
from oppo_megatron.processes import started
from oppo_megatron.report.comparison import format_table
from oppo_megatron.rundir.directory import write_json

SCRIPT = Path(__file__).with_name("trl_run.py")
PEER_PYTHON = Path(".venv-trl/bin/python")
DTYPES = ("float32", "bfloat16")
CONFIGS = {name: Path("examples/benchmark") / f"{file}.yaml" for name, file in zip(ALGORITHMS, ("overlap", "grpo"), strict=True)}
LOG_TAIL_LINES = 15
BUSY_SHARE = 0.25  # of the cores


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("benchmarks.peers.compare", __doc__, add_arguments, measure, arguments)


def measure(args: argparse.Namespace) -> int:
    """Run what the options ask for and return the exit code."""
    args = with_config(args)
    if args.trl_only:
        return trl_only(args)
    return generate_only(args) if args.hf_generate else compare(args)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "trl", config="?")
    parser.add_argument(
        "--algorithm",
        choices=ALGORITHMS,
        help=f"algorithm.preset; without CONFIG.yaml also which: {', '.join(map(str, CONFIGS.values()))}; default: "
        "the configuration's, or ppo",
    )
    parser.add_argument("--threads", type=count, metavar="N", help="CPU threads of each side; default: all cores")
    parser.add_argument("--modes", type=names, default=["sequential", "full"], metavar="A,B", help=f"of ours: {', '.join(MODES)}")
    parser.add_argument(
        "--placements", type=names, default=["pair", "single"], metavar="A,B", help=f"of ours: {', '.join(PLACEMENTS)}"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of both sides; default: the configuration's")
    parser.add_argument("--trl-micro-batch", type=count, metavar="N", help="rows of TRL's micro-batch; default: a minibatch")
    parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON, metavar="FILE", help="default %(default)s")
    parser.add_argument(
        "--hf-generate", action="store_true", help="only measure transformers' generate at this batch, on a CUDA device"
    )
    parser.add_argument(
        "--trl-only", action="store_true", help="only run TRL, on whatever torch it finds (`oppo bench gpu` makes this call)"
    )


def with_config(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with the algorithm's default configuration if none is named, and the algorithm among the overrides."""
    if args.config is not None and "=" in str(args.config):  # it is the first override
        args.config, args.overrides = None, [str(args.config), *args.overrides]
    if args.config is None:
        args.config = CONFIGS[args.algorithm or "ppo"]
    if args.algorithm is not None:
        args.overrides = [f"algorithm.preset={args.algorithm}", *args.overrides]
    return args


def compare(args: argparse.Namespace) -> int:
    """Run TRL and every mode of ours `--repeats` times.  Writes trl.json, trl.png and each run below `--out`."""
    modes, placements = chosen("--modes", args.modes, list(MODES)), chosen("--placements", args.placements, PLACEMENTS)
    load, versions = os.getloadavg()[0], require_peer(args.peer_python)
    require_unused(args.out)
    config = prepared(load_base(args), args.dtype)
    require_same_work(config, args.trl_micro_batch)
    threads = args.threads or usable_cores()
    configs = our_configs(config, placements, modes, threads)
    work = build_work(
        config, args.out, device=config.runtime.device, dtype=config.actor.dtype, threads=threads,
        micro_batch=args.trl_micro_batch,
    )  # fmt: skip
    write_json(args.out / "work.json", work)
    trl, runs = run_in_turn(args, configs)
    ours = {name: (how_it_runs(configs[name]), runs[name]) for name in configs}
    if faults := outcome.unequal_work(work, trl, ours):
        raise BenchError("\n  - ".join(["the work was not equal, so nothing is compared:", *faults]))
    rows = outcome.table_rows(work, trl, ours)
    print(format_table(outcome.COLUMNS, rows), *remarks(work, trl), *busy(load), sep="\n")
    raw = {"versions": versions, "load_average_before": load, "trl": trl, "ours": runs}
    write(args.out, config, work, rows, raw)
    return 0


def trl_only(args: argparse.Namespace) -> int:
    """Run TRL alone: a line of trl.jsonl below `--out` for every step of TRL, then trl.json."""
    require_peer(args.peer_python, any_build=True)
    require_unused(args.out)
    config = prepared(load_base(args), args.dtype)
    require_same_work(config, args.trl_micro_batch)
    work = build_work(
        config, args.out, device=config.runtime.device, dtype=config.actor.dtype, threads=args.threads or usable_cores(),
        micro_batch=args.trl_micro_batch,
    )  # fmt: skip
    write_json(args.out / "work.json", work)
    run_peer(args.peer_python, args.out / "work.json", args.out, any_build=True)
    return 0


def generate_only(args: argparse.Namespace) -> int:
    """Run `--hf-generate`; needs no TRL environment."""
    require_cuda()
    require_unused(args.out)
    config = prepared(load_base(args), args.dtype)
    paths, rollout = export_models(config, args.out / "models"), config.rollout
    found = measure_generate(
        Path(paths["actor"]), rollout.batch_size, config.data.max_prompt_tokens, rollout.max_response_tokens,
        config.actor.dtype, args.repeats,
    )  # fmt: skip
    write_json(args.out / "hf_generate.json", {"machine": describe_machine(), **found})
    print("transformers generate, {dtype}: {tokens_per_s:.0f} tokens/s ({min:.0f} to {max:.0f})".format(**found))
    print(f"figures: {args.out / 'hf_generate.json'}")
    return 0


def require_peer(python: Path, any_build: bool = False) -> dict[str, str]:
    """Return the versions in the peer's environment.  Raises BenchError if it is missing or differs from the pinned versions.

    `any_build`: require this of TRL only; other packages may be what the GPU machine has.
    """
    if not python.is_file():
        raise BenchError(
            f"{python} is missing: TRL runs in an environment of its own, which `make bench-trl` creates (once, with "
            "access to a package index); or name its Python with --peer-python"
        )
    answer = subprocess.run([*peer_command(python, any_build), "--check"], capture_output=True, text=True)
    if answer.returncode:
        raise BenchError(answer.stderr.strip() or f"{python} --check ended with exit code {answer.returncode}, in silence")
    try:
        return dict(json.loads(answer.stdout))
    except ValueError as error:
        raise BenchError(
            f"{python} runs {SCRIPT.name} --check without printing versions, so it is not Python; name the one of TRL's "
            "environment with --peer-python"
        ) from error


def peer_command(python: Path, any_build: bool) -> list[str]:
    """An environment of its own is shut off from this one's variables; this one may have got TRL by them."""
    apart = ["-I"] if python.absolute() != Path(sys.executable).absolute() else []
    return [str(python), *apart, str(SCRIPT), *(["--any-build"] if any_build else [])]


def require_unused(out: Path) -> None:
    """Raise ConfigError if an earlier comparison is in the way."""
    if (out / "models").exists():
        raise ConfigError(f"{out} holds an earlier comparison, which is not written over; name another folder with --out")


def prepared(config: TrainConfig, dtype: str | None) -> TrainConfig:
    """Return the configuration with one dtype for all roles, and the device that `auto` selects."""
    import torch

    roles = {name: role for name in ("actor", "critic", "reference", "reward") if (role := getattr(config, name))}
    if dtype is None and len({role.dtype for role in roles.values()}) > 1:
        raise ConfigError("the roles have different dtypes, which TRL cannot have; give --dtype")
    cuda = config.runtime.device != "cpu" and torch.cuda.is_available()
    changes = {name: role.model_copy(update={"dtype": dtype or role.dtype}) for name, role in roles.items()}
    runtime = config.runtime.model_copy(update={"device": "cuda" if cuda else "cpu"})
    return config.model_copy(update={**changes, "runtime": runtime})


def our_configs(config: TrainConfig, placements: Sequence[str], modes: Sequence[str], threads: int) -> dict[str, TrainConfig]:
    """Every mode in every placement, by name.  Raises ConfigError with all that is wrong with any of them."""
    configs = {
        f"{placement}-{mode}": switched(with_threads(config, placement, threads), mode)
        for placement in placements
        for mode in modes
    }
    if problems := [f"{name}: {problem}" for name, chosen in configs.items() for problem in train_problems(chosen)]:
        raise ConfigError(problems)
    return configs


def with_threads(config: TrainConfig, placement: str, threads: int) -> TrainConfig:
    """Return the configuration in a placement whose ranks together have as many threads as TRL."""
    import torch

    config = placed(config, placement, threads)
    ranks = world_size(config)
    if threads % ranks:
        raise ConfigError(f"--threads {threads} cannot be shared by the {ranks} ranks of {placement}; give a multiple")
    if config.runtime.device == "cuda" and ranks > torch.cuda.device_count():
        raise ConfigError(
            f"{placement} needs {ranks} CUDA devices, and there are {torch.cuda.device_count()}; give --placements single, "
            "or runtime.device=cpu"
        )
    return config.model_copy(update={"runtime": config.runtime.with_threads(threads // ranks)})


def how_it_runs(config: TrainConfig) -> Ours:
    placements = role_placements(config)
    return Ours(
        layout=f"{world_size(config)} x {config.runtime.threads_per_rank}",
        carries=config.overlap.inter,
        streams_here=config.overlap.intra and decodes_and_scores(placements),
        shares_ranks="critic" in placements and bool(set(placements["actor"].ranks) & set(placements["critic"].ranks)),
    )


def run_in_turn(args: argparse.Namespace, configs: Mapping[str, TrainConfig]) -> tuple[list[Lines], dict[str, list[Lines]]]:
    """TRL, then every configuration of ours, and again: the steps of each run."""
    trl: list[Lines] = []
    ours: dict[str, list[Lines]] = {name: [] for name in configs}
    for turn in range(1, args.repeats + 1):
        folder = args.out / f"turn-{turn}"
        folder.mkdir(parents=True)
        print(f"--- TRL, run {turn} of {args.repeats}", flush=True)
        trl.append(run_peer(args.peer_python, args.out / "work.json", folder))
        suite = new_suite(args)
        runs = Suite(folder, 1, suite.launch).run(configs)
        for name, (run,) in runs.items():
            ours[name].append(run.lines)
    return trl, ours


def run_peer(python: Path, work: Path, folder: Path, any_build: bool = False) -> Lines:
    """Run TRL once; its output is in trl.log.  Raises BenchError with the end of the log if it fails."""
    result, log = folder / "trl.json", folder / "trl.log"
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    if json.loads(work.read_text(encoding="utf-8"))["device"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with started([*peer_command(python, any_build), work, result], log, environment=environment) as process:
        code = process.wait()
    if code:
        tail = log.read_text(encoding="utf-8").splitlines()[-LOG_TAIL_LINES:]
        raise BenchError("\n".join([f"TRL ended with exit code {code}; the end of {log}:", *tail]))
    found = json.loads(result.read_text(encoding="utf-8"))
    return list(found["steps"])


def remarks(work: Mapping[str, Any], trl: Sequence[Lines]) -> list[str]:
    """Return the lines below the table."""
    prompt, response = sum(map(len, work["prompts"])), sum(work["lengths"])
    seconds, share = outcome.forcing(trl)
    return [
        f"equal work: {work['steps']} steps, {prompt} prompt and {response} response tokens in every run, and every "
        "response of TRL has its forced length",
        *([f"KL: beta {work['grpo']['beta']:g} on both sides, in the loss"] if "grpo" in work else []),
        f"forcing the lengths takes {seconds:.4f} s of a step of TRL, {share:.2%} of its generation",
        f"TRL scores and trains {outcome.padding(trl):.2f} tokens for each real one (padding to the longest row)",
        "tokens/s: prompt and response tokens, without padding, over all steps of a run; seconds: medians after the first",
    ]


def busy(load: float) -> list[str]:
    """True if others used the machine: `load` is the load average before the first run."""
    cores = usable_cores()
    if load < BUSY_SHARE * cores:
        return []
    return [f"this machine was busy before the first run (load average {load:.1f} on {cores} cores): measure again when idle"]


def write(
    out: Path, config: TrainConfig, work: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], raw: Mapping[str, Any]
) -> None:
    """`trl.json` and `trl.png`."""
    seconds, share = outcome.forcing(raw["trl"])
    facts = {
        "machine": describe_machine(),
        "config": config.model_dump(mode="json"),
        "work": {name: value for name, value in work.items() if name not in ("prompts", "lengths")},
        "real_tokens": outcome.real_tokens(work),
        "forcing": {"step_s": seconds, "share_of_generate": share},
        "computed_per_real_token": outcome.padding(raw["trl"]),
    }
    write_json(out / "trl.json", {"bench": "trl", **facts, "results": rows, **raw})
    rows_of = "{batch_size} prompts" if work["group_size"] == 1 else "{batch_size} responses, {group_size} to a prompt"
    title = f"{rows_of}, at most {{max_response_tokens}} response tokens, {{dtype}}, {{device}}".format(**work)
    outcome.draw(rows, title, out / "trl.png")
    print(f"figures: {out / 'trl.json'}, {out / 'trl.png'}")


if __name__ == "__main__":
    sys.exit(main())
