"""Studies in virtual time: the figures of OPPO's paper, and steps on thousands of ranks."""
