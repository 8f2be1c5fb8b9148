"""Commands of `dooly` one after the other in one process, for tests of what they refuse.

    python commands_in_turn.py '["trace", "smollm-135m", "--tp", "3"]' ...

Each argument is a JSON list of arguments of `dooly`. One line of JSON a command: its exit code,
and all that was written to stdout and stderr meanwhile, by whatever library. Importing vLLM takes
ten times as long as such a command.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from dooly_backend.cli import cli
from dooly_backend.console import exit_code


@contextmanager
def written(descriptor: int, stream: Any) -> Iterator[IO[str]]:
    """A file that gets what is written to the descriptor of `stream` while the block runs."""
    kept = os.dup(descriptor)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), descriptor)
        try:
            yield file
        finally:
            stream.flush()
            os.dup2(kept, descriptor)
            os.close(kept)


def run(arguments: list[str]) -> dict[str, Any]:
    with written(1, sys.stdout) as out, written(2, sys.stderr) as err:
        sys.argv = ["dooly", *arguments]
        code = exit_code(cli, "dooly")
        sys.stdout.flush()
        sys.stderr.flush()
        out.seek(0)
        err.seek(0)
        return {"returncode": code, "stdout": out.read(), "stderr": err.read()}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        sys.stdout.write(json.dumps(run(json.loads(argument))) + "\n")
        sys.stdout.flush()
