"""How long the project's own work takes, on databases whose times come from formulas."""
