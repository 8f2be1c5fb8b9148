"""Errors that a user can act on.

Every message says what is wrong and what to do about it, in one line. The
command line prints the message and exits with the error's ``exit_code``;
anything that is not a `DoolyError` is a bug and keeps its traceback.
"""

from __future__ import annotations


class DoolyError(Exception):
    """Base of the errors that are reported as one line."""

    exit_code = 1


class InputError(DoolyError):
    """What the user gave cannot be used: exit code 2."""

    exit_code = 2


class DatabaseError(InputError):
    """The file given as a latency database cannot be read or written."""


class DamagedError(DatabaseError):
    """The file is a latency database, but parts of it are lost or contradict themselves."""


class EngineError(InputError):
    """The serving engine is missing, or refuses this configuration."""


class TraceError(DoolyError):
    """A trace that contradicts itself, naming the operation that does."""


class CheckFailed(DoolyError):
    """A check that the user asked for did not hold: exit code 1."""
