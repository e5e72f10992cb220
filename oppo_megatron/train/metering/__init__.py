"""Measures a step: seconds by part, the cause of each wait, and the facts for its line in the metrics."""
