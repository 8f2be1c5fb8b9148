"""Figures computed again: which commands, and the database that ships."""

from __future__ import annotations

import json
import lzma
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from dooly_backend.database import Database
from dooly_backend.database.records import PartCost
from dooly_backend.database.shipped import shipped_path
from integration.accuracy import refresh
from integration.accuracy.refresh import GROUPS, Task, run
from integration.gpu import ship
from tests.sample_records import CPU, store

TASKS = [task for tasks in GROUPS.values() for task in tasks("builtin:h200")]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_programs_know_their_arguments(task: Task) -> None:
    name, *arguments = task.command
    context = import_module(name).main.make_context(name, arguments)
    given = {str(value) for each in context.params.values() for value in _flat(each)}
    assert {word for word in arguments if not word.startswith("-")} <= given
    for path in (Path(word) for word in arguments if word.endswith((".xz", ".jsonl"))):
        assert path.exists()


def _flat(value: object) -> list[object]:
    return list(value) if isinstance(value, tuple) else [value]


def test_every_recorded_run_is_compared(tmp_path: Path) -> None:
    told = {"model": "m", "backend": "B", "execution_mode": "eager", "calibrated": True}
    folder = tmp_path / "validate/results/h200-x"
    folder.mkdir(parents=True)
    (folder / "figures.json").write_text(json.dumps({**told, "device_clock": True}))
    for number in (0, 1):
        (folder / f"live-{number}.json.xz").touch()
    (task,) = refresh.served("x.db", tmp_path)
    assert task.command == (
        "integration.validate.cross", "m", str(folder / "live-0.json.xz"),
        str(folder / "live-1.json.xz"), "--db", "x.db", "--backend", "B", "--mode", "eager",
        "--calibrate", "--device-clock", "-o", str(folder),
    )  # fmt: skip


def test_what_fails_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(Task("nothing", ("integration.no_such_program",))) == ("nothing", 1)
    assert "No module named integration.no_such_program" in capfd.readouterr().err
    assert run(Task("help", ("integration.accuracy.page", "--help"))) == ("help", 0)


def test_a_database_is_packed(tmp_path: Path) -> None:
    with Database.open(tmp_path / "x.db", create=True) as database:
        store(database, {}, environment=CPU)
    before = (tmp_path / "x.db").read_bytes()
    done = CliRunner().invoke(ship.main, [str(tmp_path / "x.db"), "-o", str(tmp_path / "x.xz")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "x.db").read_bytes() == before
    (tmp_path / "y.db").write_bytes(lzma.decompress((tmp_path / "x.xz").read_bytes()))
    with Database.open(tmp_path / "y.db", read_only=True) as database:
        assert len(database.configurations()) == 1


def test_what_ships_is_fitted_by_the_code_of_now(tmp_path: Path) -> None:
    """One profile's step costs, as they were stored, and fitted again."""
    copy = tmp_path / "h200.db"
    copy.write_bytes(shipped_path("h200").read_bytes())
    with Database.open(copy) as database:
        places = [(i, e) for i in database.configurations() for e in database.environments()]
        place = next(place for place in places if database.stream_steps(*place))
        stored = sorted(database.stream_cost(*place), key=_name)
        again = sorted(ship.store_stream_cost(database, place), key=_name)
    assert [*map(_name, stored)] == [*map(_name, again)]
    for known, now in zip(stored, again, strict=True):
        assert now.step_us == pytest.approx(known.step_us, rel=0.01, abs=1.0)
        assert now.share == pytest.approx(known.share, rel=1e-3)


def _name(cost: PartCost) -> tuple[str, str]:
    return cost.mode, cost.part
