"""The workflow in docs/ci.md: valid, and its own commands run where they need no GPU."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import shim_fixture
import yaml

from dooly_backend.cli import cli
from dooly_backend.config import known_models

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "ci.md").read_text("utf-8")
MODEL = "meta-llama/Llama-3.1-8B"
#: What only the runner with the GPU does: install, measure, simulate.
ELSEWHERE = ("Install", "Measure what is not known", "Run Vidur on them")


def workflow() -> dict[str, Any]:
    blocks = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 1
    return yaml.safe_load(blocks[0])


def steps() -> dict[str, str]:
    """The commands of each step by its name."""
    (job,) = workflow()["jobs"].values()
    return {step["name"]: step["run"] for step in job["steps"] if "run" in step}


@pytest.fixture
def runner(tmp_path: Path) -> Path:
    """A folder as the runner's, with a database and both programs on the path."""
    shim_fixture.latency_model(tmp_path / "latency.db", MODEL)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, call in (("dooly", "main"), ("dooly-export", "export_main")):
        program = programs / name
        code = f"from dooly_backend.cli import {call}; {call}()"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n')
        program.chmod(0o755)
    return tmp_path


def run(runner: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Run a step as GitHub Actions does."""
    path = f"{runner / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", steps()[name]],
        cwd=runner,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_steps_are_those_that_this_test_knows() -> None:
    here = [name for name in steps() if name not in ELSEWHERE]
    assert here == [
        "Look at the database",
        "Compare with the accepted tables",
        "Write Vidur's tables",
    ]
    assert MODEL in known_models()


def test_the_commands_run_in_turn(runner: Path) -> None:
    here = [name for name in steps() if name not in ELSEWHERE]
    for _ in range(2):  # a first run, and one that has the first one's export
        for name in here:
            done = run(runner, name)
            assert done.returncode == 0, f"{name}: {done.stderr}"
    assert (runner / "vidur-profiles" / "run_vidur.py").is_file()


def test_a_step_fails_where_times_moved(runner: Path) -> None:
    assert run(runner, "Write Vidur's tables").returncode == 0
    with sqlite3.connect(runner / "latency.db") as connection:
        connection.execute(
            "UPDATE measurement SET samples_us = replace(samples_us, '[', '[1e6, 1e6, 1e6, 1e6, "
            "1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, ')"
            " WHERE signature IN (SELECT hash FROM signature WHERE name = 'SiluAndMul')"
        )
    done = run(runner, "Compare with the accepted tables")
    assert done.returncode == 1
    assert "mlp_act" in done.stderr


def test_the_measuring_command_exists() -> None:
    words = steps()["Measure what is not known"].split()
    assert words[:3] == ["dooly", "profile", MODEL]
    command = cli.commands["profile"]
    options = {flag for parameter in command.params for flag in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= options
