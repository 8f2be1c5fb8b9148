"""A bundle: all that a simulation needs of a database, in one file.

    bundle = load_bundle("bundle.joblib")
    bundle.predict("QKVParallelLinear", {"num_tokens": 512})     # or arrays of features
    bundle.predict_batches(signature_hash, [Batch.parse("1x512+0,8x1+1024")])
    llama = bundle.configuration("Llama-3.1-8B", backend="FLASH_ATTN")
    llama.occurrences, llama.counts, llama.step_cost
    llama.predict(signature_hash, batches)
    llama.operations_us(batches)

A signature is given as itself, by its hash or the first digits of it, or by its
name where only one has that name. Times are microseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dooly_backend.database.records import (
    Configuration,
    Environment,
    KvCapacity,
    KvGroup,
    Occurrence,
    PartCost,
    Signature,
    StepCost,
)
from dooly_backend.errors import InputError
from dooly_backend.regression import container
from dooly_backend.regression.batches import BatchArray, Columns, Floats, as_array
from dooly_backend.regression.clock import ClockResponse
from dooly_backend.regression.container import BundleError
from dooly_backend.regression.features import KINDS
from dooly_backend.regression.fitting import FittedSignature
from dooly_backend.regression.prediction import Prediction, SignaturePredictor
from dooly_backend.regression.select import (
    TELLING,
    UnmeasuredError,
    in_usual_mode,
    is_called,
    tell_apart,
)
from dooly_backend.workload import Batch

__all__ = ["Bundle", "BundleConfiguration", "BundleError", "load_bundle"]

_DIGITS = 6  # of a hash that select a signature
SomeBatches = BatchArray | Columns | Sequence[Batch]


@dataclass(frozen=True)
class BundleConfiguration:
    """A configuration: its call graph with counts, and a predictor for each signature of it.

    Collectives are operations of the graph like others. `kv_capacity` is what
    decides the full model's KV blocks; None where the database does not hold it.
    `stream_cost` is what steps take beyond these predictions as the engine runs
    them by default; empty where no such steps were measured. `clock` is how the
    device's clock gives way under load; None where it was not watched.
    """

    configuration: Configuration
    occurrences: tuple[Occurrence, ...] = field(repr=False)
    step_cost: StepCost | None
    fitted: Mapping[str, FittedSignature] = field(repr=False)
    kv_capacity: KvCapacity | None = None
    stream_cost: tuple[PartCost, ...] = ()
    clock: ClockResponse | None = None

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """How often one step of the full model runs each signature, by hash."""
        counts: Counter[str] = Counter()
        for occurrence in self.occurrences:
            counts[occurrence.signature.hash] += occurrence.count
        return counts

    @cached_property
    def predictors(self) -> Mapping[str, SignaturePredictor]:
        """By signature hash."""
        return {hash_: self.fitted[hash_].predictor for hash_ in self.counts}

    def predict(self, signature: str, batches: SomeBatches) -> Prediction:
        """One call of a signature, given by its hash, for each batch."""
        return self.predictors[signature].predict_batches(batches)

    def predict_all(self, batches: SomeBatches) -> dict[str, Prediction]:
        """One call of every signature for each batch; alike ones share their features."""
        batches = as_array(batches)
        known: dict[Any, Floats] = {}
        predictions = {}
        for signature, predictor in self.predictors.items():
            key = predictor.kind, predictor.feature_names, tuple(predictor.facts.items())
            if key not in known:
                known[key] = predictor.rows(batches)
            predictions[signature] = predictor.predict_rows(known[key])
        return predictions

    def operations_us(self, batches: SomeBatches) -> Floats:
        """All operations of one step of the full model, for each batch."""
        predictions = self.predict_all(batches)
        return np.sum([n * predictions[hash_].us for hash_, n in self.counts.items()], axis=0)


@dataclass(frozen=True)
class Bundle:
    """Fitted signatures of one environment, and the configurations that run them."""

    environment: Environment
    signatures: Mapping[str, FittedSignature] = field(repr=False)  # by hash
    configurations: tuple[BundleConfiguration, ...]
    metadata: Mapping[str, Any] = field(repr=False)

    def predict(
        self, signature: Signature | str, features: Mapping[str, Any] | Floats
    ) -> Prediction:
        """One call of a signature, from its features: numbers, or arrays for many batches.

        `features` may also be a matrix with a column for each of
        ``bundle.features(signature)``. Raises InputError for an unknown
        signature or feature.
        """
        predictor = self.predictor(signature)
        if isinstance(features, np.ndarray):
            return predictor.predict_rows(np.asarray(features, dtype=np.float64))
        return predictor.predict(features)

    def predict_batches(self, signature: Signature | str, batches: SomeBatches) -> Prediction:
        """One call of a signature for each batch."""
        return self.predictor(signature).predict_batches(batches)

    def features(self, signature: Signature | str) -> tuple[str, ...]:
        """What a signature's time is predicted from, in the order of a matrix's columns."""
        return self.predictor(signature).feature_names

    def predictor(self, signature: Signature | str) -> SignaturePredictor:
        """Raises InputError for a signature that the bundle does not hold, or several fit."""
        key = signature.hash if isinstance(signature, Signature) else signature
        found = self._predictors.get(key)
        if found is None:
            found = self._predictors[key] = self._found(key).predictor
        return found

    @cached_property
    def _predictors(self) -> dict[str, SignaturePredictor]:
        return {}

    def _found(self, text: str) -> FittedSignature:
        if text in self.signatures:
            return self.signatures[text]
        found = [f for f in self.signatures.values() if f.signature.name == text]
        if not found and len(text) >= _DIGITS:
            found = [f for hash_, f in self.signatures.items() if hash_.startswith(text)]
        if len(found) == 1:
            return found[0]
        if found:
            hashes = ", ".join(f.signature.hash[:12] for f in found)
            raise InputError(
                f"the bundle has {len(found)} signatures {text!r}: say which: {hashes}"
            )
        names = ", ".join(sorted({f.signature.name for f in self.signatures.values()}))
        raise InputError(f"the bundle has no signature {text!r}, only {names}")

    def configuration(self, model: str | None = None, **filters: Any) -> BundleConfiguration:
        """The one configuration that fits.

        `model` is a name, its last part, or a digest; `filters` are fields of
        `Configuration` (backend="FLASH_ATTN"; None: any, but of several execution
        modes the one with graphs). Raises UnmeasuredError, naming the choices, where
        none fits, InputError where several do, TypeError for a filter that
        configurations do not have.
        """
        unknown = sorted(set(filters) - set(TELLING))
        if unknown:
            raise TypeError(f"configurations have no {', '.join(unknown)}: {', '.join(TELLING)}")
        wanted = {name: value for name, value in filters.items() if value is not None}
        fitting = [
            each
            for each in self.configurations
            if (model is None or is_called(each.configuration, model))
            and all(getattr(each.configuration, n) == v for n, v in wanted.items())
        ]
        modes = {i: each.configuration for i, each in enumerate(fitting)}
        fitting = [fitting[i] for i in in_usual_mode(modes, wanted)]
        if len(fitting) == 1:
            return fitting[0]
        choices = [each.configuration for each in fitting or self.configurations]
        lines = "; ".join(tell_apart(choices, tuple(wanted)))
        if fitting:
            raise InputError(
                f"the bundle holds {len(fitting)} configurations that fit: {lines}: say which one"
            )
        asked = ", ".join([*([model] if model else []), *(f"{n}={v}" for n, v in wanted.items())])
        raise UnmeasuredError(f"the bundle has no configuration {asked}, only {lines}")

    def save(self, path: Path | str) -> None:
        """Write the bundle to one file. The same bundle gives the same bytes."""
        container.write(Path(path), _content(self))


# -- to and from plain data -----------------------------------------------------


def load_bundle(path: Path | str) -> Bundle:
    """The bundle in a file, from whomever it comes: reading it runs nothing of it.

    Raises BundleError (an InputError) for a file that is no bundle, or is
    damaged, and InputError for a regressor or feature that is not registered.
    """
    path = Path(path)
    content = container.read(path)
    try:
        bundle = _bundle(content)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise BundleError(
            f"bundle {path} lacks what a bundle holds ({type(error).__name__}: {error}): fit again"
        ) from error
    for each in bundle.signatures.values():
        bundle.predictor(each.signature)  # every one can be used, or the error is now
    return bundle


def _content(bundle: Bundle) -> dict[str, Any]:
    return {
        "metadata": dict(bundle.metadata),
        "environment": asdict(bundle.environment),
        "signatures": {hash_: _signature(f) for hash_, f in sorted(bundle.signatures.items())},
        "configurations": [_configuration(each) for each in bundle.configurations],
    }


def _signature(fitted: FittedSignature) -> dict[str, Any]:
    content = {
        "name": fitted.signature.name,
        "granularity": fitted.signature.granularity,
        "kind": fitted.signature.kind,
        "canonical": fitted.signature.canonical,
    }
    for name in ("features", "facts", "model", "parameters", "domain", "interval", "errors"):
        content[name] = getattr(fitted, name)
    return {**content, "points": fitted.points}


def _configuration(each: BundleConfiguration) -> dict[str, Any]:
    graph = [
        {
            "position": o.position,
            "path": o.path,
            "module_class": o.module_class,
            "signature": o.signature.hash,
            "count": o.count,
            "layers": o.layers,
        }
        for o in each.occurrences
    ]
    return {
        "configuration": asdict(each.configuration),
        "occurrences": graph,
        "step_cost": asdict(each.step_cost) if each.step_cost is not None else None,
        "kv_capacity": asdict(each.kv_capacity) if each.kv_capacity is not None else None,
        "stream_cost": [asdict(part) for part in each.stream_cost],
        "clock": asdict(each.clock) if each.clock is not None else None,
    }


def _bundle(content: Mapping[str, Any]) -> Bundle:
    signatures = {hash_: _fitted(hash_, each) for hash_, each in content["signatures"].items()}
    if not isinstance(content["metadata"], dict):
        raise TypeError("metadata must be an object")
    return Bundle(
        Environment(**content["environment"]),
        signatures,
        tuple(_stored(each, signatures) for each in content["configurations"]),
        dict(content["metadata"]),
    )


def _fitted(hash_: str, content: Mapping[str, Any]) -> FittedSignature:
    parts = dict(content)
    names = ("name", "granularity", "kind", "canonical")
    signature = Signature(**{name: parts.pop(name) for name in names})
    if signature.hash != hash_ or signature.kind not in KINDS:
        raise ValueError(f"signature {hash_[:12]} is not what it says")
    return FittedSignature(signature, tuple(parts.pop("features")), **parts)


def _stored(
    content: Mapping[str, Any], signatures: Mapping[str, FittedSignature]
) -> BundleConfiguration:
    graph = tuple(
        Occurrence(
            each["position"],
            each["path"],
            each["module_class"],
            signatures[each["signature"]].signature,
            each["count"],
            tuple(each["layers"]),
        )
        for each in content["occurrences"]
    )
    cost = content["step_cost"]
    return BundleConfiguration(
        Configuration(**content["configuration"]),
        graph,
        StepCost(**cost) if cost is not None else None,
        {o.signature.hash: signatures[o.signature.hash] for o in graph},
        _capacity(content["kv_capacity"]),
        # Bundles of before there was one have none.
        tuple(PartCost(**part) for part in content.get("stream_cost", ())),
        ClockResponse(**content["clock"]) if content.get("clock") else None,
    )


def _capacity(content: Mapping[str, Any] | None) -> KvCapacity | None:
    if content is None:
        return None
    groups = tuple(KvGroup(**group) for group in content["groups"])
    return KvCapacity(**{**content, "groups": groups})
