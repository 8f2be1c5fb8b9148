"""Pack a measured database as the one that Dooly ships.

    python -m integration.gpu.ship h200.db [-o dooly_backend/database/builtin/h200.db.xz]

What whole steps cost is fitted again, with the code of now; the file is checked, made as
small as it goes and packed. The database itself stays as it is.
"""

from __future__ import annotations

import lzma
import shutil
import sqlite3
import tempfile
from itertools import product
from pathlib import Path

import click

from dooly_backend.database import Database
from dooly_backend.database.check import check_file
from dooly_backend.regression.store_cost import store_stream_cost
from integration.accuracy.refresh import ROOT

SHIPPED = ROOT / "dooly_backend/database/builtin/h200.db.xz"


@click.command()
@click.argument("db", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--out", default=SHIPPED, type=click.Path(path_type=Path))
def main(db: Path, out: Path) -> None:
    """Fit, check and pack DB."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / db.name
        shutil.copyfile(db, copy)
        fitted = refit(copy)
        report = check_file(copy)
        if not report.ok:
            raise click.ClickException(f"{db}: {'; '.join(report.problems)}")
        content = compact(copy)
    out.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    click.echo(
        f"{fitted} profiles with whole steps; {len(content) / 2**20:.1f} MiB, packed "
        f"{out.stat().st_size / 2**20:.2f}"
    )


def refit(db: Path) -> int:
    """Fit what whole steps cost wherever there are any; how many profiles have some."""
    with Database.open(db) as database:
        places = list(product(database.configurations(), database.environments()))
        return sum(bool(store_stream_cost(database, place)) for place in places)


def compact(db: Path) -> bytes:
    """The file without free pages and without a log."""
    connection = sqlite3.connect(db)
    try:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("VACUUM")
    finally:
        connection.close()
    return db.read_bytes()


if __name__ == "__main__":
    main()
