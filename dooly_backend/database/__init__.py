"""The latency database: schema and migrations, store, and what it tells about itself."""

from dooly_backend.database.store import Database

__all__ = ["Database"]
