"""Adaptive sweep against the grid of Vidur's profiler: error by number of points."""
