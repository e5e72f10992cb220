"""Whether a run still moves: watchdogs of its ranks, the warden over them, and what ranks that ended have left."""
