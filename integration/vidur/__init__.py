"""Vidur itself on an export of ours."""
