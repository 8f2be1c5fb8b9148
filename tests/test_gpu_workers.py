"""Workers that start together and measure in turn, on one device and on several."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from integration.gpu.workers import in_turn_on_each, shared_out

ROOT = Path(__file__).resolve().parent.parent

#: Starts for so long, then says when each turn began; or fails at once.
PROBE = """
import os, sys, time
from integration.gpu.workers import ready
name, seconds, turns = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
if seconds < 0:
    sys.exit(3)
time.sleep(seconds)
for _ in range(turns):
    with open("events", "a") as file:
        file.write(f"ready {name}\\n")
    ready()
    with open("events", "a") as file:
        file.write(f"turn {name} on {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
"""


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "probe.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "events"


def probe(name: str, seconds: float, turns: int = 1) -> list[str]:
    return ["probe", name, str(seconds), str(turns)]


def test_nobody_has_a_turn_before_all_are_ready_on_every_device(events: Path) -> None:
    commands = {"0": [probe("a", 0.0), probe("b", 0.0)], "1": [probe("c", 1.0)]}
    assert in_turn_on_each(commands, 60.0) == {"0": [0, 0], "1": [0]}
    lines = events.read_text().splitlines()
    assert sorted(lines[:3]) == ["ready a", "ready b", "ready c"]
    assert sorted(lines[3:]) == ["turn a on 0", "turn b on 0", "turn c on 1"]


def test_a_worker_that_fails_keeps_nobody_waiting(events: Path) -> None:
    commands = {"0": [probe("a", -1.0)], "1": [probe("b", 0.0), probe("c", -1.0)]}
    assert in_turn_on_each(commands, 60.0) == {"0": [3], "1": [0, 3]}
    assert "turn b on 1" in events.read_text().splitlines()


def test_turns_go_round(events: Path) -> None:
    commands = {None: [probe("a", 0.0, turns=2), probe("b", 0.2, turns=2)]}
    assert in_turn_on_each(commands, 60.0, turns=2) == {None: [0, 0]}
    turns = [line[5] for line in events.read_text().splitlines() if line.startswith("turn")]
    assert turns == ["a", "b", "a", "b"]


def test_configurations_are_shared_out_in_their_order() -> None:
    assert shared_out("abcde", ["0", "1"]) == {"0": "abc", "1": "de"}
    assert shared_out("ab", ["0", "1", "2"]) == {"0": "a", "1": "b"}
    assert shared_out("abc", []) == {None: "abc"}
