"""Building blocks of a transformer's layers."""
