"""A latency model with the regressors of a bundle between its measured points."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from sample_records import CPU, OCCURRENCES, store
from test_regressors import MOE, OF_KIND

from dooly_backend import console
from dooly_backend.database import Database
from dooly_backend.database.records import Occurrence
from dooly_backend.errors import InputError
from dooly_backend.export_command import export
from dooly_backend.regression.baseline import RoutingLatency
from dooly_backend.regression.bundle import Bundle
from dooly_backend.regression.bundle_fit import fit_bundle
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.regression.refined import refined
from dooly_backend.workload import Batch

GRAPH = (*OCCURRENCES, Occurrence(4, "model.layers.*.mlp", "FusedMoE", MOE, 28, tuple(range(28))))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    path = tmp_path_factory.mktemp("refined") / "latency.db"
    with Database.open(path, create=True) as database:
        store(database, {o.signature: OF_KIND[o.signature] for o in GRAPH}, occurrences=GRAPH)
        yield database


@pytest.fixture(scope="module")
def bundle(database: Database) -> Bundle:
    return fit_bundle(database)


@pytest.fixture
def plain(database: Database) -> LatencyModel:
    return LatencyModel.load(database)


def test_what_was_measured_stays(plain: LatencyModel, bundle: Bundle) -> None:
    model = refined(plain, bundle)
    for occurrence in GRAPH:
        for point in plain.signatures[occurrence.signature.hash].points:
            if point.batch is not None:
                before = plain.occurrence(occurrence, point.batch)
                assert before.measured
                assert model.occurrence(occurrence, point.batch) == before


def test_between_them_the_regressor_decides(plain: LatencyModel, bundle: Bundle) -> None:
    model = refined(plain, bundle)
    batch = Batch.parse("1x700+300,8x1+1000")
    for occurrence in GRAPH[1:]:
        latency, before = model.occurrence(occurrence, batch), plain.occurrence(occurrence, batch)
        expected = bundle.predict_batches(occurrence.signature, [batch])
        assert latency.median_us == pytest.approx(expected.us[0])
        assert not latency.measured
        assert latency.min_us <= latency.median_us <= latency.max_us
        assert latency.max_us / latency.median_us == pytest.approx(before.max_us / before.median_us)
    attention = GRAPH[2]
    assert model.occurrence(attention, batch) != plain.occurrence(attention, batch)
    assert model.occurrence(attention, Batch.prefill(4096, 90_000)).extrapolated


def test_a_mixture_can_still_be_asked_by_its_experts(plain: LatencyModel, bundle: Bundle) -> None:
    latency = refined(plain, bundle).signatures[MOE.hash]
    assert isinstance(latency, RoutingLatency)
    at_point, measured = latency.at_routing(64, 32)
    assert measured
    assert at_point == plain.signatures[MOE.hash].at_routing(64, 32)[0]  # type: ignore[attr-defined]
    between, measured = latency.at_routing(100, 20)
    assert not measured
    expected = bundle.predict(MOE, {"num_tokens": 100.0, "experts": 20.0})
    assert between.statistics.median_us == pytest.approx(expected.us)


def test_a_bundle_of_another_place_is_refused(plain: LatencyModel, bundle: Bundle) -> None:
    with pytest.raises(InputError, match="another environment"):
        refined(plain, replace(bundle, environment=CPU))
    with pytest.raises(InputError, match="lacks 5 of the 5 signatures"):
        refined(plain, replace(bundle, signatures={}))


def test_an_export_takes_a_bundle(
    database: Database,
    bundle: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle.save(tmp_path / "bundle.joblib")
    tables: dict[str, str] = {}
    for name, options in (("plain", []), ("refined", ["--bundle", tmp_path / "bundle.joblib"])):
        out = tmp_path / name
        arguments = ["--to", "revati", "--db", database.path, "-o", out, "--json", *options]
        monkeypatch.setattr("sys.argv", ["dooly-export", *map(str, arguments)])
        assert console.exit_code(export, "dooly-export") == 0
        json.loads(capsys.readouterr().out)
        tables |= {f"{name} {p.name}": p.read_text() for p in out.rglob("*.csv")}
    names = {key.split(" ", 1)[1] for key in tables}
    rows = {
        n: (tables[f"plain {n}"].splitlines(), tables[f"refined {n}"].splitlines()) for n in names
    }
    for before, after in rows.values():
        for one, other in zip(before, after, strict=True):
            assert one == other or not one.endswith("measured")
    assert any(before != after for before, after in rows.values())  # experts between the measured


def test_statistics_are_plain_numbers(plain: LatencyModel, bundle: Bundle) -> None:
    latency = refined(plain, bundle).occurrence(GRAPH[2], Batch.prefill(300))
    assert all(type(value) in (float, bool) for value in astuple(latency))
