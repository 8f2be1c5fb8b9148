"""Three workloads on live vLLM and in simulation, in pieces that a shared host allows.

    python -m integration.validate.run smollm-135m --db latency.db -o results/smollm-135m

Profiles what --db lacks, keeps it as profile.db, and serves in turns, --runs
times each, requests that calibrate the step's own cost and the workloads, at
rates that are --load of the capacity with the first calibration. Every run is written when
it is over; after --minutes the next call goes on. A run beside which other
processes kept more than --others processors busy is set aside, whatever it
found, and made again: set-aside.jsonl has them. With all runs there, the
simulation is compared with them: comparison.csv, figures.json, plots.html,
README.md. With --compare-only nothing is served, and no engine is needed.
"""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import click
import pandas as pd

from dooly_backend.config import load_model
from dooly_backend.engines.serving import ServingOptions, boot_server
from dooly_backend.profiling.watch import CpuWatch
from dooly_backend.simulation.records import Run, ServingLimits
from dooly_backend.simulation.run_file import load_run, save_run
from dooly_backend.simulation.source import Source, from_database, profiled
from dooly_backend.simulation.step_time import StepModel
from dooly_backend.simulation.validation import (
    at_load,
    calibration_workloads,
    compared,
    others_busy,
    serve,
    table_rows,
    warm_up,
    with_host,
)
from dooly_backend.simulation.validation_report import write_validation
from dooly_backend.simulation.workload import Workload
from integration.packed import profile_of

MIX = {"longest": 1024, "arrivals": "poisson"}
WORKLOADS = [
    Workload(name="balanced", prompt=192, prompt_median=150, output=40, output_median=32, **MIX,
             rate=1.0),
    Workload(name="prefill-heavy", prompt=448, prompt_median=400, output=10, output_median=8, **MIX,
             rate=1.0),
    Workload(name="decode-heavy", prompt=48, prompt_median=40, output=120, output_median=100, **MIX,
             rate=1.0),
]  # fmt: skip
SWEEP = Path(__file__).with_name("sweep.yaml")
TITLES = ("", "live", "simulated", "error, %", "noise, %", "profile only, %", "forward only, %")
CALIBRATIONS = ("calibration", "calibration-at-once")


@click.command()
@click.argument("model")
@click.option("--db", default="latency.db", show_default=True)
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True)
@click.option("--sweep", default=str(SWEEP), help="[default: sweep.yaml beside this file]")
@click.option("--seconds", default=30.0, show_default=True, help="Length of one live run.")
@click.option("--load", default=0.8, show_default=True)
@click.option("--runs", default=3, show_default=True)
@click.option("--minutes", default=5.0, show_default=True, help="Start no run that ends later.")
@click.option("--threads", default=1, show_default=True)
@click.option("--dtype", help="As of `dooly profile`; processors without AVX-512 are slow in bf16.")
@click.option("--others", default=0.03, show_default=True, help="Processors others may keep busy.")
@click.option("--compare-only", is_flag=True, help="Serve nothing: compare the runs there are.")
def main(
    model: str,
    db: str,
    out: Path,
    sweep: str,
    seconds: float,
    load: float,
    runs: int,
    minutes: float,
    threads: int,
    dtype: str | None,
    others: float,
    compare_only: bool,
) -> None:
    """Go on with the validation of MODEL in OUT."""
    began = time.monotonic()
    described = load_model(model)
    measured = profile_of(out)
    if not measured.exists():
        arguments = [
            "--threads",
            str(threads),
            "--sweep",
            sweep,
            *(["--dtype", dtype] if dtype else []),
        ]
        profiled(db, described.name, None, {"dtype": dtype}, arguments, model)
        out.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(db)) as connection:
            connection.execute("VACUUM INTO ?", (str(measured),))
    source = from_database(str(measured), described.name, None, {"dtype": dtype})
    named = [workload.name for workload in WORKLOADS]
    turns = [(*CALIBRATIONS, *named), *[(*named, *CALIBRATIONS)] * (runs - 1)]
    files = [(x, out / f"{x}-live-{n}.json.xz") for n, names in enumerate(turns) for x in names]
    pending = [(name, file) for name, file in files if not file.exists()]
    if pending and not compare_only:
        options = ServingOptions(
            model=described,
            backend=source.configuration.backend,
            dtype=source.configuration.dtype,
            block_size=source.configuration.block_size,
            threads=threads,
            eager=True,
            max_num_seqs=32,
            max_num_batched_tokens=1024,
            max_model_len=2048,
        )
        with boot_server(options) as server:
            timer = source.timer(server.limits)
            calibrating = calibration_workloads(2 * seconds, load, server.limits, timer)
            warm_up(server, WORKLOADS)
            while pending:
                if time.monotonic() - began + 1.3 * seconds > 60 * minutes:
                    break
                name, file = pending[0]
                wait_for_calm(others)
                if name in CALIBRATIONS:
                    run = serve(server, calibrating[CALIBRATIONS.index(name)])
                else:
                    run = serve(server, planned(out, timer, server.limits, load, seconds)[name])
                busy = others_busy(run) or 0.0
                said = {"run": file.name, "others": busy, "seconds": time.monotonic() - began}
                print(json.dumps(said), flush=True)
                if busy > others:
                    with (out / "set-aside.jsonl").open("a") as log:
                        log.write(json.dumps({"run": file.name, "others": busy}) + "\n")
                    continue
                save_run(run, file)
                pending.pop(0)
    if compare_only or all(file.exists() for _, file in files):
        report(out, source, [(name, load_run(file)) for name, file in files if file.exists()])
    else:
        print("not all runs are there yet: call again")


def wait_for_calm(others: float, patience_s: float = 30.0) -> None:
    """Until others have kept no more processors busy for three seconds, if they ever do."""
    until = time.monotonic() + patience_s
    watch = CpuWatch(threads=1)
    busy = None
    while time.monotonic() < until and (busy is None or busy > others):
        watch.begin()
        time.sleep(3.0)
        busy = watch.end().others or 0.0


def planned(
    out: Path, timer: StepModel, limits: ServingLimits, load: float, seconds: float
) -> dict[str, Workload]:
    """The workloads at their rates and lengths: chosen after the calibration, kept in plan.json."""
    plan = out / "plan.json"
    if not plan.exists():
        known = with_host(timer, [load_run(out / f"{n}-live-0.json.xz") for n in CALIBRATIONS])
        rates = {
            w.name: at_load(w.model_copy(update={"requests": 200}), load, limits, known).rate
            for w in WORKLOADS
        }
        plan.write_text(
            json.dumps({n: {"rate": r, "requests": round(r * seconds)} for n, r in rates.items()})
            + "\n"
        )
    return with_plan(plan)


def with_plan(plan: Path) -> dict[str, Workload]:
    chosen = json.loads(plan.read_text())
    return {w.name: w.model_copy(update=chosen[w.name]) for w in WORKLOADS}


def report(out: Path, source: Source, runs: list[tuple[str, Run]]) -> None:
    """Compare the runs with the simulation.

    The step's own cost is that of the run that was made for it or, without one,
    of the other workloads' runs: nothing of what is predicted has been seen.
    """
    found = []
    for name, workload in with_plan(out / "plan.json").items():
        live = [run for of, run in runs if of == name]
        calibrating = [run for of, run in runs if of in CALIBRATIONS]
        calibrating = calibrating or [run for of, run in runs if of != name]
        found.append(compared(workload, live, source.timer(live[0].limits), calibrating))
    write_validation(out, found, source.about(), plotlyjs="cdn")
    lines = [f"# {source.configuration.model} on {source.environment.device}", ""]
    for validation in found:
        table = pd.DataFrame(table_rows(validation)).rename(columns={"what": ""})
        table.columns = pd.Index(TITLES)
        figures = {
            name: "-" if value is None else f"{value:.1f}%"
            for name, value in validation.figures().items()
        }
        lines += [
            f"## {validation.name}, {validation.workload.requests} requests, "
            f"{len(validation.live)} live runs",
            "",
            _markdown(table),
            "",
            "Schedule, replayed: {schedule_agreement} of the steps equal. Single requests: TTFT "
            "{ttft_mape_requests} (noise {ttft_noise_requests}), TPOT {tpot_mape_requests} (noise "
            "{tpot_noise_requests}). Tokens per step {step_tokens_mape}, requests per step "
            "{step_requests_mape} (noise {step_tokens_noise}, {step_requests_noise}). Single steps "
            "{step_time_mape}, all together {step_time_bias}.".format(**figures),
            "",
            "Outside 5% (throughput 1%) and twice the noise: "
            f"{', '.join(missed(table)) or 'none'}.",
            "",
        ]
    (out / "README.md").write_text("\n".join(lines))
    print("\n".join(lines))


def missed(table: pd.DataFrame) -> list[str]:
    """Of TTFT, TPOT and throughput what is off by more than is allowed."""
    rows = table.set_index("")
    names = [name for name in rows.index if name.startswith(("TTFT", "TPOT", "output"))]
    allowed = [1.0 if name.startswith("output") else 5.0 for name in names]
    rows = rows.loc[names].assign(allowed=allowed)
    rows["allowed"] = rows["allowed"].clip(lower=2 * rows["noise, %"].fillna(0.0))
    outside = rows[rows["error, %"].abs() > rows["allowed"]]
    return [f"{name} ({row['error, %']:+.1f}%)" for name, row in outside.iterrows()]


def _markdown(table: pd.DataFrame) -> str:
    """Numbers with one decimal; what is not known as a dash."""
    rows = [TITLES, ("---",) * len(TITLES)]
    for row in table.itertuples(index=False):
        values = ["-" if v != v else f"{v:.1f}" for v in row[1:]]
        rows.append((row[0], *values))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
