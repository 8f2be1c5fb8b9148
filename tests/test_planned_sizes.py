"""Signatures that held how many blocks of tokens the traced step had, and are one without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sample_records import H200, at, query, store

from dooly_backend.database import Database
from dooly_backend.database.check import check_file
from dooly_backend.database.records import Measurement, Occurrence, Signature, canonical_json

ALIGN = "_moe_C::moe_align_block_size.default"


def experts(blocks: int | str, width: int = 64) -> Signature:
    """The layer of experts as it was traced where a step had so many blocks."""
    ids = ["int32", "contiguous", [blocks]]
    value = {
        "name": "FusedMoE",
        "operations": [
            ["aten::empty.memory_format", [], [ids], [blocks]],
            [ALIGN, [["int32", "contiguous", ["T", 6]], ["int32", "contiguous", ["6*T+1984"]],
                     ids, ["int32", "contiguous", [1]]], [], [width, 32]],
            ["aten::empty.memory_format", [], [["int32", "contiguous", [width]]], [width]],
        ],
    }  # fmt: skip
    return Signature("FusedMoE", "module", "routing", canonical_json(value))


def costing(key: str, us: float) -> Measurement:
    return replace(at(key, us), timing_us=100 * us)


@pytest.mark.parametrize("last", ["m012_planned_sizes", "m014_planned_sizes_again"])
def test_what_two_models_share_is_one_signature_again(tmp_path: Path, last: str) -> None:
    path = tmp_path / "old.db"
    points = ["routing=16x8", "routing=32x8"]
    with Database.open(path, create=True) as database:
        for blocks, model, measured in (
            (78, "V2-Lite", [costing(points[0], 5.0)]),
            (79, "MoE-16B", [costing(points[0], 5.1), costing(points[1], 6.0)]),
        ):
            occurrences = [Occurrence(0, "mlp.experts", "FusedMoE", experts(blocks), 26)]
            store(database, {experts(blocks): measured}, occurrences=occurrences, model=model)
        other = experts(64, width=78)  # 64 blocks; 78 is another size there
        store(database, {other: [at(points[0], 7.0)]}, occurrences=(), model="other")
        database._connection.execute("DELETE FROM _sqlite_migrations WHERE name = ?", [last])
        database._connection.execute("PRAGMA user_version = 11")
    with Database.open(path) as database:
        whole, alone = experts("P"), experts("P", width=78)
        environment = database.add_environment(H200)
        found = {m.point.key: m.median_us for m in database.measurements(whole.hash, environment)}
        assert found == {points[0]: 5.0, points[1]: 6.0}  # where both measured: the first
        (only,) = database.measurements(alone.hash, environment)
        assert only.median_us == 7.0
        for i, configuration in database.configurations().items():
            used = {o.signature.hash for o in database.occurrences(i, environment)}
            assert used == (set() if configuration.model == "other" else {whole.hash})
        costs = {
            key: us for (of, key), us in database.timing_us(environment).items() if of == whole.hash
        }
        assert costs == {points[0]: 500.0, points[1]: 600.0}
    assert not check_file(path).problems
    texts = [json.loads(text) for (text,) in query(path, "SELECT canonical FROM signature")]
    assert len(texts) == 2
