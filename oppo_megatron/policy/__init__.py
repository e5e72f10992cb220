"""A trained policy to be asked: what a directory holds, and the model of it on the ranks."""
