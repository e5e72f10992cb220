"""Weights in and out: directories read and written, and weights carried between layouts."""
