"""Checkpoints of a run.

saver.py    when a checkpoint is due, its snapshot, and the best one    schema.py, state.py   everything but tensors
writing.py  a snapshot on disk, complete or not at all                  caches.py             caches of sequences in flight
resuming.py the last complete checkpoint                                preemption.py         stopping on signals
"""
