"""What a run tells of itself while it goes on: lines of metrics, console, trackers, traces of each rank, pictures."""
