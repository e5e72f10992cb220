"""Whole runs made anew from what they recorded, by an implementation of their own."""
