"""Seconds of operations, messages and moves as functions of sizes, and the fit of their constants to measurements."""
