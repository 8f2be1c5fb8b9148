"""Live vLLM serving a workload: the truth that simulations are compared with."""
