"""`dooly-export --check`: what moved between two exports, by exit code, table and JSON."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from vidur_fixture import OPERATIONS, Operation, configuration, fixture_model

from dooly_backend import console
from dooly_backend.database import Database
from dooly_backend.export_command import export
from dooly_backend.export_tables import read_export

Result = subprocess.CompletedProcess[str]
Run = Callable[..., Result]

SMALL = ["--max-length", "384", "--max-chunk", "256", "--max-batch", "4"]
VIDUR = ["--to", "vidur", *SMALL]
MOVED = "model.layers.*.mlp.down_proj"  # Vidur's mlp_down_proj, LLMServingSim's down_proj


def slower(factor: float, path: str = MOVED) -> tuple[Operation, ...]:
    """The fixture's operations, one of them `factor` times as slow."""
    return tuple(
        replace(o, fixed=o.fixed * factor, each=o.each * factor) if o.path == path else o
        for o in OPERATIONS
    )


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a database as it was, and as it is after changes of several sizes."""
    folder = tmp_path_factory.mktemp("databases")
    plain = configuration()
    config = replace(plain, hf_config=plain.hf_config | {"model_type": "llama"})
    fixture_model(folder / "old.db", config=config)
    for percent in (3, 9, 40):
        fixture_model(folder / f"new{percent}.db", slower(1 + percent / 100), config=config)
    return folder


@pytest.fixture
def run(
    databases: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Run the command in this process on the database of a name."""

    def run(database: str, *arguments: str) -> Result:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "120")  # a worker of pytest-xdist has fewer
        arguments = (*arguments, "--db", str(databases / database))
        monkeypatch.setattr("sys.argv", ["dooly-export", *arguments])
        capsys.readouterr()
        code = console.exit_code(export, "dooly-export")
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(list(arguments), code, printed.out, printed.err)

    return run


def checked(run: Run, database: str, options: list[str], *more: str) -> dict:
    """The JSON of a check of `database` against the old one's export."""
    assert run("old.db", *options, "-o", "old").returncode == 0
    result = run(database, *options, "--check", "old", "--json", *more)
    assert result.returncode in (0, 1), result.stderr
    assert result.stdout.count("\n") == 1
    found = json.loads(result.stdout)
    assert result.returncode == (0 if found["ok"] else 1)
    return found


def of(found: dict, operation: str) -> dict:
    return next(item for item in found["operations"] if item["operation"] == operation)


@pytest.mark.parametrize("layout", ["repo", "pypi"])
def test_an_equal_export_has_nothing_to_say(run: Run, layout: str) -> None:
    found = checked(run, "old.db", [*VIDUR, "--layout", layout])
    assert found["ok"]
    assert found["rows"] > 1000
    assert {item["verdict"] for item in found["operations"]} == {"equal"}
    assert (found["rows_added"], found["rows_removed"]) == (0, 0)


@pytest.mark.parametrize("layout", ["repo", "pypi"])
def test_what_moved_is_named_with_its_size(run: Run, layout: str, tmp_path: Path) -> None:
    found = checked(run, "new40.db", [*VIDUR, "--layout", layout])
    # attn_decode holds what rounding tokens adds, which grew with the operation.
    assert "mlp_down_proj" in found["moved"]
    assert set(found["moved"]) <= {"mlp_down_proj", "attn_decode"}
    moved = of(found, "mlp_down_proj")
    assert moved["median_percent"] == pytest.approx(40, abs=0.1)
    assert moved["worst_percent"] == pytest.approx(40, abs=0.1)
    assert "num_tokens=" in moved["worst_at"]
    assert of(found, "mlp_up_proj")["verdict"] == "equal"
    assert {path.name for path in tmp_path.iterdir()} == {"old"}


def test_a_change_within_the_spread_is_noise(run: Run) -> None:
    found = checked(run, "new9.db", VIDUR)
    moved = of(found, "mlp_down_proj")
    assert moved["verdict"] == "within noise"
    assert moved["noise_percent"] > 9
    assert found["ok"]


def test_the_threshold(run: Run) -> None:
    assert of(checked(run, "new3.db", VIDUR), "mlp_down_proj")["verdict"] == "within threshold"
    options = ["--to", "llmservingsim"]  # its tables hold no spread
    assert of(checked(run, "new3.db", options), "tp1 down_proj")["noise_percent"] is None
    assert checked(run, "new3.db", options)["ok"]
    assert checked(run, "new3.db", options, "--threshold", "2")["moved"] == ["tp1 down_proj"]
    assert checked(run, "new9.db", options)["moved"] == ["tp1 down_proj"]


@pytest.mark.parametrize("name", ["revati", "sglang-simulator"])
def test_other_formats(run: Run, name: str) -> None:
    samples = ["--samples", "200"] if name == "sglang-simulator" else []
    options = ["--to", name, *samples]
    assert checked(run, "old.db", options)["ok"]
    found = checked(run, "new40.db", options)
    expected = "mlp.down_proj" if name == "revati" else "tp1 step"
    assert any(operation.endswith(expected) for operation in found["moved"])
    if name == "sglang-simulator":
        assert any("latency_model.pkl differs" in note for note in found["notes"])


def test_rows_that_are_gone(run: Run) -> None:
    assert run("old.db", *VIDUR, "-o", "old").returncode == 0
    fewer = [*VIDUR[:2], "--max-length", "384", "--max-chunk", "128", "--max-batch", "4"]
    found = json.loads(run("old.db", *fewer, "--check", "old", "--json").stdout)
    assert found["rows_removed"] > 0
    assert "attn_prefill" in found["moved"]
    assert run("old.db", *fewer, "-o", "fewer").returncode == 0
    result = run("old.db", *VIDUR, "--check", "fewer", "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["rows_added"] > 0


def test_the_table_for_people(run: Run) -> None:
    run("old.db", *VIDUR, "-o", "old")
    result = run("new40.db", *VIDUR, "--check", "old")
    assert result.returncode == 1
    assert re.search(r"mlp_down_proj +\d+ .*\+40\.00% .*moved", result.stdout)
    assert re.fullmatch(r"error: beyond 5% and the noise[^\n]+mlp_down_proj[^\n]*\n", result.stderr)
    assert run("old.db", *VIDUR, "--check", "old").stderr == ""


def test_the_new_export_can_be_kept(run: Run, tmp_path: Path) -> None:
    run("old.db", *VIDUR, "-o", "old")
    result = run("new40.db", *VIDUR, "--check", "old", "-o", "new")
    assert result.returncode == 1
    assert (tmp_path / "new" / "run_vidur.py").is_file()
    assert read_export(tmp_path / "new").times.keys() == read_export(tmp_path / "old").times.keys()


def test_another_environment_is_said(run: Run, databases: Path, tmp_path: Path) -> None:
    run("old.db", *VIDUR, "-o", "old")
    newer = databases / "newer.db"
    shutil.copy(databases / "old.db", newer)
    with Database.open(newer) as opened:
        opened._connection.execute("UPDATE environment SET engine_version = '9'")
    found = json.loads(run("newer.db", *VIDUR, "--check", "old", "--json").stdout)
    assert any("environments differ" in note for note in found["notes"])
    assert found["ok"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--to vidur --check nothing", "no earlier export nothing"),
        ("--to vidur --check empty", "empty is no export"),
        ("--to revati --check old", "of format 'vidur', not 'revati'"),
        ("--to vidur --layout pypi --check old", "give --layout repo"),
        ("--to vidur --check other", "of model 'else', the new export of 'fixture/"),
        ("--to vidur --check old -o old", "would replace what it is checked against"),
        ("--to vidur --check broken", "cannot be read as a table"),
        ("--to vidur --check old --threshold -1", "threshold"),
    ],
)
def test_wrong_input(run: Run, tmp_path: Path, arguments: str, message: str) -> None:
    run("old.db", *VIDUR, "-o", "old")
    (tmp_path / "empty").mkdir()
    for name in ("other", "broken"):
        shutil.copytree(tmp_path / "old", tmp_path / name)
    manifest = json.loads((tmp_path / "old" / "manifest.json").read_text())
    (tmp_path / "other" / "manifest.json").write_text(json.dumps(manifest | {"model": "else"}))
    for path in (tmp_path / "broken").rglob("mlp.csv"):
        path.write_text("time_stats.emb.median,num_tokens\nfast,8\n")
    before = sorted(tmp_path.rglob("*"))
    small = SMALL if "vidur" in arguments else []
    result = run("old.db", *arguments.split(), *small)
    assert result.returncode == 2, result.stderr
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr)
    assert re.search(message, result.stderr)
    assert result.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before
