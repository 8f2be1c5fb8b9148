"""Exporters, one folder per simulator; installed as the package `dooly_shims`."""
