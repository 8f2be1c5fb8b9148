"""Whole modules against the sums of their operations (paper, section 7.4)."""
