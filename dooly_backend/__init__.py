"""Dooly: the profiling backend that LLM-inference simulators plug in."""

__version__ = "0.1.0"
