"""Runs in virtual time: steps of a configuration without its models."""
