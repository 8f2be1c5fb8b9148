"""Wrong or partial input to every exporter: one line that says what to run, nothing left behind."""

from __future__ import annotations

import errno
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shim_fixture

from dooly_backend import console, exporters
from dooly_backend.database import Database
from dooly_backend.database.records import Measurement
from dooly_backend.export_command import export
from dooly_backend.workload import WorkloadPoint

Result = subprocess.CompletedProcess[str]
Run = Callable[..., Result]

FORMATS = ("vidur", "llmservingsim", "revati", "sglang-simulator")
SMALL = {
    "vidur": ["--max-length", "384", "--max-chunk", "256", "--max-batch", "4"],
    "sglang-simulator": ["--samples", "200"],
}
MODEL = shim_fixture.LLAMA


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "latency.db"
    shim_fixture.latency_model(path, MODEL)
    return path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(name: str, *arguments: str) -> Result:
        monkeypatch.chdir(tmp_path)
        arguments = ("--to", name, *SMALL.get(name, []), *arguments)
        monkeypatch.setattr("sys.argv", ["dooly-export", *arguments])
        capsys.readouterr()
        code = console.exit_code(export, "dooly-export")
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(list(arguments), code, printed.out, printed.err)

    return run


def refused(result: Result, message: str) -> None:
    """One line on stderr, with what to do."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr), result.stderr
    assert re.search(message, result.stderr), result.stderr


def names(folder: Path) -> set[str]:
    """What lies in a folder, without what SQLite keeps beside its file."""
    return {path.name for path in folder.iterdir() if not path.name.endswith(("-wal", "-shm"))}


@pytest.mark.parametrize("name", FORMATS)
def test_a_database_without_this_model(run: Run, database: Path, tmp_path: Path, name: str) -> None:
    result = run(name, "--model", "unheard", "-o", "out")
    refused(result, r"no model 'unheard', only meta-llama/Llama-3.1-8B: run `dooly profile unheard")
    assert names(tmp_path) == {"latency.db"}


@pytest.mark.parametrize("name", FORMATS)
def test_a_degree_that_is_missing(run: Run, database: Path, tmp_path: Path, name: str) -> None:
    result = run(name, "--tp", "1", "--tp", "4", "-o", "out")
    refused(
        result,
        r"tensor_parallel=4, only .*: run `dooly profile meta-llama/.* --tp 4 --db .*` first",
    )
    assert names(tmp_path) == {"latency.db"}


@pytest.mark.parametrize("name", FORMATS)
def test_an_ambiguous_environment(run: Run, database: Path, tmp_path: Path, name: str) -> None:
    with Database.open(database) as opened:
        (environment,) = opened.environments().values()
        other = opened.add_environment(replace(environment, engine_version="0.1-fixture"))
        for signature in opened.signatures().values():
            (known, *_) = opened.measurements(signature.hash, 1)
            opened.record(signature, other, known)
    result = run(name, "-o", "out")
    refused(result, r"measurements of 2 environments: .*--environment")
    assert names(tmp_path) == {"latency.db"}
    chosen = run(name, "--environment", environment.digest[:12], "-o", "out")
    assert chosen.returncode == 0, chosen.stderr


@pytest.mark.parametrize("name", FORMATS)
def test_a_measurement_that_is_missing(run: Run, tmp_path: Path, name: str) -> None:
    """One signature of the model is known of another environment alone."""
    config = shim_fixture.configuration(MODEL)
    whole = shim_fixture.latency_model(tmp_path / "whole.db", MODEL)
    with Database.open(tmp_path / "latency.db", create=True) as opened:
        environment = opened.add_environment(whole.environment)
        opened.add_configuration(config, whole.occurrences)
        first = whole.occurrences[0].signature
        point = WorkloadPoint(first.kind, num_tokens=8)
        opened.record(first, environment, Measurement(point, (5.0,)))
    result = run(name, "-o", "out")
    refused(result, r"is not complete: .* 1 of \d+ signatures .*: run `dooly profile")
    assert names(tmp_path) == {"latency.db", "whole.db"}


@pytest.mark.parametrize("name", FORMATS)
def test_other_peoples_files(run: Run, database: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    refused(run(name, "-o", "out"), r"files that no export wrote \(thesis.tex\): give a new or")
    assert names(out) == {"thesis.tex"}
    assert names(tmp_path) == {"latency.db", "out"}


@pytest.mark.parametrize("name", FORMATS)
def test_a_disk_that_fills_up(
    run: Run, database: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last file, so that all others are written; an earlier export stays whole."""
    assert run(name, "-o", "out").returncode == 0
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(exporters.Path, "rename", full)
    refused(run(name, "-o", "out"), "No space left")
    assert {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()} == before
    assert names(tmp_path) == {"latency.db", "out"}
