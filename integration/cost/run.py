"""Profile a corpus into one database, in pieces: what is done is not done again.

    python -m integration.cost.run --db h200.db --out results --budget 540
    python -m integration.cost.run --db h200.db --out results --corpus MoE
    python -m integration.cost.run --db h200.db --out results --apart adaptive adaptive.db
    python -m integration.cost.run --db h200.db --out results Llama-3.1 Qwen3-8B --list
    python -m integration.cost.run --db cpu.db --out results --models reduced \
        --backend CPU_ATTN --mode eager --sweep quick --threads 1 --max-num-seqs 64 \
        --max-num-batched-tokens 2048 --layers 0

Engines are those of `integration.gpu.run`. On every GPU as many start together as
its memory holds, and measure in turn; several GPUs of a host work into the same
database at once, each on its own engines, and what two of them need one measures.
Every point is committed when it is measured, every run of a configuration keeps what
its parts took (`dooly db info`), and a configuration whose sweep is complete is left
out the next time. What was tried, and how it ended, is in ``OUT/attempts.jsonl``;
what failed is tried again after everything else. `jobs.py` says in which order.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from dooly_backend.config import load_sweep
from dooly_backend.database import Database
from dooly_backend.engines.kv_cache import GIB
from dooly_backend.errors import DoolyError
from dooly_backend.sweeps import AdaptiveSweep, Grid
from integration.corpus.corpora import CASES, MOE, SMALL, find
from integration.corpus.run import HERE as CORPUS
from integration.corpus.run import results
from integration.cost.jobs import BACKENDS, Job, jobs_of, newest_first
from integration.gpu.run import APART, LAYERS
from integration.gpu.step_costs import Job as Engine
from integration.gpu.step_costs import waves
from integration.gpu.workers import Wave, devices

_GPU_BYTES = 139 * GIB  # of an H200; --memory says another
_LEAST_SECONDS = 60  # engines that start together take about that long to start


@click.command()
@click.argument("names", nargs=-1)
@click.option("--db", required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option(
    "--corpus",
    default=SMALL,
    show_default=True,
    type=click.Choice([SMALL, MOE]),
    help="Where no NAME is given.",
)
@click.option("--backend", "backends", multiple=True, default=BACKENDS, show_default=True)
@click.option("--mode", default="full_graph", show_default=True)
@click.option("--sweep", default="gpu", show_default=True)
@click.option("--budget", default=540.0, show_default=True, help="Seconds for everything.")
@click.option(
    "--models",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with configs of the same names, as integration.cost.reduced writes.",
)
@click.option("--layers", default=LAYERS, show_default=True)
@click.option("--max-num-seqs", default=256, show_default=True)
@click.option("--max-num-batched-tokens", default=8192, show_default=True)
@click.option("--threads", type=int, help="Of a CPU engine.")
@click.option("--memory", default=_GPU_BYTES, show_default=True, type=int, help="Bytes of a GPU.")
@click.option("--apart", nargs=2, multiple=True, metavar="SWEEP DB", help=APART)
@click.option("--list", "only_list", is_flag=True, help="Say what is done, and what would run.")
def main(
    names: tuple[str, ...],
    db: Path,
    out: Path,
    corpus: str,
    backends: tuple[str, ...],
    mode: str,
    sweep: str,
    budget: float,
    models: Path | None,
    layers: int,
    memory: int,
    apart: tuple[tuple[str, str], ...],
    only_list: bool,
    **engine: Any,
) -> None:
    """Profile the models whose names contain one of NAMES, or those of a corpus."""
    # A misspelt one shall not cost an engine's start.
    wanted = [(load_sweep(name), Path(path)) for name, path in ((sweep, db), *apart)]
    cases = find(list(names)) if names else [c for c in CASES if corpus in c.corpora]
    known = results(CORPUS / "results" / "models")
    jobs = jobs_of(newest_first(cases, known), backends, mode, models)
    attempts = Attempts(out / "attempts.jsonl")
    left = attempts.failed_last(unfinished(jobs, wanted))
    click.echo(f"{len(jobs) - len(left)} of {len(jobs)} configurations are done", err=True)
    if only_list:
        for job in left:
            click.echo(job.name)
        return
    out.mkdir(parents=True, exist_ok=True)
    options = ["--db", str(db), "--out", str(out), "--sweep", sweep, "--no-additivity", "--wait"]
    options += ["--layers", str(layers)]
    options += [word for pair in apart for word in ("--apart", *pair)]
    for name, value in engine.items():
        options += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    queue = deque(in_waves(left, layers, memory, devices()))
    end = time.monotonic() + budget
    threads = [
        threading.Thread(target=work, args=(queue, options, end, device, attempts))
        for device in devices() or [None]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rest = unfinished(jobs, wanted)
    for job in rest:
        click.echo(f"not done: {job.name}", err=True)
    sys.exit(int(bool(rest)))


def unfinished(
    jobs: Sequence[Job], wanted: Iterable[tuple[Grid | AdaptiveSweep, Path]]
) -> list[Job]:
    """The jobs of which one of the `wanted` sweeps is not complete in its database."""
    left = dict.fromkeys(jobs, False)
    for sweep, db in wanted:
        if not db.exists():
            return list(jobs)
        with Database.open(db) as database:
            left = {job: open_ or not job.is_done(database, sweep) for job, open_ in left.items()}
    return [job for job, open_ in left.items() if open_]


def in_waves(
    jobs: Sequence[Job], layers: int, memory: float, gpus: Sequence[str]
) -> list[list[Job]]:
    """Jobs whose engines fit into a GPU together; on a CPU one after the other."""
    if not gpus:
        return [[job] for job in jobs]
    by_name = {job.name: job for job in jobs}
    engines = [Engine(job.name, layers, job.device_bytes(layers) / memory) for job in jobs]
    return [[by_name[engine.configuration] for engine in wave] for wave in waves(engines)]


def work(
    queue: deque[list[Job]],
    options: Sequence[str],
    end: float,
    device: str | None,
    attempts: Attempts,
) -> None:
    """One device's part: wave after wave, while there is time for another.

    The next wave's processes start when this one's engines are up: what they import and
    work out needs no device, and takes longer than the rest of a start.
    """
    least = _LEAST_SECONDS if device is not None else 0.0

    def next_wave() -> tuple[list[Job], Wave] | None:
        if end - time.monotonic() <= least:
            return None
        try:
            jobs = queue.popleft()
        except IndexError:  # another device took the last one
            return None
        commands = [
            ["integration.gpu.run", "one", job.model, job.backend, job.mode, *options, "--staged"]
            for job in jobs
        ]
        return jobs, Wave(commands, device)

    upcoming = next_wave()
    while upcoming is not None:
        (jobs, wave), upcoming = upcoming, None
        began = time.monotonic()

        def prepare() -> None:
            nonlocal upcoming
            if device is not None:  # on a CPU it would disturb what is measured there
                upcoming = next_wave()

        try:
            codes = wave.run(max(end - began, 0.0), started=prepare, staged=True)
        except BaseException:
            wave.kill()
            if upcoming is not None:
                upcoming[1].kill()
            raise
        for job, code in zip(jobs, codes, strict=True):
            attempts.add(job, code, device, time.monotonic() - began)
        if upcoming is None:
            upcoming = next_wave()


class Attempts:
    """What was tried, one JSON line for every configuration and time, as it ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def add(self, job: Job, code: int, device: str | None, wave_seconds: float) -> None:
        row = {"configuration": job.name, "exit": code, "device": device}
        line = json.dumps({**row, "wave_seconds": round(wave_seconds, 1)})
        with self._lock, self._path.open("a") as file:
            file.write(line + "\n")
        click.echo(line)

    def failed_last(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs, those that failed behind the others; a killed one has not failed."""
        failed: Counter[str] = Counter()
        if self._path.exists():
            rows = map(json.loads, self._path.read_text().splitlines())
            failed.update(row["configuration"] for row in rows if row["exit"] > 0)
        return sorted(jobs, key=lambda job: failed[job.name])


if __name__ == "__main__":
    try:
        main()
    except DoolyError as error:
        sys.exit(f"error: {error}")
