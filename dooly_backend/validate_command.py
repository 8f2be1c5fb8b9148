"""`dooly validate`: the same requests on a live engine and in simulation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dooly_backend import console
from dooly_backend.errors import InputError
from dooly_backend.serving_options import scheduler_option, scheduler_options, source_options

if TYPE_CHECKING:
    from rich.table import Table

    from dooly_backend.database.records import Environment
    from dooly_backend.simulation.source import Source
    from dooly_backend.simulation.validation import Validation
    from dooly_backend.simulation.workload import Workload

_DISTURBED = 0.05  # processors that others keep busy
_SETTINGS = ("rate", "concurrency", "arrivals")  # of a workload, that leave no room for --load


@click.command(context_settings=console.CONTEXT_SETTINGS)
@click.argument("model")
@click.option(
    "--workload",
    "workload_texts",
    metavar="SPEC",
    multiple=True,
    default=("balanced",),
    show_default=True,
    help="As of `dooly simulate`; may be repeated: they take turns.",
)
@click.option(
    "--load",
    type=click.FloatRange(min=0, min_open=True),
    default=0.8,
    show_default=True,
    help="Part of the simulated engine's capacity at which requests come, where a workload "
    "names no rate.",
)
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Live runs of each workload; two or more show the noise floor.",
)
@source_options
@click.option(
    "--execution-mode",
    type=click.Choice(["eager", "full_graph"]),
    default="full_graph",
    show_default=True,
    help="How a GPU runs the model: op by op, or as vLLM does by default. A CPU runs it op by op.",
)
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads of a CPU engine; leave a core to others."
)
@console.sweep_option
@click.option(
    "--calibration",
    "calibration_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=25.0,
    show_default=True,
    help="Serve other requests for so long first, and fit the step's own cost to them; 0: take "
    "the profile's.",
)
@scheduler_options
@scheduler_option
@console.output_option("Write tables, runs and plots into this folder.")
@console.json_option
def validate(
    model: str,
    workload_texts: tuple[str, ...],
    load: float,
    runs: int,
    bundle: Path | None,
    db: str,
    environment: str | None,
    filters: Mapping[str, Any],
    execution_mode: str,
    threads: int | None,
    sweep_name: str,
    calibration_s: float,
    serving: Mapping[str, Any],
    scheduler: Any,
    out: Path | None,
    as_json: bool,
) -> None:
    """Serve a workload on the live engine and in simulation, and compare.

    Without --bundle, what --db does not know of the model is profiled first. Errors are percent;
    beside them stand the error of one live run against another (noise), the error
    with the step cost that the profile says instead of a calibrated one (profile
    only), and with none (forward only). The schedule is compared step by step, with the requests of
    each live run replayed as they came.

    \b
    Examples:
      dooly validate smollm-135m
      dooly validate smollm-135m --workload prefill-heavy:requests=30 --load 0.5 --runs 3 -o results
    """
    from dooly_backend.config import load_model
    from dooly_backend.database.records import ENGINE_QUANTIZATION
    from dooly_backend.engines.serving import ServingOptions, boot_server
    from dooly_backend.simulation import validation as module
    from dooly_backend.simulation.source import from_bundle, profiled
    from dooly_backend.simulation.workload import load_workload

    workloads = [load_workload(text) for text in workload_texts]
    described = load_model(model)
    # The usual profile is that of graphs, and on a CPU, which has none, the only one.
    mode = execution_mode if execution_mode == "eager" else None
    if bundle is not None:
        source = from_bundle(bundle, described.name, filters, mode)
    else:
        source = profiled(
            db,
            described.name,
            environment,
            filters,
            profile_arguments(filters, threads, sweep_name),
            model,
            mode,
        )
    options = ServingOptions(
        model=described,
        engine=source.configuration.engine,
        backend=source.configuration.backend,
        tensor_parallel=source.configuration.tensor_parallel,
        dtype=source.configuration.dtype,
        kv_cache_dtype=source.configuration.kv_cache_dtype,
        quantization=source.configuration.hf_config.get(ENGINE_QUANTIZATION),
        block_size=source.configuration.block_size,
        threads=profiled_threads(source.environment, threads),
        # A CPU's operations were timed as they run without compilation; a GPU's kernels
        # are those of its graphs.
        eager=source.environment.device_kind == "cpu" or execution_mode == "eager",
        **serving,
    )
    _say(f"starting {options.engine} with {described.name}")
    with boot_server(options) as server:
        timer = source.timer_of(server.about, server.limits)
        _say("warming up")
        module.warm_up(server, workloads)
        calibrating = []
        if calibration_s:
            for other in module.calibration_workloads(
                calibration_s, load, server.limits, timer, scheduler=scheduler
            ):
                _say(f"serving {other.requests} requests to calibrate")
                calibrating.append(module.serve(server, other))
        calibrated = module.with_host(timer, calibrating)
        chosen = [
            loaded(workload, text, load, server.limits, calibrated, scheduler)
            for workload, text in zip(workloads, workload_texts, strict=True)
        ]
        found = module.validate(
            server, timer, chosen, runs, calibrating=calibrating, scheduler=scheduler, say=_say
        )
    if out is not None:
        from dooly_backend.simulation.validation_report import write_validation

        write_validation(out, found, source.about())
    if as_json:
        console.print_json(
            {
                **source.about(),
                **module.overall(found),
                "workloads": {v.name: v.figures() for v in found},
            }
        )
        return
    for validation in found:
        console.show(table(validation, source))
    if out is not None:
        click.echo(f"wrote {out}")


def _say(text: str) -> None:
    console.log().print(text)


def loaded(
    workload: Workload, text: str, load: float, limits: Any, timer: Any, scheduler: Any
) -> Workload:
    """The workload at `load`, unless its text says when requests come."""
    from dooly_backend.simulation.validation import at_load

    settings = text.partition(":")[2]
    named = any(f"{name}=" in settings.replace(" ", "") for name in _SETTINGS)
    if named or workload.arrivals not in ("poisson", "uniform", "bursty"):
        return workload
    return at_load(workload, load, limits, timer, scheduler=scheduler)


def profiled_threads(environment: Environment, asked: int | None) -> int | None:
    """Threads of the live engine: those that the profile was measured with.

    Raises InputError where `asked` is another number: its operations take other times.
    """
    known = environment.facts.get("threads") if environment.device_kind == "cpu" else None
    if known is None or asked is None or asked == known:
        return known or asked
    raise InputError(
        f"the profile was measured with {known} threads, not {asked}: leave --threads out, or "
        f"profile with --threads {asked} and name that environment"
    )


def profile_arguments(filters: Mapping[str, Any], threads: int | None, sweep: str) -> list[str]:
    """The options of `dooly profile` for what is to be validated."""
    from dooly_backend.regression.select import profile_options

    arguments = [*profile_options(filters), "--sweep", sweep]
    if threads is not None:
        arguments += ["--threads", str(threads)]
    return arguments


def table(validation: Validation, source: Source) -> Table:
    """Live beside simulated, with errors in percent."""
    from rich.table import Table

    from dooly_backend.simulation.validation import OTHERS, table_rows

    figures = validation.figures()
    caption = (
        f"schedule, replayed: {figures['schedule_agreement']:.1f}% of the steps equal; "
        f"single requests: TTFT within {figures['ttft_mape_requests']:.1f}%, TPOT "
        f"{figures['tpot_mape_requests']:.1f}%; single steps: {figures['step_time_mape']:.1f}%, "
        f"all together {figures['step_time_bias']:+.1f}%"
    )
    others = figures[OTHERS]
    if source.environment.device_kind == "cpu" and others is not None and others > _DISTURBED:
        caption += f"; other processes kept {others:.2f} processors busy, which slows live runs"
    result = Table(
        "", "live", "simulated", "error, %", "noise, %", "profile only, %", "forward only, %",
        title=f"{source.configuration.model} on {source.environment.device}: {validation.name}",
        caption=caption, title_justify="left", caption_justify="left",
    )  # fmt: skip
    for row in table_rows(validation):
        result.add_row(
            row["what"],
            f"{row['live']:.1f}",
            f"{row['simulated']:.1f}",
            _percent(row["error"], "+.1f"),
            _percent(row["noise"], ".1f"),
            _percent(row["profile_only"], "+.1f"),
            _percent(row["forward_only"], "+.1f"),
        )
    return result


def _percent(value: float, form: str) -> str:
    return "-" if value != value else format(value, form)
