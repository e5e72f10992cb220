"""Typed configuration: schema, loading with dotted overrides, cross-checks.  No torch here."""
