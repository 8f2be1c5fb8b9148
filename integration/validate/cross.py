"""Recorded live runs beside their simulation, by the profile alone or calibrated on other runs.

    python -m integration.validate.cross meta-llama/Llama-3.1-8B RUN... \
        --db builtin:h200 --backend FLASH_ATTN --no-calibrate -o results/h200

The runs are those that `integration.live_vllm.run` writes. What a simulation
knows of steps is what the profile holds; with calibration the host's part of a
step is fitted to the runs of all other workloads, so that nothing of what is
predicted has been seen. Without it a second figure says what error is left with launches as
long as those of the very runs (`integration.validate.host`). Needs no engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from dooly_backend.simulation.calibrate import calibrated
from dooly_backend.simulation.compare import Comparison, schedule_agreement
from dooly_backend.simulation.execution import Execution
from dooly_backend.simulation.metrics import Metrics
from dooly_backend.simulation.records import Run
from dooly_backend.simulation.replay import replayed
from dooly_backend.simulation.run_file import load_run
from dooly_backend.simulation.scheduler import simulate
from dooly_backend.simulation.source import Source, from_bundle, from_database
from dooly_backend.simulation.step_time import StepModel
from dooly_backend.simulation.validation import plain
from integration.validate.host import with_host_of


@click.command()
@click.argument("model")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--bundle", type=click.Path(path_type=Path))
@click.option("--db", help="In the place of a bundle: it is fitted.")
@click.option("--backend")
@click.option("--mode", help="Execution mode, where several were profiled.")
@click.option("--calibrate/--no-calibrate", default=True, show_default=True)
@click.option("--device-clock", is_flag=True, help="As of dooly simulate.")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True)
def main(
    model: str,
    files: tuple[Path, ...],
    bundle: Path | None,
    db: str | None,
    backend: str | None,
    mode: str | None,
    calibrate: bool,
    device_clock: bool,
    out: Path,
) -> None:
    """Compare FILES, grouped by workload, with simulations of MODEL.

    Without calibration only the profile is known, and no live run.
    """
    runs: dict[str, list[Run]] = {}
    for file in files:
        run = load_run(file)
        runs.setdefault(str(run.about.get("workload", file.name)), []).append(run)
    served = {quantization_of(run) for those in runs.values() for run in those}
    if len(served) > 1:
        raise click.UsageError(f"the runs were served with {', '.join(sorted(served))}: give one's")
    filters = {"backend": backend, "execution_mode": mode, "quantization": served.pop()}
    source = _source(model, bundle, db, filters)
    lines = [f"# {source.configuration.model} on {source.environment.device}", ""]
    figures = {}
    for workload, live in runs.items():
        assert live[0].limits is not None
        execution = Execution.served(live[0].about, live[0].limits.max_num_seqs)
        model_of_steps = StepModel.of(source.fitted, execution)
        forward = simulated(live[0], model_of_steps.forward_only())
        kernels = Comparison([*map(Metrics, live)], Metrics(forward))
        if device_clock:
            model_of_steps = source.with_clock(model_of_steps)
        with_cost = simulated(live[0], model_of_steps)
        if calibrate:
            others = [run for name, those in runs.items() if name != workload for run in those]
            with_cost = simulated(
                live[0], model_of_steps.with_cost(calibrated(others, model_of_steps))
            )
        found = Comparison(kernels.live, Metrics(with_cost))
        of_host = None if calibrate else with_host_of(live, model_of_steps)
        at_host = of_host and Comparison(kernels.live, Metrics(simulated(live[0], of_host)))
        lines += [f"## {workload}", "", *rows(found, kernels), ""]
        figures[workload] = figures_of(found, kernels)
        if at_host:
            figures[workload] |= {
                f"{name}_mape_at_its_launches": plain(at_host.mape(name))
                for name in ("ttft", "tpot")
            }
        agreement = min(schedule_agreement(run, replayed(run)) for run in live)
        figures[workload]["schedule_agreement"] = agreement
        lines += [
            f"Schedule, replayed: {agreement:.1f}% of the steps equal. Mean of the four: TTFT "
            f"{found.mape('ttft'):.1f}%, TPOT {found.mape('tpot'):.1f}%; kernels only "
            f"{kernels.mape('ttft'):.1f}%, {kernels.mape('tpot'):.1f}%. Tokens per step "
            f"{found.steps.loc['tokens', 'mape']:.1f}%, requests per step "
            f"{found.steps.loc['requests', 'mape']:.1f}%.",
            "",
            *(
                [
                    f"With launches as long as in these runs: TTFT {at_host.mape('ttft'):.1f}%, "
                    f"TPOT {at_host.mape('tpot'):.1f}%.",
                    "",
                ]
                if at_host
                else []
            ),
            f"Served with {json.dumps(settings(live[0]))}.",
            "",
        ]
    out.mkdir(parents=True, exist_ok=True)
    told = {**source.about(), "calibrated": calibrate, "device_clock": device_clock}
    told["workloads"] = figures
    (out / "figures.json").write_text(json.dumps(told, indent=2) + "\n")
    (out / "README.md").write_text("\n".join(lines))
    print("\n".join(lines))


def _source(model: str, bundle: Path | None, db: str | None, filters: dict[str, Any]) -> Source:
    if (bundle is None) == (db is None):
        raise click.UsageError("give either --bundle or --db")
    if bundle is not None:
        return from_bundle(bundle, model, filters)
    assert db is not None
    return from_database(db, model, None, filters)


def quantization_of(run: Run) -> str:
    """Of the weights of the model that was served, as configurations name it."""
    return str(run.about.get("quantization") or "none")


def simulated(live: Run, timer: StepModel) -> Run:
    assert live.limits is not None
    return simulate([record.request for record in live.requests], live.limits, timer)


def figures_of(found: Comparison, kernels: Comparison) -> dict[str, float | None]:
    """As `Validation.figures` names them; percent."""
    values = {
        "ttft_mape": found.mape("ttft"),
        "tpot_mape": found.mape("tpot"),
        "throughput_error": abs(found.throughput["error"]),
        "ttft_noise": found.noise("ttft"),
        "tpot_noise": found.noise("tpot"),
        "throughput_noise": found.throughput["noise"],
        "ttft_mape_profile_only": kernels.mape("ttft"),
        "tpot_mape_profile_only": kernels.mape("tpot"),
        "step_tokens_mape": found.steps.loc["tokens", "mape"],
        "step_requests_mape": found.steps.loc["requests", "mape"],
    }
    return {name: plain(value) for name, value in values.items()}


def rows(found: Comparison, kernels: Comparison) -> list[str]:
    """A table in Markdown."""
    lines = [
        "| | live | simulated | error, % | noise, % | kernels only, % |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for key, row in found.latencies.iterrows():
        lines.append(
            f"| {key[0].upper()} {key[1]}, ms | {row['live'] * 1e3:.1f} "
            f"| {row['simulated'] * 1e3:.1f} | {row['error']:+.1f} | {row['noise']:.1f} "
            f"| {kernels.latencies.loc[key, 'error']:+.1f} |"
        )
    row = found.throughput
    lines.append(
        f"| output tokens/s | {row['live']:.1f} | {row['simulated']:.1f} | {row['error']:+.2f} "
        f"| {row['noise']:.2f} | {kernels.throughput['error']:+.2f} |"
    )
    return lines


def settings(run: Run) -> dict[str, object]:
    left_out = ("cudagraph_capture_sizes", "workload", "model")
    return {name: value for name, value in run.about.items() if name not in left_out}


if __name__ == "__main__":
    main()
