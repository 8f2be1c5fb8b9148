"""Single batches as a simulation predicts them, beside what they took live."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from dooly_backend.database import Database
from dooly_backend.regression.bundle import BundleConfiguration
from dooly_backend.regression.bundle_fit import fit_bundle
from dooly_backend.regression.select import select_all
from dooly_backend.regression.step_operations import of_depth
from dooly_backend.simulation.execution import Execution
from dooly_backend.simulation.own_cost import own_cost
from dooly_backend.simulation.records import Batches, StepTimes
from dooly_backend.simulation.step_time import BundlePredictor, StepModel, parts_of
from dooly_backend.workload import Batch
from integration.gpu.step_errors import digest_of, rule_of
from integration.per_batch.batches import kind_of, place_of
from integration.per_batch.live import Engine, How, Measured

#: What of a batch is compared with the target: a decode's time per token, a prompt's first token.
HEADLINE: dict[str, How] = {"decode": "in a row", "prefill": "waited for", "mixed": "in a row"}


def compared(
    database: Database, measured: Iterable[Measured], environment: str | None = None
) -> pd.DataFrame:
    """One row for every one of `measured`.

    Raises what `digest_of` and `fit_bundle` raise where the database does not have it.
    """
    by_engine: dict[Engine, list[Measured]] = defaultdict(list)
    for each in measured:
        by_engine[each.engine].append(each)
    rows = []
    for engine, batches in by_engine.items():
        digest = digest_of(database, engine.served)
        (fitted,) = (bundle := fit_bundle(database, [digest], environment)).configurations
        rule = rule_of(
            engine.served.mode,
            engine.max_num_seqs,
            engine.max_num_batched_tokens,
            bundle.environment.engine_version,
        )
        times = step_model(fitted, rule, engine.layers).times(
            Batches.of([each.batch for each in batches])
        )
        (configuration_id,), environment_id = select_all(database, [digest], environment)
        seen = fitted_to(database, configuration_id, environment_id)
        for number, each in enumerate(batches):
            predicted_us = _predicted(times, number, each.how)
            rows.append(
                {
                    **_names(each),
                    "in_fit": ", ".join(name for name, keys in seen.items() if each.batch in keys),
                    "rounds": each.rounds,
                    "live_us": each.time.us,
                    "noise_us": each.time.noise_us,
                    "predicted_us": predicted_us,
                    "error_percent": (predicted_us / each.time.us - 1) * 100,
                    "noise_percent": each.time.noise_us / each.time.us * 100,
                    "extrapolated": bool(times.extrapolated[number]),
                }
            )
    return pd.DataFrame(rows)


def step_model(fitted: BundleConfiguration, rule: Execution, layers: int) -> StepModel:
    """Injected steps of so many layers: without what the scheduler takes."""
    first, _ = fitted.configuration.facts.get("stage_layers", (0, 0))
    launching = [part for part in fitted.stream_cost if part.mode != "any"]
    return StepModel(
        parts_of(of_depth(fitted.occurrences, first, layers)),
        BundlePredictor(fitted.predictors),
        own_cost(fitted.step_cost, layers, launching),
        rule,
    )


def _predicted(times: StepTimes, number: int, how: How) -> float:
    """In a row the slower of device and host decides; alone the host begins before the device."""
    launch = 0.0 if times.launch_us is None else float(times.launch_us[number])
    device, host = float(times.device_us[number]), float(times.host_us[number])
    return max(device, host + launch) if how == "in a row" else host + max(device, launch)


def _names(each: Measured) -> dict[str, object]:
    served, place = each.engine.served, place_of(each.batch)
    return {
        "model": served.model,
        "backend": served.backend,
        "execution_mode": served.mode,
        "quantization": served.quantization,
        "kv_cache_dtype": served.kv_cache_dtype,
        "layers": each.engine.layers,
        "batch": each.batch.key,
        "kind": kind_of(each.batch),
        "requests": each.batch.num_reqs,
        "length": place[1] if place else None,
        "how": each.how,
        "step_mode": each.step_mode,
    }


def fitted_to(
    database: Database, configuration_id: int, environment_id: int
) -> dict[str, frozenset[Batch]]:
    """The batches that predictions have seen: whole steps, and those of attention timed alone."""
    steps = {step.batch for step in database.stream_steps(configuration_id, environment_id)}
    graph = database.occurrences(configuration_id, environment_id)
    attention = {each.signature.hash for each in graph if each.signature.is_attention}
    points = (p.point for hash_ in attention for p in database.measurements(hash_, environment_id))
    return {
        "steps": frozenset(steps),
        "attention": frozenset(point.batch for point in points if point.batch),
    }


def mape(errors: Sequence[float]) -> tuple[float, float]:
    """Mean and worst, percent."""
    absolute = np.abs(np.asarray(errors, float))
    return float(absolute.mean()), float(absolute.max())
