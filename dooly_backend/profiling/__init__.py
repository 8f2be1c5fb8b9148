"""Timing what the database does not know."""
