"""Our own scheduler against vLLM's, on random workloads and limits."""
