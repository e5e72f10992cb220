"""What the parts of a step take on a cluster, by the laws, as a run in virtual time asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.pricing.decoding import Decoding, line_through
from oppo_megatron.sim.pricing.prices import Prices
from oppo_megatron.sim.runs.step_costs import StepCosts


@dataclass(frozen=True)
class Sampled:
    """Lengths of `batches` batches of a run, from its first prompts on: what prices are drawn up for."""

    length: Callable[[int], int]
    batch: int
    batches: int = 16

    def middle(self) -> list[int]:
        """A typical batch: of all lengths in order, those in the middle of each of `batch` equal parts; longest last."""
        ordered = sorted(self.length(seq_id) for seq_id in range(self.batch * self.batches))
        return ordered[self.batches // 2 :: self.batches]

    def longest(self) -> float:
        """Tokens of a batch's longest response, on average."""
        firsts = range(0, self.batch * self.batches, self.batch)
        return fmean(max(map(self.length, range(first, first + self.batch))) for first in firsts)


def prices(config: TrainConfig, cluster: Cluster, prompt_tokens: int, sampled: Sampled, *, captured: bool) -> Prices:
    return Prices(config, cluster, Decoding(prompt_tokens, sampled.middle(), captured))


def step_costs(priced: Prices, round_s: float) -> StepCosts:
    """The laws as lines: of decoding and prefill around a typical batch, of updates by its response tokens."""
    lengths = priced.decoding.lengths
    rows = {(row.role, row.phase): row.seconds for row in priced.rows()}
    few = [max(1, length // 2) for length in lengths]
    fewer = replace(priced, decoding=replace(priced.decoding, lengths=few))
    less = {row.role: row.seconds for row in fewer.rows() if row.phase == "update"}
    updates = {
        role: line_through(sum(few), less[role], sum(lengths), seconds)
        for (role, phase), seconds in rows.items()
        if phase == "update"
    }
    moves = {role: seconds for (role, phase), seconds in rows.items() if phase == "weights"}
    return StepCosts(priced.costs(), updates, moves, round_s, sources=_sources(priced.cluster))


def padded_s(priced: Prices, longest: float) -> Mapping[str, float]:
    """Seconds of a step's phases in which every sequence is decoded, scored and trained as long as the longest, by name."""
    lengths = [round(longest)] * len(priced.decoding.lengths)
    padded = replace(priced, decoding=replace(priced.decoding, lengths=lengths))
    return {f"{row.role} {row.phase}": row.seconds for row in padded.rows()}


def _sources(cluster: Cluster) -> tuple[str, ...]:
    return tuple(f"{name}: {source}" for name, source in cluster.sources())
