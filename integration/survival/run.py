"""Kill `dooly profile` with SIGKILL at random moments, and look at what is left each time.

    python -m integration.survival.run --out integration/survival/results/cpu.json

One profile of a real model is started again and again into one database and
killed: mostly while it measures, sometimes while it starts. Another process
reads the database all the time. After every kill `dooly db check` must be
clean, and every point that a reader has seen before the kill must be there, with
the same samples, or with quicker ones where its neighbours contradicted it and it
was measured again. In the end one run must finish, and another one must find
nothing to do.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dooly_backend.database import Database
from dooly_backend.database.check import check_file
from dooly_backend.errors import DatabaseError

Points = dict[tuple[str, str, str], tuple[float, ...]]

#: Share of the kills that come before the first point, while the engine starts.
STARTING_SHARE = 0.15


def committed(path: Path) -> Points:
    """Samples by environment, signature and point; nothing where there is no database yet."""
    if not path.exists() or not path.stat().st_size:
        return {}
    with Database.open(path, read_only=True) as database:
        return {
            (environment.digest, hash_, m.point.key): m.samples_us
            for id_, environment in database.environments().items()
            for hash_ in database.signatures()
            for m in database.measurements(hash_, id_)
        }


def is_worse(before: tuple[float, ...], after: tuple[float, ...]) -> bool:
    """Whether samples were replaced by others that are not quicker."""
    return before != after and statistics.median(after) >= statistics.median(before)


def is_measuring(path: Path) -> bool:
    """Whether a live process has announced itself in the database."""
    from dooly_backend.database.claims import workers

    if not path.exists() or not path.stat().st_size:
        return False
    with Database.open(path, read_only=True) as database:
        return workers(database) > 0


def wait_until(
    condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float
) -> bool:
    """Whether `condition` came true while `process` ran; reading must never fail."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if condition():
            return True
        time.sleep(0.02)
    return False


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dooly_backend", "profile", *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL the process and all that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def killed_once(
    arguments: list[str], path: Path, rng: random.Random, within: float
) -> dict[str, Any]:
    """Start a profile, kill it at a random moment, and say what was found.

    That is at most `within` seconds after it has begun to measure.
    """
    before = committed(path)
    process = start(arguments)
    begun = time.monotonic()
    starting = rng.random() < STARTING_SHARE
    if starting:
        wait_until(lambda: False, process, rng.uniform(0.5, 20))
    elif wait_until(lambda: is_measuring(path), process, 300):
        wait_until(lambda: False, process, rng.uniform(0, within))
    seen = committed(path)
    finished = process.poll() is not None
    kill(process) if not finished else process.communicate()
    left = committed(path)
    report = check_file(path) if left else None
    return {
        "moment": "starting" if starting else "measuring",
        "seconds": round(time.monotonic() - begun, 2),
        "finished_before": finished,
        "points_before": len(before),
        "points_seen": len(seen),
        "points_after": len(left),
        "lost": len((before.keys() | seen.keys()) - left.keys()),
        "measured_again": sum(left[key] != seen[key] for key in seen.keys() & left.keys()),
        "worse": sum(is_worse(seen[key], left[key]) for key in seen.keys() & left.keys()),
        "problems": list(report.problems) if report else [],
    }


@click.command()
@click.option("--kills", default=20, show_default=True)
@click.option("--model", default="smollm-135m", show_default=True)
@click.option("--sweep", default="quick", show_default=True)
@click.option("--layers", default=2, show_default=True)
@click.option("--within", default=2.0, show_default=True, help="Seconds of measuring, at most.")
@click.option("--seed", default=0, show_default=True)
@click.option("--db", default=Path("survival.db"), type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Write the report here.")
def main(
    kills: int,
    model: str,
    sweep: str,
    layers: int,
    within: float,
    seed: int,
    db: Path,
    out: Path | None,
) -> None:
    """Kill a profile KILLS times, then let it finish. Exit code 1 when anything was lost."""
    rng = random.Random(seed)
    arguments = [model, "--sweep", sweep, "--layers", str(layers), "--threads", "1"]
    arguments += ["--db", str(db)]
    rounds = []
    for number in range(kills):
        rounds.append(killed_once(arguments, db, rng, within))
        click.echo(f"{number + 1}: {json.dumps(rounds[-1])}", err=True)
    ends = []
    for _ in range(2):
        process = start(arguments)
        output, _ = process.communicate(timeout=600)
        summary = json.loads(output) if process.returncode == 0 else {}
        ends.append({"exit": process.returncode, "points": summary.get("points")})
    left = committed(db)
    report = check_file(db)
    result = {
        "model": model,
        "sweep": sweep,
        "kills": kills,
        "killed_while_starting": sum(r["moment"] == "starting" for r in rounds),
        "killed_with_points": sum(
            not r["finished_before"] and r["points_after"] > r["points_before"] for r in rounds
        ),
        "points": len(left),
        "lost": sum(r["lost"] for r in rounds),
        "worse": sum(r["worse"] for r in rounds),
        "problems": [p for r in rounds for p in r["problems"]] + list(report.problems),
        "last_run": ends[0],
        "run_after_it": ends[1],
        "rounds": rounds,
    }
    good = not result["lost"] and not result["worse"] and not result["problems"]
    good &= ends[0]["exit"] == ends[1]["exit"] == 0 and ends[1]["points"] == 0
    result["ok"] = good and not report.notes
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    click.echo(json.dumps({k: v for k, v in result.items() if k != "rounds"}))
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    try:
        main()
    except DatabaseError as error:
        sys.exit(f"a reader was refused: {error}")
