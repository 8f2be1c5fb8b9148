"""Predicts the times of operations from a bundle that dooly-export wrote. Needs numpy only.

    predictor = Predictor("bundle", tensor_parallel=1)
    predictor.predict("self_attn.qkv_proj", {"num_tokens": 100})        # seconds, one call
    predictor.predict("self_attn.attn.decode", {"batch_size": 8, "kv_cache_size": 512})
    predictor.predict_step([(128, 0), (1, 512)])                        # seconds, a whole step

Reading a bundle runs none of its contents: tables are CSV, the manifest JSON.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MANIFEST = "manifest.json"
#: Columns of every table that hold times, in microseconds.
STATISTICS = ("min_us", "mean_us", "median_us", "max_us", "std_us")


class Table:
    """Times over one or two features: exact at its rows, straight lines between them.

    Below the first row of a feature a time is that row's; above the last it
    goes on along the last two, but does not fall.
    """

    def __init__(self, path: Path, features: Sequence[str]) -> None:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self.features = tuple(features)
        self._axes = [np.unique([float(row[name]) for row in rows]) for name in features]
        shape = [len(axis) for axis in self._axes]
        self._values = {name: np.full(shape, np.nan) for name in STATISTICS}
        for row in rows:
            place = tuple(
                int(np.searchsorted(axis, float(row[name])))
                for name, axis in zip(features, self._axes, strict=True)
            )
            for name in STATISTICS:
                self._values[name][place] = float(row[name])
        if any(np.isnan(values).any() for values in self._values.values()):
            raise ValueError(f"{path} is no full grid over {', '.join(features)}")

    def at(self, place: Sequence[float], statistic: str) -> float:
        """Microseconds at `place`, a value for each feature."""
        values = self._values[statistic]
        for axis, value in zip(self._axes, place, strict=True):
            values = _along(axis, values, value)
        return float(values)


def _along(axis: np.ndarray, values: np.ndarray, place: float) -> np.ndarray:
    """`values` at `place` on their first axis."""
    if len(axis) == 1 or place <= axis[0]:
        return values[0]
    high = min(int(np.searchsorted(axis, place)), len(axis) - 1)
    low = high - 1
    share = (place - axis[low]) / (axis[high] - axis[low])
    rise = values[high] - values[low]
    if share > 1:
        return values[high] + (share - 1) * np.maximum(rise, 0)
    return values[low] + share * rise


class Predictor:
    """All operations of a model at one degree of tensor parallelism."""

    def __init__(self, folder: str | Path, tensor_parallel: int | None = None) -> None:
        """Raises KeyError for a degree that the bundle does not have."""
        self._folder = Path(folder)
        self.manifest: dict[str, Any] = json.loads((self._folder / MANIFEST).read_text("utf-8"))
        degrees = self.manifest["degrees"]
        degree = str(tensor_parallel or min(map(int, degrees)))
        if degree not in degrees:
            raise KeyError(f"no tensor-parallel degree {degree}, only {', '.join(degrees)}")
        mine = degrees[degree]
        self.operations: list[dict[str, Any]] = mine["operations"]
        self._step_cost: dict[str, float] = mine["step_cost_us"]
        self._whole_steps: dict[str, Any] | None = mine["whole_steps"]
        self._tables = {
            entry["table"]: Table(self._folder / entry["file"], entry["features"])
            for entry in mine["tables"]
            if "batch" not in entry["features"]
        }
        self._batches = {
            entry["table"]: _batches(self._folder / entry["file"])
            for entry in mine["tables"]
            if "batch" in entry["features"]
        }
        self._by_name = {operation["op"]: operation for operation in self.operations}

    def predict(
        self, op: str, features: Mapping[str, float], statistic: str = "median_us"
    ) -> float:
        """Seconds of one call of `op`.

        Attention has two: NAME.prefill and NAME.decode. `batch_size` equal
        prefills take as often the time of one. Raises KeyError for an unknown
        operation or a missing feature.
        """
        name, _, phase = op.rpartition(".")
        if op in self._by_name and not self._by_name[op].get("phases"):
            table = self._tables[self._by_name[op]["table"]]
            return self._at(table, features, statistic)
        phases = self._by_name[name].get("phases") or {} if name in self._by_name else {}
        if phase not in phases:
            raise KeyError(f"unknown operation {op}")
        count = features.get("batch_size", 1) if phase == "prefill" else 1
        return count * self._at(self._tables[phases[phase]], features, statistic)

    def predict_batch(self, op: str, requests: Sequence[tuple[int, int]]) -> float:
        """Seconds of one call of `op` in a step of (new tokens, cached tokens) requests.

        Tokens draw their experts at random; `predict` takes any number of them.
        Attention is what was measured for exactly these requests, else the sum
        of its prefills and of as many decodes at their mean length.
        """
        return self._predict_batch(op, requests, sum(query for query, _ in requests))

    def _predict_batch(self, op: str, requests: Sequence[tuple[int, int]], tokens: int) -> float:
        """The same where operations over tokens see so many, padding among them."""
        operation = self._by_name[op]
        if not operation.get("phases"):
            amounts: dict[str, float] = {
                "num_tokens": tokens,
                "batch_size": len(requests),
            }
            if "routing" in operation:
                amounts["num_experts"] = expected_experts(
                    int(amounts["num_tokens"]), **operation["routing"]
                )
            return self.predict(op, amounts)
        measured = self._batches.get(operation["phases"].get("batch"), {})
        known = measured.get(_key(requests))
        if known is not None:
            return known / 1e6
        prefills = [(q, c) for q, c in requests if q > 1 or c == 0]
        decodes = [c for q, c in requests if q == 1 and c > 0]
        seconds = sum(
            self.predict(
                op + ".prefill",
                {"prefill_chunk_size": query, "kv_cache_size": context, "batch_size": count},
            )
            for (query, context), count in Counter(prefills).items()
        )
        if decodes:
            mean = sum(decodes) / len(decodes)
            features: dict[str, float] = {"batch_size": len(decodes), "kv_cache_size": mean}
            seconds += self.predict(op + ".decode", features)
        return seconds

    def predict_step(self, requests: Sequence[tuple[int, int]]) -> float:
        """Seconds of a whole step of (new tokens, cached tokens) requests, one of many like it."""
        tokens = sum(query for query, _ in requests)
        cost = None
        if self._whole_steps is not None:
            mode, tokens = mode_of(self._whole_steps, requests)
            cost = self._whole_steps["modes"][mode]
        fused = whole = 0.0
        for operation in self.operations:
            us = 1e6 * operation["count"] * self._predict_batch(operation["op"], requests, tokens)
            if operation["whole"]:
                whole += us
            else:
                fused += us
        if cost is None:
            own = self._step_cost["constant"] + self._step_cost["per_request"] * len(requests)
            return (fused + whole + own) / 1e6
        device = whole + cost["share"] * fused + cost["own_us"]
        launch = cost["launch_us"] + cost["launch_request_us"] * len(requests)
        return max(device, launch) / 1e6

    @staticmethod
    def _at(table: Table, features: Mapping[str, float], statistic: str) -> float:
        place = [float(features[name]) for name in table.features]
        return table.at(place, statistic) / 1e6


def mode_of(rules: Mapping[str, Any], requests: Sequence[tuple[int, int]]) -> tuple[str, int]:
    """How an engine with these rules runs a step, and its tokens with padding."""
    tokens = sum(query for query, _ in requests)
    size = min((size for size in rules["sizes"] if size >= tokens), default=None)
    if size is None:
        return "eager", tokens
    uniform = all(query == 1 for query, _ in requests)
    mode = rules["of_decodes" if uniform and size <= rules["max_num_seqs"] else "of_others"]
    return mode, tokens if mode == "eager" else size


def expected_experts(tokens: int, experts: int, top_k: int) -> float:
    """Distinct experts that fire when every token draws `top_k` of `experts` at random."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def _key(requests: Sequence[tuple[int, int]]) -> str:
    """COUNTxNEW+CACHED,...: 2x128+0,8x1+1024."""
    counts = Counter(requests)
    ordered = sorted(counts.items(), reverse=True)
    return ",".join(f"{count}x{query}+{context}" for (query, context), count in ordered)


def _batches(path: Path) -> dict[str, float]:
    with path.open(newline="", encoding="utf-8") as file:
        return {row["batch"]: float(row["median_us"]) for row in csv.DictReader(file)}
