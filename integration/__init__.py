"""The real consumers of Dooly's numbers, driven end to end."""
