"""Choosing a placement: candidates for a machine and the models, their measurement, the choice.  Pure."""
