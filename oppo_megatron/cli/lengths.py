"""Response lengths of a batch that is predicted, not run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oppo_megatron.config.run import TrainConfig


def even_lengths(config: TrainConfig) -> list[int]:
    """Evenly from the forced distribution, longest last; without one, all of full length."""
    from oppo_megatron.config.debug import log_normal
    from oppo_megatron.data.length_trace import forced_quantile

    count, most = config.rollout.batch_size, config.rollout.max_response_tokens
    forced = config.debug.lengths
    if forced is None:
        return [most] * count
    quantile = forced_quantile(forced, most) or log_normal(forced)
    return [max(1, min(most, round(quantile((i + 0.5) / count)))) for i in range(count)]
