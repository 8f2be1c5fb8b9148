"""What steps cost at the engine's defaults: fitted, kept, and used for predictions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from rich.console import Console

from dooly_backend.database import Database, migrations
from dooly_backend.database.check import check_file
from dooly_backend.database.info_tables import formula, render
from dooly_backend.database.merge import merge
from dooly_backend.database.records import HostStep, PartCost, StepCost, StepMode, StreamStep
from dooly_backend.profiling.stream_batches import STREAM_BATCHES
from dooly_backend.regression.bundle import Bundle, load_bundle
from dooly_backend.regression.bundle_fit import fit_bundle
from dooly_backend.regression.clock import HEAVY_TOKENS
from dooly_backend.regression.step_operations import Operations, step_operations
from dooly_backend.regression.store_cost import store_stream_cost
from dooly_backend.regression.stream_cost import fit_stream_cost, time_us
from dooly_backend.simulation.execution import Execution, Mode, capture_sizes
from dooly_backend.simulation.own_cost import HostCost, NoCost, Shapes, StreamedCost, own_cost
from dooly_backend.simulation.records import Batches
from dooly_backend.simulation.step_time import StepModel
from dooly_backend.workload import Batch
from integration.gpu import step_errors
from integration.gpu.steps import BATCHES
from tests.sample_records import ATTENTION, LINEAR, QWEN, ROPE, SAMPLER, at, store

SIZES = capture_sizes(256, 8192, "0.25.1")
RULE = Execution("FULL_AND_PIECEWISE", SIZES, 256)
NAMES: dict[int, StepMode] = {0: "eager", 1: "piecewise", 2: "full"}

#: An H200's, about: microseconds.
TRUTH = {
    ("full", "device"): PartCost("full", "device", share=0.92, step_us=40.0),
    ("full", "launch"): PartCost("full", "launch", step_us=1300.0, layer_us=20.0, request_us=1.5),
    ("piecewise", "device"): PartCost("piecewise", "device", share=0.94, step_us=90.0),
    ("piecewise", "launch"): PartCost(
        "piecewise", "launch", step_us=900.0, layer_us=60.0, request_us=1.5
    ),
    ("eager", "device"): PartCost("eager", "device", share=0.97),
    ("eager", "launch"): PartCost(
        "eager", "launch", step_us=1800.0, layer_us=520.0, request_us=1.5
    ),
}


def by_hand(batch: Batch, layers: int) -> Operations:
    """Some sum of operations, of it attention what reads the cache."""
    read = sum(request.query + request.context for request in batch.requests)
    attention = layers * 0.002 * read
    return Operations(attention + layers * (140 + 0.8 * batch.num_tokens) + 350, attention)


def shown(batch: Batch, layers: int, times: Callable[[float], float]) -> StreamStep:
    """What a stream of `batch` takes by TRUTH; `times` disturbs a time."""
    longest = max(request.query for request in batch.requests)
    numbers = (np.array([n]) for n in (batch.num_tokens, batch.num_reqs, longest))
    mode, padded = RULE.modes(*numbers)
    name = NAMES[int(mode[0])]
    device = time_us(TRUTH[name, "device"], by_hand(batch, layers))
    launch = time_us(TRUTH[name, "launch"], layers=layers, requests=batch.num_reqs)
    interval = tuple(times(max(device, launch)) for _ in range(5))
    return StreamStep(
        batch, layers, name, int(padded[0]), interval, tuple(times(launch) for _ in range(5))
    )


def steps(times: Callable[[float], float] = float) -> list[StreamStep]:
    return [shown(batch, layers, times) for layers in (4, 32) for batch in STREAM_BATCHES]


def by_part(costs: Sequence[PartCost]) -> dict[tuple[str, str], PartCost]:
    return {(cost.mode, cost.part): cost for cost in costs}


#: What passes before an idle device begins: a whole graph is launched first.
WAITS = {"full": 700.0, "piecewise": 400.0, "eager": 450.0}
GRAPH_LAYER_US = 15.0  # of a whole graph, beside what WAITS has


def with_lone_steps(measured: Sequence[StreamStep], noise: random.Random) -> list[StreamStep]:
    """The steps, each alone as well: heavy ones at the higher clock of a rested device."""
    found = []
    for step in measured:
        device = time_us(TRUTH[step.mode, "device"], by_hand(step.batch, step.num_layers))
        launch = time_us(
            TRUTH[step.mode, "launch"], layers=step.num_layers, requests=step.batch.num_reqs
        )
        before = WAITS[step.mode] + (step.mode == "full") * GRAPH_LAYER_US * step.num_layers
        device *= 0.88 if step.batch.num_tokens >= HEAVY_TOKENS else 1.0
        lone = max(before + device, launch)
        found.append(replace(step, alone_us=tuple(lone * noise.gauss(1, 0.005) for _ in range(5))))
    return found


def operations(measured: Sequence[StreamStep]) -> list[Operations]:
    return [by_hand(step.batch, step.num_layers) for step in measured]


# -- the fit ---------------------------------------------------------------------


def test_what_steps_cost_is_found_again() -> None:
    measured = steps()
    found = by_part(fit_stream_cost(measured, operations(measured)))
    assert set(found) == set(TRUTH)
    for key, truth in TRUTH.items():
        cost = found[key]
        assert cost.mape < 0.5
        assert cost.share == pytest.approx(truth.share, abs=0.005)
        # Decodes have as many tokens as requests: what either costs is one thing.
        several = (cost.request_us + cost.token_us, truth.request_us + truth.token_us)
        assert several[0] == pytest.approx(several[1], abs=0.05)
        assert cost.step_us == pytest.approx(truth.step_us, abs=30)
        assert cost.layer_us == pytest.approx(truth.layer_us, abs=2)


def test_attention_is_not_fused() -> None:
    """Long contexts take what their attention takes, however much of the rest is fused."""
    measured = steps()
    found = by_part(fit_stream_cost(measured, operations(measured)))["full", "device"]
    short, long = (Operations(4000.0 + us, us) for us in (100.0, 9000.0))
    assert time_us(found, long) - time_us(found, short) == pytest.approx(8900.0)
    one = np.ones(1, np.int64)
    shapes = Shapes(one, one, one, np.array([Mode.FULL], np.int8))
    own = own_cost(None, 32, (found,)).of(shapes)
    for each in (short, long):
        device = own.device_us(np.array([each.us]), np.array([each.attention_us]))
        assert device[0] == pytest.approx(time_us(found, each))


def test_noise_and_outliers_move_it_little() -> None:
    draw = random.Random(3)

    def disturbed(us: float) -> float:
        return us * (1.6 if draw.random() < 0.08 else draw.gauss(1, 0.01))

    measured = steps(disturbed)
    costs = fit_stream_cost(measured, operations(measured))
    found = by_part(costs)
    held_out = [Batch.decode(32, 1500), Batch.prefill(400), Batch.prefill(2048)]
    for batch in held_out:
        truth = shown(batch, 32, float)
        device = time_us(found[truth.mode, "device"], by_hand(batch, 32))
        launch = time_us(found[truth.mode, "launch"], layers=32, requests=batch.num_reqs)
        assert max(device, launch) == pytest.approx(truth.median_us, rel=0.02)
    assert all(0 < cost.mape < 3 for cost in costs)


def test_only_what_the_device_bounded_tells_of_it() -> None:
    """Four layers of a decode are launched more slowly than they run."""
    measured = [step for step in steps() if step.num_layers == 4 and step.mode == "full"][:3]
    assert {c.part for c in fit_stream_cost(measured, operations(measured))} == {"launch"}


def test_lone_steps_tell_what_passes_before_the_device_begins() -> None:
    measured = with_lone_steps(steps(), random.Random(1))
    found = by_part(fit_stream_cost(measured, operations(measured)))
    full, pieces = found["full", "before"], found["piecewise", "before"]
    at_depth = full.step_us + 32 * full.layer_us
    assert at_depth == pytest.approx(WAITS["full"] + 32 * GRAPH_LAYER_US, rel=0.1)
    assert pieces.step_us + 32 * pieces.layer_us == pytest.approx(WAITS["piecewise"], rel=0.15)
    assert full.mape < 2.0
    # Steps without a graph are heavy, and run at another clock alone.
    assert ("eager", "before") not in found
    own = own_cost(None, 32, list(found.values()))
    shapes = Shapes(
        np.array([700, 200, 8]), np.array([700, 200, 8]), np.array([1, 1, 8]),
        np.array([Mode.EAGER, Mode.PIECEWISE, Mode.FULL], np.int8),
    )  # fmt: skip
    parts = own.of(shapes)
    assert parts.host_us[0] == pytest.approx(parts.host_us[1])
    launched = [time_us(found[mode, "launch"], layers=32, requests=int(n)) for mode, n in
                (("eager", 1), ("piecewise", 1), ("full", 8))]  # fmt: skip
    assert parts.host_us + parts.launch_us == pytest.approx(launched)


def test_lone_steps_of_whole_graphs_stand_for_those_of_others() -> None:
    """The launch of one depth says nothing of what passes first: all of it was taken for that."""
    parts = (
        PartCost("full", "device", 0.9),
        PartCost("full", "launch", step_us=3_400.0),
        PartCost("full", "before", step_us=1_700.0),
        PartCost("eager", "launch", step_us=28_000.0),
        PartCost("piecewise", "launch", step_us=1_000.0),
    )
    found = own_cost(None, 32, parts)
    assert isinstance(found, StreamedCost)
    assert found.modes[Mode.EAGER].host.step_us == 1_700.0
    assert found.modes[Mode.EAGER].launch.step_us == 26_300.0
    assert found.modes[Mode.PIECEWISE].host.step_us == 1_000.0


def test_what_passes_before_the_device_begins_is_no_more_than_the_launch() -> None:
    stream = (
        PartCost("full", "device", 0.9, 10.0),
        PartCost("full", "launch", step_us=500.0, request_us=2.0),
        PartCost("full", "before", step_us=900.0, request_us=1.0),
    )
    numbers = np.array([4])
    own = own_cost(None, 8, stream).of(
        Shapes(numbers, numbers, numbers, np.array([Mode.FULL], np.int8))
    )
    assert (own.host_us[0], own.launch_us[0]) == (504.0, 4.0)


def test_a_backend_that_waits_while_it_launches_hides_nothing() -> None:
    """FlashInfer's plan copies from the device: its launch ends when the step before does."""
    measured = []
    for step in steps():
        waiting = tuple(
            max(launch, 0.99 * interval)
            for launch, interval in zip(step.launch_us, step.interval_us, strict=True)
        )
        measured.append(replace(step, launch_us=waiting, device_us=step.interval_us))
    found = by_part(fit_stream_cost(measured, operations(measured)))
    for mode in ("full", "eager"):
        assert found[mode, "device"].share == pytest.approx(TRUTH[mode, "device"].share, abs=0.01)
    for batch in (Batch.decode(32, 1500), Batch.prefill(2048), Batch.prefill(128)):
        truth = shown(batch, 32, float)
        device = time_us(found[truth.mode, "device"], by_hand(batch, 32))
        launch = time_us(found[truth.mode, "launch"], layers=32, requests=batch.num_reqs)
        assert max(device, launch) == pytest.approx(truth.median_us, rel=0.03)


def test_on_a_cpu_launching_is_computing() -> None:
    measured = [replace(step, launch_us=step.interval_us) for step in steps()]
    assert {c.part for c in fit_stream_cost(measured, operations(measured))} == {"launch"}


def test_noise_of_few_layers_does_not_reach_the_devices_share() -> None:
    """A host that was busy while four layers were timed made their steps twice as long."""
    measured = [
        replace(step, interval_us=tuple(2 * us for us in step.interval_us))
        if step.num_layers == 4
        else step
        for step in steps()
    ]
    found = by_part(fit_stream_cost(measured, operations(measured)))
    assert found["full", "device"].share == pytest.approx(0.92, abs=0.01)
    assert found["eager", "device"].share == pytest.approx(0.97, abs=0.01)


def test_few_steps_are_predicted_as_they_were() -> None:
    measured = [step for step in steps() if step.num_layers == 32 and step.mode == "full"][:3]
    cost = by_part(fit_stream_cost(measured, operations(measured)))["full", "device"]
    for step, us in zip(measured, operations(measured), strict=True):
        assert time_us(cost, us) == pytest.approx(step.median_us, rel=0.01)


def test_the_schedulers_part() -> None:
    hosts = [
        HostStep(n, (90.0, 100.0 + 2 * n, 999.0), (40.0 + 1.5 * n,)) for n in (1, 4, 16, 64, 256)
    ]
    found = by_part(fit_stream_cost([], [], hosts))
    assert set(found) == {("any", "schedule"), ("any", "output")}
    assert found["any", "schedule"].step_us == pytest.approx(100.0, rel=0.05)
    assert found["any", "schedule"].request_us == pytest.approx(2.0, rel=0.05)
    assert found["any", "output"].step_us == pytest.approx(40.0, rel=0.05)
    assert found["any", "output"].request_us == pytest.approx(1.5, rel=0.05)


# -- in a database, a bundle and a simulation --------------------------------------


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database.open(tmp_path / "latency.db", create=True) as database:
        yield database


MEASURED = {
    ROPE: [at("constant", 5.0)],
    LINEAR: [at(f"tokens={n}", 50 + n / 4) for n in (1, 64, 512, 8192)],
    SAMPLER: [at("requests=1", 30.0), at("requests=256", 90.0)],
    ATTENTION: [
        at(f"batch={text}", us)
        for text, us in {
            "1x64+0": 12.0,
            "1x8192+0": 900.0,
            "1x64+4096": 30.0,
            "1x4096+4096": 700.0,
            "1x1+64": 6.0,
            "1x1+8192": 25.0,
            "256x1+64": 40.0,
            "256x1+4096": 1200.0,
        }.items()
    ],
}
HOSTS = [HostStep(n, (100.0 + 2 * n,), (40.0 + n,)) for n in (1, 16, 256)]


def fill(database: Database) -> tuple[tuple[int, int], Bundle]:
    """Steps that follow TRUTH beyond what the bundle predicts; fitted and stored."""
    ids = store(database, MEASURED, execution_mode="full_graph")
    each = fit_bundle(database).configurations[0]
    plain = [replace(step, interval_us=(1.0,)) for step in steps()]
    sums = step_operations(each.configuration, each.occurrences, each.predictors, plain)
    for step, us in zip(plain, sums, strict=True):
        device = time_us(TRUTH[step.mode, "device"], us)
        interval = max(device, step.launch_median_us)
        database.record_stream_step(*ids, replace(step, interval_us=(interval,)))
    for host in HOSTS:
        database.record_host_step(*ids, host)
    store_stream_cost(database, ids)
    return ids, fit_bundle(database)


def test_a_simulation_takes_what_a_step_takes(database: Database) -> None:
    _, bundle = fill(database)
    each = bundle.configurations[0]
    model = StepModel.of(each, RULE)
    layers = each.configuration.layers_run
    for batch in (Batch.decode(32, 1500), Batch.prefill(300), Batch.prefill(2048)):
        one = shown(batch, layers, float)
        time = model.time(batch)
        (us,) = step_operations(each.configuration, each.occurrences, each.predictors, [one])
        assert us.us == pytest.approx(model.forward_only().time(batch).device_us)
        assert time.device_us == pytest.approx(time_us(TRUTH[one.mode, "device"], us), rel=0.01)
        host = time.host_us + time.launch_us - (100 + 2 * batch.num_reqs)
        assert host == pytest.approx(one.launch_median_us, rel=0.02)
        assert time.output_us == pytest.approx(40 + batch.num_reqs, rel=0.05)
        parts = model.parts_us(Batches.of([batch]))
        assert float(parts["attention"][0]) == pytest.approx(us.attention_us)
        device = max(time.device_us, time.launch_us)
        total = sum(float(part[0]) for part in parts.values())
        assert total == pytest.approx(device + time.host_us + time.output_us)


def test_a_graph_is_launched_at_once_and_kernels_one_by_one(database: Database) -> None:
    _, bundle = fill(database)
    model = StepModel.of(bundle.configurations[0], RULE)
    layers = bundle.configurations[0].configuration.layers_run
    assert model.time(Batch.decode(8, 500)).launch_us == 0.0
    assert model.time(Batch.prefill(2048)).launch_us == pytest.approx(520 * layers, rel=0.02)
    assert model.time(Batch.prefill(300)).launch_us == pytest.approx(60 * layers, rel=0.02)


def test_bundles_carry_it(database: Database, tmp_path: Path) -> None:
    ids, bundle = fill(database)
    bundle.save(tmp_path / "bundle.joblib")
    costs = load_bundle(tmp_path / "bundle.joblib").configurations[0].stream_cost
    assert costs == bundle.configurations[0].stream_cost != ()
    assert sorted(by_part(costs)) == sorted(by_part(database.stream_cost(*ids)))
    assert len(costs) == 8


def test_the_cost_of_steps_in_a_row_goes_first() -> None:
    serial = StepCost(100.0, 10.0, 1.0)
    stream = (PartCost("full", "device", 0.9, 10.0), PartCost("full", "launch", step_us=5.0))
    assert own_cost(None, 4) == NoCost()
    assert isinstance(own_cost(serial, 4), HostCost)
    assert isinstance(own_cost(serial, 4, stream), StreamedCost)
    # On a CPU launching is computing: such steps say nothing that the others do not.
    assert isinstance(own_cost(serial, 4, stream[1:]), HostCost)


def test_a_mode_whose_launch_bounded_every_step_has_the_others_share() -> None:
    stream = (
        PartCost("full", "device", 0.9, 10.0),
        PartCost("eager", "device", 1.0),
        PartCost("piecewise", "launch", step_us=5.0, layer_us=2.0),
    )
    numbers = np.array([7])
    mode = np.array([Mode.PIECEWISE], np.int8)
    own = own_cost(None, 10, stream).of(Shapes(numbers, numbers, numbers, mode))
    assert own.device_us(np.array([100.0])).tolist() == pytest.approx([95.0])
    assert (own.host_us[0], own.launch_us[0]) == (5.0, 20.0)


def test_errors_on_batches_that_no_fit_has_seen(database: Database, tmp_path: Path) -> None:
    """`integration.gpu.step_errors` on steps that follow the truth: it predicts them."""
    _, bundle = fill(database)
    each = bundle.configurations[0]
    held_out = [shown(batch, layers, float) for layers in (4, 28) for batch in BATCHES]
    sums = step_operations(each.configuration, each.occurrences, each.predictors, held_out)
    about = {"model": QWEN.model, "backend": QWEN.backend, "mode": "full_graph"}
    rows = []
    for step, us in zip(held_out, sums, strict=True):
        interval = max(time_us(TRUTH[step.mode, "device"], us), step.launch_median_us)
        row = {"layers": step.num_layers, "batch": step.batch.key, "interval_us": interval}
        rows.append(json.dumps({**about, **row, "launch_us": step.launch_median_us}))
    (tmp_path / "steps.jsonl").write_text("\n".join(rows))
    command = [
        "--db",
        str(database.path),
        "-o",
        str(tmp_path / "e.csv"),
        str(tmp_path / "steps.jsonl"),
    ]
    result = CliRunner().invoke(step_errors.main, command, catch_exceptions=False)
    assert "forward_only_mape" in result.output
    found = pd.read_csv(tmp_path / "e.csv")
    assert len(found) == len(held_out)
    assert set(found["kind"]) == {"prefill", "decode", "mixed"}
    assert found["error_percent"].abs().max() < 3
    assert (
        found["error_percent"].abs().mean() < 0.5 < found["forward_only_error_percent"].abs().mean()
    )


def test_info_shows_it(database: Database) -> None:
    ids, _ = fill(database)
    info = database.info()
    (stream,) = info.stream
    assert (stream.configuration_id, stream.environment_id) == ids
    assert (stream.steps, stream.depths) == (2 * len(STREAM_BATCHES), (4, 32))
    console = Console(width=140, record=True, file=None)
    with console.capture() as captured:
        console.print(render(info))
    assert "62 steps of 4, 32 layers" in captured.get()
    assert "full device" in captured.get()
    assert formula(TRUTH["full", "launch"]) == "1300 + 20.0 a layer + 1.50 a request"
    assert formula(TRUTH["full", "device"]) == "attention + 0.920 of the rest + 40"


def test_files_with_it_are_united_and_checked(database: Database, tmp_path: Path) -> None:
    ids, _ = fill(database)
    with Database.open(tmp_path / "other.db", create=True) as other:
        there = store(other, {LINEAR: [at("tokens=8", 1.0)]}, execution_mode="full_graph")
        other.record_stream_step(*there, steps()[0])
    into = tmp_path / "all.db"
    merge(into, [tmp_path / "other.db", database.path])
    with Database.open(into, read_only=True) as united:
        assert united.stream_steps(1, 1) == database.stream_steps(*ids)
        assert united.host_steps(1, 1) == HOSTS
        assert united.stream_cost(1, 1) == database.stream_cost(*ids)
    assert check_file(into).ok
    with Database.open(into) as united:
        united._connection.execute("UPDATE stream_step SET launch_median_us = 1 WHERE rowid = 1")
        united._connection.execute("UPDATE host_step SET schedule_us = '[]' WHERE num_reqs = 1")
    problems = check_file(into).problems
    assert len(problems) == 2
    assert "launch_median_us is 1.0" in problems[0]
    assert problems[1].startswith("host_step 1 cannot be read")


def test_samples_of_another_time_are_added(database: Database) -> None:
    ids, _ = fill(database)
    known = database.stream_steps(*ids)
    first = replace(known[0], device_us=(7.0,), alone_us=(9.0,))
    later = replace(first, interval_us=(1.0, 2.0), launch_us=(3.0, 4.0))
    assert not database.record_stream_step(*ids, later)
    assert database.stream_steps(*ids) == known
    assert not database.record_stream_step(*ids, later, add=True)
    kept = {(step.batch, step.num_layers): step for step in database.stream_steps(*ids)}
    assert len(kept) == len(known)
    united = kept.pop((first.batch, first.num_layers))
    assert united.interval_us == (*known[0].interval_us, 1.0, 2.0)
    assert united.launch_us == (*known[0].launch_us, 3.0, 4.0)
    assert (united.device_us, united.alone_us) == ((7.0,), (9.0,))
    assert list(kept.values()) == known[1:]
    new = replace(first, num_layers=5)
    assert database.record_stream_step(*ids, new, add=True)


def test_a_file_of_before_forgets_shares_of_attention(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with Database.open(path, create=True) as database:
        ids, _ = fill(database)
        assert database.stream_cost(*ids)
        assert migrations.latest_version() >= 13
        database._connection.execute(
            "DELETE FROM _sqlite_migrations WHERE name = 'm013_attention_whole'"
        )
        database._connection.execute(f"PRAGMA user_version = {migrations.latest_version() - 1}")
    with Database.open(path) as database:
        assert database.stream_cost(*ids) == ()
        assert len(database.stream_steps(*ids)) == 2 * len(STREAM_BATCHES)
        assert {cost.part for cost in store_stream_cost(database, ids)} >= {"device", "launch"}
        assert database.stream_cost(*ids)


def test_a_file_of_before_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old.db"
    tables = ("stream_step", "host_step", "stream_cost")
    with Database.open(path, create=True) as database:
        ids = store(database, {LINEAR: [at("tokens=8", 1.0)]})
        for table in tables:
            database._connection.execute(f"DROP TABLE {table}")
        database._connection.execute(
            "DELETE FROM _sqlite_migrations WHERE name IN "
            "('m008_stream_steps', 'm011_lone_steps', 'm013_attention_whole')"
        )
        version = migrations.latest_version() - 3
        database._connection.execute(f"PRAGMA user_version = {version}")
    with Database.open(path) as database:
        assert database.info().schema_version == migrations.latest_version()
        assert database.stream_steps(*ids) == database.host_steps(*ids) == []
        assert database.stream_cost(*ids) == ()
        assert database.record_stream_step(*ids, steps()[0])
        assert not database.record_stream_step(*ids, steps()[0])
        assert len(database.measurements(LINEAR.hash, ids[1])) == 1
    assert check_file(path).ok
