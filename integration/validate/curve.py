"""How close together the points of a CPU's step cost should be, told by calibration runs alone.

    python -m integration.validate.curve integration/validate/results/smollm-135m

For each choice of places the cost is fitted to all calibration runs of FOLDER but
one, and the steps of that one are predicted: the mean of |log(live / predicted)|,
percent. The workloads that judge the simulation are not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from dooly_backend.simulation.calibrate import PLACES, calibrated
from dooly_backend.simulation.columns import Steps
from dooly_backend.simulation.records import Run
from dooly_backend.simulation.replay import batches
from dooly_backend.simulation.run_file import load_run
from dooly_backend.simulation.source import from_database
from dooly_backend.simulation.step_time import StepModel
from integration.packed import profile_of

CHOICES = {
    "wide": (64, 256, 1024, 4096),
    "by fours": (4, 16, 64, 256, 1024, 4096),
    "used": PLACES,
}


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Leave one calibration run of FOLDER out after the other."""
    source = from_database(str(profile_of(folder)), None, None, {})
    runs = [load_run(path) for path in sorted(folder.glob("calibration*-live-*.json.xz"))]
    model = source.timer(runs[0].limits)
    for name, places in CHOICES.items():
        errors = [
            held_out(runs[:i] + runs[i + 1 :], run, model, places) for i, run in enumerate(runs)
        ]
        by_run = ", ".join(f"{100 * each.mean():.1f}" for each in errors)
        every = np.concatenate(errors)
        print(
            f"{name}: {100 * every.mean():.2f} %, median {100 * np.median(every):.2f} % ({by_run})"
        )


def held_out(
    fitted: Sequence[Run], run: Run, model: StepModel, places: Sequence[int]
) -> np.ndarray:
    """Of every step of `run`, |log(live / predicted)| with the cost of the `fitted` runs."""
    best = model.with_cost(calibrated(fitted, model, places))
    columns = Steps.of(run.steps)
    live_us = (columns.end_s - columns.start_s) * 1e6
    return np.abs(np.log(live_us / best.times(batches(run)).device_us))


if __name__ == "__main__":
    main()
