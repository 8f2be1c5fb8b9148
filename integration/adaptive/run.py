"""How many points a sweep needs for its error: the adaptive one against Vidur's own grid.

    python -m integration.adaptive.run [MODEL] [--what linear|attention] [-o FOLDER]

Both measure the same signatures of one model in one run, within the same caps;
in the same run random places are measured that neither of them knows, a third
each ahead of, between and behind the sweeps. The same regressor is fitted to
what each sweep measured, and to thinned Vidur grids and the beginnings of the
adaptive sweep. Writes held_out.csv, curves.csv and curves.html (curves.png,
too, where plotly can draw one), and prints a table. Caps are those of a CPU
(1,024 tokens, 32 requests) or, on a GPU, Vidur's defaults.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import pandas as pd
from rich.console import Console
from rich.table import Table

from dooly_backend.config import AdaptiveSweep, RunOptions, VidurSweep, load_model, load_sweep
from dooly_backend.database import Database
from dooly_backend.database.records import Measurement, Signature
from dooly_backend.engines import Engine, boot
from dooly_backend.errors import DoolyError
from dooly_backend.operations.callgraph import occurrences, signatures
from dooly_backend.operations.runnable import Entry, resolve
from dooly_backend.profiling.families import shape
from dooly_backend.profiling.measure import Regime
from dooly_backend.profiling.planners import group_of
from dooly_backend.profiling.profiler import measure_batch, run_sweep
from dooly_backend.profiling.progress import Silent
from dooly_backend.profiling.sharing import Sharing
from dooly_backend.profiling.sweep import batch_of
from dooly_backend.profiling.timer import Timer, quiet_process, timer_for
from dooly_backend.regression.baseline import signature_latency
from dooly_backend.tracing.tracer import trace_model
from dooly_backend.workload import WorkloadPoint
from integration.adaptive.held_out import Caps, attention_places, token_places
from integration.adaptive.plot import draw

CPU_CAPS = Caps(tokens=1024, length=1024, batch=32)
GPU_CAPS = Caps(tokens=4096, length=4096, batch=128)
#: Of the adaptive sweep: what it aims at, and the most points of a curve or plane, such that a
#: signature has at most a fifth of the grid's (131 and 1,101 on a CPU).
TARGET, POINTS = 0.02, {"linear": 26, "attention": 85}
ADAPTIVE, VIDUR = "adaptive", "Vidur's grid"

Samples = Mapping[str, Sequence[Measurement]]  # by signature, oldest first


@dataclass(frozen=True)
class Bench:
    """The engine and the signatures of one kind that the sweeps measure."""

    engine: Engine
    timer: Timer
    signed: Mapping[Entry, Signature]
    wanted: Sequence[Signature]
    caps: Caps

    def sweep(self, sweep: AdaptiveSweep | VidurSweep, path: Path) -> Samples:
        """Everything that `sweep` measures, in a database of its own."""
        with Database.open(path, create=True) as database:
            environment_id = database.add_environment(self.engine.environment)
            graph = occurrences(self.engine, dict(self.signed))
            configuration = self.engine.configuration
            ids = database.add_configuration(configuration, graph, environment_id), environment_id
            with Sharing(database, environment_id, self.engine.device) as sharing:
                run_sweep(
                    self.engine, self.timer, database, ids, self.signed, self.wanted, sweep,
                    Regime(), Silent(), sharing,
                )  # fmt: skip
            return {
                s.hash: database.measurements(s.hash, environment_id, oldest_first=True)
                for s in self.wanted
            }

    def at(self, points: Iterable[WorkloadPoint]) -> Samples:
        """Every signature at every one of `points`."""
        found: dict[str, list[Measurement]] = {s.hash: [] for s in self.wanted}
        for point in points:
            keys = [(s.hash, point) for s in self.wanted]
            batch = batch_of(point, self.engine)
            measured = measure_batch(self.engine, self.timer, batch, keys, self.signed, Regime())
            if isinstance(measured, str):
                raise DoolyError(f"{batch.key}: {measured}")
            for key, measurement in measured.items():
                found[key[0]].append(measurement)
        return found


def judged(
    bench: Bench, samples: Samples, held_out: Samples, names: tuple[str, str]
) -> pd.DataFrame:
    """Predictions at the held-out places from the regressor fitted to `samples`."""
    rows = []
    for signature in bench.wanted:
        used = samples[signature.hash]
        latency = signature_latency(signature, used)
        for measurement in held_out[signature.hash]:
            estimate, _ = latency.at(batch_of(measurement.point, bench.engine))
            predicted, measured = estimate.statistics.median_us, measurement.median_us
            rows.append(
                {
                    "sweep": names[0],
                    "part": names[1],
                    "signature": signature.hash[:12],
                    "name": signature.name,
                    "shape": _shape(measurement.point),
                    "point": measurement.point.key,
                    "points": len(used),
                    "measured_us": round(measured, 2),
                    "predicted_us": round(predicted, 2),
                    "error": abs(predicted / measured - 1),
                }
            )
    return pd.DataFrame(rows)


def compare(bench: Bench, kind: str, count: int) -> tuple[pd.DataFrame, dict[str, float]]:
    """Judgements of both sweeps and of their parts, and how long each sweep took, in seconds."""
    caps = bench.caps
    places = (token_places if kind == "linear" else attention_places)(caps, count)
    default = load_sweep("adaptive")
    assert isinstance(default, AdaptiveSweep)
    adaptive = default.model_copy(
        update={
            "tokens": caps.tokens,
            "requests": caps.batch,
            "context": caps.length,
            "target": TARGET,
            "points": POINTS[kind],
        }
    )
    vidur = VidurSweep(
        name="vidur", rule="vidur", tokens=caps.tokens, length=caps.length, batch=caps.batch
    )
    seconds = {}
    with tempfile.TemporaryDirectory() as folder, quiet_process():
        # A host drifts: held-out places are measured ahead of, between and behind the sweeps.
        parts = [bench.at(places[0::3])]
        measured: dict[str, Samples] = {}
        for index, (name, sweep) in enumerate(((ADAPTIVE, adaptive), (VIDUR, vidur)), 1):
            start = time.perf_counter()
            measured[name] = bench.sweep(sweep, Path(folder) / f"{sweep.name}.db")
            seconds[name] = time.perf_counter() - start
            parts.append(bench.at(places[index::3]))
    held_out = {key: [m for part in parts for m in part[key]] for key in parts[0]}
    tables = [judged(bench, measured[name], held_out, (name, "all")) for name in measured]
    for share in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        part = {key: list(m[: round(share * len(m))]) for key, m in measured[ADAPTIVE].items()}
        tables.append(judged(bench, part, held_out, (ADAPTIVE, f"first {share:.0%}")))
    for step in (2, 4, 8, 16, 32):
        part = {key: thinned(m, step) for key, m in measured[VIDUR].items()}
        tables.append(judged(bench, part, held_out, (VIDUR, f"1 in {step}")))
    return pd.concat(tables, ignore_index=True), seconds


def thinned(measurements: Sequence[Measurement], step: int) -> list[Measurement]:
    """About one in `step`: along a curve every so many; of a plane as many rows and columns."""
    batches = [m.point.batch for m in measurements]
    if not all(batches):
        ordered = sorted(measurements, key=lambda m: m.point.num_tokens or 0)
        return [*ordered[::step], ordered[-1]] if len(ordered) % step != 1 else ordered[::step]
    rows = max(1, round(step**0.5))
    columns = max(1, round(step / rows))
    kept: list[Measurement] = []
    for decodes in (False, True):
        grid: dict[int, list[Measurement]] = {}
        for m in measurements:
            batch = m.point.batch
            if batch is not None and bool(batch.decodes) == decodes:
                size = batch.num_reqs if decodes else batch.num_tokens
                grid.setdefault(size, []).append(m)
        sizes = sorted(grid)
        for size in dict.fromkeys([*sizes[::rows], sizes[-1]]):
            line = sorted(grid[size], key=lambda m: m.point.batch.requests[0].context)  # type: ignore[union-attr]
            chosen = {m.point.key: m for m in [*line[::columns], line[-1]]}
            kept += chosen.values()
    return kept


def curves(table: pd.DataFrame) -> pd.DataFrame:
    """Mean error and its 90th percentile by sweep, part and shape; `points` are per signature."""
    both = pd.concat([table, table.assign(shape="all")])
    grouped = both.groupby(["sweep", "part", "shape"], sort=False)
    result = grouped.agg(
        points=("points", "mean"),
        places=("error", "size"),
        mean_error=("error", "mean"),
        p90_error=("error", lambda errors: errors.quantile(0.9)),
    )
    return result.reset_index().sort_values(["shape", "sweep", "points"], ignore_index=True)


def show(curve: pd.DataFrame, title: str) -> Table:
    table = Table(
        "sweep", "shape", "points", "places", "mean error", "90th percentile", title=title
    )
    for row in curve[curve["part"] == "all"].itertuples():
        table.add_row(
            row.sweep, row.shape, f"{row.points:.0f}", str(row.places),
            f"{row.mean_error:.1%}", f"{row.p90_error:.1%}",
        )  # fmt: skip
    return table


def _shape(point: WorkloadPoint) -> str:
    return shape(point.batch) if point.batch is not None else "tokens"


def benches(engine: Engine, caps: Caps, kinds: Sequence[str]) -> dict[str, Bench]:
    """What to measure of each kind: the linear layers, or attention."""
    trace = trace_model(engine)
    signed = signatures(trace, resolve(trace, engine), engine)
    distinct = {s.hash: s for s in signed.values()}.values()
    timer = timer_for(engine)
    chosen = {
        "linear": [
            s for s in distinct if s.kind == "tokens" and group_of(s.name, s.kind) == "linear"
        ],
        "attention": [s for s in distinct if s.kind == "batch"],
    }
    return {kind: Bench(engine, timer, signed, chosen[kind], caps) for kind in kinds}


@click.command()
@click.argument("model", default="HuggingFaceTB/SmolLM-135M")
@click.option("--layers", default=2, show_default=True, type=click.IntRange(1))
@click.option("--backend", help="The attention backend.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
@click.option("--what", type=click.Choice(["linear", "attention", "both"]), default="both")
@click.option("--places", default=60, show_default=True, help="Held-out places of a shape.")
@click.option("--tokens", type=int, help="Cap of the tokens of a step and of a request.")
@click.option("--batch", type=int, help="Cap of the requests of a step.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder for the results.")
def main(
    model: str, layers: int, backend: str | None, threads: int, what: str, places: int,
    tokens: int | None, batch: int | None, out: Path | None,
) -> None:  # fmt: skip
    """Compare the adaptive sweep with Vidur's grid on MODEL."""
    from dooly_backend.engines.vllm_boot import on_gpu

    default = GPU_CAPS if on_gpu() else CPU_CAPS
    caps = Caps(tokens or default.tokens, tokens or default.length, batch or default.batch)
    options = RunOptions(
        model=load_model(model), layers=layers, backend=backend, threads=threads,
        max_num_seqs=max(caps.batch, 32), max_num_batched_tokens=max(caps.tokens, 1024),
    )  # fmt: skip
    try:
        with boot(options) as engine:
            _run(engine, caps, ["linear", "attention"] if what == "both" else [what], places, out)
    except DoolyError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


def _run(engine: Engine, caps: Caps, kinds: list[str], places: int, out: Path | None) -> None:
    for kind, bench in benches(engine, caps, kinds).items():
        table, seconds = compare(bench, kind, places)
        curve = curves(table)
        device = engine.environment.device
        title = f"{engine.configuration.model}, {kind}, {engine.configuration.backend}, {device}"
        took = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
        limits = f"at most {caps.tokens} tokens and {caps.batch} requests"
        Console(width=110).print(show(curve, f"{title}; {limits}; {took}"))
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            table[table["part"] == "all"].round(4).to_csv(out / f"{kind}-held-out.csv", index=False)
            curve.round(4).to_csv(out / f"{kind}-curves.csv", index=False)
            draw(curve, f"{title}<br>{limits}", out / f"{kind}.html")


if __name__ == "__main__":
    main()
