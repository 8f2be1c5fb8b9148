"""Model, sweep and hardware descriptions, installed as `dooly_configs`."""
