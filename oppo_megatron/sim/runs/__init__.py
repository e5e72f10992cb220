"""Steps of a configuration in virtual time, without models."""
