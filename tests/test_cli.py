"""The command line as a shell sees it: help, one-line errors, exit codes, JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dooly_backend import __version__, console
from dooly_backend.cli import cli
from dooly_backend.errors import CheckFailed, InputError

ROOT = Path(__file__).resolve().parent.parent

Result = subprocess.CompletedProcess[str]
Dooly = Callable[..., Result]


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    """Every command and group below `group`, by the words that call it."""
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)


def command_at(path: tuple[str, ...]) -> click.Command:
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return command


ALL_COMMANDS = list(commands(cli))


def one_error(result: Result, code: int = 2) -> str:
    """The message of a command that failed as it should: one line, nothing on stdout."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr), result.stderr
    return result.stderr


# -- help ---------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL_COMMANDS, ids=" ".join)
def test_every_command_explains_itself(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, [*path, "--help"])
    assert result.exit_code == 0
    command = command_at(path)
    assert command.help
    assert "Example" in command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{' '.join(path)} {parameter.opts[-1]}"


@pytest.mark.parametrize("path", ALL_COMMANDS, ids=" ".join)
def test_every_example_parses(path: tuple[str, ...]) -> None:
    """Each line below "Examples:" names a command and options that exist."""
    examples = re.findall(r"^\s*(dooly .+)$", command_at(path).help or "", re.MULTILINE)
    assert examples
    for example in examples:
        words = example.split()[1:]
        known = max(
            (path for path in ALL_COMMANDS if tuple(words[: len(path)]) == path),
            key=len,
            default=None,
        )
        assert known, example
        command = command_at(known)
        parameters = command.get_params(click.Context(command))
        options = {flag for parameter in parameters for flag in parameter.opts}
        used = {word for word in words if word.startswith("-")}
        assert used <= options, example


def test_help_of_the_program(dooly: Dooly) -> None:
    result = dooly("--help")
    assert result.returncode == 0
    assert "Examples:" in result.stdout


def test_version(dooly: Dooly) -> None:
    assert dooly("--version").stdout == f"dooly, version {__version__}\n"


def test_the_package_runs_as_the_program_does(dooly: Dooly) -> None:
    assert dooly("--help", module="dooly_backend").stdout == dooly("--help").stdout


def test_help_imports_nothing_heavy(dooly: Dooly) -> None:
    code = (
        "import sys; from dooly_backend.cli import cli;"
        "cli.main(['--help'], standalone_mode=False);"
        "heavy = {'torch', 'vllm', 'pandas', 'sklearn', 'numpy', 'pydantic'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


# -- models -------------------------------------------------------------------


def test_models(dooly: Dooly) -> None:
    result = dooly("models")
    assert result.returncode == 0
    assert re.search(
        r"^HuggingFaceTB/SmolLM-135M +30 layers +LlamaForCausalLM$", result.stdout, re.M
    )


def test_models_as_json_is_one_line(dooly: Dooly) -> None:
    result = dooly("models", "--json")
    assert result.stdout.count("\n") == 1
    names = [model["name"] for model in json.loads(result.stdout)["models"]]
    assert "HuggingFaceTB/SmolLM-135M" in names


# -- wrong input --------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [["modles"], ["models", "--jsn"], ["db", "info", "--db"], ["db", "infos"], ["models", "extra"]],
    ids=" ".join,
)
def test_a_wrong_command_line(dooly: Dooly, arguments: list[str]) -> None:
    one_error(dooly(*arguments))


def test_a_missing_database(dooly: Dooly) -> None:
    assert "nothing.db" in one_error(dooly("db", "info", "--db", "nothing.db"))


@pytest.mark.parametrize("content", [b"", b"not a database\n" * 99, b"SQLite format 3\x00junk"])
def test_a_file_that_is_no_database(dooly: Dooly, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "latency.db").write_bytes(content)
    assert "latency.db" in one_error(dooly("db", "info"))


# -- db -----------------------------------------------------------------------


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A database with one environment and one configuration."""
    from dooly_backend.config import load_model
    from dooly_backend.database import Database
    from dooly_backend.database.records import Configuration, Environment

    model = load_model("smollm-135m")
    configuration = Configuration(
        model=model.name,
        hf_config=model.hf_config,
        engine="vllm",
        backend="CPU_ATTN",
        dtype="bfloat16",
        kv_cache_dtype="auto",
        block_size=128,
        tensor_parallel=1,
        pipeline_parallel=1,
        execution_mode="eager",
        num_layers=model.num_layers,
    )
    path = tmp_path / "latency.db"
    with Database.open(path, create=True) as opened:
        opened.add_environment(Environment("AMD EPYC (2 threads)", "cpu", "vllm", "0.32.0"))
        opened.add_configuration(configuration, [])
    return path


def test_db_info(dooly: Dooly, database: Path) -> None:
    result = dooly("db", "info")
    assert (result.returncode, result.stderr) == (0, "")
    assert "HuggingFaceTB/SmolLM-135M" in result.stdout
    assert "AMD EPYC (2 threads)" in result.stdout


def test_db_info_as_json_is_one_line(dooly: Dooly, database: Path) -> None:
    result = dooly("db", "info", "--json")
    assert result.stdout.count("\n") == 1
    info = json.loads(result.stdout)
    assert info["measurements"] == 0
    assert info["configurations"][0]["configuration"]["backend"] == "CPU_ATTN"


def test_db_info_leaves_the_file_alone(dooly: Dooly, database: Path) -> None:
    before = database.read_bytes()
    dooly("db", "info")
    assert database.read_bytes() == before


# -- errors -------------------------------------------------------------------


def failing(error: BaseException) -> click.Command:
    @click.command()
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InputError("no\nsuch thing"), 2, "error: no such thing"),
        (CheckFailed("it does not hold"), 1, "error: it does not hold"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (OSError(28, "No space left on device", "out.csv"), 2, "error: no space left .*out.csv"),
        (OSError(27, "File too large"), 2, "error: no space left to write: File too large"),
        (PermissionError(13, "Permission denied", "/root/x"), 2, "error: cannot use /root/x: "),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["dooly"])
    monkeypatch.setattr(console, "_drop_stdout", lambda: None)
    assert console.exit_code(failing(error), "dooly") == code
    captured = capsys.readouterr()
    assert captured.err.strip().count("\n") == 0
    assert re.match(message, captured.err.strip())
    assert captured.out == ""


@pytest.mark.parametrize(
    "error", [ValueError("bug"), FileNotFoundError(2, "gone", "x"), KeyError("x")]
)
def test_anything_else_is_a_bug(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr("sys.argv", ["dooly"])
    with pytest.raises(type(error)):
        console.exit_code(failing(error), "dooly")


def test_engine_options_become_run_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from dooly_backend.config import RunOptions, load_model

    seen: list[RunOptions] = []

    @click.command()
    @click.argument("model")
    @console.engine_options
    def command(model: str, engine_settings: dict[str, object]) -> None:
        seen.append(RunOptions.checked(model=load_model(model), **engine_settings))

    arguments = ["smollm-135m", "--tp", "2", "--backend", "CPU_ATTN", "--layers", "3"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert (seen[0].tensor_parallel, seen[0].backend, seen[0].layers) == (2, "CPU_ATTN", 3)
    defaults = RunOptions.checked(model=seen[0].model)
    assert (
        seen[0].model_copy(update={"tensor_parallel": 1, "backend": None, "layers": None})
        == defaults
    )
