"""`dooly fit`: a bundle of regressors from a latency database."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dooly_backend import console

if TYPE_CHECKING:
    from dooly_backend.regression.bundle import Bundle


@click.command()
@console.database_option
@click.option(
    "--model",
    "models",
    metavar="NAME",
    multiple=True,
    help="A model to put in; may be repeated. [default: all that are measured to the end]",
)
@console.environment_option
@click.option(
    "--regressor",
    "only",
    metavar="NAME",
    multiple=True,
    help="A regressor to choose from; may be repeated. [default: all but `forest`]",
)
@console.output_option("The bundle's file.", required=True)
@console.json_option
def fit(
    db: str,
    models: tuple[str, ...],
    environment: str | None,
    only: tuple[str, ...],
    out: Path,
    as_json: bool,
) -> None:
    """Fit regressors to a latency database, and write them as one bundle.

    Each signature gets the regressor that errs least at points it has not
    seen. The bundle holds all that a simulation needs, and reading one runs
    no code, whoever made it.

    \b
    Examples:
      dooly fit --db latency.db -o bundle.joblib
      dooly fit --db builtin:h200 --model meta-llama/Llama-3.1-8B -o llama.joblib
    """
    from dooly_backend.database import Database
    from dooly_backend.regression.bundle_fit import fit_bundle

    with Database.open(db, read_only=True) as database:
        bundle = fit_bundle(database, models, environment, only)
    bundle.save(out)
    if as_json:
        console.print_json({**summary(bundle), "out": str(out)})
        return
    console.show(_table(bundle))
    click.echo(f"wrote {len(bundle.signatures)} signatures to {out}")


def summary(bundle: Bundle) -> dict[str, object]:
    """Counts, and by kind of signature the mean error at held-out points, in percent."""
    errors: dict[str, list[float]] = {}
    for each in bundle.signatures.values():
        if each.model in each.errors:
            errors.setdefault(each.signature.kind, []).append(each.errors[each.model])
    return {
        "signatures": len(bundle.signatures),
        "configurations": len(bundle.configurations),
        "points": sum(each.points for each in bundle.signatures.values()),
        "held_out_error": {k: 100 * sum(v) / len(v) for k, v in sorted(errors.items())},
    }


def _table(bundle: Bundle) -> object:
    """A row for each signature: what predicts it, and how well."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("signature", "depends on", "points", "regressor"):
        table.add_column(heading, justify="right" if heading == "points" else "left")
    table.add_column("held-out error", justify="right")
    table.add_column("baseline's", justify="right")
    order = sorted(bundle.signatures.values(), key=lambda f: (f.signature.kind, f.signature.name))
    for each in order:
        errors = [each.errors.get(each.model), next(iter(each.errors.values()), None)]
        table.add_row(
            f"{each.signature.name} ({each.signature.hash[:8]})",
            each.signature.kind,
            str(each.points),
            each.model,
            *("" if error is None else f"{100 * error:.1f}%" for error in errors),
        )
    return table
