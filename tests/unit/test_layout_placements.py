"""Placements of roles, and the memory of a rank: against sums over the whole model, by hand, and by what a setting changes."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from oppo_megatron.config.model import LoraConfig, ParallelConfig, RoleConfig, TrainingLayoutConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import RewardModelConfig
from oppo_megatron.layout import placements as placements_module
from oppo_megatron.layout.activations import MASK_NUMBERS, Call, Model, TrainingBatch, cached_activations, kept_activations
from oppo_megatron.layout.layouts import Sizes
from oppo_megatron.layout.memory import Memory, kv_slots, stage_layers, stage_parameters, table_bytes, training_state
from oppo_megatron.layout.placements import RolePlacement, has_own_training_weights, named_roles, role_placements, shares_weights
from oppo_megatron.layout.role_memory import Holding, rank_memory, supervised_holdings, train_holdings
from oppo_megatron.layout.shape import kv_bytes_per_token
from tests.support.configs import least_config, run_of


def placed_by(**sections: Any) -> TrainConfig:
    base = {"actor": {"checkpoint": "a", "dtype": "bfloat16"}, "critic": {"checkpoint": "a"}}
    return least_config(Path("run"), **base | {name: base.get(name, {}) | own for name, own in sections.items()})


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_coords_by_role_and_ranks_are_inverse(tp: int, pp: int, dp: int, random: Any) -> None:
    placement = RolePlacement(ranks := tuple(random.sample(range(100), tp * pp * dp)), tp, pp, dp)
    coords_by_role = {placement.coords(rank): rank for rank in ranks}
    assert len(coords_by_role) == len(ranks)
    assert all(coords is not None and placement.rank(*coords) == rank for coords, rank in coords_by_role.items())
    replicas = [placement.replica_ranks(replica) for replica in range(dp)]
    assert sorted(rank for replica in replicas for rank in replica) == sorted(ranks)
    for d, p in ((d, p) for d in range(dp) for p in range(pp)):
        assert placement.stage_ranks(d, p) == replicas[d][p * tp : (p + 1) * tp]
    assert placement.coords(100) is None
    assert placement.output_rank(dp - 1) == placement.stage_ranks(dp - 1, pp - 1)[0]


def test_default_places_of_each_mode_and_a_reference_beside_the_actor() -> None:
    """Without a reference of its own a run has the actor's model as one."""
    roles = named_roles(placed_by(reward={"checkpoint": "rm"}))
    assert list(roles) == ["actor", "reference", "critic", "reward"]
    assert (roles["reference"].checkpoint, roles["reference"].dtype) == (roles["actor"].checkpoint, "bfloat16")
    ranks = {name: placement.ranks for name, placement in role_placements(placed_by()).items()}
    assert ranks == {"actor": (0,), "reference": (1,), "critic": (1,)}
    sizes = {"tp": 2, "dp": 2}
    disaggregated = role_placements(placed_by(placement={"actor": sizes, "scorer": {"pp": 2}}))
    assert disaggregated["actor"] == RolePlacement((0, 1, 2, 3), 2, 1, 2)
    assert disaggregated["critic"] == RolePlacement((4, 5), 1, 2, 1)
    colocated = role_placements(placed_by(placement={"mode": "colocated", "actor": sizes}))
    assert colocated["actor"] == colocated["critic"] == colocated["reference"]
    assert set(role_placements(placed_by(placement={"mode": "single"})).values()) == {RolePlacement((0,))}
    placement = {"actor": {"tp": 2}, "reference": "actor"}
    placements = role_placements(placed_by(placement=placement))
    assert placements["reference"] == placements["actor"] == RolePlacement((0, 1), 2)
    assert placements["critic"] == RolePlacement((2,))
    lora = {"lora": {"rank": 2, "alpha": 4}}
    assert shares_weights(placed_by(placement=placement, actor=lora)), "its weights are the actor's without adapters"
    assert not shares_weights(placed_by(placement={"actor": {"tp": 2}}, actor=lora))
    laid_out = role_placements(placed_by(placement=placement, actor={"parallel": {"dp": 2}} | lora))
    assert laid_out["reference"] == laid_out["actor"] == RolePlacement((0, 1), dp=2), "where the actor decodes"
    elsewhere = role_placements(placed_by(placement=placement, actor={"ranks": "1-2"}, critic={"ranks": "0"}))
    assert elsewhere["reference"] == elsewhere["actor"] == RolePlacement((1, 2), 2)
    named = placed_by(placement=placement, reference={"checkpoint": "a", "ranks": "2"})
    assert role_placements(named)["reference"] == RolePlacement((2,), 1, 1, 1), "ranks of its own come first"


def test_ranks_and_layouts_of_a_role_whose_training_is_over_the_same_ranks() -> None:
    placement = {"mode": "colocated", "actor": {"pp": 4}}
    config = placed_by(placement=placement, critic={"ranks": "0-1"}, reference={"checkpoint": "a", "ranks": "5,4,3,2"})
    placements = role_placements(config)
    assert placements["critic"] == RolePlacement((0, 1), 1, 1, 2), "ranks alone: replicas"
    assert placements["reference"] == RolePlacement((5, 4, 3, 2), 1, 4, 1), "as many as the pool has: its layout"
    assert placements_module.world_size(config) == 6
    config = placed_by(
        placement={"mode": "colocated", "actor": {"tp": 2, "pp": 2}},
        actor={"parallel": {"dp": 4}, "train": {"tp": 2, "pp": 1, "dp": 2}}, critic={"train": {"vpp": 2}},
    )  # fmt: skip
    serving, training = role_placements(config), placements_module.training_placements(config)
    assert serving["actor"].layout == (1, 1, 4) and training["actor"].layout == (2, 1, 2)
    assert training["critic"] == serving["critic"]
    assert has_own_training_weights(serving["actor"], training["actor"], 1)
    assert not has_own_training_weights(serving["critic"], training["critic"], 1)
    assert has_own_training_weights(serving["critic"], training["critic"], 2)


@pytest.mark.parametrize(("text", "ranks"), [(3, (3,)), ("3", (3,)), ("0-2,5", (0, 1, 2, 5)), ("4,1-2", (4, 1, 2)), ("00", (0,))])
def test_ranks_as_yaml_reads_them(text: object, ranks: tuple[int, ...]) -> None:
    assert RoleConfig.model_validate({"ranks": text}).ranks == str(text)
    assert placements_module.parse_ranks(str(text)) == ranks


@pytest.mark.parametrize(
    "ranks", [" 1", "", "-1", -1, "1-", "0,,1", "a", "1 ,2", "\N{ARABIC-INDIC DIGIT ONE}", "9" * 5000, [0, 1], True, 1.5]
)
def test_ranks_that_are_none(ranks: object) -> None:
    with pytest.raises(ValidationError, match="ranks and spans of ranks with commas between them, as in 0-3,6"):
        RoleConfig.model_validate({"ranks": ranks})


SHAPE: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 96,
}  # fmt: skip


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (8, 1), (2, 2), (4, 2), (2, 4)])
def test_every_layer_is_held_once(pp: int, vpp: int) -> None:
    held = [layer for stage in range(pp) for chunk in stage_layers(SHAPE, pp, stage, vpp) for layer in chunk]
    assert sorted(held) == list(range(8))
    assert all(len(stage_layers(SHAPE, pp, stage, vpp)) == vpp for stage in range(pp))
    assert stage_layers(SHAPE, 2, 1, 2) == [range(2, 4), range(6, 8)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_and_shards_add_up_to_the_model(family: str, tied: bool) -> None:
    """Norms (and norms of queries and keys) are on every tensor rank; everything else is on one."""
    shape = {**SHAPE, "model_type": family, "tie_word_embeddings": tied}
    whole = stage_parameters(shape, 1, 1, 0, scalar=False)
    norms = 64 * (8 * 2 + 1) + (8 * 2 * 128 if family == "qwen3" else 0)
    for tp, pp in ((1, 4), (2, 1), (2, 8)):
        total = sum(tp * stage_parameters(shape, tp, pp, stage, scalar=False) for stage in range(pp))
        assert total == whole + (tp - 1) * norms + (96 * 64 if tied and pp > 1 else 0)
    with_logits, scalar = (stage_parameters(SHAPE, 2, 2, 1, scalar=scalar) for scalar in (False, True))
    assert with_logits - scalar == 96 // 2 * 64 - 64, "a scalar head takes the place of the vocabulary"


def test_training_state_and_whole_slots_of_a_kv_cache_by_hand() -> None:
    for dtype, dp, optimizer in ("float32", 1, 800), ("bfloat16", 1, 1200), ("bfloat16", 4, 300):
        assert training_state(100, dtype, dp) == Memory(gradients=400, optimizer=optimizer)
    layout = ParallelConfig(tp=2, pp=2)
    slot = 10 * kv_bytes_per_token(SHAPE, layout, "bfloat16")
    assert slot == 10 * 2 * 4 * 1 * 8 * 2, "tokens, keys and values, layers, heads, width, bytes"
    budgets = None, 2.5 * slot / 2**20
    assert [kv_slots(SHAPE, layout, "bfloat16", slots=6, context=10, budget_mb=most) for most in budgets] == [6, 2]


def test_kept_activations_by_hand() -> None:
    def kept(vpp: int = 1, stage: int = 0, rows: int = 10**6, **train: Any) -> float:
        model, batch = Model(SHAPE, 2, "bfloat16", scalar=True), TrainingBatch(100, rows)
        return kept_activations(model, Sizes(2, 4, 1, vpp), stage, TrainingLayoutConfig(**train), batch)

    # of a token: 4 x 64 whole; over tp 2: rotated queries, output twice 3 x 64, rotated keys, values 2 x 16, 3 x 128
    layer = 4 * 64 + (3 * 64 + 2 * 16 + 3 * 128) / 2
    angles = 2 * 8 * 4  # cosine and sine of 8 frequencies
    assert kept() == 4 * 100 * ((2 * layer + 64) * 2 + angles), "4 micro-batches in flight, 2 layers and an input"
    assert kept(stage=3) == kept() / 4
    assert kept(rows=150) == kept() * 150 / 400, "no more tokens than the minibatch has"
    assert kept(sequence_parallel=True) == 4 * 100 * ((2 * (layer - 2 * 64) + 32) * 2 + angles)
    one_each = kept(recompute="selective")  # of the queries one, of the output one
    assert one_each == 4 * 100 * ((2 * (layer - 64 / 2) + 64) * 2 + angles)
    assert kept(recompute="full") == 4 * 100 * ((2 * 64 + 64) * 2 + angles)
    assert kept(vpp=2) == 11 * 100 * ((layer + 64) * 2 + angles), "2 x 3 + 4 + 1 virtual stages of one layer in flight"
    # Float32 on a GPU repeats keys, and adapters keep the inputs of their products.
    train, targets = TrainingLayoutConfig(), LoraConfig(rank=4, targets=["q_proj", "down_proj"])
    gpu, cpu = (Model(SHAPE, 2, "float32", on_cpu=on_cpu).kept_of_layer(train)[0] for on_cpu in (False, True))
    assert gpu - cpu == 2 * (64 - 16) / 2
    whole, adapted = (Model(SHAPE, 2, "bfloat16", lora=lora).kept_of_layer(train)[0] for lora in (None, targets))
    assert whole - adapted == 64 / 2 + 64 - 2 * 4, "neither the output as joined nor the norm before gate and up"


def holdings(on_cpu: bool = False, **changes: Any) -> list[Holding]:
    settings = {
        "run_dir": "run", "tokenizer": {"path": "tok"}, "data": {"path": "rows.jsonl", "max_prompt_tokens": 28},
        "placement": {"mode": "colocated", "actor": {"tp": 2, "pp": 2, "dp": 2}},
        "actor": {"init": SHAPE}, "critic": {"init": SHAPE}, "rewards": [{"kind": "verifier", "name": "gsm8k"}],
        "rollout": {"batch_size": 8, "max_response_tokens": 100}, "overlap": {"delta": {"initial": 0, "max": 3}},
    }  # fmt: skip
    return train_holdings(run_of({**settings, **changes}), on_cpu=on_cpu)


def test_what_each_rank_holds() -> None:
    held = holdings()
    assert [(h.rank, h.role) for h in held[:4]] == [(0, "actor"), (0, "reference"), (0, "critic"), (1, "actor")]
    assert held[-1].coords == (1, 1, 1) and held[-1].rank == 7
    actor, reference, _ = held[:3]
    parameters = stage_parameters(SHAPE, 2, 2, 0, scalar=False)
    assert actor.memory.weights == reference.memory.weights == parameters * 4
    assert (actor.memory.gradients, actor.memory.optimizer) == (parameters * 4, parameters * 8 / 2)
    assert (reference.memory.gradients, reference.memory.optimizer, reference.memory.packed) == (0, 0, 0)
    assert reference.phases == {"reading": reference.memory.activations}
    reads = cached_activations(Model(SHAPE, 2, "float32"), Call(6 * 128, 0, 128))
    assert reference.memory.activations == reads, "all that its cache holds, in one call"
    assert reference.memory.buffers == table_bytes(SHAPE, 128) == 2 * 128 * 8 * 4
    assert actor.memory.kv_cache == 6 * 128 * 2 * 4 * 1 * 8 * 4, "6 of 11 sequences are a replica's"
    assert actor.batches["B + delta"] == "8-11" and actor.batches["sequences a replica"] == "6"
    assert actor.batches["rows a replica"] == "4" and "rows a replica" not in reference.batches


WOVEN = {"mode": "colocated", "actor": {"pp": 2}}
APART = {"mode": "disaggregated", "actor": {"pp": 2}}
SHORT = {"batch_size": 8, "max_response_tokens": 20}


@pytest.mark.parametrize(("changes", "actor", "reference"), [
    # what a batch is cut into is measured only where decoding leaves bubbles that scoring may fill
    ({"placement": WOVEN}, {"decode m-batches": "auto", "chunk C": "16-64"}, {"prefill tokens": "auto"}),
    ({"placement": APART}, {"decode m-batches": "1"}, {"prefill tokens": "4096", "decode m-batches": "-"}),
    ({"placement": {"mode": "single"}}, {"decode m-batches": "1"}, {"prefill tokens": "4096"}),
    ({"placement": WOVEN, "overlap": {"schedule": "intra", "inter": False}}, {"decode m-batches": "1", "B + delta": "8"},
        {"prefill tokens": "4096"}),
    # without streaming a chunk has the same size: the scorers only wait for the last one
    ({"placement": WOVEN, "overlap": {"intra": False, "chunk": 24}}, {"decode m-batches": "1", "chunk C": "24"},
        {"prefill tokens": "4096"}),
    # no more micro-batches than sequences, no chunk beyond the response limit, no micro-batch beyond its budget
    ({"placement": WOVEN, "overlap": {"weave": [40, 9000], "delta": {"rule": "fixed"}}, "rollout": SHORT},
        {"decode m-batches": "16", "chunk C": "16-20", "B + delta": "12", "sequences a replica": "16"},
        {"prefill tokens": "4096"}),
    # a slot on a rank: 128 tokens x 2 x 4 layers x 2 heads x 8 x 4 bytes = 64 KiB
    ({"placement": WOVEN, "runtime": {"kv_cache_mb": 0.2}, "overlap": {"weave": [8, "auto"]}},
        {"KV slots": "3", "sequences a replica": "16", "decode m-batches": "3"}, {"KV slots": "3"}),
])  # fmt: skip
def test_batch_sizes_are_those_of_a_run(changes: dict[str, Any], actor: dict[str, str], reference: dict[str, str]) -> None:
    held = {h.role: h for h in holdings(**{"overlap": {}, **changes}) if h.rank == 0 or h.role == "reference"}
    assert actor.items() <= held["actor"].batches.items()
    assert reference.items() <= held["reference"].batches.items()


def test_the_cache_has_the_slots_that_are_shown_and_another_training_layout_is_a_second_copy() -> None:
    actor = holdings(runtime={"kv_cache_mb": 0.1})[0]
    slot = 128 * 2 * 4 * 1 * 8 * 4
    assert actor.batches["KV slots"] == "3" and actor.memory.kv_cache == 3 * slot
    paged = holdings(runtime={"kv_cache_mb": 0.1, "kv_layout": "paged"})[0]
    assert paged.batches["KV slots"] == "1" and paged.memory.kv_cache == 2 * slot, "a block has 256 positions"
    rule = {"kind": "verifier", "name": "gsm8k"}
    judged = {"data": {"path": "rows.jsonl", "max_prompt_tokens": 28, "max_rows": 2}, "metrics": [rule]}
    without, evaluated = (holdings(evaluation=evaluation)[0].memory.kv_cache for evaluation in (None, judged))
    assert evaluated == without * 8 / 6, "held-out answers have their own cache"
    same = {h.role: h for h in holdings() if h.rank == 0}
    moved = {h.role: h for h in holdings(actor={"init": SHAPE, "train": {"tp": 1, "pp": 4}}) if h.rank == 0}
    assert list(moved) == ["actor", "actor.train", "reference", "critic"]
    weights, cache = same["actor"].memory.weights, same["actor"].memory.kv_cache
    call, tables = max(moved["actor"].phases.values()), table_bytes(SHAPE, 128)
    assert moved["actor"].memory == Memory(weights=weights, kv_cache=cache, buffers=tables, activations=call)
    assert same["actor"].memory.buffers == moved["actor.train"].memory.buffers == tables, "one model, and two"
    copy = moved["actor.train"].memory
    assert copy.copy == copy.gradients == stage_parameters(SHAPE, 1, 4, 0, scalar=False) * 4
    assert copy.weights == 0 and moved["actor.train"].layers == [range(0, 2)]
    assert same["actor"].memory.copy == 0
    sharded = {h.role: h.memory for h in holdings(actor={"init": SHAPE, "train": {"sequence_parallel": True}}) if h.rank == 0}
    gathered = 4 * 128 * 64 * 4  # the tokens of 4 rows, of which a micro-batch holds 4,096
    assert sharded["actor"].buffers == 2 * tables + gathered and sharded["critic"].buffers == tables, "a model and a buffer"


def test_a_processor_decodes_by_a_copy_of_the_products_weights() -> None:
    """All weights but norms, biases and embeddings; the vocabulary's once more where it is tied to the embeddings."""
    tied = {**SHAPE, "tie_word_embeddings": True}
    one = {"placement": {"mode": "single"}, "actor": {"init": tied}, "critic": {"init": tied}}
    held = {h.role: h.memory for h in holdings(on_cpu=True, **one)}
    norms_and_biases = 8 * (2 * 64 + 64 + 2 * 16) + 64
    assert held["actor"].packed == held["reference"].packed == held["actor"].weights - norms_and_biases * 4
    assert held["critic"].packed == held["critic"].weights - (norms_and_biases + 96 * 64 + 64) * 4
    assert {h.memory.packed for h in holdings(**one)} == {0}


def test_kernels_are_counted_for_every_number_of_rows_that_a_role_meets() -> None:
    """The actor decodes 1 to 16 sequences and reads 160, 192 ... 2048 tokens; its vocabulary's product only decodes.
    Log-probs are made of slices of the vocabulary, of two widths."""
    one = {"placement": {"mode": "single"}, "overlap": {}, "runtime": {"micro_batch_tokens": 2048}}
    kernels = {h.role: h.memory.kernels / 2**19 for h in holdings(on_cpu=True, **one)}
    assert kernels == {"actor": 4 * (16 + 60) + 16, "reference": 4 * 60 + 2 * 60, "critic": 4 * 60}
    many = one | {"rollout": {"batch_size": 200, "max_response_tokens": 100}, "runtime": {}}
    kernels = {h.role: h.memory.kernels / 2**19 for h in holdings(on_cpu=True, **many)}
    assert kernels == {"actor": 1024, "reference": 6 * 124, "critic": 4 * 124}, "at most 1024"


def test_calls_by_hand() -> None:
    """Numbers of a token: 64 hidden; over tp 2 of queries 32, of keys and of values 8, of the feed-forward 64."""
    model, half = (Model(SHAPE, 2, dtype) for dtype in ("float32", "bfloat16"))
    mask = 10 * 4 * 12  # 4 query heads a key head
    assert cached_activations(model, Call(10, 0, 12)) == 10 * (2 * 64 + 64 + 3 * 64) * 4 + mask * 4, "kept beside all"
    narrow = Model({**SHAPE, "intermediate_size": 32}, 2, "float32")
    repeated = 48 + 32 + 8 + 3 * 32 + 2 * 32
    assert cached_activations(narrow, Call(10, 0, 4)) == 10 * (2 * 64 + repeated) * 4, "new tokens, without a mask"
    summed = 64 + 64  # the output, and its sum with the states
    assert cached_activations(Model(SHAPE, 8, "float32"), Call(10, 0, 12)) == 10 * (2 * 64 + summed) * 4 + mask * 4
    assert cached_activations(half, Call(10, 0, 12, draws=True)) == 10 * 2 * (2 * 64 + 64 + 3 * 64 + 12), "and a mask"
    assert cached_activations(half, Call(10, 0, 12, gathered=10**4)) == (
        10 * (2 * 64 * 2 + 48 * 2 + (32 + 8 + 3 * 32) * 2) + mask * (2 + 3 / 4) + 2 * 10**4 * 8 * 2
    )
    long = cached_activations(half, Call(10**4, 0, 10**4)) - cached_activations(half, Call(10**4, 0, 10**5))
    assert long == 0 < MASK_NUMBERS, "a mask is bounded"
    # hidden states of tokens and rows, a row's logits and two float32 copies; to draw, states of rows alone
    wide = Model({**SHAPE, "vocab_size": 96 * 64}, 2, "float32")
    hidden, logits = (1000 + 1000) * 64 * 4, 1000 * 48 * 64 * 4
    assert cached_activations(wide, Call(1000, 1000, 12)) == hidden + 3 * logits
    assert cached_activations(wide, Call(1000, 1000, 12, draws=True)) == hidden / 2 + 3 * logits, "itself, odds, their sum"
    warm = Call(1000, 1000, 12, draws=True, temperature=0.7)
    assert cached_activations(wide, warm) == hidden / 2 + 4 * logits, "and divided by the temperature"


def test_a_rank_takes_what_its_roles_hold_and_the_largest_of_what_they_compute_and_a_supervised_model_is_one_role() -> None:
    parts = [Memory(weights=1, packed=2, kernels=3, activations=30), Memory(weights=10, kernels=4, activations=20)]
    assert Memory.of_rank(parts) == Memory(weights=11, packed=2, kernels=4, activations=30)
    both = holdings(placement={"mode": "single"})
    assert rank_memory(both) == {0: Memory.of_rank([h.memory for h in both])}
    config = {"run_dir": "r", "tokenizer": {"path": "t"}, "data": {"path": "d"}, "model": {"init": SHAPE}}
    held = supervised_holdings(RewardModelConfig(**config, batch_size=9, parallel={"pp": 2, "dp": 2}), on_cpu=True)
    found = [(h.rank, h.role, h.coords.stage, h.coords.replica) for h in held]
    assert found == [(0, "model", 0, 0), (1, "model", 0, 1), (2, "model", 1, 0), (3, "model", 1, 1)]
    assert held[0].batches["rows a replica"] == "5" and held[0].memory.kv_cache == 0
    assert held[0].memory.weights == stage_parameters(SHAPE, 1, 2, 0, scalar=True) * 4
