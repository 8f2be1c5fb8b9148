"""From measurements to predictions: times between and beyond the measured points."""
