"""Profiling on an offline GPU host, in pieces that resume."""
