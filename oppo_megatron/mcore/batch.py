"""Packed micro-batches.  Legend: T packed tokens, R rows of interest (positions whose output counts)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from oppo_megatron.mcore.context import SequenceShare
from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.groups import RoleGroups
from oppo_megatron.schedule.packing import pack_by_tokens

Answered = tuple[Sequence[int], Sequence[int]]
Family = tuple[Sequence[int], Sequence[Sequence[int]]]
"""A prompt and the responses that share it."""


@dataclass
class MicroBatch:
    """`index`: in the batch; `rows_R`: packed positions of outputs; `targets_R`: next tokens; `counts`: rows per response.

    `rows`: `rows_R` on the host.  `routes`: of each row the experts that drew its target (`mcore.experts.replay`); none: the
    model chooses.  `prefixes`: sequence -> the packed sequence that it continues; responses of a shared prompt also share its
    last row.  With a `share` of the sequences, `tokens_T`, `rows_R` and `routes` are this rank's.
    """

    index: list[int]
    lengths: list[int]
    tokens_T: Tensor
    rows_R: Tensor
    targets_R: Tensor
    tokens: Sequence[int] = ()
    counts: Sequence[int] = ()
    extra: dict[str, Tensor] = field(default_factory=dict)
    routes: Sequence[str] = ()
    rows: Sequence[int] = ()
    prefixes: Mapping[int, int] = field(default_factory=dict)
    share: SequenceShare | None = None

    @classmethod
    def dummy(cls, device: torch.device) -> MicroBatch:
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        return cls([], [1], zero, zero, zero, rows=[0])

    @property
    def is_dummy(self) -> bool:
        return not self.index

    def shared_by(self, groups: RoleGroups, multiple: int) -> MicroBatch:
        """Cut to the stretches of this rank, a multiple of `multiple` tokens."""
        if groups.cp == 1:
            return self
        assert not self.prefixes, "sequences that share a prompt are not divided (`config.derived.rows_per_prompt`)"
        share = SequenceShare(self.lengths, self.rows, groups.context, self.tokens_T.device, multiple)
        routes = [self.routes[i] for i in share.chosen] if self.routes else ()
        return replace(self, tokens_T=self.tokens_T[share.own_S], rows_R=share.rows_R, routes=routes, share=share)

    def of_all_rows(self, values_R: Tensor) -> Tensor:
        """Complete the values of this rank's rows; differentiable."""
        return values_R if self.share is None else self.share.of_all_rows(values_R)

    def padded(self, num_tokens: int, longest: int) -> tuple[list[int], Tensor]:
        """Return lengths and tokens [num_tokens]; padding sequences have at most `longest`."""
        missing = num_tokens - len(self.tokens_T)
        assert missing >= 0, f"{len(self.tokens_T)} tokens do not fit into {num_tokens}"
        full, rest = divmod(missing, longest)
        lengths = [*self.lengths, *[longest] * full, *([rest] if rest else [])]
        return lengths, torch.nn.functional.pad(self.tokens_T, (0, missing))


def pack_responses(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], budget: int, device: torch.device
) -> list[MicroBatch]:
    """Pack at most `budget` tokens (longer sequences alone), longest first.  A token's row is the position before."""
    return pack_together([[(prompt, [response])] for prompt, response in zip(prompts, responses, strict=True)], budget, device)


def read_tokens(unit: Iterable[Family]) -> int:
    """Tokens that a micro-batch reads for `unit`, or its rows if those are more.  A last token predicts nothing."""
    return sum(max(len(prompt), len(answers)) + sum(map(len, answers)) - len(answers) for prompt, answers in unit)


def pack_together(units: Sequence[Sequence[Family]], budget: int, device: torch.device) -> list[MicroBatch]:
    """As `pack_responses`, keeping units together; `index` counts units."""
    packed = pack_by_tokens([read_tokens(unit) for unit in units], budget)
    return [_whole_responses(index, [family for i in index for family in units[i]], device) for index in packed]


def _whole_responses(index: list[int], families: Iterable[Family], device: torch.device) -> MicroBatch:
    tokens, rows, targets = list[int](), list[int](), list[int]()
    lengths, counts, prefixes = list[int](), list[int](), dict[int, int]()
    for prompt, responses in families:
        whole, last = len(lengths), len(tokens) + len(prompt) - 1
        tokens += prompt
        lengths.append(len(prompt))
        for response in responses:
            more = len(response) - 1
            rows += [last, *range(len(tokens), len(tokens) + more)]
            targets += response
            tokens += response[:-1]
            counts.append(len(response))
            if len(responses) == 1:
                lengths[whole] += more
            elif more:
                prefixes[len(lengths)] = whole
                lengths.append(more)
    tokens_T, rows_R, targets_R = (on_device(x, device) for x in (tokens, rows, targets))
    return MicroBatch(index, lengths, tokens_T, rows_R, targets_R, tokens, counts, rows=rows, prefixes=prefixes)


def pack_at(
    sequences: Sequence[Sequence[int]], places: Sequence[Sequence[int]], budget: int, device: torch.device
) -> list[MicroBatch]:
    """Pack sequences with rows at `places`, without targets."""
    return [
        whole_sequences(index, [sequences[i] for i in index], device, [places[i] for i in index])
        for index in pack_by_tokens([len(sequence) for sequence in sequences], budget)
    ]


def whole_sequences(
    index: list[int], sequences: Sequence[Sequence[int]], device: torch.device, places: Sequence[Sequence[int]] | None = None
) -> MicroBatch:
    """`places`: positions of the rows in each sequence; None: its last."""
    rows: list[int] = []
    start = 0
    for number, sequence in enumerate(sequences):
        rows += [start + place for place in ([len(sequence) - 1] if places is None else places[number])]
        start += len(sequence)
    tokens_T = on_device([token for sequence in sequences for token in sequence], device)
    lengths = [len(sequence) for sequence in sequences]
    return MicroBatch(index, lengths, tokens_T, on_device(rows, device), targets_R=tokens_T.new_empty(0), rows=rows)


def split_rows(values_T: Tensor, lengths: Sequence[int], batches: Sequence[MicroBatch]) -> list[Tensor]:
    pieces = values_T.split(list(lengths))
    return [torch.cat([pieces[i] for i in batch.index]) for batch in batches]


def join_rows(outputs: Sequence[Tensor], lengths: Sequence[int], batches: Sequence[MicroBatch]) -> Tensor:
    pieces: dict[int, Tensor] = {}
    for batch, rows in zip(batches, outputs, strict=True):
        for i, piece in zip(batch.index, rows.split([lengths[i] for i in batch.index]), strict=True):
            pieces[i] = piece
    return torch.cat([pieces[i] for i in range(len(lengths))])
