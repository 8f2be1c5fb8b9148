"""What every command shares: errors as one line, output, and common options.

Results go to stdout, everything else to stderr. rich and the packages that do
the work are imported when they are used, so that ``dooly --help`` is quick.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from dooly_backend.errors import DoolyError

if TYPE_CHECKING:
    from rich.console import Console

F = TypeVar("F", bound=Callable[..., Any])

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
DEFAULT_DATABASE = "latency.db"

# What a user can mend without knowing the code. Any other OSError is a bug.
_NO_SPACE = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
_BAD_PATH = {
    errno.EACCES,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def run(command: click.Command, name: str) -> NoReturn:
    """Run `command` as the program `name` and exit with its code."""
    handler = logging.StreamHandler()
    handler.setFormatter(_LogFormatter("{levelname}: {message}", style="{"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    code = exit_code(command, name)
    if "torch" in sys.modules:
        # An engine's native libraries take seconds to come down and report leaks
        # of their own on stderr. Nothing of ours is open any more.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def exit_code(command: click.Command, name: str) -> int:
    """Run `command`; what the user can mend becomes one line on stderr."""
    try:
        code = command.main(prog_name=name, standalone_mode=False)
        sys.stdout.flush()  # a full disk shows here, not while the interpreter ends
        return code if isinstance(code, int) else 0
    except DoolyError as error:
        return fail(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        return fail(_usage(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return fail("interrupted", _INTERRUPTED)
    except Exception as error:
        message = outside_cause(error)
        if message is None:
            raise
        return fail(message, 2)


def fail(message: str, code: int) -> int:
    """Print ``error: message`` on one line of stderr; returns `code`."""
    click.echo("error: " + " ".join(message.split()), err=True)
    return code


class _LogFormatter(logging.Formatter):
    """``warning: message``, as `fail` prints errors."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).split()).replace(
            record.levelname, record.levelname.lower(), 1
        )


def _usage(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    hint = f" (see `{context.command_path} --help`)" if context else ""
    return error.format_message().rstrip(".") + hint


def outside_cause(error: Exception) -> str | None:
    """The message for a full disk or a path that cannot be used; None for a bug."""
    if not isinstance(error, OSError):
        return None
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _NO_SPACE:
        _drop_stdout()
        where = f" to {error.filename}" if error.filename else ""
        return f"no space left to write{where}: {reason}; free some, and run it again"
    if error.errno in _BAD_PATH and error.filename:
        return f"cannot use {error.filename}: {reason}"
    return None


def _drop_stdout() -> None:
    """Give up what stdout still holds, or the interpreter trips over it once more at exit."""
    with contextlib.suppress(OSError, ValueError):  # a stdout that is no file
        descriptor = sys.stdout.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


# -- output -------------------------------------------------------------------


@functools.cache
def log() -> Console:
    """The console for progress and logs: stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def show(result: Any) -> None:
    """Print what rich can render on stdout, as wide as the terminal or, in a pipe, wide."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    Console(width=width, highlight=False).print(result)


def print_json(values: dict[str, Any]) -> None:
    """One object on one line of stdout. NaN is refused: it is not JSON."""
    click.echo(json.dumps(values, ensure_ascii=False, allow_nan=False, default=str))


# -- options ------------------------------------------------------------------


def database_option(function: F) -> F:
    """``--db``: passed on as `db`."""
    return click.option(
        "--db",
        metavar="FILE",
        default=DEFAULT_DATABASE,
        show_default=True,
        help="The latency database; builtin:NAME for one that ships with Dooly.",
    )(function)


def json_option(function: F) -> F:
    """``--json``: passed on as `as_json`."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one line of JSON on stdout, for scripts."
    )(function)


def sweep_option(function: F) -> F:
    """``--sweep``: passed on as `sweep_name`."""
    return click.option(
        "--sweep",
        "sweep_name",
        metavar="NAME",
        default="adaptive",
        show_default=True,
        help="The workload points: a name in configs/sweeps, or a YAML file.",
    )(function)


def output_option(help: str, required: bool = False) -> Callable[[F], F]:
    """``-o/--out``: passed on as `out`, a path."""
    return click.option(
        "-o", "--out", metavar="PATH", type=click.Path(path_type=Path), required=required, help=help
    )


def model_option(function: F) -> F:
    """``--model``: which of a database's models; passed on as `model`."""
    return click.option(
        "--model", metavar="NAME", help="The model, where the database holds several."
    )(function)


def environment_option(function: F) -> F:
    """``--environment``: which of a database's environments; passed on as `environment`."""
    return click.option(
        "--environment",
        metavar="ID",
        help="The environment, where the database holds several: the start of its id, "
        "as `dooly db info` shows it, or a part of its device's name.",
    )(function)


def precision_options(function: F) -> F:
    """``--kv-cache-dtype`` and ``--quantization``: passed on as `kv_cache_dtype`, `quantization`.

    Which of a model's configurations is meant; None where not given.
    """
    options = (
        click.option(
            "--kv-cache-dtype",
            metavar="FORMAT",
            help="Number format of the KV cache, where several are measured.",
        ),
        click.option(
            "--quantization",
            metavar="METHOD",
            help="How the weights are quantised (fp8; none), where several ways are measured.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


_ENGINE_OPTIONS = (
    click.option("--engine", default="vllm", show_default=True, help="The serving engine."),
    click.option(
        "--backend",
        metavar="NAME",
        help="The attention backend, such as FLASH_ATTN or CPU_ATTN. [default: the engine's]",
    ),
    click.option(
        "--tp",
        "tensor_parallel",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Tensor-parallel size: one of the ranks runs, the others are emulated.",
    ),
    click.option(
        "--pp",
        "pipeline_parallel",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Pipeline-parallel size, in stages.",
    ),
    click.option(
        "--ep",
        "expert_parallel",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Expert-parallel size: --tp, or a multiple of it with data-parallel replicas.",
    ),
    click.option(
        "--rank",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="The rank that runs: replicas, then stages, then tensor-parallel ranks.",
    ),
    click.option("--dtype", help="Number format of the weights. [default: the model's]"),
    click.option(
        "--kv-cache-dtype",
        metavar="FORMAT",
        default="auto",
        show_default=True,
        help="Number format of the KV cache, such as fp8.",
    ),
    click.option(
        "--quantization",
        metavar="METHOD",
        help="How the engine quantises the weights, such as fp8. [default: as the model's config "
        "says it of its checkpoint]",
    ),
    click.option(
        "--block-size",
        type=click.IntRange(min=1),
        help="Tokens in a block of the KV cache. [default: the engine's]",
    ),
    click.option(
        "--layers",
        type=click.IntRange(min=1),
        help="Layers to build. [default: as few as show every kind of layer]",
    ),
    click.option(
        "--threads",
        type=click.IntRange(min=1),
        help="Threads of a CPU engine; leave a core to others. [default: the engine's]",
    ),
    click.option(
        "--max-num-seqs",
        type=click.IntRange(min=1),
        default=64,
        show_default=True,
        help="Most requests in one step.",
    ),
    click.option(
        "--max-num-batched-tokens",
        type=click.IntRange(min=1),
        default=2048,
        show_default=True,
        help="Most tokens in one step.",
    ),
    click.option(
        "--execution-mode",
        type=click.Choice(["eager", "piecewise", "full_graph"]),
        default="eager",
        show_default=True,
        help="How the engine runs the model: op by op, or as captured graphs.",
    ),
)
_ENGINE_FIELDS = (
    "engine",
    "backend",
    "tensor_parallel",
    "pipeline_parallel",
    "expert_parallel",
    "rank",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "block_size",
    "layers",
    "threads",
    "max_num_seqs",
    "max_num_batched_tokens",
    "execution_mode",
)


def engine_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a run, passed on as one dict `engine_settings`.

    ``RunOptions.checked(model=load_model(text), **engine_settings)`` makes them
    a checked description.
    """

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        settings = {field: values.pop(field) for field in _ENGINE_FIELDS}
        return function(engine_settings=settings, **values)

    decorated: Callable[..., Any] = command
    for option in reversed(_ENGINE_OPTIONS):
        decorated = option(decorated)
    return decorated
