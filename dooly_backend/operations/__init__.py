"""From a trace to the list of things worth measuring, each with its signature."""
