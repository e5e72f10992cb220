"""Configurations of runs in virtual time: of one shape, and drawn at random over layouts, settings and costs."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from benchmarks.dry_run import MODEL_70B
from oppo_megatron.config.derived import switched
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import role_placements
from oppo_megatron.schedule.weaving.costs import Costs, Linear, Lines
from oppo_megatron.sim.runs.step_costs import StepCosts

Layout = tuple[int, int, int]
"""tp, pp, dp."""
SIZES = ("tp", "pp", "dp")
SCORERS = ("reference", "critic", "reward")


def tree(actor: Layout = (1, 1, 1), scorer: Layout | None = None, **changes: Any) -> dict[str, Any]:
    mode = "single" if actor == (1, 1, 1) and scorer is None else "colocated" if scorer is None else "disaggregated"
    pools = {name: dict(zip(SIZES, own, strict=True)) for name, own in (("actor", actor), ("scorer", scorer)) if own is not None}
    config: dict[str, Any] = {
        "run_dir": "none", "steps": 6, "placement": {"mode": mode, **pools}, "tokenizer": {"path": "none"},
        "data": {"path": "none", "max_prompt_tokens": 64},
        **dict.fromkeys(("actor", "critic", "reward"), {"init": MODEL_70B}),
        "rewards": [{"kind": "model"}], "rollout": {"batch_size": 16, "max_response_tokens": 96, "forced_lengths": [30.0, 0.8]},
        "overlap": {"chunk": 16, "delta": {"rule": "fixed", "initial": 4, "max": 4}}, "runtime": {"micro_batch_tokens": 2048},
    }  # fmt: skip
    for key, value in changes.items():
        config[key] = config.get(key, {}) | value if isinstance(value, dict) else value
    return config


def plain(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(tree(**changes))


def drawn(seed: int) -> tuple[TrainConfig, StepCosts]:
    random = Random(seed)
    actor, scorer, roles = _placed(random)
    group, limit = random.choice((1, 1, 1, 2, 4)), random.choice((48, 96, 160, 256))
    batch = random.choice((8, 16, 32, 64))
    chunk = random.choice((4, 8, 16, 64))
    sizes = list(dict.fromkeys([chunk, 16, 32, 64])) if random.random() < 0.2 else chunk
    delta = random.choice((0, 2, 4, batch // 4, batch // 2))
    weave = random.choice((["auto", "auto"],) * 3 + (["auto", 256], [2, "auto"], [3, 128]))
    overlap = {
        "chunk": sizes, "delta": {"rule": "fixed", "initial": delta, "max": max(1, delta)}, "weave": weave,
        "schedule": random.choice(("auto", "woven", "intra")), "backfill": random.random() < 0.2,
        "actor_kv": random.choice(("recompute", "recompute", "keep")),
    }  # fmt: skip
    lengths = [float(limit // random.choice((2, 3, 6))), random.choice((0.0, 0.4, 0.8, 1.2))]
    overlap["without"] = random.choice(([], [], [], ["critic"], ["scores"])) + ([] if random.random() < 0.8 else ["fork"])
    config = tree(
        actor, scorer, overlap=overlap, seed=seed, data={"max_prompt_tokens": random.choice((32, 64, 128))},
        runtime={"micro_batch_tokens": random.choice((256, 512, 1024, 2048, 8192))},
        rollout={"batch_size": batch, "max_response_tokens": limit, "group_size": group, "forced_lengths": lengths},
    )  # fmt: skip
    if group > 1 and random.random() < 0.7:
        config["algorithm"] = {"preset": random.choice(("grpo", "rloo", "remax"))}
        del config["critic"]
        roles.pop("critic", None)
    config |= {role: {"init": MODEL_70B, **own} for role, own in roles.items()}
    mode = random.choice(("sequential", "intra", "inter", "full", "full"))
    parsed = switched(TrainConfig.model_validate(config), mode)
    return parsed, _priced(random, {role: placement.pp for role, placement in role_placements(parsed).items()})


def _placed(random: Random) -> tuple[Layout, Layout | None, dict[str, dict[str, Any]]]:
    """Layouts of the actor and the scorers (None: on its ranks), and ranks and layouts of the roles that have their own."""
    mode, roles = random.choice(("single", "colocated", "disaggregated", "custom", "custom")), dict[str, dict[str, Any]]()
    if mode == "single":
        return (1, 1, 1), None, roles
    size = random.choice((2, 4, 8, 16) if mode == "colocated" else (1, 2, 4, 8))
    if mode == "colocated":
        for role in SCORERS:
            if random.random() < 0.3:
                roles[role] = {"parallel": dict(zip(SIZES, _layout(random, size), strict=True))}
        return _layout(random, size), None, roles
    other = random.choice([each for each in (1, 2, 4, 8) if size + each <= 16])
    for role in SCORERS if mode == "custom" else ():
        if random.random() < 0.5:
            count = random.choice([each for each in (1, 2, 4, 8) if each <= size + other])
            first = random.randrange(size + other - count + 1)
            ranks = f"{first}-{first + count - 1}" if count > 1 else str(first)
            roles[role] = {"ranks": ranks, "parallel": dict(zip(SIZES, _layout(random, count), strict=True))}
    return _layout(random, size), _layout(random, other), roles


def _layout(random: Random, ranks: int) -> Layout:
    tp, pp = random.choice([(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if ranks % (tp * pp) == 0])
    return tp, pp, ranks // tp // pp


def _priced(random: Random, stages: Mapping[str, int]) -> StepCosts:
    def line(fixed: tuple[float, float], each: tuple[float, float]) -> Linear:
        """Log-uniform between powers of ten; now and then nothing is fixed."""
        return Linear(10 ** random.uniform(*fixed) if random.random() < 0.9 else 0.0, 10 ** random.uniform(*each))

    def lines(role: str, fixed: tuple[float, float], each: tuple[float, float]) -> Lines:
        if random.random() < 0.5:
            return line(fixed, each)
        return tuple(line(fixed, each) for _ in range(stages[role]))

    costs = Costs()
    if random.random() < 0.7:
        costs = Costs(
            lines("actor", (-3.3, -2), (-5, -4)), line((-4.5, -3), (-6, -4.5)),
            {role: lines(role, (-4, -2), (-5.5, -4)) for role in stages if random.random() < 0.7},
            line((-4, -2), (-5.5, -4)), line((-4.5, -3), (-7, -5.5)), 10 ** random.uniform(-6, -3),
        )  # fmt: skip
    updates = {"actor": Linear(random.choice((0.0, 0.05, 0.2)), 1e-5), "critic": Linear(random.choice((0.0, 0.3)), 2e-5)}
    moves = {"actor": 0.05} if random.random() < 0.5 else {}
    return StepCosts(costs, updates, moves, random.choice((0.0, 1e-3)), random.choice((0.0, 0.01)))
