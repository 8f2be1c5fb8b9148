"""The cost tables and plots of a database that `integration.cost.run` has filled.

    python -m integration.cost.report --db h200.db -o integration/cost/results/h200
    python -m integration.cost.report --db h200.db --adaptive adaptive.db --alone alone.db -o FOLDER

Needs neither engine nor torch. `--adaptive` is a database of the same signatures
under the sweep `adaptive`; `--alone` one into which a configuration was profiled
with nothing known, as a check. Writes cost.md, planners.csv, configurations.csv,
signatures.csv, cost.html and, of the other databases, sweeps.csv and alone.csv.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dooly_backend.database import Database
from dooly_backend.errors import DoolyError, InputError
from dooly_backend.profiling.planners import PLANNERS
from dooly_backend.regression.select import select_all
from integration.accuracy.tables import paragraph, table
from integration.corpus.corpora import CORPORA
from integration.corpus.plot import layout, page, traces
from integration.corpus.summary import GROUPS, Figures
from integration.corpus.table import rows_of
from integration.cost.account import PARTS, Account, Profile, account, sweeps_in
from integration.cost.compare import alone, sweeps
from integration.cost.packed import unpacked

#: A100-hours of the paper's Tables 3 and 13, by corpus, planner and group.
PAPER_HOURS = {
    ("7B-8B", "Naive", "all"): 26.54, ("7B-8B", "HF-Diff", "all"): 24.44,
    ("7B-8B", "HF-Model-Diff", "all"): 15.97, ("7B-8B", "Dooly", "all"): 11.58,
    ("MoE", "Naive", "attention"): 4.06, ("MoE", "Dooly", "attention"): 1.59,
    ("MoE", "Naive", "moe"): 0.64, ("MoE", "Dooly", "moe"): 0.17,
    ("MoE", "Naive", "linear"): 0.19, ("MoE", "Dooly", "linear"): 0.10,
    ("MoE", "Naive", "other"): 0.06, ("MoE", "Dooly", "other"): 0.05,
    ("MoE", "Naive", "all"): 4.94, ("MoE", "Dooly", "all"): 1.91,
}  # fmt: skip
#: Seconds of a device for a further model of known geometry, at most.
TARGET_S = 60


@click.command()
@click.option("--db", required=True, help="A file, or builtin:NAME.")
@click.option("--sweep", help="Where runs of several are in the database.")
@click.option("--environment", help="Where the database holds several.")
@click.option("--adaptive", help="May be packed (.xz).")
@click.option("--alone", "alone_dbs", multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path))
def main(
    db: str,
    sweep: str | None,
    environment: str | None,
    adaptive: str | None,
    alone_dbs: tuple[Path, ...],
    out: Path,
) -> None:
    """Write what was spent, and what the other planners would have spent."""
    whole = read(db, sweep, environment)
    other = read(adaptive, None, environment) if adaptive else None
    fresh = [read(path, whole.sweep, environment) for path in alone_dbs]
    write(whole, other, fresh, out)
    click.echo((out / "cost.md").read_text())


def read(db: Path | str, sweep: str | None, environment: str | None) -> Account:
    """The account of a database. Raises InputError where it is not clear which is meant."""
    with unpacked(str(db)) as path, Database.open(path, read_only=True) as database:
        _, environment_id = select_all(database, (), environment)
        found = sweeps_in(database, environment_id)
        if sweep is None and len(found) != 1:
            raise InputError(
                f"{db} holds runs of {', '.join(found) or 'no sweep'}: say which with --sweep, or "
                "profile with this version, which keeps what its runs were for"
            )
        return account(database, environment_id, sweep or found[0])


def write(whole: Account, other: Account | None, fresh: Sequence[Account], out: Path) -> None:
    """All files."""
    out.mkdir(parents=True, exist_ok=True)
    # A single configuration shares nothing.
    corpora = [figures for corpus in CORPORA if len((figures := whole.of(corpus)).workloads) > 1]
    planners = [row for figures in corpora for row in planner_rows(figures, whole)]
    configurations = [configuration_row(profile) for profile in whole.profiles]
    signatures = [row for profile in whole.profiles for row in signature_rows(profile)]
    compared = sweeps(whole, other) if other else []
    checks = [row for each in fresh for row in alone(whole, each)]
    for name, rows in (
        ("planners", planners),
        ("configurations", configurations),
        ("signatures", signatures),
        ("sweeps", compared),
        ("alone", checks),
    ):
        if rows:
            write_csv(out / f"{name}.csv", rows)
    lines = ["# What profiling cost, and what reuse saved", "", about(whole)]
    for figures in corpora:
        mine = [row for row in planners if row["corpus"] == figures.corpus.name]
        lines += corpus_section(figures, mine)
    lines += configuration_section(whole, configurations)
    if other:
        lines += sweep_section(whole, other, compared)
    if checks:
        lines += ["", "## Profiled alone", "", ALONE, "", *rows_table(checks)]
    (out / "cost.md").write_text("\n".join(lines) + "\n")
    charts = [(traces(f), layout(f, "cumulative seconds, timing")) for f in corpora]
    if compared:
        charts.append(sweep_chart(whole, other, compared))
    (out / "cost.html").write_text(page(charts, "What profiling cost"), encoding="utf-8")


def about(whole: Account) -> str:
    """What was measured where, and what the figures mean."""
    seconds = whole.seconds
    untimed = sum(profile.untimed for profile in whole.profiles)
    parts = [f"{part} {took:.0f} s" for part, took in seconds.items()]
    pieces = [
        f"{whole.device}; {len(whole.profiles)} configurations whose sweep `{whole.sweep}` is",
        f"complete. Spent in all: {', '.join(parts)}. *Timing* are the samples of a point: kept",
        "ones, warm-ups, rounds that were not kept, and what runs around each call. *Setup* is",
        "capturing the steps that show the points, *rest* choosing points, writing them, waiting",
        "for another device that measures the same. *Boot* is the start of the engines, each by",
        "its own clock also where several started together; it is in no other sum.",
    ]
    if untimed:
        pieces.append(f"Of {untimed} points it is not known what they cost: they are left out.")
    if whole.incomplete:
        pieces.append(f"Begun and not complete, left out: {', '.join(whole.incomplete)}.")
    return paragraph(*pieces)


# -- deduplication ---------------------------------------------------------------


def planner_rows(figures: Figures, whole: Account) -> list[dict[str, Any]]:
    """The planners of a corpus by group, with setup where it was measured."""
    setup = {id(p.workload): p.seconds.get("setup", 0.0) for p in whole.profiles}
    rows = []
    for row in rows_of(figures, 2):
        at_least: Any = ""
        if row["group"] == "all":
            plan = zip(figures.workloads, PLANNERS[row["planner"]](figures.workloads), strict=True)
            at_least = round(sum(setup[id(w)] for w, items in plan if items), 2)
        hours = PAPER_HOURS.get((row["corpus"], row["planner"], row["group"]), "")
        rows.append({**row, "setup_seconds_at_least": at_least, "paper_a100_hours": hours})
    return rows


def corpus_section(figures: Figures, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of a corpus, and what is not in it."""
    lines = ["", f"## {figures.corpus.title}", ""]
    missed = figures.missed("HF-Model-Diff")
    pieces = [
        f"{len(figures.workloads)} configurations, {figures.calls} calls in a step of each,",
        f"{figures.signatures} signatures, {figures.unique} of them unique. The paper's:",
        f"{figures.corpus.paper}. *Seconds* are timing: the measured ones of every point, summed",
        "over what a planner would measure again. Setup cannot be told for what nobody captured:",
        "for all but Dooly it is what Dooly captured in the configurations that they measure, too,",
        "and so less than they would have spent.",
    ]
    if missed:
        pieces.append(f"HF-Model-Diff never measures {missed} signatures: it takes others' times.")
    if figures.missing:
        pieces.append(f"**Not measured yet:** {', '.join(figures.missing)}.")
    heads = {
        "planner": "planner", "group": "group", "signatures": "signatures", "points": "points",
        "seconds": "seconds", "saved": "saved %", "paper_saved": "paper: saved %",
        "paper_a100_hours": "paper: A100-hours", "setup_seconds_at_least": "setup, at least, s",
    }  # fmt: skip
    return [*lines, paragraph(*pieces), "", *rows_table(rows, heads)]


# -- configurations ---------------------------------------------------------------


def configuration_row(profile: Profile) -> dict[str, Any]:
    """What one configuration added to the database, and what that took."""
    row: dict[str, Any] = {"configuration": profile.name}
    wanted = {item.signature for item in profile.workload.items}
    own = {item.signature: item.group for item in profile.own}
    row |= {"signatures": len(wanted), "new": len(own)}
    row |= {f"new_{group}": list(own.values()).count(group) for group in GROUPS}
    row |= {"points": len(profile.workload.items), "new_points": len(profile.own)}
    row |= {"captured_steps": profile.captured_steps, "skipped": profile.skipped}
    row |= {f"{part}_s": round(profile.seconds.get(part, 0.0), 2) for part in ("boot", *PARTS)}
    row["device_s"] = round(profile.device_s, 1)
    return row | {"known_geometry": "yes" if profile.is_of_known_geometry else "no"}


def signature_rows(profile: Profile) -> Iterable[dict[str, Any]]:
    """Each signature of a configuration: measured from it, or reused, and at what cost."""
    for hash_, name in profile.names.items():
        items = [item for item in profile.workload.items if item.signature == hash_]
        own = [item for item in profile.own if item.signature == hash_]
        yield {
            "configuration": profile.name,
            "signature": hash_[:12],
            "name": name,
            "group": items[0].group if items else "",
            "points": len(items),
            "measured_points": len(own),
            "reused_points": len(items) - len(own),
            "seconds": round(sum(item.seconds for item in items), 3),
            "measured_seconds": round(sum(item.seconds for item in own), 3),
        }


def configuration_section(whole: Account, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every configuration in the order they ran, and the further models of known geometry."""
    further = [p for p in whole.profiles if p.is_of_known_geometry]
    if further:
        slowest = max(further, key=lambda profile: profile.device_s)
        text = (
            f"{len(further)} configurations found their attention and experts known; they took "
            f"the device for {slowest.device_s:.1f} s at most ({slowest.name}; aim: {TARGET_S} s)."
        )
    else:
        text = "No configuration found its attention and experts known yet."
    heads = {
        "configuration": "configuration", "signatures": "signatures", "new": "new",
        "new_attention": "attention", "new_moe": "experts", "new_linear": "linear",
        "new_other": "other", "points": "points", "new_points": "new points",
        "trace_s": "trace, s", "resolve_s": "resolve, s", "setup_s": "setup, s",
        "timing_s": "timing, s", "rest_s": "rest, s", "device_s": "all, s", "boot_s": "boot, s",
        "known_geometry": "known geometry",
    }  # fmt: skip
    return ["", "## Configurations in the order in which they ran", "", paragraph(text), "",
            *rows_table(rows, heads)]  # fmt: skip


# -- the adaptive sweep, and checks ----------------------------------------------

ALONE = paragraph(
    "Configurations profiled into a database of their own, with nothing known: what was accounted",
    "for them from the points that others had measured, and what they really took.",
)


def sweep_section(whole: Account, other: Account, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Both sweeps on the signatures that both measured, and what the other one took in all."""
    total = sum(profile.device_s for profile in other.profiles)
    text = paragraph(
        f"Signatures that both sweeps measured; those of `{other.sweep}` in a database of their",
        f"own, with {len(other.profiles)} configurations, which took the device for {total:.0f} s",
        f"({total / 3600:.3f} h) in all.",
    )
    return ["", f"## `{whole.sweep}` and `{other.sweep}`", "", text, "", *rows_table(rows)]


def sweep_chart(
    whole: Account, other: Account, rows: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Seconds of both sweeps by group."""
    bars = [
        {
            "type": "bar",
            "name": name,
            "x": [row["group"] for row in rows],
            "y": [row[f"{name}_seconds"] for row in rows],
        }
        for name in (whole.sweep, other.sweep)
    ]
    title = f"{whole.sweep} and {other.sweep}, the same signatures"
    return bars, {"title": {"text": title}, "yaxis": {"title": {"text": "seconds, timing"}}}


# -- files -----------------------------------------------------------------------


def rows_table(
    rows: Iterable[Mapping[str, Any]], heads: Mapping[str, str] | None = None
) -> list[str]:
    """A table of `rows`; `heads` chooses columns, and names them."""
    rows = list(rows)
    names = heads or {name: name.replace("_", " ") for name in rows[0]}
    return table(list(names.values()), [[str(row[name]) for name in names] for row in rows])


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    try:
        main()
    except DoolyError as error:
        sys.exit(f"error: {error}")
