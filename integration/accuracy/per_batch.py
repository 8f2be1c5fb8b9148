"""Sections of single batches: live beside predicted, and which configuration is fastest where."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from integration.accuracy.gpu import short
from integration.accuracy.tables import MISSES, at_most, causes, paragraph, source, table

_TARGET = at_most(3)
#: As `integration.per_batch.errors.HEADLINE`; batches with both kinds have no target.
_JUDGED = {"decode": "in a row", "prefill": "waited for"}
_HOWS = ("in a row", "waited for")


def single_batches(root: Path) -> list[str]:
    """Errors of single batches by configuration and kind."""
    files = _files(root, "per-batch.csv")
    if not files:
        return ["Not measured yet."]
    rows = []
    for path in files:
        frame = pd.read_csv(path)
        by = ["model", "backend", "execution_mode", "quantization", "layers"]
        for (model, backend, mode, quantization, layers), of in frame.groupby(by, sort=False):
            precision = "" if quantization == "none" else f", {quantization}"
            for kind in ("prefill", "decode", "mixed"):
                group = of[of["kind"] == kind]
                if group.empty:
                    continue
                hows = {how: group[group["how"] == how] for how in _HOWS}
                judged = hows.get(_JUDGED.get(kind, ""))
                mark = "" if judged is None else _TARGET.mark(judged["error_percent"].abs().mean())
                batches = group.drop_duplicates("batch")
                rows.append(
                    [
                        f"{short(model)}, {backend}, {mode}{precision}, {layers} layers",
                        kind,
                        f"{len(batches)} ({batches['in_fit'].notna().sum()})",
                        *(_figures(hows[how], how, kind) for how in _HOWS),
                        f"{group['noise_percent'].mean():.1f} %",
                        mark,
                    ]
                )
    heads = ["configuration", "kind", "batches (seen)", *(f"{how}: mean / worst" for how in _HOWS)]
    return [
        paragraph(
            "Batches of one size on the live engine at its defaults, as in appendix F.2 of the",
            "paper (there at most 4.5 % for prefills, 3.5 % for decodes). *In a row*: many equal",
            "steps, each launched before the one before it is out: a decode's time per output",
            "token. *Waited for*: alone on an idle engine: a prompt's time to its first token.",
            "Of how many a fit has *seen* the batch: as a whole step, or attention with just its",
            f"lengths. *Noise*: one standard error of a live time. Target: mean {_TARGET.text} (in",
            "bold what it is for). Measured by `python -m integration.per_batch.measure` and",
            f"`integration.gpu.step_costs`, predicted by `integration.per_batch.report`; from "
            f"{source(root, files)}.",
        ),
        "",
        *table([*heads, "noise", ""], rows),
        *causes(root, files),
    ]


def _figures(group: pd.DataFrame, how: str, kind: str) -> str:
    if group.empty:
        return "-"
    error = group["error_percent"].abs()
    text = f"{error.mean():.1f} / {error.max():.1f} %"
    return f"**{text}**" if _JUDGED.get(kind) == how else text


def fastest(root: Path) -> list[str]:
    """The winners by length, and the lengths at which they change."""
    files = _files(root, "winners.csv")
    if not files:
        return ["Not measured yet."]
    choices, changes = [], []
    for path in files:
        for kind, of in pd.read_csv(path).groupby("kind", sort=False):
            choices.append(
                [
                    f"{path.parent.name}: {kind}",
                    str(of["configurations"].max()),
                    str(len(of)),
                    f"{of['right'].sum()} ({100 * of['right'].mean():.0f} %)",
                    f"{of['lost_percent'].mean():.2f} / {of['lost_percent'].max():.2f} %",
                    f"{of['worst_percent'].mean():.1f} / {of['worst_percent'].max():.1f} %",
                ]
            )
        for row in pd.read_csv(path.with_name("inversions.csv")).to_dict("records"):
            crosses = row["predicted"]
            changes.append(
                [
                    f"{path.parent.name}: {row['kind']} x {row['requests']}",
                    row["before"],
                    row["after"],
                    f"{row['low']} to {row['high']}",
                    f"{row['live']:.0f}",
                    "-" if pd.isna(crosses) else f"{crosses:.0f}",
                    row["verdict"],
                    "" if row["verdict"] == "predicted" else MISSES,
                ]
            )
    heads = ["workload", "configurations", "places", "predicted fastest wins"]
    lines = [
        paragraph(
            "Which model and backend is fastest for single batches, by the number of requests",
            "and their length (figure 1 and appendix G of the paper): prefills by the time to the",
            "first token, decodes by the time per token. At a *place* the predicted fastest wins",
            "where no other is faster live by more than two standard errors; what following the",
            "prediction loses against the live fastest, and what the slowest would.",
            f"Computed by `python -m integration.per_batch.report`; from {source(root, files)}.",
        ),
        "",
        *table([*heads, "lost: mean / worst", "by the slowest: mean / worst"], choices),
        "",
        paragraph(
            "Inversions that the live measurements show beyond their noise: of two winners the",
            "first is faster at the lower length, the second at the higher one. Where they cross",
            "in between is interpolated (ratio and length as logarithms). Target: every one is",
            "predicted, between the same lengths.",
        ),
        "",
    ]
    if changes:
        heads = ["batches", "fastest before", "and after", "tokens", "live", "predicted at", ""]
        lines += table([*heads, " "], changes)
    else:
        lines.append("None.")
    return [*lines, *causes(root, files)]


def _files(root: Path, name: str) -> list[Path]:
    return sorted((root / "integration/per_batch/results").glob(f"*/{name}"))
