"""Messages and bytes that a rank gives to others in a round, as the engine's workers make them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from oppo_megatron.bench.rank_run import WORD, RankRound, Rows
from oppo_megatron.chunks import FIELDS
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.engine.chunk_codec import HEADER_SIZE, ROW_SIZE
from oppo_megatron.engine.row_words import DRAWN
from oppo_megatron.layout.placements import named_roles
from oppo_megatron.layout.shape import DTYPE_BYTES
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.rounds import Round, Site

GATHER_CALLS = 2  # lengths, then what is as long as the longest


@dataclass
class Traffic:
    """`messages` and `num_bytes` by payload; `gathers` are collective calls, and the bytes given to them "gather"."""

    messages: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    gathers: int = 0

    @property
    def sent_bytes(self) -> int:
        """In messages; what collectives move is the back end's choice."""
        return self.num_bytes.total() - self.num_bytes["gather"]


def token_bytes(config: TrainConfig) -> dict[str, int]:
    """Of the hidden state of one token, by role."""
    return {
        role: read_hf_config(model)["hidden_size"] * DTYPE_BYTES[model.dtype]
        for role, model in named_roles(config).items()
    }


@dataclass(frozen=True)
class Carried:
    """What the messages of one rank carry in a round.  `new`: tokens of its replicas' prefill micro-batches, by role."""

    rows: Rows
    new: Mapping[str, Sequence[int]]
    chunk: tuple[int, int] | None
    token_bytes: Mapping[str, int]

    @classmethod
    def of(cls, rank: int, made: RankRound, site: Site, token_bytes: Mapping[str, int]) -> Carried:
        """What `rank` has by its own plan."""
        return cls(made.rows, dict(_prefilled(rank, made.plan.round, site)), made.chunk, token_bytes)

    def live(self, action: Action) -> bool:
        """False for what the executor leaves out: its micro-batch has ended."""
        return action.step is None or action.step < len(self.rows[action.micro_batch])

    def parts(self, action: Action) -> list[int]:
        """Bytes of each message that a send or receive stands for."""
        if action.payload is Payload.CHUNK:
            assert self.chunk is not None
            rows, tokens = self.chunk
            payload = WORD * (ROW_SIZE * rows + DRAWN * tokens)
            return [WORD * HEADER_SIZE, *([payload] if payload else [])]
        rows = 0 if action.step is None else self.rows[action.micro_batch][action.step]
        if action.payload is Payload.TOKENS:
            return [WORD * DRAWN * rows]
        tokens = self.new[action.role][action.micro_batch] if action.step is None else rows
        return [tokens * self.token_bytes[action.role]]

    @property
    def words(self) -> int:
        """Those that the replica gives its peers: how many rows, their table, their tokens."""
        sequences = sum(own[0] for own in self.rows if own)
        return 1 + FIELDS * sequences + DRAWN * sum(map(sum, self.rows))


def _prefilled(rank: int, round_: Round, site: Site) -> Iterator[tuple[str, list[int]]]:
    for role, replicas in round_.prefill.items():
        coords = site.placements[role].coords(rank)
        if coords is not None:
            yield role, [sum(growth.new for growth in batch) for batch in replicas[coords.replica]]


def traffic_of(actions: Sequence[Action], carried: Carried, longest: int) -> Traffic:
    """Of one rank's list.  `longest`: the most words that a replica of the actor gives to the gather."""
    traffic = Traffic()
    for action in actions:
        if action.op is Op.GATHER:
            traffic.gathers += GATHER_CALLS
            traffic.num_bytes["gather"] += WORD * (1 + longest)
        elif action.op is Op.SEND and carried.live(action):
            assert action.payload is not None
            parts = carried.parts(action)
            traffic.messages[action.payload.value] += len(parts)
            traffic.num_bytes[action.payload.value] += sum(parts)
    return traffic
