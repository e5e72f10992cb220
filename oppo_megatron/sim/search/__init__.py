"""Search the ranks and layouts of the roles."""
