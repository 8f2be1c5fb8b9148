"""Sections of calls timed alone: additivity, granularity, the sweeps, the intervals."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from integration.accuracy.tables import MISSES, Target, at_most, causes, paragraph, source, table

_PHASES = ("prefill", "decode", "mixed")
_FORWARD = {
    "cpu": {"prefill": at_most(3), "decode": at_most(5), "mixed": at_most(5)},
    "gpu": {phase: at_most(2) for phase in _PHASES},
}
#: Issue 5 has whole steps on a CPU within 2% for prefills and 4% for decodes.
_STEP = {"prefill": at_most(2), "decode": at_most(4), "mixed": at_most(4)}

_GRANULARITY = {
    "Linear": at_most(1),
    "Gemma RMSNorm": at_most(0.1),
    "Cohere LayerNorm": at_most(0.1),
}

_COVERED = Target("85 to 95%", most=95, least=85)
_WIDTH = at_most(10)


def additivity(root: Path) -> list[str]:
    """The live forward pass against the sum of its calls timed alone."""
    files = sorted((root / "integration/additivity/results").glob("**/additivity*.csv"))
    rows = []
    for path in files:
        frame = pd.read_csv(path)
        device = "cpu" if path.parent.name.startswith("cpu") else "gpu"
        name = path.stem.removeprefix("additivity").removeprefix("-") or path.parent.name
        if device == "cpu" and name != path.parent.name:
            name = f"{path.parent.name}: {name}"
        for phase in _PHASES:
            of = frame[frame["phase"] == phase]
            if of.empty:
                continue
            error = of["forward_error"].abs()
            target = _FORWARD[device][phase]
            missed = [target.mark(error.mean())]
            of_step = ["", ""]
            if "step_error" in of:
                whole = of["step_error"].abs()
                of_step = [f"{whole.mean():.1f} / {whole.max():.1f} %", _STEP[phase].text]
                missed.append(_STEP[phase].mark(whole.mean()))
            rows.append(
                [
                    f"{path.parent.name}: {name}" if device == "gpu" else name,
                    phase,
                    str(len(of)),
                    f"{error.mean():.1f} / {error.max():.1f} %",
                    target.text,
                    *of_step,
                    MISSES if any(missed) else "",
                ]
            )
    heads = ["configuration", "batches", "number", "forward: mean / worst", "target (mean)"]
    return [
        paragraph(
            "Calls timed alone, summed, against the model's forward pass in the live engine, in",
            "turns in one run; nothing is fitted. On a CPU whole steps too: their own cost is",
            "fitted to the other half of the batches. Measured by `python -m",
            f"integration.additivity.run` and `integration.gpu.run`; from {source(root, files)}.",
        ),
        "",
        *table([*heads, "step: mean / worst", "target (mean)", ""], rows),
        *causes(root, files),
    ]


def granularity(root: Path) -> list[str]:
    """Whole modules against the sums of their operations."""
    files = sorted((root / "integration/granularity/results").glob("*/granularity.csv"))
    frame = pd.concat([pd.read_csv(path) for path in files], ignore_index=True)
    rows = []
    by = ["environment", "pair", "module", "operations"]
    for (environment, pair, module, operations), group in frame.groupby(by, sort=False):
        difference, jitter = group["difference"].abs(), group["jitter"].abs()
        measured = difference.dropna()
        # Calling is what counts on a CPU: the paper's figures are a GPU's.
        target = _GRANULARITY[pair] if "NVIDIA" in environment else None
        rows.append(
            [
                environment,
                f"{pair}: {module.rpartition(' ')[2]}",
                str(operations),
                f"{group['tokens'].min()} to {group['tokens'].max()}",
                "none is seen"
                if measured.empty
                else f"{measured.median():.2f} / {measured.max():.2f} %",
                f"{jitter.median():.2f} / {jitter.max():.2f} %",
                target.text if target else "",
                target.mark(measured.max()) if target and not measured.empty else "",
            ]
        )
    heads = ["device", "module", "operations", "tokens", "difference: median / worst"]
    return [
        paragraph(
            "By how much the sum of a module's operations, each timed alone, differs from the",
            "module timed whole; *jitter* is the difference of two timings of the same module",
            "in the same turns. The targets are the paper's figures (section 7.4), on a GPU; on a",
            "CPU there is none.",
            f"Measured by `python -m integration.granularity.run`; from {source(root, files)}.",
        ),
        "",
        *table([*heads, "jitter: median / worst", "target (all)", ""], rows),
        *causes(root, files),
    ]


def sweeps(root: Path) -> list[str]:
    """The adaptive sweep against Vidur's grid."""
    files = sorted((root / "integration/adaptive/results").glob("*/*-curves.csv"))
    rows = []
    for path in files:
        frame = pd.read_csv(path)
        whole = frame[(frame["part"] == "all") & (frame["shape"] == "all")].set_index("sweep")
        own, grid = whole.loc["adaptive"], whole.loc["Vidur's grid"]
        reached = own["points"] <= grid["points"] / 5 and own["mean_error"] <= grid["mean_error"]
        rows.append(
            [
                path.parent.name,
                path.stem.removesuffix("-curves"),
                f"{own['points']:.0f} / {grid['points']:.0f}",
                f"{100 * own['mean_error']:.1f} / {100 * grid['mean_error']:.1f} %",
                f"{100 * own['p90_error']:.1f} / {100 * grid['p90_error']:.1f} %",
                f"{own['places']:.0f}",
                "" if reached else MISSES,
            ]
        )
    heads = ["run", "operations", "points: adaptive / grid", "mean error", "90th percentile"]
    return [
        paragraph(
            "Held-out error of what is fitted to each sweep's points, measured in one run.",
            "Target: at most a fifth of the grid's points, and no larger mean error. Measured",
            f"by `python -m integration.adaptive.run`; from {source(root, files)}.",
        ),
        "",
        *table([*heads, "held-out places", ""], rows),
        *causes(root, files),
    ]


def intervals(root: Path) -> list[str]:
    """How often the 90% interval holds what was measured, and how wide it is."""
    files = sorted((root / "integration/benchmarks/results").glob("intervals-*.csv.xz"))
    rows = []
    for path in files:
        frame = pd.read_csv(path)
        inside = frame[~frame["extrapolated"]]
        held = inside["us"].between(inside["low_us"], inside["high_us"])
        covered = 100 * held.mean()
        half = 50 * (inside["high_us"] - inside["low_us"]) / inside["predicted_us"]
        error = 100 * (inside["predicted_us"] / inside["us"] - 1).abs()
        marks = [_COVERED.mark(covered), _WIDTH.mark(half.median())]
        rows.append(
            [
                path.name.partition(".")[0].removeprefix("intervals-"),
                str(len(inside)),
                f"{error.mean():.1f} %",
                f"{covered:.1f} %",
                f"{half.median():.1f} %",
                MISSES if any(marks) else "",
            ]
        )
    heads = ["database", "held-out points", "mean error", "covered", "median half-width", ""]
    return [
        paragraph(
            "The 90% interval of held-out points within the measured range. Targets: covers",
            f"{_COVERED.text}, median half-width {_WIDTH.text}. Measured by `python -m",
            f"integration.benchmarks.intervals`; from {source(root, files)}.",
        ),
        "",
        *table(heads, rows),
        *causes(root, files),
    ]
