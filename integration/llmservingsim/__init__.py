"""LLMServingSim's own code on an export of ours."""
