"""What one case gave, as the columns of the CSVs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from integration.coverage.runnable import registry_agrees

#: Every row has these; what else it has, the parts that ran decide.
_CASE = ("name", "shows", "changes", "layers")
_TRACE = (
    "operations", "operations_outside", "dimensions",
    "label_model_config", "label_num_toks", "label_num_reqs", "label_mix", "label_engine",
    "label_literal", "unlabelled", "unlabelled_names", "accuracy", "repaired", "following",
    "predicted", "planned", "outside", "outside_agreeing", "tokens", "requests", "collision",
    "retraced", "same_labels", "boot_seconds", "seconds", "traced_to_plain", "peak_gib",
    "trace_error",
)  # fmt: skip
#: Entries with whole modules, then (finer) where operations are preferred;
#: leaves of a step, and those under exactly one entry of either set.
_RUNNABLE = (
    "entries_modules", "entries_operations", "stateful", "finer_modules", "finer_operations",
    "finer_captured", "registry_agrees",
    *(f"{step}_{what}" for step in ("traced", "prefill", "decode")
      for what in ("leaves", "once", "finer_once", "idle")),
    "not_once", "resolve_seconds", "resolve_peak_gib", "runnable_error",
)  # fmt: skip

COLUMNS = (*_CASE, *_TRACE, *_RUNNABLE)
ENTRY_COLUMNS = ("name", "preferred", "entry", "reason", "count")
PARTS = ("trace", "runnable")

#: A column that a part fills whenever it does not fail, and what of a result it needs for that.
FIRST_COLUMN = {"trace": "dimensions", "runnable": "traced_leaves"}
FIRST_RESULT = {"trace": "labels", "runnable": "steps"}


def flat(row: dict[str, Any], parts: Sequence[str]) -> dict[str, str]:
    """The case's columns and those that `parts` fill; empty ones where a part failed."""
    values: dict[str, Any] = {column: row[column] for column in _CASE if column in row}
    for part, columns, derived in (("trace", _TRACE, _traced), ("runnable", _RUNNABLE, _resolved)):
        if part in parts:
            plain = {c: row[c] for c in columns if isinstance(row.get(c), (int, float, str))}
            found = derived(row) if FIRST_RESULT[part] in row else {}
            values |= dict.fromkeys(columns, "") | plain | found
    return {column: str(value) for column, value in values.items()}


def _traced(row: dict[str, Any]) -> dict[str, Any]:
    labels = {column: 0 for column in _TRACE if column.startswith("label_")}
    for name, count in row["labels"].items():
        if f"label_{name}" in labels:  # "none" is in `unlabelled`, with its places
            labels[f"label_{name}"] = count
    return {
        **labels,
        "unlabelled": sum(row["unlabelled"].values()),
        "unlabelled_names": "; ".join(row["unlabelled"]),
        "collision": "x".join(map(str, row["collision"])),
    }


def _resolved(row: dict[str, Any]) -> dict[str, Any]:
    entries, finer = row["entries"], row["operation_entries"]
    values = {
        "entries_modules": entries.get("module", 0),
        "entries_operations": entries.get("operation", 0),
        "stateful": entries["stateful"],
        "finer_modules": finer.get("module", 0),
        "finer_operations": finer.get("operation", 0),
        "finer_captured": finer["captured"],
        "registry_agrees": registry_agrees(row),
    }
    missed: set[str] = set()
    for name, step in row["steps"].items():
        whole, fine = step["modules"], step["operations"]
        values |= {
            f"{name}_leaves": whole["kernels"],
            f"{name}_once": whole["once"],
            f"{name}_finer_once": fine["once"],
            f"{name}_idle": len(whole["idle"]),
        }
        for cover in (whole, fine):
            missed |= {*cover["gaps"], *cover["doubles"]}
    return values | {"not_once": "; ".join(sorted(missed))}


def reasons(row: dict[str, Any]) -> list[dict[str, str]]:
    """Lines of runnable.csv: why entries of either set are coarser than an operation."""
    return [
        {
            "name": row["name"],
            "preferred": preferred,
            "entry": reason.partition(": ")[0],
            "reason": reason.partition(": ")[2],
            "count": str(count),
        }
        for preferred, entries in (("modules", "entries"), ("operations", "operation_entries"))
        for reason, count in row.get(entries, {}).get("reasons", {}).items()
    ]
