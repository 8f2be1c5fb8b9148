"""DoolySim, the reference simulator: the engine's scheduler on a virtual clock."""
