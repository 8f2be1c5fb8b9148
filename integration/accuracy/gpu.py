"""Sections of what was measured on GPUs: coverage, whole steps at the engine's defaults."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd

from integration.accuracy.tables import MISSES, at_most, causes, paragraph, source, table
from integration.gpu.export_errors import PRICES, errors_of

_STEP = {"eager": at_most(5)}
_STEP_DEFAULT = at_most(3)


def coverage(root: Path) -> list[str]:
    """Kernels of live steps under the entries of the runnable set."""
    files = sorted((root / "integration/gpu/results").glob("**/coverage*.json"))
    rows = []
    for configuration in (c for path in files for c in json.loads(path.read_text())):
        batches = configuration["batches"]
        name = f"{short(configuration['model'])}, {configuration['backend']}"
        for phase in ("prefill", "decode", "mixed"):
            of = [batch for batch in batches if batch["phase"] == phase]
            if of:
                rows.append(
                    [
                        f"{name}, {configuration['mode']}",
                        configuration["device"],
                        phase,
                        *_counts(of, configuration["unit"]),
                    ]
                )
    if not rows:
        return ["Not measured yet."]
    heads = ["configuration", "device", "steps", "under one entry", "under none", "under several"]
    return [
        paragraph(
            "What the modules of live steps launch, and how much of it lies under exactly one",
            "entry of the runnable set, by count and by time: kernels, copies and fills on a",
            "GPU, operations that call no other on a CPU. *Outside* is what no module launches",
            "(inputs before the model, what follows the sampler): it is part of the step's own",
            "cost. Target: all under exactly one. Measured by `python -m",
            f"integration.gpu.coverage`; from {source(root, files)}.",
        ),
        "",
        *table([*heads, "outside", "", "with ranges"], rows),
        *causes(root, files),
    ]


def _counts(batches: list[dict[str, Any]], unit: str) -> list[str]:
    def total(part: str) -> tuple[int, float]:
        return sum(b[part]["count"] for b in batches), sum(b[part]["us"] for b in batches)

    inside, once = total("inside"), total("once")
    outside = [of for batch in batches for of in batch["outside"].values()]
    changes = sum(abs(n) for batch in batches for n in batch["ranges_change"].values())
    return [
        f"{once[0]} of {inside[0]} {unit}, {share(once[1], inside[1])} of the time",
        _gaps(batches),
        str(total("doubles")[0]),
        f"{sum(of['count'] for of in outside)}, {sum(of['us'] for of in outside):.0f} us",
        "" if all(batch["exact"] for batch in batches) else MISSES,
        f"{changes} differ" if changes else "the same",
    ]


def _gaps(batches: list[dict[str, Any]]) -> str:
    """How much lies under no entry, and where."""
    places: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for gap in (gap for batch in batches for gap in batch["gap_names"]):
        places[gap["where"]] += gap["count"]
        times[gap["where"]] += gap["us"]
    return ", ".join(f"{n} in {w} ({times[w]:.0f} us)" for w, n in places.items()) or "0"


def whole_steps(root: Path) -> list[str]:
    """Held-out steps in a row at the engine's defaults, beside what is predicted."""
    files = sorted((root / "integration/gpu/results").glob("**/step-errors*.csv"))
    if not files:
        return ["Not measured yet."]
    frame = pd.concat([pd.read_csv(path) for path in files], ignore_index=True)
    frame = frame.fillna({"quantization": "none"})
    served = ["model", "backend", "execution_mode", "quantization"]
    frame = frame[frame["layers"] == frame.groupby(served)["layers"].transform("max")]
    rows = []
    by = [*served, "layers", "kind"]
    for key, group in frame.groupby(by, sort=False):
        model, backend, mode, quantization, layers, kind = key
        error = group["error_percent"].abs()
        alone = group["forward_only_error_percent"].abs()
        target = _STEP.get(mode, _STEP_DEFAULT)
        precision = "" if quantization == "none" else f", {quantization}"
        rows.append(
            [
                f"{short(model)}, {backend}, {mode}{precision}",
                str(layers),
                kind,
                str(len(group)),
                f"{error.mean():.1f} / {error.max():.1f} %",
                f"{alone.mean():.1f} / {alone.max():.1f} %",
                target.text,
                target.mark(error.mean()),
            ]
        )
    heads = ["configuration", "layers", "steps", "number", "predicted: mean / worst"]
    return [
        paragraph(
            "Steps in a row, launched as asynchronous scheduling launches them; none of them is",
            "in a fit. *Operations alone* is their sum, with no cost of the step itself. The",
            "deepest engines alone: those of few layers show what launching takes.",
            "Measured by `python -m integration.gpu.step_costs`, predicted by",
            f"`integration.gpu.step_errors`; from  {source(root, files)}.",
        ),
        "",
        *table([*heads, "operations alone", "target (mean)", ""], rows),
        *causes(root, files),
    ]


def exports(root: Path) -> list[str]:
    """The same held-out steps as simulators price them that read an export."""
    files = sorted((root / "integration/gpu/results").glob("**/export-errors*.csv"))
    if not files:
        return ["Not measured yet."]
    frame = pd.concat([pd.read_csv(path) for path in files], ignore_index=True)
    rows = []
    for key, group in frame.groupby(["model", "backend", "execution_mode", "kind"], sort=False):
        model, backend, mode, kind = key
        errors = errors_of(group).abs()
        each = [f"{errors[n].mean():.1f} / {errors[n].max():.1f} %" for n in PRICES]
        rows.append([f"{short(model)}, {backend}, {mode}", kind, str(len(group)), *each])
    heads = ["configuration", "steps", "number", "sum of operations", "Dooly's step"]
    return [
        paragraph(
            "The held-out steps above, mean and worst error: as the sum of their operations, as",
            "`LatencyModel.step_us` has them, and by the rules of simulators over exported tables",
            "(the rules are tested against the simulators). Exports hold what whole steps take:",
            "padded, fused and launched as the engine does by default. Computed by",
            f"`python -m integration.gpu.export_errors`; from {source(root, files)}.",
        ),
        "",
        *table([*heads, "Vidur's repository", "Vidur of PyPI", "LLMServingSim"], rows),
        *causes(root, files),
    ]


def short(model: str) -> str:
    """A model's name without its owner."""
    return model.rpartition("/")[2]


def share(part: float, whole: float) -> str:
    """Percent; only what is all is 100 %."""
    percent = 100 * part / whole if whole else 100.0
    return f"{percent:.0f} %" if part == whole else f"{min(percent, 99.99):.2f} %"
