"""Search which ranks hold which role, in which layouts."""
