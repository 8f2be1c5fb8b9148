"""`dooly db`: look into latency databases, check, unite and compare them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dooly_backend import console

if TYPE_CHECKING:
    from dooly_backend.database.merge import MergeResult


@click.group()
def db() -> None:
    """Look into latency databases, check, unite and compare them.

    \b
    Examples:
      dooly db info --db latency.db
      dooly db check
    """


@db.command()
@console.database_option
@console.json_option
def info(db: str, as_json: bool) -> None:
    """Show what a latency database holds.

    \b
    Examples:
      dooly db info
      dooly db info --db other.db --json
    """
    from dooly_backend.database import Database
    from dooly_backend.database.info_tables import render

    with Database.open(db, read_only=True) as database:
        result = database.info()
    if as_json:
        console.print_json(dataclasses.asdict(result))
    else:
        console.show(render(result))


@db.command()
@console.database_option
@console.json_option
@click.pass_context
def check(ctx: click.Context, db: str, as_json: bool) -> None:
    """Tell whether a latency database is sound.

    SQLite's own checks, the schema, foreign keys, hashes and digests, the
    stored statistics against the raw samples, and points that are there twice.
    Exit code 1 when something is wrong. The file is left as it is.

    \b
    Examples:
      dooly db check
      dooly db check --db builtin:h200 --json
    """
    from dooly_backend.database.check import check_file
    from dooly_backend.errors import CheckFailed

    report = check_file(db)
    if as_json:
        console.print_json({"ok": report.ok, "problems": report.problems, "notes": report.notes})
        ctx.exit(0 if report.ok else CheckFailed.exit_code)
    for line in (*report.problems, *report.notes):
        click.echo(line)
    if not report.ok:
        count = len(report.problems)
        raise CheckFailed(f"{db} is not sound: {count} problem{'s' if count > 1 else ''}")
    click.echo(f"{db} is sound")


@db.command()
@click.argument("into", metavar="INTO", type=click.Path(path_type=Path))
@click.argument("sources", metavar="FROM...", nargs=-1, required=True)
@console.json_option
def merge(into: Path, sources: tuple[str, ...], as_json: bool) -> None:
    """Put the contents of databases into one.

    INTO is created if there is none; FROM are only read. The order does not
    matter, and merging again changes nothing. Environments stay apart. Of a
    point that two files measured in the same environment, one keeps its
    samples: the stable one, with more samples, measured earlier.

    \b
    Examples:
      dooly db merge latency.db from-the-server.db
      dooly db merge all.db builtin:h200 cpu.db
    """
    from dooly_backend.database.merge import merge as unite

    result = unite(into, sources)
    if as_json:
        console.print_json(dataclasses.asdict(result))
    else:
        click.echo(_merged(result, into))


def _merged(result: MergeResult, into: Path) -> str:
    def listed(counts: dict[str, int]) -> str:
        return ", ".join(f"{name}s {n}" for name, n in counts.items() if n)

    changes = {
        "added": listed(dict(result.added)),
        "replaced by better ones": listed(dict(result.replaced)),
    }
    told = [f"{what}: {text}" for what, text in changes.items() if text] or ["nothing new"]
    if any(result.kept.values()):
        told.append(f"left out, {into} has better ones: {listed(dict(result.kept))}")
    return f"{into}: {'; '.join(told)} (contents {result.content_digest[:12]})"


@db.command()
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="[NEW]", required=False)
@click.option("--from", "old_environment", metavar="ENV", help="The environment in OLD.")
@click.option("--to", "new_environment", metavar="ENV", help="The one in NEW, or else in OLD.")
@click.option(
    "--threshold",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Percent that a median must move by to matter.",
)
@click.option(
    "--alpha",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.05,
    show_default=True,
    help="Share of the findings that may be false (false discovery rate).",
)
@console.json_option
@click.pass_context
def diff(
    ctx: click.Context,
    old: str,
    new: str | None,
    old_environment: str | None,
    new_environment: str | None,
    threshold: float,
    alpha: float,
    as_json: bool,
) -> None:
    """Tell which signatures' times changed, by how much, and whether significantly.

    Compares two files, or two environments of one file (devices, engine
    versions), on the raw samples of the points that both measured. ENV is the
    start of an environment's digest, or a part of its device, engine or version.
    Exit code 1 when something moved by more than the threshold.

    \b
    Examples:
      dooly db diff latency.db --from "vllm 0.25" --to "vllm 0.32"
      dooly db diff yesterday.db today.db --threshold 10
    """
    from contextlib import ExitStack

    from dooly_backend.database import Database
    from dooly_backend.database.diff import Place, choose, choose_two
    from dooly_backend.database.diff import diff as compare
    from dooly_backend.diff_report import as_values, lines
    from dooly_backend.errors import CheckFailed

    with ExitStack() as stack:
        before = stack.enter_context(Database.open(old, read_only=True))
        if new is None:
            ids = choose_two(before, old_environment, new_environment)
            places = Place(before, ids[0]), Place(before, ids[1])
        else:
            after = stack.enter_context(Database.open(new, read_only=True))
            places = (
                Place(before, choose(before, old_environment)),
                Place(after, choose(after, new_environment)),
            )
        result = compare(*places, threshold=threshold / 100, alpha=alpha)
    if as_json:
        console.print_json(as_values(result))
        ctx.exit(CheckFailed.exit_code if result.moved else 0)
    for line in lines(result):
        click.echo(line)
    if result.moved:
        raise CheckFailed(f"{len(result.moved)} signatures moved by more than {threshold:g}%")


@db.command(name="export")
@console.database_option
@console.output_option("The folder to write to, created if there is none.", required=True)
@console.json_option
def export_(db: str, out: Path, as_json: bool) -> None:
    """Write a latency database as Parquet files, one a table.

    latency.parquet joins every measurement, with its raw samples, with its
    signature, point and environment.

    \b
    Examples:
      dooly db export -o parquet
      dooly db export --db builtin:h200 -o parquet --json
    """
    from dooly_backend.database import Database
    from dooly_backend.database.parquet import export

    with Database.open(db, read_only=True) as database:
        rows = export(database, out)
    if as_json:
        console.print_json({"out": str(out), "rows": rows})
        return
    for name, count in rows.items():
        click.echo(f"{out / name}.parquet: {count} rows")
