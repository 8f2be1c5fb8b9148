"""`dooly export` as a shell sees it, on a database whose times come from formulas."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from vidur_fixture import ENVIRONMENT, configuration, fixture_model

from dooly_backend import console, exporters
from dooly_backend.database import Database
from dooly_backend.errors import InputError
from dooly_backend.export_command import export, load_models

Result = subprocess.CompletedProcess[str]
Dooly = Callable[..., Result]
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with one model at tensor-parallel sizes 1 and 2."""
    path = tmp_path_factory.mktemp("database") / "latency.db"
    fixture_model(path)
    fixture_model(path, tensor_parallel=2)
    return path


@pytest.fixture
def database(measured: Path, tmp_path: Path) -> Path:
    """A copy of it under the name that is the default, where `dooly` runs."""
    return Path(shutil.copy(measured, tmp_path / "latency.db"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process: the code and what it printed, as `dooly` tells them."""

    def run(*arguments: str) -> Result:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["dooly-export", *arguments])
        capsys.readouterr()
        code = console.exit_code(export, "dooly-export")
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(list(arguments), code, printed.out, printed.err)

    return run


def one_error(result: Result) -> str:
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr), result.stderr
    return result.stderr


# -- what it writes -----------------------------------------------------------


def test_export_tells_how_to_run_the_simulator(
    dooly: Dooly, database: Path, tmp_path: Path
) -> None:
    result = dooly("export", "--to", "vidur", "-o", "out")
    assert result.returncode == 0, result.stderr
    assert re.search(r"^wrote \d+ files to out\nrun: cd out && python ", result.stdout)
    assert (tmp_path / "out" / "manifest.json").is_file()


def test_export_as_json_is_one_line(run: Run, database: Path) -> None:
    result = run("--to", "vidur", "-o", "out", "--layout", "pypi", "--json")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1
    manifest = json.loads(result.stdout)
    assert manifest["format"] == "vidur"
    assert manifest["layout"] == "pypi"
    assert manifest["out"] == "out"


def test_every_measured_degree_is_exported(run: Run, database: Path) -> None:
    manifest = json.loads(run("--to", "vidur", "-o", "out", "--json").stdout)
    assert manifest["tensor_parallel"] == [1, 2]


def test_a_degree_can_be_chosen(run: Run, database: Path) -> None:
    result = run("--to=vidur", "--tp", "2", "-o", "out", "--json")
    assert json.loads(result.stdout)["tensor_parallel"] == [2]


def test_a_shipped_device_gives_its_figures(run: Run, database: Path) -> None:
    result = run("--to", "vidur", "--hardware", "h100", "-o", "out", "--json")
    assert result.returncode == 0, result.stderr
    assert "not known" not in json.dumps(json.loads(result.stdout)["approximations"])


def test_the_database_is_only_read(run: Run, database: Path) -> None:
    before = database.read_bytes()
    run("--to", "vidur", "-o", "out")
    assert database.read_bytes() == before


# -- its options --------------------------------------------------------------


def test_help_shows_the_options_of_every_format(run: Run) -> None:
    text = run("--help").stdout
    assert "--layout VALUE" in text
    assert "[vidur]" in text
    assert "[vidur]" not in run("--to", "vidur", "--help").stdout


def test_formats(run: Run) -> None:
    result = run("--formats")
    assert result.returncode == 0
    names = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert names == sorted(names)
    assert "vidur" in names


def test_a_broken_exporter_does_not_hide_the_others(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load = exporters.get_exporter

    def get_exporter(name: str) -> exporters.Exporter:
        if name == "broken":
            raise InputError("the exporter 'broken' cannot be loaded")
        return load(name)

    monkeypatch.setattr(exporters, "exporter_names", lambda: ["broken", "vidur"])
    monkeypatch.setattr(exporters, "get_exporter", get_exporter)
    assert "--layout" in run("--help").stdout
    assert run("--formats").stdout.startswith("vidur")
    assert "'broken' cannot be loaded" in caplog.text


# -- wrong input --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--to nothing -o out", "unknown export format 'nothing': known are .*vidur"),
        ("--to vidur", "Missing option '-o' / '--out'"),
        ("-o out", "Missing option '--to'"),
        ("--to vidur -o out --layout odd", "layout must be"),
        ("--to vidur -o out --lay repo", "No such option"),
        ("--to vidur -o out --max-batch none", "max_batch must be"),
        ("--to vidur -o out --hardware h1000", "unknown hardware 'h1000'"),
        ("--to vidur -o out --db nothing.db", "nothing.db"),
        ("--to vidur -o out --db builtin:nothing", "nothing"),
        ("--to vidur -o out --model unheard", "unheard"),
        ("--to vidur -o out --environment unheard", "unheard"),
        ("--to vidur -o out --tp 4", "tensor_parallel=4"),
        ("--to vidur -o latency.db", "latency.db is not a folder"),
    ],
)
def test_wrong_input(
    run: Run, database: Path, tmp_path: Path, arguments: str, message: str
) -> None:
    assert re.search(message, one_error(run(*arguments.split())))
    assert not (tmp_path / "out").exists()


def test_wrong_input_in_a_process_of_its_own(dooly: Dooly) -> None:
    assert "unknown export format" in one_error(dooly("export", "--to", "nothing", "-o", "out"))


def test_a_file_that_is_no_database(dooly: Dooly, tmp_path: Path) -> None:
    (tmp_path / "latency.db").write_text("junk " * 1000)
    assert "latency.db" in one_error(dooly("export", "--to", "vidur", "-o", "out"))


# The smallest keeps SQLite from its index of the log, the next the tables from their folder.
@pytest.mark.parametrize("file_limit", [4_096, 65_536])
def test_a_full_disk(dooly: Dooly, database: Path, tmp_path: Path, file_limit: int) -> None:
    result = dooly("export", "--to", "vidur", "-o", "out", file_limit=file_limit)
    assert re.search("cannot be written|cannot write|no space", one_error(result))
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"latency.db", "latency.db-shm", "latency.db-wal"}  # SQLite's are its own


# -- which models -------------------------------------------------------------


def test_an_unfinished_degree_is_left_out_with_a_warning(
    database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Database.open(database) as opened:
        occurrences = opened.occurrences(1)
        opened.add_configuration(configuration(tensor_parallel=4), occurrences[:1])
        unmeasured = configuration(tensor_parallel=8)
        opened.add_configuration(unmeasured, [])
    with Database.open(database, read_only=True) as opened:
        models = load_models(opened, None, None)
    degrees = [model.configuration.tensor_parallel for model in models]
    assert degrees[:2] == [1, 2]
    assert "tensor-parallel size 8 is left out" in caplog.text


def test_when_nothing_is_measured_the_reason_is_told(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    with Database.open(path, create=True) as opened:
        opened.add_environment(ENVIRONMENT)
        for degree in (1, 2):
            opened.add_configuration(configuration(degree), [])
    with (
        Database.open(path, read_only=True) as opened,
        pytest.raises(InputError, match="dooly profile"),
    ):
        load_models(opened, "SmolLM-135M", None)
