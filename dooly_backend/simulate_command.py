"""`dooly simulate`: TTFT, TPOT and throughput of a workload, without the hardware."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dooly_backend import console
from dooly_backend.serving_options import scheduler_option, scheduler_options, source_options

if TYPE_CHECKING:
    from rich.table import Table

    from dooly_backend.simulation.metrics import Summary


@click.command(context_settings=console.CONTEXT_SETTINGS)
@click.argument("model")
@click.option(
    "--workload",
    "workload_text",
    metavar="SPEC",
    default="fixed",
    show_default=True,
    help="NAME[:SETTING=VALUE,...]: a name in configs/workloads, a YAML file, or a trace.",
)
@source_options
@click.option(
    "--pp",
    "pipeline_parallel",
    type=click.IntRange(min=1),
    help="Pipeline stages, each profiled on its own (`dooly profile --pp N --rank R`).",
)
@click.option(
    "--sweep",
    "sweep_name",
    metavar="NAME",
    default="adaptive",
    show_default=True,
    help="The workload points of what --db lacks: a name in configs/sweeps, or a YAML file.",
)
@scheduler_options
@click.option(
    "--execution-mode",
    type=click.Choice(["eager", "piecewise", "full_graph"]),
    help="How the engine runs the model: op by op, or as captured graphs (full_graph: vLLM's "
    "default on a GPU), from what was profiled in that mode, if anything was. [default: as "
    "profiled, or as the runs of --calibrate]",
)
@click.option(
    "--calibrate",
    "live_runs",
    metavar="RUN",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A live run of this configuration, as `dooly validate -o` writes them: what the host "
    "adds to a step is fitted to it. May be repeated.",
)
@click.option(
    "--device-clock/--steady-clock",
    "device_clock",
    default=False,
    show_default=True,
    help="Let the device's clock give way under prefills and recover, as far as the profile "
    "watched it; steady: as in a long stream of them.",
)
@scheduler_option
@console.output_option("Write tables, summary, trace and plots into this folder.")
@console.json_option
def simulate(
    model: str,
    workload_text: str,
    bundle: Path | None,
    db: str,
    environment: str | None,
    filters: Mapping[str, Any],
    pipeline_parallel: int | None,
    sweep_name: str,
    serving: Mapping[str, Any],
    execution_mode: str | None,
    live_runs: tuple[Path, ...],
    device_clock: bool,
    scheduler: Any,
    out: Path | None,
    as_json: bool,
) -> None:
    """Simulate how an engine serves a workload: TTFT, TPOT, throughput.

    Step times come from --bundle, or from --db, which is fitted first. A model
    that --db does not know yet is profiled into it, which needs the engine; else
    nothing does. Limits that are not given are vLLM's defaults for its server on
    the profiled device.

    \b
    Examples:
      dooly simulate smollm-135m --workload fixed:requests=200,rate=1
      dooly simulate smollm-135m --bundle bundle.joblib --workload balanced -o results
      dooly simulate Llama-3.1-8B --db builtin:h200 --backend FLASH_ATTN --kv-cache-memory 100
      dooly simulate Llama-3.1-70B --tp 4 --pp 2 --workload paper-large:rate=2
    """
    from dooly_backend.regression.select import profile_options
    from dooly_backend.simulation.metrics import Metrics
    from dooly_backend.simulation.scheduler import simulate as run_simulation
    from dooly_backend.simulation.source import from_bundle, model_name, profiled
    from dooly_backend.simulation.workload import load_workload

    workload = load_workload(workload_text)
    requests = workload.build()
    filters = {**filters, "pipeline_parallel": pipeline_parallel}
    if bundle is not None:
        source = from_bundle(bundle, model_name(model), filters, execution_mode)
    else:
        arguments = [*profile_options(filters), "--sweep", sweep_name]
        source = profiled(
            db, model_name(model), environment, filters, arguments, model, execution_mode
        )
    limits = source.limits(serving)
    timer = source.timer(limits, execution_mode)
    if live_runs:
        from dooly_backend.simulation.calibrate import calibrated
        from dooly_backend.simulation.run_file import load_run
        from dooly_backend.simulation.step_time import StepModel

        known = [load_run(path) for path in live_runs]
        served = known[0].about
        cost = calibrated(known, source.timer_of(served, known[0].limits or limits))
        if execution_mode is None or not isinstance(timer, StepModel):
            timer = source.timer_of(served, limits)
        timer = timer.with_cost(cost)
    if device_clock:
        timer = source.with_clock(timer)
    began = time.perf_counter()
    run = run_simulation(
        requests, limits, timer, concurrency=workload.concurrency, scheduler=scheduler
    )
    seconds = time.perf_counter() - began
    metrics = Metrics(run)
    about = {**source.about(), "workload": workload_text, "seconds": round(seconds, 3)}
    if execution_mode is not None:
        about["execution_mode"] = execution_mode
    if source.later:
        from dooly_backend.simulation.columns import Steps
        from dooly_backend.simulation.stages import stage_utilisation

        about["stage_utilisation"] = stage_utilisation(Steps.of(run.steps), metrics.duration_s)
    if out is not None:
        from dooly_backend.simulation.results import parts_of_steps, write_results

        write_results(out, metrics, about, parts_of_steps(run, timer))
    if as_json:
        console.print_json({**about, **flat(metrics.summary)})
        return
    console.show(table(metrics.summary, f"{about['model']} on {about['device']}"))
    if out is not None:
        click.echo(f"wrote {out}")


def flat(summary: Summary) -> dict[str, Any]:
    """The summary without nesting: ``ttft_p50_s`` and the like, seconds."""
    values = summary.as_dict()
    for name, spread in values.pop("latencies").items():
        for statistic, value in (spread or {}).items():
            values[f"{name}_{statistic}_s"] = value
    return values


def table(summary: Summary, title: str) -> Table:
    """The latencies in milliseconds, and under them the rates."""
    from rich.table import Table

    caption = (
        f"{summary.requests} requests in {summary.duration_s:.1f} s and {summary.steps} steps: "
        f"{summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:.1f} output "
        f"tokens/s; busy {summary.utilisation:.0%}, {summary.requests_per_step:.1f} requests a "
        f"step, {summary.preemptions} preemptions"
    )
    if summary.extrapolated_share:
        caption += f"; {summary.extrapolated_share:.0%} of the steps outside the profiled range"
    result = Table(
        "ms", "mean", "P50", "P90", "P99",
        title=title, caption=caption, title_justify="left", caption_justify="left", min_width=72,
    )  # fmt: skip
    for name, spread in summary.latencies.items():
        if spread is not None:
            values = (spread.mean, spread.p50, spread.p90, spread.p99)
            result.add_row(name.upper(), *(f"{value * 1e3:.1f}" for value in values))
    return result
