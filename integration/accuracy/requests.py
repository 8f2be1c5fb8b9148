"""Sections of served requests: simulation beside live vLLM, and wrongly reused profiles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration.accuracy.gpu import short
from integration.accuracy.tables import MISSES, causes, paragraph, source, table

#: Percent. On a CPU twice the error of one live run against another, where that is larger.
_LATENCY = {"cpu": 5.0, "gpu": 3.0}
_THROUGHPUT = 1.0
_SCHEDULE = {"cpu": 100.0, "gpu": 99.5}


def served(root: Path) -> list[str]:
    """Latencies of live vLLM against the simulated ones."""
    files = sorted((root / "integration/validate/results").glob("*/figures.json"))
    rows = []
    for path in files:
        run = json.loads(path.read_text())
        device = "gpu" if "NVIDIA" in run["device"] else "cpu"
        for workload, figures in run["workloads"].items():
            rows.append(
                [
                    _label(run, device),
                    workload,
                    f"{figures['ttft_mape']:.1f} ({_noise(figures, 'ttft', '.1f')}) %",
                    f"{figures['tpot_mape']:.1f} ({_noise(figures, 'tpot', '.1f')}) %",
                    f"{figures['throughput_error']:.2f} ({_noise(figures, 'throughput', '.2f')}) %",
                    _at_its_launches(figures),
                    f"{figures['schedule_agreement']:.1f} %",
                    _missed(figures, device),
                ]
            )
    heads = ["configuration", "workload", "TTFT (noise)", "TPOT (noise)", "throughput (noise)"]
    heads.append("TTFT, TPOT at its launches")
    return [
        paragraph(
            "The same requests on live vLLM and in simulation; TTFT and TPOT as mean absolute",
            "error of mean, P50, P90 and P99. *Noise* is the same of one live run against",
            "another. Targets on a CPU: 5% or twice the noise, throughput 1% or twice the",
            "noise, schedules equal when step times are replayed; on a GPU 3%, 1% and 99.5%.",
            "*At its launches*: what is left where launches without a whole graph are as long as",
            "the live run's (`integration.validate.host`), which this host takes up to twice as",
            "long for in one minute as in another.",
            "Measured by `python -m integration.validate.run`, compared with recorded runs by",
            f"`integration.validate.cross`; from {source(root, files)}.",
        ),
        "",
        *table([*heads, "steps equal", ""], rows),
        *causes(root, files),
    ]


def _label(run: Mapping[str, Any], device: str) -> str:
    served = [short(run["model"]), run["backend"]]
    if device == "gpu" and run.get("execution_mode") == "eager":
        served.append("eager")
    return ", ".join([*served, run["device"]])


def _at_its_launches(figures: Mapping[str, Any]) -> str:
    """A dash where the profile knows no launches, or the live runs tell too few."""
    found = [figures.get(f"{name}_mape_at_its_launches") for name in ("ttft", "tpot")]
    return "-" if None in found else f"{found[0]:.1f}, {found[1]:.1f} %"


def _noise(figures: Mapping[str, Any], name: str, form: str) -> str:
    """A dash where there is one live run."""
    noise = figures[f"{name}_noise"]
    return "-" if noise is None else format(noise, form)


def _missed(figures: Mapping[str, Any], device: str) -> str:
    missed = []
    for name in ("ttft", "tpot"):
        limit = _LATENCY[device]
        if device == "cpu":
            limit = max(limit, 2 * (figures[f"{name}_noise"] or 0.0))
        if figures[f"{name}_mape"] > limit:
            missed.append(name.upper())
    limit = _THROUGHPUT
    if device == "cpu":
        limit = max(limit, 2 * (figures["throughput_noise"] or 0.0))
    if figures["throughput_error"] > limit:
        missed.append("throughput")
    if figures["schedule_agreement"] < _SCHEDULE[device]:
        missed.append("schedule")
    return f"{MISSES}: {', '.join(missed)}" if missed else ""


def in_vidur(root: Path) -> list[str]:
    """Recorded live runs beside Vidur on an export."""
    files = sorted((root / "integration/vidur/results").glob("served-*.json"))
    if not files:
        return ["Not measured yet."]
    rows = []
    for path in files:
        run = json.loads(path.read_text())
        known = root / "integration/validate/results" / run["runs"] / "figures.json"
        simulated = json.loads(known.read_text())["workloads"]
        for workload, found in run["workloads"].items():
            row = [_label(run, "gpu"), workload]
            for latency in ("ttft", "tpot"):
                mape = f"{latency}_mape"
                row += [f"{each[mape]:.1f} %" if mape in each else "-" for each in found.values()]
                row.append(f"{simulated[workload][mape]:.1f} %")
            noise = [_noise(simulated[workload], name, ".1f") for name in ("ttft", "tpot")]
            rows.append([*row, f"{', '.join(noise)} %"])
    parts = ("Vidur", "sum of operations", "DoolySim")
    heads = [f"{latency}: {part}" for latency in ("TTFT", "TPOT") for part in parts]
    return [
        paragraph(
            "The recorded requests of live vLLM, served by the real Vidur (0.0.26 of PyPI) on what",
            "`dooly-export --to vidur` writes from the shipped database, which knows no live run;",
            "errors as above. *Sum of operations*: Vidur on an export without whole steps, as all",
            "were until 2026-12-07. *DoolySim*: from the same profile, as in the section above. A",
            "dash: Vidur stopped.",
            f"Measured by `python -m integration.vidur.served`; from {source(root, files)}.",
        ),
        "",
        *table(["configuration", "workload", *heads, "noise: TTFT, TPOT"], rows),
        *causes(root, files),
    ]


def wrong_reuse(root: Path) -> list[str]:
    """What it costs to take another model's attention for one's own."""
    files = sorted((root / "integration/wrong_reuse/results").glob("*.json"))
    if not files:
        return ["Not measured yet."]
    rows = []
    forward = []
    for path in files:
        run = json.loads(path.read_text())
        name = f"{short(run['model'])} with {short(run['donor'])}'s attention, {run['device']}"
        for workload in run["workloads"]:
            error = workload["error"]
            rows.append(
                [
                    name,
                    workload["workload"],
                    f"{1e3 * workload['own_ttft_s']:.1f} ms",
                    f"{1e3 * workload['wrong_ttft_s']:.1f} ms",
                    f"{error['ttft']:+.1f} %",
                    f"{error['tpot']:+.1f} %",
                    f"{workload['extrapolated']:.0f} %",
                ]
            )
        forward += [
            [
                name,
                batch["batch"],
                f"{batch['live_us']:.0f} us",
                f"{batch['own_error']:+.1f} %",
                f"{batch['wrong_error']:+.1f} %",
            ]
            for batch in run.get("forward", ())
        ]
    heads = ["what", "workload", "TTFT: own attention", "the other's"]
    lines = [
        paragraph(
            "A profile that compares architectures takes Command-R7B, whose layers look 4,096",
            "tokens back but for every fourth, for Aya-Expanse-8B, whose layers look at",
            "everything. Simulated TTFT and TPOT (means) with the attention that was measured",
            "for each. The paper: TTFT 37.3% wrong, against 4.1% with the right one (workload",
            "not given). Computed by `python -m integration.wrong_reuse.run`; from",
            f"{source(root, files)}.",
        ),
        "",
        *table([*heads, "TTFT differs", "TPOT differs", "beyond the measured"], rows),
    ]
    if forward:
        heads = ["what", "batch", "live forward pass", "error: own attention", "the other's"]
        lines += ["", "Against live forward passes of four layers:", "", *table(heads, forward)]
    return lines + causes(root, files)
