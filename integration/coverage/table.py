"""The coverage table as Markdown."""

from __future__ import annotations

COLUMNS = (
    "name", "shows", "changes", "layers", "operations", "operations_outside", "dimensions",
    "label_model_config", "label_num_toks", "label_num_reqs", "label_mix", "label_engine",
    "label_literal", "unlabelled", "unlabelled_names", "accuracy", "repaired", "following",
    "predicted", "planned", "outside", "outside_agreeing", "tokens", "requests", "collision",
    "retraced", "same_labels", "boot_seconds", "seconds", "traced_to_plain", "peak_gib", "error",
)  # fmt: skip

_HEAD = (
    "configuration", "shows", "layers", "ops", "sizes", "model_config", "num_toks", "num_reqs",
    "mix", "engine", "literal", "unlabelled", "accuracy before repair", "repaired",
    "follow R", "predicted", "outside modules", "collision retraced, same labels", "s",
    "traced/plain",
)  # fmt: skip

NOTES = """\
One mixed step (a prefill beside decodes) of each configuration, dummy weights, bfloat16, as few
layers as show every kind. *sizes* counts dimensions and integer arguments inside modules, the label
columns those above 1. *accuracy before repair* is the share of sizes whose label, as the rules gave
it, says exactly what the differential check found; *repaired* were corrected by it. *follow R*: of
all sizes, those whose label says num_reqs exactly if they change when only the batch size does.
*predicted*: sizes of the held-out pass that the formulas gave (a plan of the attention kernel, once
a layer, may have none). *outside modules*: the same check
for input preparation, agreeing of compared. *collision*: traced again with a length equal to the
hidden size and a batch equal to the KV heads; it was seen and the labels are the same. *s*: from
the start of the process to the checked trace, two threads on a shared host.
"""


def markdown(rows: list[dict[str, str]]) -> str:
    """The table, with what it means; rows that failed say why."""
    lines = ["# Coverage of tainted tracing", "", NOTES, ""]
    lines += [_line(_HEAD), _line(["---"] * len(_HEAD))]
    lines += [_line(_cells(row)) for row in rows if not row["error"]]
    failures = [f"- {row['name']} ({row['shows']}): {row['error']}" for row in rows if row["error"]]
    if failures:
        lines += ["", "Not traced:", "", *failures]
    unlabelled = [f"- {r['name']}: {r['unlabelled_names']}" for r in rows if r["unlabelled_names"]]
    if unlabelled:
        lines += ["", "Unlabelled:", "", *unlabelled]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, str]) -> list[str]:
    name = row["name"] + (f" ({row['changes']})" if row["changes"] else "")
    sizes = row["dimensions"]
    followed = f"{int(row['following']) / int(sizes):.1%}"
    retraced = "yes" if row["retraced"] == row["same_labels"] == "True" else "no"
    return [
        name, row["shows"], row["layers"], row["operations"], sizes,
        *(row[f"label_{base}"] for base in
          ("model_config", "num_toks", "num_reqs", "mix", "engine", "literal")),
        row["unlabelled"], f"{float(row['accuracy']):.2%}", row["repaired"], followed,
        f"{row['predicted']}/{sizes}", f"{row['outside_agreeing']}/{row['outside']}",
        f"{retraced} ({row['collision']})", row["seconds"], row["traced_to_plain"],
    ]  # fmt: skip


def _line(cells: object) -> str:
    return "| " + " | ".join(cells) + " |"  # type: ignore[arg-type]
