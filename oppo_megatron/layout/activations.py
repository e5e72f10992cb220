"""Activation memory of a rank, counted from what the modules of `mcore` allocate on a GPU.  Pure.

Every formula is held to what the modules take on fake CUDA tensors (`tests/rehearsal/test_memory_plan.py`).  A CPU's kernels
take other amounts, of the same order.

Legend of sizes, in elements per token: `hidden`; `shard`, the hidden size or with sequence parallelism a tensor rank's part of
it; `query`, `key`, `ffn`, the sizes on one tensor rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from oppo_megatron.config.lora import LoraConfig
from oppo_megatron.config.model import TrainingLayoutConfig
from oppo_megatron.layout.layouts import Sizes, vocab_rows
from oppo_megatron.layout.memory import FP32, Shape
from oppo_megatron.layout.shape import DTYPE_BYTES, head_dim, num_kv_heads

MASK_NUMBERS = 2**25
"""Upper bound on the elements of an attention mask, for calls on a GPU that need one (`mcore/kv/call_parts.py`)."""
BLOCK_NUMBERS, CACHED_NUMBERS = 2**26, 2**17
"""The most logits that log-probs are made of at once (`mcore/vocab.py`): on a GPU enough that kernels are
few, on a CPU what its cache holds."""
DRAWN_BLOCK = 64
"""Sampled tokens are processed in blocks of this size (`engine/sampler.py`)."""


@dataclass(frozen=True)
class TrainingBatch:
    """Tokens of one packed micro-batch, and of all rows that a replica has in an optimizer step: both upper bounds.

    `answered`: the tokens whose outputs are computed, which belong to responses (None: possibly all).
    """

    micro_batch_tokens: int
    replica_tokens: int
    answered: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the largest micro-batch."""
        return min(self.micro_batch_tokens, self.replica_tokens)

    @property
    def rows(self) -> int:
        """The tokens whose outputs are computed."""
        return self.tokens if self.answered is None else min(self.tokens, self.answered)


@dataclass(frozen=True)
class Model:
    """A model as its modules compute with it on one tensor rank.

    `repeats_keys`: float32 on a GPU, whose attention knows no groups of heads.
    """

    shape: Shape
    tp: int
    dtype: str
    scalar: bool = False
    lora: LoraConfig | None = None
    on_cpu: bool = False

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
        return float(self.shape["intermediate_size"] / self.tp)

    @property
    def vocab(self) -> int:
        return vocab_rows(self.shape["vocab_size"], self.tp)

    @property
    def repeat(self) -> int:
        """Query heads a key head."""
        return int(self.shape["num_attention_heads"]) // num_kv_heads(self.shape)

    @property
    def block(self) -> int:
        """Logits that log-probs are made of at once."""
        return CACHED_NUMBERS if self.on_cpu else BLOCK_NUMBERS

    @property
    def one_group(self) -> bool:
        """A tensor rank has one key head: queries are then a view of their product with keys and values."""
        return num_kv_heads(self.shape) == self.tp

    @property
    def repeats_keys(self) -> bool:
        return not self.on_cpu and self.dtype == "float32" and self.repeat > 1

    def kept_of_layer(self, train: TrainingLayoutConfig) -> tuple[float, float]:
        """Elements per token in one layer: all that a backward pass needs, and the ones kept until then.

        Inputs and outputs of both norms; the rotated queries and keys, the values, the attention's output as computed and as
        joined; gate, up and their product.  Norms of queries and keys keep the product that the values are a view of.  With
        frozen weights, only products with adapters keep their inputs.
        """
        shard, targets = self.shard(train), set(_ALL) if self.lora is None else set(self.lora.projections)
        attention = shard * bool(targets & _ATTENTION) + self.query * ("o_proj" in targets)
        outside = 2 * shard + shard * bool(targets & _GATES) + 2 * self.ffn + self.ffn * ("down_proj" in targets)
        if self.shape["model_type"] == "qwen3":
            outside += self.query + 2 * self.key + (0 if self.one_group else self.query)
        if self.lora is not None:
            outside += self.lora.rank * len(targets)
        inside = 2 * self.query + 2 * (self.query if self.repeats_keys else self.key)
        given = self.query + 2 * self.key
        whole = attention + outside + inside
        kept = {"none": whole, "selective": attention + outside + given, "full": float(shard)}[train.recompute]
        return whole, kept

    def shard(self, train: TrainingLayoutConfig) -> float:
        return self.hidden / (self.tp if train.sequence_parallel else 1)

    def backward_of_layer(self, train: TrainingLayoutConfig, tokens: int) -> float:
        """Peak bytes of the backward pass through a feed-forward, in addition to the kept activations.

        The gradient of the layer's output and, in turn, the gradients of the product and its weights; of gate and up; of the
        input and the weights of gate and up, after the tensors that these needed are freed.
        """
        shard, gathered = self.shard(train), self.hidden if train.sequence_parallel else 0
        weights = 0.0 if self.lora is not None else self.hidden * self.ffn
        own = self.ffn if self.lora is None or "down_proj" in self.lora.projections else 0
        down = tokens * (shard + gathered + self.ffn) + weights
        gates = tokens * (shard + 4 * self.ffn - own)
        up = tokens * (shard + self.hidden - own) + 2 * weights
        return max(down, gates, up) * self.width

    def loss(self, rows: int) -> float:
        """Bytes that the last stage holds, without the layers' kept activations, from the final norm to the gradient of the
        hidden states.

        For each row: the hidden state, logits and their gradient, as computed, and float32 blocks of these; with a scalar
        head, the hidden state and its gradient in float32.
        """
        if self.scalar:
            rounded = 0 if self.width == FP32 else self.width
            return float(rows * self.hidden * (2 * FP32 + rounded))
        logits, hidden = rows * self.vocab, rows * self.hidden * self.width
        weights = 0 if self.lora is not None else self.vocab * self.hidden
        in_blocks = logits * 2 * self.width + 2 * min(logits, self.block) * FP32
        return float(hidden + max(in_blocks, (logits + weights) * self.width + hidden))


_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ATTENTION, _GATES = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}


def kept_activations(
    model: Model, sizes: Sizes, stage: int, train: TrainingLayoutConfig, batch: TrainingBatch
) -> float:
    """Bytes that forward passes keep for their backward passes at once, loss apart: an upper bound.

    Each keeps its layers' part (`kept_of_layer`), the stage's input, and the rotary angles of its tokens.
    """
    return _tokens_in_flight(sizes, stage, batch) * _kept_of_token(model, sizes, train)


def _tokens_in_flight(sizes: Sizes, stage: int, batch: TrainingBatch) -> int:
    """1F1B has at most pp - stage micro-batches in flight, and no more tokens than the minibatch.  Interleaved it has
    2 (pp - stage - 1) + (vpp - 1) pp + 1 of one virtual stage each, of micro-batches that are padded to one size, and to a
    multiple of pp."""
    if sizes.vpp == 1:
        return min((sizes.pp - stage) * batch.tokens, batch.replica_tokens)
    in_flight = 2 * (sizes.pp - stage - 1) + (sizes.vpp - 1) * sizes.pp + 1
    count = -(-batch.replica_tokens // (batch.micro_batch_tokens * sizes.pp)) * sizes.pp
    return min(in_flight, sizes.vpp * count) * batch.tokens


def _kept_of_token(model: Model, sizes: Sizes, train: TrainingLayoutConfig) -> float:
    """Bytes, in the layers of one (virtual) stage."""
    layers, (_, kept) = model.shape["num_hidden_layers"] // (sizes.pp * sizes.vpp), model.kept_of_layer(train)
    return float((layers * kept + model.shard(train)) * model.width + 2 * head_dim(model.shape) * FP32)


def training_activations(
    model: Model, sizes: Sizes, stage: int, train: TrainingLayoutConfig, batch: TrainingBatch
) -> float:
    """Bytes that an update holds at once, at the most: what is kept, and the loss, or a layer whose backward pass is under
    way.

    With `recompute: full` that layer has been computed again.  At the end of a micro-batch's backward pass nothing is left of
    it but the gradient of the embeddings, on the first stage where these are trained, and its own way in and out.
    """
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
    of_embeddings = (model.vocab * model.hidden + of_tokens) * model.width
    return max(held + max(of_layer, of_loss), others + of_embeddings)


@dataclass(frozen=True)
class Call:
    """A cached call: new tokens of any number of sequences, and the rows of them whose logits are made.

    `context`: the longest sequence; `gathered`: positions of all sequences that a layer's attention has copied, which a paged
    cache without a kernel of its own makes it do.  `draws`: tokens are drawn from the logits, by `copies` tensors like them.
    """

    tokens: int
    rows: int
    context: int
    gathered: int = 0
    draws: bool = False
    temperature: float = 1.0


def cached_activations(model: Model, call: Call) -> float:
    """Bytes that a decode step or a prefill micro-batch holds at most.

    For each token: the stage's input and the hidden state, and in turn queries, keys and values and their rotation in float32;
    attention, with its mask; the feed-forward.  Then the rows' hidden states and logits, in float32 and as computed.
    """
    return max(_in_layers(model, call), _of_logits(model, call))


def _in_layers(model: Model, call: Call) -> float:
    width, product = model.width, model.query + 2 * model.key
    rotating = (model.query + model.key) * (2 * FP32 + width)
    attending = (model.query + model.key + 3 * model.query) * width
    gathered = 2 * call.gathered * model.key * width
    kept, mask, repeated = _beside_attention(model, call)
    attention = call.tokens * product * width + max(call.tokens * rotating, call.tokens * attending + mask + gathered)
    fresh = call.tokens * (product * width + max(rotating, attending + repeated)) + gathered
    adapted = set() if model.lora is None else set(model.lora.projections)
    gates = 6 if adapted & _GATES else 3  # gate and up, and what adapters add to them, and the sum; or silu's result
    own, down, joined = (model.hidden * (3 if name in adapted else 1) for name in ("", "down_proj", "o_proj"))
    feed_forward = call.tokens * max(own + gates * model.ffn, down + 3 * model.ffn) * width
    leaving = call.tokens * (product + model.query + joined) * width
    if model.shape["model_type"] == "qwen3":  # product, its queries and keys as normed, and all of these side by side
        leaving = max(leaving, call.tokens * (2 * product + model.query + model.key) * width)
    return float(call.tokens * 2 * model.hidden * width + max(kept + max(attention, leaving, feed_forward), fresh))


def _beside_attention(model: Model, call: Call) -> tuple[float, float, float]:
    """Bytes kept from layer to layer and bytes made in each, for continuing tokens; and for a new token, the keys and values
    that are repeated for each query head.

    When masks are made of as many tokens as their bound allows, the others may be new.
    """
    repeated = 2 * model.query * model.width if model.repeats_keys else 0.0
    if call.draws:
        return 0.0, call.tokens * repeated, 0.0
    kept, mask = _mask(model, call)
    numbers = call.tokens * model.repeat * call.context
    beyond = 0.0 if numbers <= MASK_NUMBERS else 1 - MASK_NUMBERS / numbers
    return kept, mask + beyond * call.tokens * repeated, repeated


def _mask(model: Model, call: Call) -> tuple[float, float]:
    """For continuing tokens: bytes kept from layer to layer, and bytes made in each or in the first.

    On a CPU each sequence has a mask for all heads.  On a GPU each query head of a group has one, made from a common mask and
    from bits; all are kept if they are small together, as masks of a few tokens among new ones may be.
    """
    if model.on_cpu:
        return float(call.tokens * call.context * model.width), 0.0
    bounded = min(MASK_NUMBERS, call.tokens * model.repeat * call.context)
    made = (model.width + 1) / model.repeat if model.repeat > 1 else 1
    return float(bounded * model.width), bounded * made


def _of_logits(model: Model, call: Call) -> float:
    """In addition to the stage's input and the rows' hidden states, which are let go before log-probs are made, or tokens
    drawn."""
    rounded = 0 if model.width == FP32 else model.width
    logits, hidden = call.rows * model.vocab, (call.tokens + call.rows) * model.hidden * model.width
    if model.scalar:
        return float(hidden + call.rows * model.hidden * FP32)
    made = hidden + logits * (FP32 + rounded)
    if call.draws:
        padded = model.vocab % DRAWN_BLOCK > 0
        copies = 1 + (call.temperature not in (0.0, 1.0)) + padded + (model.tp > 1)
        return float(max(made, logits * FP32 * (1 + copies)))
    return float(max(made, logits * FP32 + 2 * min(logits, model.block) * FP32))
