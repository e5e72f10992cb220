"""Whether a run still moves: watchdogs of its ranks, the supervisor over them, and what ranks that ended have left."""
