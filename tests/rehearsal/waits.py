"""Waits of the host for the device in a run, by phase, kind and function: at most so many each time of a phase.
A step on a GPU takes seconds, a wait of this list some microseconds; one that is not in it may take far more."""

Wait = tuple[str, str, str]

ONCE_A_STEP = "exchange"

EXPECTED: dict[Wait, tuple[int, str]] = {
    # a window of decode steps; with pipeline stages each step, on the last stage and on those that hear of it
    ("decode", "synchronize", "engine/device_decode.py read"): (1, "decode window"),
    ("decode", "read", "engine/generation.py _sample"): (1, "decode"),
    ("decode", "read", "engine/generation.py inbox"): (1, "decode"),
    # a chunk, header and payload
    ("listen", "read", "engine/stream.py inbox"): (2, "listen"),
    # an optimizer step: the gradient norm, by which it is made or refused, and the statistics of all micro-batches
    ("update", "read", "mcore/training.py _checked_step"): (1, "update"),
    ("update", "read", "mcore/training.py read_reports"): (1, "update"),
    # experts that tensor ranks share: the tokens of this rank's, in each of two layers of a micro-batch
    **{(phase, "read", "mcore/experts.py mix"): (12, "update") for phase in ("update", "ahead")},
    # experts that replicas divide: the pairs that come and go, in each of two layers of a micro-batch, made again or not
    ("update", "read", "mcore/experts.py __init__"): (4, "update"),
    ("move", "synchronize", "mcore/weights/weight_sync.py move"): (1, "move"),
    # weights that come while others decode, in a thread of their own, and the checksum of all
    ("rest", "synchronize", "mcore/weights/weight_sync.py _complete"): (1, ONCE_A_STEP),
    ("rest", "read", "mcore/weights/weight_sync.py digest"): (1, ONCE_A_STEP),
    ("rest", "read", "train/updates.py _learn_figures"): (1, ONCE_A_STEP),
    # carried responses, drawn again
    ("rest", "nonzero", "engine/generation.py drawn_again"): (1, ONCE_A_STEP),
    ("rest", "read", "engine/generation.py drawn_again"): (1, ONCE_A_STEP),
    ("rest", "read", "train/score_exchange.py drawn_again"): (1, ONCE_A_STEP),
    # a step: scores, and figures of the other ranks
    ("exchange", "read", "train/score_exchange.py _rewards"): (1, "exchange"),
    ("exchange", "read", "train/score_exchange.py _scored"): (1, "exchange"),
    ("exchange", "read", "train/score_exchange.py critic_stats"): (1, "exchange"),
    ("exchange", "read", "train/score_exchange.py gather"): (2, "exchange"),
    ("exchange", "synchronize", "train/score_exchange.py shared"): (10, "exchange"),
    ("rest", "read", "train/loop.py _gather_scores"): (1, ONCE_A_STEP),
    ("rest", "read", "train/logs/meter.py scored"): (1, ONCE_A_STEP),
    ("rest", "read", "train/score_exchange.py by_rank"): (4, ONCE_A_STEP),
    ("rest", "read", "train/score_exchange.py critic_stats"): (1, ONCE_A_STEP),
    ("rest", "read", "train/score_exchange.py sum_over_ranks"): (1, ONCE_A_STEP),
    ("rest", "read", "train/roles.py share"): (2, ONCE_A_STEP),
    ("rest", "synchronize", "train/score_exchange.py shared"): (
        3,
        ONCE_A_STEP,
    ),  # figures of an update elsewhere, tokens drawn again
    # a step: checks and figures of its numbers
    ("experience", "nonzero", "algorithms/experience.py _check_inputs"): (1, "experience"),
    ("experience", "nonzero", "algorithms/experience.py _check_tokens"): (5, "experience"),
    ("experience", "pageable", "algorithms/packed.py lengths_like"): (1, "experience"),
    ("experience", "read", "algorithms/advantages.py gae"): (2, "experience"),
    ("experience", "read", "algorithms/advantages.py of"): (4, "experience"),
    ("experience", "read", "algorithms/experience.py _check_tokens"): (5, "experience"),
    ("experience", "read", "algorithms/experience.py _explained_variance"): (3, "experience"),
    ("experience", "read", "algorithms/experience.py _summarise"): (10, "experience"),
    ("experience", "read", "algorithms/packed.py lengths_like"): (10, "experience"),
    ("experience", "read", "algorithms/packed.py tokens_after"): (2, "experience"),
    # of pairs: their number, their mean scores and their rows
    ("experience", "index", "algorithms/experience.py with_pairs"): (2, "experience"),
    ("experience", "read", "algorithms/experience.py <genexpr>"): (2, "experience"),
    ("experience", "read", "algorithms/supervised_losses.py rows_of_pairs"): (1, "experience"),
    ("rest", "read", "train/actor.py update"): (1, ONCE_A_STEP),
    # a step with tokens that an older policy has drawn: figures of the log-probs at its start
    ("rest", "read", "mcore/training.py read_reports"): (1, ONCE_A_STEP),
    # a checkpoint: two shards a scored sequence, and of a sharded optimizer three tensors a weight
    ("checkpoint", "read", "train/saving/writing.py hold"): (2, "checkpoint"),
    ("checkpoint", "read", "mcore/weights/checkpoint.py _state"): (87, "checkpoint"),
    ("rest", "synchronize", "mcore/weights/checkpoint.py write_data"): (1, ONCE_A_STEP),
    # training on preferences: held-out rows, and those by which KTO's reference point is measured before an update
    ("held out", "read", "train/supervised_tasks.py measure_rows"): (1, "held out"),
    ("held out", "read", "train/score_exchange.py sum_over_ranks"): (1, "held out"),
    ("held out", "read", "train/score_exchange.py by_rank"): (1, "held out"),
    ("supervised", "read", "train/supervised_tasks.py measure_rows"): (1, "update"),
    ("supervised", "read", "train/score_exchange.py sum_over_ranks"): (1, "update"),
    ("supervised", "read", "train/score_exchange.py by_rank"): (1, "update"),
}
