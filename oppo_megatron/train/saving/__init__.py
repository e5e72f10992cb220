"""A run's checkpoints: when they are due, what they hold, how all ranks write one, and how a run continues from one.

keeper.py     when, and whether the run waits for it         state.py, state_schema.py     everything but tensors
saver.py      those of `oppo train`                          supervised_saver.py          those of supervised training
snapshot.py   the content of a checkpoint, at one moment     caches.py                     of sequences in flight
writing.py    a snapshot on the disk, whole or not at all    resuming.py                   the last whole one
"""
