"""Choosing a placement: which ones a machine and the models admit, how they are measured, which is taken.  Pure."""
