"""The coverage tables as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

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


_COVER_HEAD = (
    "configuration", "modules", "operations", "stateful", "finer: modules", "operations",
    "captured", "registry agrees", "traced step", "prefill", "decode", "coarse because",
)  # fmt: skip

COVER_NOTES = """\
Every call of the trace was run again, at two other sizes, and the trace resolved into entries
twice: as on a CPU, where leaf modules stay whole, and (*finer*) as on a GPU, where operations are
preferred. *stateful*: entries that ran only with the engine's forward context; *registry agrees*:
they are those that the engine's own registry binds to state, mixture-of-experts layers apart (not
where vLLM runs transformers' code: attention is no module call there, its caller is the entry).
*captured*: operations that ran with the arguments of a step, since none could be made. *traced
step*, *prefill* (two alone), *decode* (nine alone): leaves of the step, which are operations inside
modules that run a kernel of this device, found under exactly one entry by their place, in both
sets; views and collectives are none. *coarse because*: number of a reason below, and how many
entries have it. `runnable.csv` has the reasons by configuration and entry."""


def markdown(
    rows: list[dict[str, str]], entries: list[dict[str, str]], cases: Sequence[str]
) -> str:
    """Both tables, with what they mean; rows that failed say why, `cases` without one are named."""
    traced = [row for row in rows if row["dimensions"]]
    lines = ["# Coverage of tainted tracing", "", NOTES, ""]
    lines += [_line(_HEAD), _line(["---"] * len(_HEAD)), *(_line(_cells(row)) for row in traced)]
    lines += _listed("Not traced:", rows, "trace_error") + _waiting(cases, rows, "dimensions")
    lines += _listed("Unlabelled:", rows, "unlabelled_names")
    lines += ["", "# Runnable sets", "", COVER_NOTES, "", *_covers(rows, entries)]
    lines += _listed("Not resolved:", rows, "runnable_error")
    lines += _waiting(cases, rows, "traced_leaves")
    lines += _listed("Not under exactly one entry:", rows, "not_once")
    return "\n".join(lines) + "\n"


def _listed(title: str, rows: list[dict[str, str]], column: str) -> list[str]:
    found = [f"- {row['name']} ({row['shows']}): {row[column]}" for row in rows if row[column]]
    return ["", title, "", *found] if found else []


def _waiting(cases: Sequence[str], rows: list[dict[str, str]], column: str) -> list[str]:
    """Those of `cases` that have no row with `column` yet, and no error."""
    done = {r["name"] for r in rows if r[column] or r["trace_error"] or r["runnable_error"]}
    waiting = [name for name in cases if name not in done]
    return ["", f"Not run yet: {', '.join(waiting)}."] if waiting else []


def _covers(rows: list[dict[str, str]], entries: list[dict[str, str]]) -> list[str]:
    """The table of entries, and below it the reasons, numbered from the most frequent on."""
    met = Counter((e["preferred"], e["reason"]) for e in entries)
    numbers = {reason: number for number, (reason, _) in enumerate(met.most_common(), 1)}
    lines = [_line(_COVER_HEAD), _line(["---"] * len(_COVER_HEAD))]
    for row in rows:
        if row["traced_leaves"]:
            why: Counter[int] = Counter()
            for e in entries:
                if e["name"] == row["name"]:
                    why[numbers[e["preferred"], e["reason"]]] += int(e["count"])
            lines.append(_line(_cover_cells(row, sorted(why.items()))))
    head = ("reason", "set", "why it is not finer", "entries", "configurations")
    lines += ["", _line(head), _line(["---"] * len(head))]
    for (preferred, reason), number in numbers.items():
        here = [e for e in entries if (e["preferred"], e["reason"]) == (preferred, reason)]
        which = "finer" if preferred == "operations" else "whole modules"
        names = ", ".join(sorted({e["entry"] for e in here}))
        models = str(len({e["name"] for e in here}))
        lines.append(_line([str(number), which, reason.replace("|", "\\|"), names, models]))
    return lines


def _cover_cells(row: dict[str, str], why: list[tuple[int, int]]) -> list[str]:
    steps = []
    for step in ("traced", "prefill", "decode"):
        once = min(int(row[f"{step}_once"]), int(row[f"{step}_finer_once"]))
        steps.append(f"{once} of {row[f'{step}_leaves']}")
    return [
        row["name"], row["entries_modules"], row["entries_operations"], row["stateful"],
        row["finer_modules"], row["finer_operations"], row["finer_captured"],
        "yes" if row["registry_agrees"] == "True" else "no", *steps,
        ", ".join(f"{number} ({count})" for number, count in why),
    ]  # fmt: skip


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


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
