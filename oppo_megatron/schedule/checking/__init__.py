"""Checks of a schedule: the dry run in virtual time, and all faults that it or the lists show."""
