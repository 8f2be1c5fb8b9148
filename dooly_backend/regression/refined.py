"""A latency model that takes a bundle's regressors between the measured points.

    model = refined(LatencyModel.load(database, "Qwen/Qwen3-0.6B"), load_bundle("bundle.joblib"))

What was measured stays as it was measured; elsewhere the median is the chosen
regressor's, and the other statistics keep their ratios to it.
"""

from __future__ import annotations

from dataclasses import replace

from dooly_backend.errors import InputError
from dooly_backend.regression.baseline import RoutingLatency, SignatureLatency
from dooly_backend.regression.bundle import Bundle
from dooly_backend.regression.interpolate import Estimate, Statistics
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.regression.prediction import SignaturePredictor
from dooly_backend.workload import Batch


def refined(model: LatencyModel, bundle: Bundle) -> LatencyModel:
    """`model` with the regressors of `bundle`. Raises InputError where it is of another place."""
    if bundle.environment.digest != model.environment.digest:
        raise InputError(
            f"the bundle was fitted in another environment ({bundle.environment.device}, "
            f"{bundle.environment.engine} {bundle.environment.engine_version}): "
            "fit one from this database with `dooly fit`"
        )
    missing = [hash_ for hash_ in model.signatures if hash_ not in bundle.signatures]
    if missing:
        raise InputError(
            f"the bundle lacks {len(missing)} of the {len(model.signatures)} signatures of "
            f"{model.configuration.model}: fit one from this database with `dooly fit`"
        )
    signatures = {
        hash_: _refined(latency, bundle.predictor(hash_))
        for hash_, latency in model.signatures.items()
    }
    return replace(model, signatures=signatures)


def _refined(measured: SignatureLatency, predictor: SignaturePredictor) -> SignatureLatency:
    if isinstance(measured, RoutingLatency):
        return _RefinedRouting(measured, predictor)
    return _Refined(measured, predictor)


class _Refined(SignatureLatency):
    def __init__(self, measured: SignatureLatency, predictor: SignaturePredictor) -> None:
        self.points = measured.points
        self._measured, self._predictor = measured, predictor

    def at(self, batch: Batch) -> tuple[Estimate, bool]:
        estimate, is_measured = self._measured.at(batch)
        if is_measured:
            return estimate, True
        us, _, _, outside = self._predictor.predict_batches([batch])
        return _moved(estimate, float(us[0]), bool(outside[0])), False


class _RefinedRouting(RoutingLatency):
    def __init__(self, measured: RoutingLatency, predictor: SignaturePredictor) -> None:
        self.__dict__.update(measured.__dict__)
        self._baseline, self._predictor = measured, predictor

    def at_routing(self, num_tokens: int, num_experts: float) -> tuple[Estimate, bool]:
        estimate, is_measured = self._baseline.at_routing(num_tokens, num_experts)
        if is_measured:
            return estimate, True
        us, _, _, outside = self._predictor.predict(
            {"num_tokens": float(num_tokens), "experts": float(num_experts)}
        )
        return _moved(estimate, us, outside), False


def _moved(estimate: Estimate, us: float, extrapolated: bool) -> Estimate:
    """The statistics in their ratios, around another median."""
    factor = us / estimate.statistics.median_us if estimate.statistics.median_us else 1.0
    return Estimate(Statistics(*[value * factor for value in estimate.statistics]), extrapolated)
