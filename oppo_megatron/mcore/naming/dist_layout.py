"""megatron-core's names of parameters in a `dist_checkpointing` checkpoint, mapped to the modules' own names.

Layers of one kind are stacked: `decoder.layers.mlp.linear_fc2.weight` has all of them, its first dimension counts them.  Newer
checkpoints may give each its own (`decoder.layers.7...`).  Either way a tensor is whole: the shards of tensor ranks
follow each other, and all of gate comes before up.  Norms are named as transformer-engine fuses them into the
product behind them; NeMo-Aligner calls a scalar head `rm_head`.  Pure.
"""

from __future__ import annotations

LAYERS = "decoder.layers."
HEAD = "output_layer.weight"
ALIGNER_HEAD, ALIGNER_BIAS = "rm_head.weight", "rm_head.bias"
_RENAMED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
NO_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state", "opt_param_scheduler")
"""How keys begin that are not the model's."""


def saved_names(param: str) -> tuple[tuple[str, int | None], ...]:
    """The keys under which a parameter may lie, and for a stacked one the number of its layer."""
    if not param.startswith(LAYERS):
        return ((param, None),)
    number, _, name = param.removeprefix(LAYERS).partition(".")
    for ours, saved in _RENAMED.items():
        if name.startswith(ours):
            name = saved + name.removeprefix(ours)
    return (f"{LAYERS}{name}", int(number)), (f"{LAYERS}{number}.{name}", None)


def is_weight(key: str) -> bool:
    """Whether a key of the model is a parameter's: `_extra_state` is of transformer-engine's FP8."""
    return not key.startswith(NO_WEIGHTS) and not key.endswith("_extra_state") and "._extra_state" not in key
