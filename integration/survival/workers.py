"""Several `dooly profile` processes at once share one database: every point is measured once.

    python -m integration.survival.workers --out integration/survival/results/workers.json

Each process starts an engine of its own and runs the same profile. What they say
they measured must add up to what the database holds, and `dooly db check` must
be clean.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click

from dooly_backend.database.check import check_file
from integration.survival.run import committed, start


@click.command()
@click.option("--workers", default=4, show_default=True)
@click.option("--model", default="smollm-135m", show_default=True)
@click.option("--sweep", default="quick", show_default=True)
@click.option("--layers", default=2, show_default=True)
@click.option("--db", default=Path("workers.db"), type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Write the report here.")
def main(workers: int, model: str, sweep: str, layers: int, db: Path, out: Path | None) -> None:
    """Profile with several processes at once. Exit code 1 unless each point was measured once."""
    begun = time.monotonic()
    arguments = [model, "--sweep", sweep, "--layers", str(layers), "--threads", "1"]
    processes = [start([*arguments, "--db", str(db)]) for _ in range(workers)]
    answers = [process.communicate()[0] for process in processes]
    codes = [process.returncode for process in processes]
    summaries = [json.loads(text) if text.strip() else {} for text in answers]
    points = [summary.get("points", 0) for summary in summaries]
    stored = len(committed(db))
    report = check_file(db)
    result = {
        "model": model,
        "sweep": sweep,
        "workers": workers,
        "exit_codes": codes,
        "points_by_worker": points,
        "points_stored": stored,
        "problems": list(report.problems),
        "notes": list(report.notes),
        "seconds": round(time.monotonic() - begun, 1),
    }
    result["ok"] = not any(codes) and sum(points) == stored and report.ok and not report.notes
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    click.echo(json.dumps(result))
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
