"""Checks before anything expensive starts: settings, files, shapes.  No torch here."""
