"""The layout of Hugging Face tensors on tensor- and pipeline-parallel ranks, against another way of cutting them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from oppo_megatron.errors import CheckpointError, ConfigError
from oppo_megatron.layout.hf_layout import EMBEDDING, LM_HEAD, hf_tensors, stage_parts
from oppo_megatron.layout.shape import ModelShape
from oppo_megatron.mcore.weights.hf_source import RandomSource, SafetensorsSource, read_shape
from oppo_megatron.mcore.weights.hf_weights import load_weights, put_part, take_part
from tests.support.hf import save_tiny, tiny_config

LAYOUTS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]
MODELS = {
    "qwen2": ("qwen2", {}), "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}), "llama": ("llama", {}),
    "llama-tied-mha": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 8}), "qwen3": ("qwen3", {}),
}  # fmt: skip


class Params(torch.nn.Module):
    """A module with parameters of the given dotted names."""

    def __init__(self, params: dict[str, Tensor]):
        super().__init__()
        for name, tensor in params.items():
            owner: torch.nn.Module = self
            *path, leaf = name.split(".")
            for step in path:
                if step not in owner._modules:
                    owner.add_module(step, torch.nn.Module())
                owner = owner._modules[step]
            owner.register_parameter(leaf, torch.nn.Parameter(tensor))


def cut_by_hand(
    state: dict[str, Tensor], config, head: str, tp_rank: int = 0, tp_size: int = 1, pp_rank: int = 0, pp_size: int = 1
) -> dict[str, Tensor]:
    """One rank's parameters from a state dict: reshape by groups, concatenate, chunk."""
    groups = config.num_key_value_heads

    def mine(tensor: Tensor, dim: int = 0) -> Tensor:
        return tensor.chunk(tp_size, dim)[tp_rank]

    def qkv(prefix: str, kind: str) -> Tensor:
        q, k, v = (state[f"{prefix}self_attn.{x}_proj.{kind}"] for x in "qkv")
        columns = q.shape[1:]
        by_group = [x.reshape(groups, x.shape[0] // groups, *columns) for x in (q, k, v)]
        return mine(torch.cat(by_group, dim=1)).reshape(-1, *columns)

    out: dict[str, Tensor] = {}
    if pp_rank == 0:
        out["embedding.word_embeddings.weight"] = mine(state["model.embed_tokens.weight"])
    per_stage = config.num_hidden_layers // pp_size
    for local in range(per_stage):
        hf, ours = f"model.layers.{pp_rank * per_stage + local}.", f"decoder.layers.{local}."
        out[f"{ours}input_layernorm.weight"] = state[f"{hf}input_layernorm.weight"]
        out[f"{ours}self_attention.linear_qkv.weight"] = qkv(hf, "weight")
        if config.model_type == "qwen2":
            out[f"{ours}self_attention.linear_qkv.bias"] = qkv(hf, "bias")
        if config.model_type == "qwen3":
            out[f"{ours}self_attention.q_layernorm.weight"] = state[f"{hf}self_attn.q_norm.weight"]
            out[f"{ours}self_attention.k_layernorm.weight"] = state[f"{hf}self_attn.k_norm.weight"]
        out[f"{ours}self_attention.linear_proj.weight"] = mine(state[f"{hf}self_attn.o_proj.weight"], 1)
        out[f"{ours}pre_mlp_layernorm.weight"] = state[f"{hf}post_attention_layernorm.weight"]
        gate, up = state[f"{hf}mlp.gate_proj.weight"], state[f"{hf}mlp.up_proj.weight"]
        out[f"{ours}mlp.linear_fc1.weight"] = torch.cat([mine(gate), mine(up)])
        out[f"{ours}mlp.linear_fc2.weight"] = mine(state[f"{hf}mlp.down_proj.weight"], 1)
    if pp_rank == pp_size - 1:
        out["decoder.final_layernorm.weight"] = state["model.norm.weight"]
        if head == "scalar":
            out["output_layer.weight"] = state["score.weight"]
        elif not config.tie_word_embeddings:
            out["output_layer.weight"] = mine(state["lm_head.weight"])
        elif pp_size > 1:
            out["output_layer.weight"] = mine(state["model.embed_tokens.weight"])
    return out


def places(tp: int, pp: int) -> list[dict[str, int]]:
    return [{"tp_rank": t, "tp_size": tp, "pp_rank": p, "pp_size": pp} for p in range(pp) for t in range(tp)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def get(model: str, head: str):
        directory = tmp_path_factory.mktemp("hf") / f"{model}-{head}"
        family, changes = MODELS[model]
        return directory, save_tiny(directory, family, head, max_shard_size="40KB", **changes)

    return get


@pytest.mark.parametrize("tp,pp", LAYOUTS)
@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("model", MODELS)
def test_every_rank_loads_its_own_cut_and_gives_it_back(saved, model: str, head: str, tp: int, pp: int) -> None:
    directory, hf = saved(model, head)
    state = hf.state_dict()
    shape, source = read_shape(directory), SafetensorsSource(directory)
    gathered: dict[str, list[Tensor]] = {}
    for place in places(tp, pp):
        expected = cut_by_hand(state, hf.config, head, **place)
        module = Params({name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()})
        load_weights(module, shape, source, head=head, **place)
        for name, param in module.named_parameters():
            assert torch.equal(param, expected[name]), name
        for part in stage_parts(shape, head, tp_size=tp, pp_rank=place["pp_rank"], pp_size=pp):
            share = take_part(dict(module.named_parameters())[part.param].detach(), part)
            assert torch.equal(share, state[part.hf_name][part.share(place["tp_rank"], tp)]), part.hf_name
            gathered.setdefault(part.hf_name, []).append(share)
    assert gathered.keys() == {name for name in state if not (name == "lm_head.weight" and hf.config.tie_word_embeddings)}


def test_a_rank_reads_no_more_than_its_own_share_and_casts_it(saved) -> None:
    directory, hf = saved("qwen2", "lm")
    source = SafetensorsSource(directory)
    read, sizes = source.read, []

    def counted(name: str, region: tuple[slice, ...]) -> Tensor:
        tensor = read(name, region)
        sizes.append(tensor.numel())
        return tensor

    source.read = counted
    place = {"tp_rank": 1, "tp_size": 4, "pp_rank": 1, "pp_size": 2}
    params = cut_by_hand(hf.state_dict(), hf.config, "lm", **place)
    module = Params({name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in params.items()})
    load_weights(module, read_shape(directory), source, head="lm", **place)
    assert sum(sizes) == sum(tensor.numel() for tensor in params.values())
    assert all(torch.equal(param, params[name].bfloat16()) for name, param in module.named_parameters())


@pytest.mark.parametrize("change", ["unknown", "absent", "shape"])
def test_a_model_that_is_not_of_the_shape_is_refused(saved, change: str) -> None:
    directory, hf = saved("llama", "lm")
    params = {name: torch.zeros_like(t) for name, t in cut_by_hand(hf.state_dict(), hf.config, "lm").items()}
    wrong = "decoder.layers.0.mlp.linear_fc2.weight"
    if change == "unknown":
        wrong = "decoder.layers.0.mlp.router.weight"
        params[wrong] = torch.zeros(2)
    elif change == "absent":
        del params[wrong]
    else:
        params[wrong] = torch.zeros(3, 3)
    with pytest.raises(CheckpointError, match=wrong.replace(".", r"\.")):
        load_weights(Params(params), read_shape(directory), SafetensorsSource(directory), head="lm")


def test_random_weights_do_not_depend_on_the_layout() -> None:
    shape = ModelShape.from_hf(tiny_config("qwen2").to_dict())
    source = RandomSource(shape, seed=7, head="lm")
    whole = {name: source.read(name, tuple(slice(0, n) for n in size)) for name, size in hf_tensors(shape, "lm").items()}
    for place in [place for layout in LAYOUTS for place in places(*layout)]:
        expected = cut_by_hand(whole, tiny_config("qwen2"), "lm", **place)
        module = Params({name: torch.empty_like(tensor) for name, tensor in expected.items()})
        load_weights(module, shape, RandomSource(shape, seed=7, head="lm"), head="lm", **place)
        assert all(torch.equal(param, expected[name]) for name, param in module.named_parameters())


def test_random_weights_have_the_distribution_of_the_config_and_differ_by_name_and_seed() -> None:
    shape = ModelShape.from_hf(tiny_config("qwen2", initializer_range=0.5, vocab_size=4096).to_dict())

    def read(name: str, seed: int = 7) -> Tensor:
        source = RandomSource(shape, seed, "scalar")
        return source.read(name, tuple(slice(0, n) for n in source.tensors[name].shape))

    embedding = read("model.embed_tokens.weight")
    assert embedding.std().item() == pytest.approx(0.5, rel=0.02) and embedding.mean().item() == pytest.approx(0.0, abs=0.01)
    assert torch.equal(read("model.norm.weight"), torch.ones(32))
    assert torch.equal(read("model.layers.0.self_attn.q_proj.bias"), torch.zeros(32))
    assert read("score.weight").abs().min() > 0
    q_0, q_1 = (read(f"model.layers.{i}.self_attn.q_proj.weight") for i in (0, 1))
    assert not torch.equal(q_0, q_1) and not torch.equal(embedding, read("model.embed_tokens.weight", seed=8))
    # A pinned value: a change of the keying would silently change every run that starts from random weights.
    shape = ModelShape.from_hf(tiny_config("llama").to_dict())
    first = RandomSource(shape, 1234, "lm").read("model.embed_tokens.weight", (slice(0, 1), slice(0, 3)))
    assert first[0].tolist() == pytest.approx([0.0217510983, -0.0128830690, -0.0124224387], abs=1e-9)


def test_sizes_that_do_not_divide_are_all_named() -> None:
    shape = ModelShape.from_hf(tiny_config("llama", intermediate_size=66).to_dict())
    assert stage_parts(shape, "lm", tp_size=2, pp_size=2)
    named = "num_key_value_heads = .*\n  - intermediate_size = 66 does not divide by tp = 8.*\n  - num_hidden_layers = "
    with pytest.raises(ConfigError, match=named) as refused:
        stage_parts(shape, "lm", tp_size=8, pp_size=3)
    assert len(refused.value.problems) == 3


@pytest.mark.parametrize(("multiple", "tp", "rows"), [(1, 4, 17), (4, 1, 68), (4, 2, 34), (6, 4, 18), (1, 1, 67)])
def test_tensor_ranks_share_a_vocabulary_that_they_do_not_divide(multiple: int, tp: int, rows: int) -> None:
    shape = replace(ModelShape.from_hf(tiny_config("llama", vocab_size=67).to_dict()), vocab_multiple=multiple)
    parts = {part.hf_name: part for part in stage_parts(shape, "lm", tp_size=tp)}
    for name in (EMBEDDING, LM_HEAD):
        part, tensor, param = parts[name], torch.randn(67, 32), torch.full((rows, 32), 9.0)
        found = []
        for rank in range(tp):
            put_part(param, part, tensor[part.share(rank, tp)])
            found.append(take_part(param, part))
        assert torch.equal(torch.cat(found)[:67], tensor) and not torch.cat(found)[67:].any()
