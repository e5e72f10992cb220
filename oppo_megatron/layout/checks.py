"""Checks that layouts fit ranks, models, batch, and each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, lcm

from oppo_megatron.config.derived import max_context, members, minibatch_parts, most_sequences, share_of_sequences
from oppo_megatron.config.model import ParallelConfig, RoleConfig, TrainedRoleConfig, format_ranks
from oppo_megatron.config.run import TrainConfig, TrainSettings
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.layout.layouts import Limits, Sizes, fills_shards, suggestion
from oppo_megatron.layout.memory import slot_tokens
from oppo_megatron.layout.placements import (
    RolePlacement,
    decodes_and_scores,
    named_roles,
    parse_ranks,
    role_placements,
    round_placements,
    training_placements,
    world_size,
)
from oppo_megatron.layout.shape import Shape, check_divisions, kv_bytes_per_token, model_limits

MOST_RANKS = 2**16
MEBIBYTE = 2**20


@dataclass(frozen=True)
class _Asked:
    name: str
    sizes: Sizes
    num_ranks: int
    limits: Limits | None

    @property
    def near(self) -> str:
        return suggestion(self.sizes, self.num_ranks, self.limits)

    def divisions(self, shape: Shape | None) -> list[str]:
        if shape is None or self.limits is None:
            return []
        return check_divisions(self.name, shape, self.sizes, self.num_ranks, self.limits)


def check_layouts(config: TrainConfig, shapes: Mapping[str, Shape]) -> list[str]:
    """Return all problems. `shapes`: the config.jsons that could be read."""
    if enormous := _check_magnitude(config):
        return enormous
    wrong_ranks = {
        name: found for name, role in _sections(config) if (found := _check_ranks(config, f"{name}.ranks", role.ranks))
    }
    problems = [problem for found in wrong_ranks.values() for problem in found]
    without: dict[str, RoleConfig] = {
        name: role.model_copy(update={"ranks": None}) for name, role in _sections(config) if name in wrong_ranks
    }
    if found := _check_ranks(config, "actor.train.ranks", config.actor.train.ranks):
        problems += found
        train = config.actor.train.model_copy(update={"ranks": None})
        without["actor"] = without.get("actor", config.actor).model_copy(update={"train": train})
    config = config.model_copy(update=without)  # so that their other problems can be reported
    problems += [*_check_scorers(config), *_check_pools(config, shapes), *_check_counts(config, shapes)]
    serving = role_placements(config)
    for name, placement in round_placements(config).items():
        problems += serving_problems(config, name, placement, shapes.get(name))
    for name, placement in training_placements(config).items():
        problems += training_problems(config, name, placement, serving[name], shapes.get(name))
    held = {rank: name for name, placement in serving.items() for rank in placement.ranks}
    held |= dict.fromkeys(training_placements(config)["actor"].ranks, "actor.train")
    if not wrong_ranks and (idle := [rank for rank in range(world_size(config)) if rank not in held]):
        problems.append(
            f"{_ranks(idle)} without a role, but a run has ranks 0 to the highest, {max(held)} of {held[max(held)]}, "
            "and each must hold one; number the roles' ranks without gaps, or change placement"
        )
    if config.overlap.intra and config.overlap.schedule == "woven" and not decodes_and_scores(serving):
        problems.append(
            "overlap.schedule is woven, but no rank holds both the actor and a scorer, so there is nothing to weave; "
            "choose auto or intra, or placement.mode colocated"
        )
    return problems


def serving_problems(config: TrainConfig, name: str, placement: RolePlacement, shape: Shape | None) -> list[str]:
    return [*_check_serving(config, name, placement, shape), *_check_kv_budget(config, name, placement, shape)]


def check_auto_placement(settings: TrainSettings) -> list[str]:
    placement = settings.placement
    written: dict[str, object] = {
        "placement.actor": placement.actor if placement.actor.num_ranks > 1 else None,
        "placement.scorer": placement.scorer,
        "placement.reference": placement.reference if placement.reference != "scorer" else None,
    }
    for name, role in _sections(settings):
        written |= {f"{name}.ranks": role.ranks, f"{name}.parallel": role.parallel}
        if isinstance(role, TrainedRoleConfig):
            written |= {f"{name}.train.{size}": getattr(role.train, size, None) for size in ("tp", "pp", "dp", "ranks")}
            more = {"vpp": role.train.vpp, "cp": role.train.cp, "ep": role.train.ep}
            written |= {f"{name}.train.{key}": count if count > 1 else None for key, count in more.items()}
    return [
        f"{key} is {Sizes.of(value) if isinstance(value, ParallelConfig) else value}, but placement.mode auto chooses the ranks "
        "and layouts of all roles; remove it, or choose disaggregated, colocated or single"
        for key, value in written.items()
        if value is not None
    ]


def check_supervised_layout(config: SupervisedConfig, shape: Shape, name: str = "model") -> list[str]:
    sizes = Sizes.of(config.parallel)
    if sizes.num_ranks > MOST_RANKS:
        return [_enormous("parallel", config.parallel)]
    limits = model_limits(shape, config.batch_size)
    problems = check_divisions(name, shape, sizes, sizes.num_ranks, limits)
    problems += _check_stretches("parallel.cp", sizes.cp, config.max_tokens)
    if sizes.dp > config.batch_size:
        problems.append(
            f"parallel.dp is {sizes.dp}, but a batch has {config.batch_size} rows (batch_size) and each replica needs "
            f"one; lower dp or raise batch_size{suggestion(sizes, sizes.num_ranks, limits)}"
        )
    return problems


def _check_stretches(key: str, cp: int, longest: int) -> list[str]:
    if cp == 1 or 2 * cp <= longest:
        return []
    return [
        f"{key} is {cp}, but sequences have at most {longest} tokens, and each of its ranks reads two stretches of each; lower "
        f"it to {max(1, longest // 2)} or less"
    ]


def _check_scorers(config: TrainConfig) -> list[str]:
    placement, roles = config.placement, set(named_roles(config))
    if placement.reference == "actor" and "reference" not in roles:
        return ["placement.reference is actor, but ppo.kl.mode is none, so the run has no reference; remove it"]
    if placement.scorer is None or len(roles) > 1:
        return []
    return [
        f"placement.scorer is {Sizes.of(placement.scorer)}, but the run has no reward model, no critic, and with "
        "ppo.kl.mode none no reference, so that nothing would use its ranks; remove it"
    ]


def _sections(config: TrainSettings) -> Iterator[tuple[str, RoleConfig]]:
    roles = (("actor", config.actor), ("reference", config.reference), ("critic", config.critic))
    yield from ((name, role) for name, role in (*roles, ("reward", config.reward)) if role is not None)


def _check_magnitude(config: TrainConfig) -> list[str]:
    placement = config.placement
    layouts: dict[str, ParallelConfig | None] = {"placement.actor": placement.actor, "placement.scorer": placement.scorer}
    layouts |= {f"{name}.parallel": role.parallel for name, role in _sections(config)}
    problems = [_enormous(key, layout) for key, layout in layouts.items() if layout and layout.num_ranks > MOST_RANKS]
    for name, role in _sections(config):
        named = {f"{name}.ranks": role.ranks, f"{name}.train.ranks": getattr(getattr(role, "train", None), "ranks", None)}
        for key, ranks in named.items():
            if any(int(number) >= MOST_RANKS for number in (ranks or "0").replace("-", ",").split(",")):
                problems.append(f"{key} is {ranks}, but ranks end at {MOST_RANKS - 1}; name ranks of this run")
    return problems


def _enormous(key: str, layout: ParallelConfig) -> str:
    return f"{key} is {Sizes.of(layout)} = {layout.num_ranks} ranks, but at most {MOST_RANKS} are allowed; lower it"


def _check_ranks(config: TrainConfig, key: str, ranks: str | None) -> list[str]:
    if ranks is None:
        return []
    if config.placement.mode == "single":
        return [f"{key} is {ranks}, but placement.mode single has one process; remove it, or choose another mode"]
    for part in ranks.split(","):
        first, dash, last = part.partition("-")
        if dash and int(first) > int(last):
            return [f"{key} is {ranks}, but {part} counts down; write {last}-{first}"]
    twice = [rank for rank, times in sorted(Counter(parse_ranks(ranks)).items()) if times > 1]
    if twice:
        return [f"{key} is {ranks}, but a rank holds one part of a role and {_ranks(twice)} named twice; name each once"]
    if (ordered := sorted(parse_ranks(ranks))) != list(parse_ranks(ranks)):
        return [f"{key} is {ranks}, but a role's parts lie on its ranks in counting order; write {format_ranks(ordered)}"]
    return []


def _check_pools(config: TrainConfig, shapes: Mapping[str, Shape]) -> list[str]:
    placement = config.placement
    pools = [("placement.actor", placement.actor), ("placement.scorer", placement.scorer)]
    if placement.mode == "single":
        return [
            f"{key} is {Sizes.of(pool)}, but placement.mode single has one process; remove it, or choose another mode"
            for key, pool in pools
            if pool is not None and pool.num_ranks != 1
        ]
    scorer, num_ranks = placement.scorer, placement.actor.num_ranks
    if placement.mode == "disaggregated" or scorer is None or scorer.num_ranks == num_ranks:
        return []
    name = next((each for each in named_roles(config) if each != "actor"), "actor")
    limits = _limits(config, name, shapes.get(name))
    return [
        f"placement.scorer is {Sizes.of(scorer)} = {scorer.num_ranks} ranks, but colocated scorers share the actor's "
        f"{num_ranks} ({Sizes.of(placement.actor)}); make tp x pp x dp equal to that, or choose disaggregated"
        + suggestion(Sizes.of(scorer), num_ranks, limits)
    ]


def _check_counts(config: TrainConfig, shapes: Mapping[str, Shape]) -> list[str]:
    asked = []
    placements, training = role_placements(config), training_placements(config)
    for name, role in named_roles(config).items():
        ranks, limits = placements[name].ranks, _limits(config, name, shapes.get(name))
        if role.parallel is not None:
            asked.append(_Asked(f"{name}.parallel", Sizes.of(role.parallel), len(ranks), limits))
        if isinstance(role, TrainedRoleConfig) and (
            role.train.cp > 1 or any(getattr(role.train, each, None) for each in ("tp", "pp", "dp", "ranks"))
        ):
            placement, limits = training[name], _training_limits(config, role, shapes.get(name))
            asked.append(_Asked(f"{name}.train", Sizes.of(placement, role.train.vpp), len(placement.ranks), limits))
    problems = []
    for each in asked:
        sizes, replica = each.sizes._replace(vpp=1), each.sizes.tp * each.sizes.pp * each.sizes.cp
        unequal = f", which equal replicas of {replica} do not fill" if each.num_ranks % replica else ""
        null = " (null sizes are taken from the role)" if each.name.endswith(".train") else ""
        if sizes.num_ranks != each.num_ranks:
            problems.append(
                f"{each.name} is {sizes} = {sizes.num_ranks} ranks{null}, but the role has {each.num_ranks}{unequal}; make "
                f"tp x pp x dp{' x cp' * (sizes.cp > 1)} equal to that, or give the role other ranks{each.near}"
            )
    return problems


def _check_serving(config: TrainConfig, name: str, placement: RolePlacement, shape: Shape | None) -> list[str]:
    sequences = most_sequences(config)
    asked = _Asked(name, Sizes.of(placement), len(placement.ranks), _limits(config, name, shape))
    problems, each = asked.divisions(shape), members(config)
    size, own = each.size, each.trained
    if placement.dp * size > sequences:
        most, needed = config.overlap.delta.max, "one" if size == 1 else f"a group of {size}"
        groups = f" x rollout.group_size {own}" * (own > 1)
        delta = f" + overlap.delta.max {most}{groups}" if config.overlap.inter else ""
        delta += ", and a greedy one for each prompt" * each.greedy
        work = "1 sequence is" if sequences == 1 else f"{sequences} sequences are"
        problems.append(
            f"{name} has dp {placement.dp}, but at most {work} in work at once (rollout.batch_size "
            f"{config.rollout.batch_size}{delta}) and each replica needs {needed}; lower dp or raise the batch size{asked.near}"
        )
    return problems


def training_problems(
    config: TrainConfig, name: str, placement: RolePlacement, serving: RolePlacement, shape: Shape | None
) -> list[str]:
    role = config.trained[name]
    train, parts = role.train, minibatch_parts(config)
    limits = _training_limits(config, role, shape)
    asked = _Asked(f"{name}.train", Sizes.of(placement, train.vpp), len(placement.ranks), limits)
    problems = []
    if asked.sizes != Sizes.of(serving):  # else its divisions are reported there
        wrong = asked.divisions(shape)
        tensor_ranks = asked.sizes.tp, serving.tp
        multiple = lcm(*tensor_ranks)
        if not wrong and shape and not all(fills_shards(shape["vocab_size"], tp, multiple) for tp in tensor_ranks):
            wrong = [
                f"{asked.name}: vocab_size {shape['vocab_size']}, filled up to a multiple of {multiple} that tp {asked.sizes.tp} "
                f"and tp {serving.tp} divide, leaves a tensor rank without a token; train and serve with equal tp, or lower one"
            ]
        problems += wrong
    if placement.dp > parts:
        what = f"{parts} {'pair' if config.algorithm.pairs else 'row'}{'s' * (parts > 1)}"
        problems.append(
            f"{name} is trained with dp {placement.dp}, but a minibatch has {what} (rollout.batch_size "
            f"{config.rollout.batch_size} / ppo.minibatches {config.ppo.minibatches}) and each replica needs one; lower "
            f"{name}.train.dp or ppo.minibatches{asked.near}"
        )
    problems += _check_stretches(f"{name}.train.cp", train.cp, max_context(config))
    if train.vpp > 1 and placement.pp == 1:
        problems.append(
            f"{name}.train.vpp is {train.vpp}, but 1F1B interleaves the virtual stages of at least 2 ranks and pp is 1; "
            f"set vpp to 1 or raise {name}.train.pp{asked.near}"
        )
    if train.sequence_parallel and placement.tp == 1:
        problems.append(
            f"{name}.train.sequence_parallel is true, but it shards over tensor ranks and tp is 1; "
            f"set it to false or raise {name}.train.tp{asked.near}"
        )
    return problems


def _check_kv_budget(config: TrainConfig, name: str, placement: RolePlacement, shape: Shape | None) -> list[str]:
    """The cache must hold a sequence, or a scorer's prefill micro-batch."""
    budget_mb, (_, tokens) = config.runtime.kv_cache_mb, config.overlap.weave
    if budget_mb is None or shape is None:
        return []
    context, sizes, most = max_context(config), Sizes.of(placement), 1
    if name != "actor" and config.overlap.intra and isinstance(tokens, int):
        most = ceil(min(tokens, config.runtime.micro_batch_tokens) / context)

    def count(layout: Sizes) -> int:
        return min(most, share_of_sequences(config, name, layout.dp))

    def needed_mb(layout: Sizes) -> float:
        dtype, slot = named_roles(config)[name].dtype, slot_tokens(context, config.runtime.kv_layout)
        return count(layout) * slot * kv_bytes_per_token(shape, layout, dtype) / MEBIBYTE

    if needed_mb(sizes) <= budget_mb:
        return []
    what, lower = f"one sequence of {context} tokens needs", "the prompt or response limit"
    if count(sizes) > 1:
        lower = "overlap.weave's prefill_tokens"
        what = f"a micro-batch of {lower} {tokens} has at least {count(sizes)} sequences of {context} tokens, which need"
    limits = _limits(config, name, shape)
    near = suggestion(sizes, len(placement.ranks), limits, lambda other: needed_mb(other) <= budget_mb)
    return [
        f"{name}: runtime.kv_cache_mb is {budget_mb:g}, but {what} {needed_mb(sizes):.3g} MiB on each rank; "
        f"raise the budget or lower {lower}{near}"
    ]


def _limits(config: TrainConfig, name: str, shape: Shape | None) -> Limits | None:
    """Limits of serving, and of training if it has the same sizes."""
    if shape is None:
        return None
    role, sequences, min_tp = named_roles(config)[name], most_sequences(config), 1
    if isinstance(role, TrainedRoleConfig):
        sequences = min(sequences, minibatch_parts(config)) if role.train.dp is None else sequences
        min_tp = 2 if role.train.sequence_parallel and role.train.tp is None else 1
    return model_limits(shape, sequences, min_tp)


def _training_limits(config: TrainConfig, role: TrainedRoleConfig, shape: Shape | None) -> Limits | None:
    min_tp = 2 if role.train.sequence_parallel else 1
    return None if shape is None else model_limits(shape, minibatch_parts(config), min_tp)


def _ranks(ranks: list[int]) -> str:
    one = len(ranks) == 1
    return f"rank{'' if one else 's'} {format_ranks(ranks)} {'is' if one else 'are'}"
