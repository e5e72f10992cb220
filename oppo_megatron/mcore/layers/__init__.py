"""What the layers of a transformer are made of."""
