"""What it costs to reuse another model's attention (paper, section 7.2 and appendix K)."""
