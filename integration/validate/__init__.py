"""Live engines beside their simulation, with committed results."""
