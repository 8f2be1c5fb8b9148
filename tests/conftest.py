"""Fixtures that several test files use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# No test reaches for the network: set before anything imports the hub's client.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent

Dooly = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def dooly(tmp_path: Path) -> Dooly:
    """Run the command line in a process of its own, in an empty folder.

    Names and exit codes are what a shell sees. `file_limit` is the most bytes
    that a file may grow to, as on a full disk.
    """

    def limit_files(size: int) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    def run(
        *arguments: str | Path, file_limit: int | None = None, module: str = "dooly_backend.cli"
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
        return subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            preexec_fn=None if file_limit is None else lambda: limit_files(file_limit),
        )

    return run
