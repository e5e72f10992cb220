"""Upper bounds of a rank's activation memory in `mcore`, checked on fake CUDA tensors. Sizes are elements per token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from oppo_megatron.config.model import LoraConfig, TrainingLayoutConfig
from oppo_megatron.layout.experts import experts_of, ffn_width
from oppo_megatron.layout.families import composes_attention, is_tied, traits
from oppo_megatron.layout.layouts import Sizes, vocab_rows
from oppo_megatron.layout.memory import FP32, table_bytes
from oppo_megatron.layout.shape import DTYPE_BYTES, Shape, head_dim, num_kv_heads

MASK_NUMBERS = 2**25
"""Most elements of an attention mask on a GPU (`mcore/kv/cached_plan.py`)."""
SLICE_NUMBERS, CACHED_NUMBERS = 2**26, 2**17
"""Most logits that log-probs make at once (`mcore/vocab.py`), and of a block in a CPU's cache."""
SLICE_MULTIPLE = 128
COMPOSED_NUMBERS = 2**24
"""Most logits of attention that are computed at once under a soft cap or sinks without a kernel (`mcore/attention.py`)."""
PIECE = 128
"""Queries of a masked piece whose keys are not bounded by a window (`mcore/attention.py`)."""
DRAWN_BLOCK = 64
"""Block size of sampling (`engine/sampler.py`)."""


def slice_width(rows: int, vocab: int) -> int:
    """Return the tokens of the vocabulary whose logits are made at once, in slices of about the same width."""
    slices = max(1, -(-rows * vocab // SLICE_NUMBERS))
    return -(-vocab // (slices * SLICE_MULTIPLE)) * SLICE_MULTIPLE


@dataclass(frozen=True)
class TrainingBatch:
    """Tokens of a micro-batch and of a replica's optimizer step. `answered`: those with outputs (None: possibly all)."""

    micro_batch_tokens: int
    replica_tokens: int
    answered: int | None = None

    def shared(self, cp: int) -> TrainingBatch:
        """Return the part of one of `cp` ranks, which may have all rows."""
        return replace(self, micro_batch_tokens=ceil(self.micro_batch_tokens / cp), replica_tokens=ceil(self.replica_tokens / cp))

    @property
    def tokens(self) -> int:
        return min(self.micro_batch_tokens, self.replica_tokens)

    @property
    def rows(self) -> int:
        return self.tokens if self.answered is None else min(self.tokens, self.answered)


@dataclass(frozen=True)
class Model:
    shape: Shape
    tp: int
    dtype: str
    scalar: bool = False
    lora: LoraConfig | None = None
    on_cpu: bool = False
    ep: int = 1

    @property
    def width(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def hidden(self) -> int:
        return int(self.shape["hidden_size"])

    @property
    def query(self) -> float:
        return float(self.shape["num_attention_heads"] * head_dim(self.shape) / self.tp)

    @property
    def key(self) -> float:
        return float(num_kv_heads(self.shape) * head_dim(self.shape) / self.tp)

    @property
    def ffn(self) -> float:
        return float(ffn_width(self.shape, active=True) / self.tp)

    @property
    def experts(self) -> float:
        """Experts of a token on this rank, evenly chosen; 0 without any."""
        experts = experts_of(self.shape)
        return 0.0 if experts is None else experts.active / self.tp

    @property
    def vocab(self) -> int:
        return vocab_rows(self.shape["vocab_size"], self.tp)

    @property
    def repeat(self) -> int:
        return int(self.shape["num_attention_heads"]) // num_kv_heads(self.shape)

    @property
    def repeats_keys(self) -> bool:
        return not self.on_cpu and self.dtype == "float32" and self.repeat > 1 and not composes_attention(self.shape)

    def kept_of_layer(self, train: TrainingLayoutConfig) -> tuple[float, float]:
        """Elements of a layer that a backward pass needs, and those kept until then.

        Inputs and outputs of norms; rotated queries and keys, values, attention's output; gate, up and their product. Norms
        of queries and keys also keep the product that values are a view of. Frozen products keep no inputs. Experts also keep
        their product without the router's weight and, unless frozen, a copy of their input.
        """
        shard, targets = self.shard(train), set(_ALL) if self.lora is None else set(self.lora.projections)
        attention = shard * bool(targets & _ATTENTION) + self.query * ("o_proj" in targets)
        outside = (len(traits(self.shape).norms) + bool(targets & _GATES)) * shard
        outside += 2 * self.ffn + self.ffn * ("down_proj" in targets)
        outside += self.experts * self.hidden * (self.lora is None) + (self.ffn if self.experts else 0)
        if traits(self.shape).qk_norm:
            outside += self.query + 2 * self.key + (0 if num_kv_heads(self.shape) == self.tp else self.query)
        if self.lora is not None:
            outside += self.lora.rank * len(targets)
        seen = 1.0 if train.cp == 1 else train.cp + 0.5  # both stretches' keys, of the tokens of all ranks
        inside = 2 * self.query + 2 * seen * (self.query if self.repeats_keys else self.key)
        given = self.query + 2 * self.key
        whole = attention + outside + inside
        kept = {"none": whole, "selective": attention + outside + given, "full": float(shard)}[train.recompute]
        return whole, kept

    def shard(self, train: TrainingLayoutConfig) -> float:
        """Hidden size, or a tensor rank's part of it with sequence parallelism."""
        return self.hidden / (self.tp if train.sequence_parallel else 1)

    def backward_of_layer(self, train: TrainingLayoutConfig, tokens: int) -> float:
        """Peak bytes of a feed-forward's backward, beyond kept activations."""
        shard, gathered = self.shard(train), self.hidden if train.sequence_parallel else 0
        weights = 0.0 if self.lora is not None else self.hidden * self.ffn
        own = self.ffn if self.lora is None or "down_proj" in self.lora.projections else 0
        pairs, experts = self.experts * self.hidden, experts_of(self.shape)
        if experts is not None:
            weights *= experts.count / experts.active / self.ep
        down = tokens * (shard + gathered + self.ffn + pairs) + weights
        gates = tokens * (shard + (6 if experts is not None and experts.clamp else 4) * self.ffn - own)
        up = tokens * (shard + self.hidden - own + pairs) + 2 * weights
        sums = 0 if experts is None else tokens * (shard + pairs + experts.active * self.hidden)
        norms = 5 * tokens * shard * FP32 if traits(self.shape).norm_offset else 0
        attention = 0.0
        if train.cp > 1:  # gradients of gathered keys and values: of both stretches, and of all tokens with their sum
            attention = tokens * 2 * (self.query + (3 * train.cp + 0.5) * self.key)
            again = 0 if train.recompute == "none" else tokens * 2 * (train.cp + 0.5) * self.key
            ring = tokens * ((train.cp + 4 * bool(again)) * self.query + 2 * self.key) + again  # outputs of all parts
            attention = max(attention + again, 0 if self.on_cpu else ring)
            masks = PIECE if self.on_cpu else tokens if self.dtype == "float32" else 0  # for each position of a sequence
            attention += masks * tokens * train.cp
        return max(max(down, gates, up, sums, attention) * self.width, norms, self.composed(tokens, tokens, made=6))

    def composed(self, tokens: int, context: int, made: int = 3) -> float:
        """Bytes of attention's logits without a kernel that takes soft caps or sinks, `made` float32 numbers each."""
        if not composes_attention(self.shape):
            return 0.0
        return made * FP32 * min(self.query / head_dim(self.shape) * tokens * context, COMPOSED_NUMBERS)

    def loss(self, rows: int) -> float:
        """Bytes from the final norm to the gradient of hidden states."""
        if self.scalar:
            rounded = 0 if self.width == FP32 else self.width
            return float(rows * self.hidden * (2 * FP32 + rounded))
        hidden, weights = rows * self.hidden, 0 if self.lora is not None else self.vocab * self.hidden
        gradients = hidden * FP32 + weights * self.width
        return float(hidden * self.width + gradients + max(self.log_probs(rows), 2 * hidden * self.width))

    def log_probs(self, rows: int) -> int:
        """Bytes of a slice's logits, and two float32 copies of what is computed at once."""
        logits = rows * min(self.vocab, slice_width(rows, self.vocab))
        return logits * self.width + 2 * (min(logits, CACHED_NUMBERS) if self.on_cpu else logits) * FP32


_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ATTENTION, _GATES = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}


def kept_activations(model: Model, sizes: Sizes, stage: int, train: TrainingLayoutConfig, batch: TrainingBatch) -> float:
    """Bytes that forward passes keep at once, without the loss.

    1F1B has at most pp - stage micro-batches in flight; interleaved, 2 (pp - stage - 1) + (vpp - 1) pp + 1 virtual stages'
    micro-batches, padded to one size and to a multiple of pp.
    """
    tokens = min((sizes.pp - stage) * batch.tokens, batch.replica_tokens)
    if sizes.vpp > 1:
        in_flight = 2 * (sizes.pp - stage - 1) + (sizes.vpp - 1) * sizes.pp + 1
        count = -(-batch.replica_tokens // (batch.micro_batch_tokens * sizes.pp)) * sizes.pp
        tokens = min(in_flight, sizes.vpp * count) * batch.tokens
    return tokens * _kept_of_token(model, sizes, train)


def _kept_of_token(model: Model, sizes: Sizes, train: TrainingLayoutConfig) -> float:
    layers, (_, kept) = model.shape["num_hidden_layers"] // (sizes.pp * sizes.vpp), model.kept_of_layer(train)
    return float((layers * kept + model.shard(train)) * model.width + table_bytes(model.shape, 1))


def training_activations(model: Model, sizes: Sizes, stage: int, train: TrainingLayoutConfig, batch: TrainingBatch) -> float:
    """Bytes of an update. The first stage ends with the gradient of the embeddings, which tied ones add to their head's."""
    whole, kept = model.kept_of_layer(train)
    of_layer = model.backward_of_layer(train, batch.tokens)
    if train.recompute == "full":
        of_layer += batch.tokens * (whole - kept) * model.width
    of_loss = model.loss(batch.rows) if stage == sizes.pp - 1 else 0.0
    held = kept_activations(model, sizes, stage, train, batch)
    if stage > 0 or model.lora is not None:
        return held + max(of_layer, of_loss)
    others = held - batch.tokens * _kept_of_token(model, sizes, train)
    of_tokens = batch.tokens * (model.hidden + 2 * model.shard(train))
    of_weights = model.vocab * model.hidden * model.width
    waiting = of_weights if sizes.pp == 1 and not model.scalar and is_tied(model.shape) else 0
    return max(held + max(of_layer + waiting, of_loss), others + waiting + of_weights + of_tokens * model.width)


@dataclass(frozen=True)
class Call:
    """`rows`: tokens with logits; `context`: longest sequence; `gathered`: positions that a paged cache copies."""

    tokens: int
    rows: int
    context: int
    gathered: int = 0
    draws: bool = False
    temperature: float = 1.0


def cached_activations(model: Model, call: Call) -> float:
    """Bytes of a decode step or a prefill micro-batch."""
    return max(_in_layers(model, call), _of_logits(model, call))


def _in_layers(model: Model, call: Call) -> float:
    width, product = model.width, model.query + 2 * model.key
    rotating = (model.query + model.key) * (2 * FP32 + width)
    attending = (model.query + model.key + 3 * model.query) * width
    gathered = 2 * call.gathered * model.key * width
    kept, mask, repeated = _attention_extras(model, call)
    attention = call.tokens * product * width + max(call.tokens * rotating, call.tokens * attending + mask + gathered)
    fresh = call.tokens * (product * width + max(rotating, attending + repeated)) + gathered
    adapted = set() if model.lora is None else set(model.lora.projections)
    gates = 6 if adapted & _GATES else 3  # gate and up, and what adapters add to them, and the sum; or silu's result
    own, down, joined = (model.hidden * (3 if name in adapted else 1) for name in ("", "down_proj", "o_proj"))
    summed = 2 * model.hidden  # the output, and its sum with the states
    feed_forward = call.tokens * max(own + gates * model.ffn, down + 3 * model.ffn, summed) * width
    if (experts := experts_of(model.shape)) is not None:  # the host does not wait to leave out pairs of other ranks
        inputs, ffn = experts.active * model.hidden, model.ffn * model.tp
        clamped = 5 * ffn + model.hidden if experts.clamp else 0.0
        feed_forward = call.tokens * (model.hidden + max(inputs + 3 * ffn, 2 * inputs, clamped)) * width
    leaving = call.tokens * (product + model.query + joined) * width
    if traits(model.shape).qk_norm:  # product, normed queries and keys, and all concatenated
        leaving = max(leaving, call.tokens * (2 * product + model.query + model.key) * width)
    held = 2  # states that enter the stage, and a layer
    return float(call.tokens * held * model.hidden * width + max(kept + max(attention, leaving, feed_forward), fresh))


def _attention_extras(model: Model, call: Call) -> tuple[float, float, float]:
    """Bytes kept across layers, made in each, and of a new token's repeated keys and values."""
    repeated = 2 * model.query * model.width if model.repeats_keys else 0.0
    composed = model.composed(call.tokens, call.context)
    if call.draws:  # a mask for all layers, if no kernel reads the cache
        kept = 0.0 if model.on_cpu else float(call.tokens * call.context * model.width)
        return kept, call.tokens * repeated + composed, 0.0
    numbers = call.tokens * model.repeat * call.context
    beyond = 0.0 if numbers <= MASK_NUMBERS else 1 - MASK_NUMBERS / numbers
    if model.on_cpu:  # a mask per sequence
        kept, mask = float(call.tokens * call.context * model.width), composed
    else:  # a mask per query head of a group, made in each layer or the first
        bounded = min(MASK_NUMBERS, numbers)
        made = (model.width + 1) / model.repeat if model.repeat > 1 else 1
        kept, mask = float(bounded * model.width), bounded * made + composed
    return kept, mask + beyond * call.tokens * repeated, repeated


def _of_logits(model: Model, call: Call) -> float:
    hidden = (call.tokens + call.rows) * model.hidden * model.width
    if model.scalar:
        return float(hidden + call.rows * model.hidden * FP32)
    if not call.draws:
        return float(hidden + model.log_probs(call.rows))
    logits, rounded = call.rows * model.vocab, 0 if model.width == FP32 else model.width
    padded = model.vocab % DRAWN_BLOCK > 0
    copies = 1 + (call.temperature not in (0.0, 1.0)) + padded + (model.tp > 1)
    drawn = call.rows * model.hidden * model.width + logits * FP32 * (1 + copies)
    return float(max(hidden + logits * (FP32 + rounded), drawn))
