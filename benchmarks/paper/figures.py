"""The figures of OPPO's paper from runs in virtual time, each with the printed value."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from benchmarks.paper import printed as oppo
from benchmarks.paper.assumptions import ABLATED, DELTA, SETTINGS
from benchmarks.paper.printed import mean_delta, most_intra_gain
from benchmarks.paper.runs import Case, Summary, fixed, rewards
from oppo_megatron.config.overlap import DeltaConfig

CHUNKS, CHUNK_STEPS = (10, 32, 100, 256, 500, 1000, 2000, 3000, 4096), 20
"""`CHUNK_STEPS`: the most steps of these runs, since chunks of ten tokens have hundreds of rounds per step."""
INTER_DELTAS = (0, 2, 4, 8, 16, 32)
VARIANTS = {"intra": oppo.INTRA_ONLY, "inter": oppo.INTER_ONLY}
DYNAMIC_MOST = 32


@dataclass(frozen=True)
class Paper:
    """All figures at `steps` steps per run; runs that several figures need are made once."""

    steps: int
    seed: int
    _cases: dict[str, Case] = field(default_factory=dict, repr=False)
    _runs: dict[tuple[str, str, int], Summary] = field(default_factory=dict, repr=False)

    def case(self, name: str) -> Case:
        if name not in self._cases:
            self._cases[name] = Case(SETTINGS[name], self.seed)
        return self._cases[name]

    def mode(self, name: str, mode: str, delta: int = DELTA) -> Summary:
        """Return a setting's run in a mode; without inter-step overlap delta is 0."""
        key = name, mode, delta if mode in ("inter", "full") else 0
        if key not in self._runs:
            self._runs[key] = self.case(name).run(mode, self.steps, delta=fixed(delta))
        return self._runs[key]

    def speedups(self) -> list[dict[str, Any]]:
        """Figure 3: the reward is reached after the same number of steps in every mode, so seconds per step decide."""
        return [self._speedup(row) for row in oppo.SPEEDUPS]

    def _speedup(self, row: oppo.Speedup) -> dict[str, Any]:
        name = row.setup
        base, both, padded = (self.mode(name, "sequential"), self.mode(name, "full"), sum(self.case(name).padded.values()))
        assumed, implied = both.step_s, self.mode(name, "full", implied_delta()).step_s
        case = self.case(name)
        return {
            "setup": name, "sequential_s": base.step_s, "padded_s": padded, "both_s": assumed,
            "speedup": base.step_s / assumed, "speedup_implied": base.step_s / implied, "speedup_padded": padded / assumed,
            "stated": row.stated, "gb": case.fullest_gb, "room_gb": case.cluster.gpu.memory_bytes / 1e9,
        }  # fmt: skip

    def ablation(self) -> list[dict[str, Any]]:
        """Figure 6."""
        return [row for name in ABLATED for row in self._ablated(name)]

    def _ablated(self, name: str) -> list[dict[str, Any]]:
        base, case = self.mode(name, "sequential").step_s, self.case(name)
        minutes = oppo.minutes_of(name, oppo.BASELINE).minutes
        main = oppo.speedup_of(name).oppo_minutes
        rows: list[dict[str, Any]] = []
        for mode in ("intra", "inter", "full"):
            printed = oppo.minutes_of(name, VARIANTS[mode]).minutes if mode in VARIANTS else main
            assert printed is not None
            run = self.mode(name, mode)
            rows.append(
                {"setup": name, "mode": mode, "step_s": run.step_s, "speedup": base / run.step_s, "printed": minutes / printed}
            )
        intra, inter, both = (row["speedup"] for row in rows)
        share = self.mode(name, "sequential").scored_s / base
        padded = case.padded["reward score"] / sum(case.padded.values())
        rows[0] |= {"bound": most_intra_gain(share), "bound_padded": most_intra_gain(padded)}
        rows[2] |= {"product": intra * inter, "printed_product": rows[0]["printed"] * rows[1]["printed"]}
        return rows

    def inter(self, name: str = "se7b") -> list[dict[str, Any]]:
        """Inter-step overlap alone, by delta."""
        base = self.mode(name, "inter", 0)
        return [
            {
                "delta": delta, "step_s": run.step_s, "speedup": base.step_s / run.step_s, "decode_steps": run.decode_steps,
                "fewer": base.decode_steps / run.decode_steps, "deferrals": run.deferrals,
            }
            for delta in INTER_DELTAS
            for run in [self.mode(name, "inter", delta)]
        ]  # fmt: skip

    def delta(self, name: str = "se7b") -> list[dict[str, Any]]:
        """Figure 7a, by the seconds of equal steps; the dynamic rule is eq. 4 under the rewards of section 4.2."""
        ranks = {f"{kind} {value}": place for place, (kind, value) in enumerate(oppo.DELTA_POLICIES, 1)}
        case, last = self.case(name), oppo.EVAL_STEPS[name]
        steps = min(last, 4 * self.steps)
        shown = rewards(oppo.REWARD_POINTS[name], steps, last, case.setting.batch, self.seed)
        policies = {f"fixed {delta}": fixed(delta) for delta in (4, 8)}
        policies |= {
            f"dynamic, at most {most}": DeltaConfig(rule="eq4", initial=min(4, most), max=most) for most in (8, DYNAMIC_MOST)
        }
        rows: list[dict[str, Any]] = []
        for policy, delta in policies.items():
            run = case.run("full", steps, delta=delta, signals=shown)
            total = sum(step.step_s for step in run.steps)
            place = ranks["dynamic adapted"] if policy.startswith("dynamic") else ranks[policy]
            rows.append({"policy": policy, "steps": steps, "mean_delta": run.delta, "minutes": total / 60, "printed": place})
        order = sorted(rows, key=lambda row: row["minutes"])
        return [row | {"place": order.index(row) + 1} for row in rows]

    def chunk(self, name: str = "se7b") -> list[dict[str, Any]]:
        """Figure 7b: seconds per step by chunk, with intra-step overlap alone and with both."""
        case, steps = self.case(name), min(self.steps, CHUNK_STEPS)
        rows: list[dict[str, Any]] = []
        for chunk in CHUNKS:
            intra, both = (case.run(mode, steps, chunk=chunk).step_s for mode in ("intra", "full"))
            rows.append({"chunk": chunk, "intra_s": intra, "step_s": both, "printed": said_of(chunk)})
        least = {key: min(row[key] for row in rows) for key in ("intra_s", "step_s")}
        more = {"intra_s": "intra_more", "step_s": "more"}
        return [row | {more[key]: 100 * (row[key] / least[key] - 1) for key in least} for row in rows]

    def law_of_chunk(self, name: str = "se7b") -> dict[str, float]:
        """The chunk C of least f T / C + s C with both overlaps; s: half a decode step, since replicas finish the chunk."""
        case, run = self.case(name), self.mode(name, "full")
        step_s = case.costs.actions.decode_at(0).fixed_s
        tokens = least_chunk(case.costs.round_s, run.decode_steps, step_s / 2)
        return {"round_s": case.costs.round_s, "decode_steps": run.decode_steps, "decode_step_s": step_s, "tokens": tokens}

    def deferral(self, name: str = "se7b") -> list[dict[str, Any]]:
        """Table 2: at the paper's fixed deltas, and at the delta that its mean implies."""
        printed = {f"deferred_{steps}": share for steps, share in oppo.DEFERRED_PERCENT.items()}
        rows: list[dict[str, Any]] = [{"delta": "table 2", "mean": oppo.DEFERRED_MEAN, **printed}]
        for delta in (4, 8, implied_delta()):
            run = self.mode(name, "full", delta)
            shares = run.deferred_percent
            rows.append(
                {
                    "delta": str(delta), "mean": run.deferrals, "law": run.delta / run.batch,
                    **{f"deferred_{steps}": shares.get(steps, 0.0) for steps in range(4)},
                    "deferred_4": sum((share for steps, share in shares.items() if steps > 3), 0.0),
                }
            )  # fmt: skip
        return rows

    def utilization(self) -> list[dict[str, Any]]:
        """Figure 5, up to the scores of a step."""
        rows = []
        for row in oppo.UTILIZATION:
            shares = [self._busy_percent(row.setup, mode) for mode in ("sequential", "full")]
            speed = self.mode(row.setup, "sequential").step_s / self.mode(row.setup, "full").step_s
            rows.append(
                {
                    "setup": row.setup, "sequential": shares[0], "both": shares[1], "gain": shares[1] / shares[0],
                    "speedup": speed, "printed_baseline": row.baseline, "printed_oppo": row.oppo, "printed_gain": row.gain,
                }
            )  # fmt: skip
        return rows

    def _busy_percent(self, name: str, mode: str) -> float:
        """Return the busy percent; a decoding GPU counts by its share of places in use, a scoring one in full."""
        case, run = self.case(name), self.mode(name, mode)
        decoding = case.setting.training
        busy_s = decoding * (run.in_use * run.decode_s + run.own_scoring_s) + case.reward_s(run.tokens)
        return 100 * busy_s / ((decoding + 1) * (run.decode_s + run.scored_s))


def implied_delta() -> int:
    """Return the delta that table 2's mean implies."""
    return round(mean_delta(oppo.DEFERRED_MEAN))


def said_of(chunk: int) -> str | None:
    """Return the paper's statement about this size."""
    for size, said in oppo.CHUNKS.items():
        low, _, high = size.partition("-")
        if int(low) <= chunk <= int(high or low):
            return said
    return None


def least_chunk(round_s: float, steps: float, exposed_s: float) -> float:
    """Return the chunk at which rounds and the last chunk together cost least: f T / C + s C is least at sqrt(f T / s).

    f: seconds of a round beyond its decode steps; T: decode steps per step; s: exposed seconds per decode step of the last chunk.
    """
    return sqrt(round_s * steps / exposed_s)
