"""Trained policies that answer prompts."""
