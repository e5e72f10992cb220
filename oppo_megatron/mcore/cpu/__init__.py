"""Kernels that only a CPU runs."""
