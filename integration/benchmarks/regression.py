"""How long fitting and predicting take.

    python -m integration.benchmarks.regression [-o regression.json]

- Fitting the regressors of twelve models. The database is SYNTHESISED: each model
  has the signatures and points of one that was measured on an H200
  (builtin:h200, Llama-3.1-8B and c4ai-command-r7b in turn), its times multiplied
  by a factor of its own, so that no two models share a signature: the worst case.
- One prediction, from features that were not asked for before, through
  `Bundle.predict`; and 1,000 at once, per prediction.

Exit code 1 where a limit is exceeded. Seconds are those of a clock.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from dooly_backend import console
from dooly_backend.database import Database
from dooly_backend.database.records import Measurement, Signature, canonical_json
from dooly_backend.errors import CheckFailed
from dooly_backend.regression.batches import BatchArray
from dooly_backend.regression.bundle import Bundle, load_bundle
from dooly_backend.regression.bundle_fit import fit_bundle
from dooly_backend.workload import Batch

MODELS = 12
VECTOR = 1000
FIT_SECONDS, ONE_US, MANY_US = 60.0, 12.0, 1.0


@click.command(context_settings=console.CONTEXT_SETTINGS)
@console.output_option("A JSON file for the result.")
@console.json_option
def main(out: Path | None, as_json: bool) -> None:
    r"""Time fitting and predicting.

    \b
    Example:
      python -m integration.benchmarks.regression -o regression.json
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "twelve.db"
        synthesise(path)
        start = time.perf_counter()
        with Database.open(path, read_only=True) as database:
            bundle = fit_bundle(database)
        fit_seconds = time.perf_counter() - start
        bundle.save(Path(scratch) / "twelve.joblib")
        start = time.perf_counter()
        loaded = load_bundle(Path(scratch) / "twelve.joblib")
        load_seconds = time.perf_counter() - start
        size = (Path(scratch) / "twelve.joblib").stat().st_size
    one, many = times(loaded)
    result = {
        "models": len(bundle.configurations),
        "signatures": len(bundle.signatures),
        "points": sum(each.points for each in bundle.signatures.values()),
        "fit_seconds": round(fit_seconds, 1),
        "load_seconds": round(load_seconds, 3),
        "bundle_kib": round(size / 1024),
        "one_us": {k: round(v, 2) for k, v in one.items()},
        "each_of_1000_us": {k: round(v, 3) for k, v in many.items()},
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }
    text = canonical_json(result)
    if out is not None:
        out.write_text(text + "\n")
    click.echo(text)
    slow = [f"fitting {fit_seconds:.0f} s"] if fit_seconds > FIT_SECONDS else []
    slow += [f"one prediction of {k}: {v:.1f} us" for k, v in one.items() if v > ONE_US]
    slow += [f"of 1000 predictions of {k} each: {v:.2f} us" for k, v in many.items() if v > MANY_US]
    if slow:
        raise CheckFailed("beyond the limits: " + "; ".join(slow))


def synthesise(path: Path) -> None:
    """Twelve models that share nothing, from the two that were measured."""
    random = np.random.default_rng(0)
    with Database.open("builtin:h200") as real, Database.open(path, create=True) as database:
        (environment_id, environment), *_ = real.environments().items()
        here = database.add_environment(environment)
        configurations = [
            (i, c) for i, c in real.configurations().items() if c.backend == "FLASH_ATTN"
        ]
        for number in range(MODELS):
            i, configuration = configurations[number % len(configurations)]
            own = replace(configuration, model=f"synthetic/{number}-{configuration.model}")
            graph = real.occurrences(i, environment_id)
            renamed = {o.signature: _renamed(o.signature, number) for o in graph}
            graph = [replace(o, signature=renamed[o.signature]) for o in graph]
            there = database.add_configuration(own, graph, here)
            for signature, copy in renamed.items():
                factor = float(random.uniform(0.5, 2.0))
                measured = real.measurements(signature.hash, environment_id)
                database.record_all(copy, here, [_scaled(m, factor) for m in measured], there)


def _renamed(signature: Signature, number: int) -> Signature:
    return replace(signature, canonical=signature.canonical[:-1] + f',"copy":{number}}}')


def _scaled(measurement: Measurement, factor: float) -> Measurement:
    return replace(measurement, samples_us=tuple(us * factor for us in measurement.samples_us))


def times(bundle: Bundle) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds of one prediction, and of each of a thousand, by kind and regressor."""
    random = np.random.default_rng(1)
    one: dict[str, list[float]] = {}
    many: dict[str, list[float]] = {}
    for hash_, fitted in bundle.signatures.items():
        kind = fitted.signature.kind
        for phase in ("prefill", "decode", "mixed") if kind == "batch" else ("",):
            batches = BatchArray.of([_batch(phase, random) for _ in range(VECTOR)])
            rows = bundle.predictor(hash_).rows(batches)
            if not rows.shape[1]:
                continue
            names = bundle.features(hash_)
            asked = [dict(zip(names, row, strict=True)) for row in rows.tolist()]

            def each(hash_: str = hash_, asked: list = asked) -> None:
                for features in asked:
                    bundle.predict(hash_, features)

            def together(hash_: str = hash_, rows: np.ndarray = rows) -> None:
                bundle.predict(hash_, rows)

            name = " ".join(filter(None, [kind, phase, fitted.model]))
            one.setdefault(name, []).append(quickest(each) / VECTOR)
            many.setdefault(name, []).append(quickest(together) / VECTOR)
    return (
        {name: statistics.median(v) for name, v in sorted(one.items())},
        {name: statistics.median(v) for name, v in sorted(many.items())},
    )


def quickest(call: Callable[[], None], repeats: int = 3) -> float:
    """Microseconds of the quickest of several calls."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def _batch(phase: str, random: np.random.Generator) -> Batch:
    prefill = Batch.prefill(int(random.integers(2, 8192)), int(random.integers(0, 16384)))
    decode = Batch.decode(int(random.integers(1, 256)), int(random.integers(64, 16384)))
    if phase == "prefill":
        return prefill
    return prefill + decode if phase == "mixed" else decode


if __name__ == "__main__":
    console.run(main, "regression")
