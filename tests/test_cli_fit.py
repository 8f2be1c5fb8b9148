"""`dooly fit` as a shell sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sample_records import OCCURRENCES, store
from test_regressors import OF_KIND

from dooly_backend import console
from dooly_backend.cli import cli
from dooly_backend.database import Database
from dooly_backend.regression.bundle import load_bundle


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "latency.db"
    with Database.open(path, create=True) as database:
        store(database, {o.signature: OF_KIND[o.signature] for o in OCCURRENCES})
    return path


def dooly(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["dooly", *map(str, arguments)])
    return console.exit_code(cli, "dooly")


def test_fit_writes_a_bundle_and_says_how_good_it_is(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle.joblib"
    assert dooly(monkeypatch, "fit", "--db", db, "-o", out, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["signatures"] == 4
    assert printed["configurations"] == 1
    assert 0 <= printed["held_out_error"]["batch"] < 10  # percent
    assert set(load_bundle(out).signatures) == {o.signature.hash for o in OCCURRENCES}


def test_fit_shows_a_table(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle.joblib"
    options = ("--regressor", "roofline", "--regressor", "interpolation")
    assert dooly(monkeypatch, "fit", "--db", db, *options, "-o", out) == 0
    printed = capsys.readouterr().out
    assert "Attention" in printed
    assert "roofline" in printed
    assert "wrote 4 signatures" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "Llama"], "no model 'Llama'"),
        (["--environment", "A100"], "no environment 'A100'"),
        (["--regressor", "oracle"], "oracle"),
    ],
)
def test_what_cannot_be_fitted_is_said_in_one_line(
    db: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    out = tmp_path / "bundle.joblib"
    assert dooly(monkeypatch, "fit", "--db", db, "-o", out, *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()
