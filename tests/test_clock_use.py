"""How the clock of a device gets from a database into a bundle and a simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from dooly_backend.cli import cli
from dooly_backend.database import Database
from dooly_backend.database.records import Occurrence, Signature
from dooly_backend.errors import InputError
from dooly_backend.regression.bundle import load_bundle
from dooly_backend.regression.bundle_fit import fit_bundle
from dooly_backend.regression.clock import ClockResponse, fit_clock
from tests.sample_records import OCCURRENCES, at, store
from tests.test_clock_response import PATTERNS, TRUTH, steps_of
from tests.test_simulate_command import MEASURED

EXPERTS = Signature("FusedMoE", "module", "routing", '{"routing": {"experts": 8, "top_k": 2}}')
WATCHED, DENSE, MOE = "org/watched", "org/dense", "org/moe"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models in one environment; the clock was watched in the first."""
    path = tmp_path_factory.mktemp("clock") / "latency.db"
    steps = list(steps_of(TRUTH, PATTERNS))
    with Database.open(path, create=True) as database:
        ids = store(database, MEASURED, model=WATCHED)
        database.record_clock(*ids, steps)
        store(database, MEASURED, model=DENSE)
        experts = {
            EXPERTS: [at(f"routing={n}x{e}", 20.0 + e + n / 8) for n in (4, 64) for e in (2, 4, 8)]
        }
        graph = [*OCCURRENCES, Occurrence(len(OCCURRENCES), "model.mlp", "FusedMoE", EXPERTS, 4)]
        store(database, {**MEASURED, **experts}, model=MOE, occurrences=graph)
    return path


def clocks(path: Path) -> dict[str, ClockResponse | None]:
    with Database.open(path, read_only=True) as database:
        bundle = fit_bundle(database)
    return {each.configuration.model: each.clock for each in bundle.configurations}


def test_dense_models_share_what_was_watched_and_experts_do_not(path: Path) -> None:
    expected = fit_clock(list(steps_of(TRUTH, PATTERNS))).response
    found = clocks(path)
    assert found[MOE] is None
    assert found[WATCHED] == found[DENSE] is not None
    for name in ("cool", "slope", "tau_s", "warm_tokens"):
        assert getattr(found[WATCHED], name) == pytest.approx(getattr(expected, name), rel=0.01)


def test_a_bundle_keeps_it(path: Path, tmp_path: Path) -> None:
    with Database.open(path, read_only=True) as database:
        bundle = fit_bundle(database)
    bundle.save(tmp_path / "bundle.joblib")
    loaded = load_bundle(tmp_path / "bundle.joblib")
    assert [c.clock for c in loaded.configurations] == [c.clock for c in bundle.configurations]
    # One that light steps never warm is kept, too.
    changed = replace(bundle.configurations[0], clock=ClockResponse(0.8, 0.2, 0.05))
    replace(bundle, configurations=(changed,)).save(tmp_path / "cold.joblib")
    assert load_bundle(tmp_path / "cold.joblib").configurations[0].clock == changed.clock


def simulated(path: Path, model: str, *more: str) -> dict[str, object]:
    """Prefills of 1,024 tokens, one after a rest."""
    arguments = ["simulate", model, "--db", str(path), "--num-gpu-blocks", "4000", "--json"]
    workload = "fixed:prompt=1024,output=2,requests=6,arrivals=uniform,rate=1"
    result = CliRunner().invoke(cli, [*arguments, "--workload", workload, *more])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_a_simulation_lets_the_clock_recover_where_it_is_asked_to(path: Path) -> None:
    steady = simulated(path, WATCHED)
    recovered = simulated(path, WATCHED, "--device-clock")
    assert recovered["requests"] == steady["requests"]
    assert ttft(recovered) < ttft(steady)


def ttft(told: dict[str, object]) -> float:
    return float(told["ttft_mean_s"])  # type: ignore[arg-type]


def test_a_clock_that_was_not_watched_is_one_clear_line(path: Path) -> None:
    result = CliRunner().invoke(
        cli, ["simulate", MOE, "--db", str(path), "--num-gpu-blocks", "4000", "--device-clock"]
    )
    assert isinstance(result.exception, InputError)
    assert "was not watched: leave out --device-clock" in str(result.exception)
