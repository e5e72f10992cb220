"""Watching a step from outside: seconds by part, what each wait was for, and the facts that its line in the metrics has."""
