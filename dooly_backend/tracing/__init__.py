"""Tainted tracing: which operations a pass runs, and where each dimension comes from."""
