"""Live steps beside the sum of isolated calls, taken in turns in one run.

    python -m integration.additivity.run [MODEL] [--layers 4] [--threads 1] [-o results]

For every batch the calls of one step are timed alone in Dooly's regime, and
live steps of the same batch are timed between them. Nothing is fitted: the
first figure is the forward pass alone, the second the whole step, whose own
cost is not in the operations. Writes additivity.csv and prints a table.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import pandas as pd
from rich.console import Console
from rich.table import Table

from dooly_backend.config import RunOptions, load_model
from dooly_backend.database.records import Signature
from dooly_backend.engines import Engine, boot
from dooly_backend.errors import DoolyError
from dooly_backend.operations.callgraph import signatures
from dooly_backend.operations.capture import WHOLE, captured, without_whole
from dooly_backend.operations.runnable import Entry, RunnableSet, resolve
from dooly_backend.profiling.measure import Regime, measure, step_samples
from dooly_backend.profiling.profiler import subject_of
from dooly_backend.profiling.timer import Timer, quiet_process, timer_for
from dooly_backend.tracing.trace import Trace
from dooly_backend.tracing.tracer import trace_model
from dooly_backend.workload import Batch, WorkloadPoint

Hook = Callable[..., None]

BATCHES = [
    Batch.prefill(48),
    Batch.prefill(192),
    Batch.prefill(384),
    Batch.prefill(768),
    Batch.prefill(200, 300),
    Batch.prefill(100, count=3),
    Batch.decode(1, 300),
    Batch.decode(2, 900),
    Batch.decode(6, 200),
    Batch.decode(12, 700),
    Batch.decode(24, 400),
    Batch.prefill(150) + Batch.decode(8, 500),
    Batch.prefill(400) + Batch.decode(16, 300),
    Batch.prefill(64, 640) + Batch.decode(3, 1000),
]


GPU_BATCHES = [
    *(Batch.prefill(n) for n in (128, 300, 512, 1024, 2048, 4096, 8192)),
    Batch.prefill(1000, 6000),
    Batch.prefill(512, count=8),
    *(Batch.decode(n, context) for n in (1, 16, 64, 128) for context in (1000, 8000)),
    Batch.decode(4, 16000),
    Batch.prefill(1024) + Batch.decode(32, 2000),
    Batch.prefill(256, 4000) + Batch.decode(100, 1000),
]


@dataclass(frozen=True)
class Row:
    """One batch. Times are medians in microseconds."""

    batch: str
    phase: str
    forward_live_us: float
    forward_isolated_us: float
    step_live_us: float
    step_isolated_us: float

    @property
    def forward_error(self) -> float:
        """Percent by which the isolated calls differ from the live forward pass."""
        return 100 * (self.forward_isolated_us / self.forward_live_us - 1)


class _ForwardClock:
    """Times of the model's forward pass inside live steps.

    On a GPU the device is kept busy while the host launches, so that the time
    between the events is the kernels', whatever the host takes: asleep before a
    short pass, multiplying matrices before one of `_HEAVY` tokens or more, since the
    clock gives way to a stream of such passes.
    """

    _SLEEP_CYCLES = 100_000_000  # 50 ms at 2 GHz: longer than the host needs to launch
    _HEAVY = 1024
    _PRODUCTS = 25  # of 8192 x 8192 matrices: 1.5 ms each on an H200

    def __init__(self, engine: Engine, timer: Timer, batch: Batch) -> None:
        self._engine = engine
        self._timer = timer
        self._on_gpu = engine.environment.device_kind == "cuda"
        self._is_heavy = batch.num_tokens >= self._HEAVY
        self.times_us: list[float] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        model = self._engine.modules[""]
        before, after = self._events() if self._on_gpu else self._wall()
        handles = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _wall(self) -> tuple[Hook, Hook]:
        start = 0

        def before(*_: object) -> None:
            nonlocal start
            start = time.perf_counter_ns()

        def after(*_: object) -> None:
            self.times_us.append((time.perf_counter_ns() - start) / 1000)

        return before, after

    def _events(self) -> tuple[Hook, Hook]:
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        factor = torch.randn(8192, 8192, device="cuda").bfloat16() if self._is_heavy else None

        def before(*_: object) -> None:
            if factor is None:
                torch.cuda._sleep(self._SLEEP_CYCLES)
            else:
                for _product in range(self._PRODUCTS):
                    torch.mm(factor, factor)
                self._timer.flush()
            start.record()

        def after(*_: object) -> None:
            end.record()
            end.synchronize()
            self.times_us.append(start.elapsed_time(end) * 1000)

        return before, after


def compare(engine: Engine, timer: Timer, batch: Batch, signed: dict[Entry, Signature]) -> Row:
    """One batch: three rounds of isolated calls, with live steps between them."""
    isolated: dict[str, list[float]] = {}
    live: list[float] = []
    clock = _ForwardClock(engine, timer, batch)
    entries = list(signed)
    for _ in range(3):
        with captured(engine, batch, [*(e.key for e in entries), WHOLE]) as captured_calls:
            calls, whole = without_whole(captured_calls)
            subjects = {
                (signature.hash, WorkloadPoint.of(signature.kind, batch)): subject_of(
                    signature.hash, entries, signed, calls
                )
                for signature in set(signed.values())
            }
            regime = Regime(repeats=3, rounds=1)
            for key, measurement in measure(engine, timer, subjects, regime, whole).items():
                isolated.setdefault(key[0], []).extend(measurement.samples_us)
        with clock.running():
            live += step_samples(engine, timer, batch, engine.num_layers, 3)
    medians = {key: statistics.median(samples) for key, samples in isolated.items()}
    in_model = [e for e in entries if e.path.startswith("model")]
    # Each call of live_steps warms up once before the steps that it returns.
    forward = [t for i, t in enumerate(clock.times_us) if i % (len(clock.times_us) // 3) != 0]
    return Row(
        batch.key,
        "mixed" if batch.decodes and batch.prefills else "decode" if batch.decodes else "prefill",
        statistics.median(forward),
        sum(medians[signed[e].hash] for e in in_model),
        statistics.median(live),
        sum(medians[signed[e].hash] for e in entries),
    )


def show(rows: list[Row], title: str) -> Table:
    """The rows and, by phase, the mean absolute and the worst error of the forward pass."""
    table = Table(
        "batch", "forward live", "isolated", "error", "step live", "operations", title=title
    )
    for row in rows:
        table.add_row(
            row.batch,
            f"{row.forward_live_us:.0f}",
            f"{row.forward_isolated_us:.0f}",
            f"{row.forward_error:+.1f}%",
            f"{row.step_live_us:.0f}",
            f"{row.step_isolated_us:.0f}",
        )
    for phase in ("prefill", "decode", "mixed"):
        errors = [abs(row.forward_error) for row in rows if row.phase == phase]
        if errors:
            figures = f"{statistics.fmean(errors):.1f}% / {max(errors):.1f}%"
            table.add_row(f"{phase}: mean / worst", "", "", figures, "", "", style="bold")
    return table


def measure_rows(
    engine: Engine, trace: Trace, runnable: RunnableSet, batches: Sequence[Batch]
) -> list[Row]:
    """One row for every batch that the engine has room for."""
    signed = signatures(trace, runnable, engine)
    timer = timer_for(engine)
    with quiet_process():
        fitting = [batch for batch in batches if batch.longest < engine.max_request_len - 16]
        return [compare(engine, timer, batch, signed) for batch in fitting]


def write(rows: Sequence[Row], path: Path) -> None:
    """The rows as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame([asdict(row) | {"forward_error": row.forward_error} for row in rows])
    frame.round(2).to_csv(path, index=False)


@click.command()
@click.argument("model", default="HuggingFaceTB/SmolLM-135M")
@click.option("--layers", default=4, show_default=True, type=click.IntRange(1))
@click.option("--backend", help="The attention backend.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder for additivity.csv.")
def main(model: str, layers: int, backend: str | None, threads: int, out: Path | None) -> None:
    """Compare MODEL's live steps with the sums of its isolated calls."""
    try:
        options = RunOptions(
            model=load_model(model),
            layers=layers,
            backend=backend,
            threads=threads,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
        )
        engine = boot(options)
    except DoolyError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    trace = trace_model(engine)
    environment = engine.environment
    batches = GPU_BATCHES if environment.device_kind == "cuda" else BATCHES
    rows = measure_rows(engine, trace, resolve(trace, engine), batches)
    title = (
        f"{options.model.name}, {engine.configuration.backend}, {layers} layers, "
        f"{environment.device}, {environment.engine} {environment.engine_version}; microseconds"
    )
    Console(width=110).print(show(rows, title))
    if out is not None:
        write(rows, out / "additivity.csv")


if __name__ == "__main__":
    main()
