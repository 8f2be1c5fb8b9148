"""Old signatures of expert layers held how many blocks the traced step had: not theirs.

An engine looks up how many blocks it divides a step's tokens into
(`moe_align_block_size`), which no formula tells. Signatures held the number of the
step that was traced, so that two models with the same layer, traced at different
sizes, seemed to have different ones. `operations/signature.py` writes "P" instead.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import sqlite_utils

from dooly_backend.database.records import canonical_json

_ALIGN, _BLOCKS = "_moe_C::moe_align_block_size.default", 2  # the input that has one entry a block
_EMPTY = "aten::empty.memory_format"
PLANNED = "P"


def forget_planned_sizes(db: sqlite_utils.Database) -> None:
    """Rename the signatures that hold a number of blocks, and all that refers to them.

    What two of them have measured at the same point counts once.
    """
    like = f"%{_ALIGN}%"
    old = db.execute("SELECT hash, canonical FROM signature WHERE canonical LIKE ?", [like])
    for name, canonical in old.fetchall():
        value = json.loads(canonical)
        if _forget(value["operations"]):
            _rename(db, name, canonical_json(value))


def _forget(operations: list[Any]) -> bool:
    """Replace the numbers of blocks; whether there was one."""
    sizes: set[int] = set()
    for name, inputs, *_ in operations:
        if name == _ALIGN and isinstance(inputs[_BLOCKS][2][0], int):
            sizes.add(inputs[_BLOCKS][2][0])
            inputs[_BLOCKS][2] = [PLANNED]
    for name, _, outputs, scalars in operations:
        if name == _EMPTY and len(scalars) == 1 and scalars[0] in sizes:
            scalars[0] = PLANNED
            outputs[0][2] = [PLANNED]
    return bool(sizes)


def _rename(db: sqlite_utils.Database, old: str, canonical: str) -> None:
    new = hashlib.sha256(canonical.encode()).hexdigest()
    db.execute(
        "INSERT OR IGNORE INTO signature (hash, name, granularity, kind, canonical) "
        "SELECT ?, name, granularity, kind, ? FROM signature WHERE hash = ?",
        [new, canonical, old],
    )
    # Foreign keys are not enforced while a file migrates, and some lead here by way of another.
    for table in db.tables:
        if "signature" in table.columns_dict:
            change = f'UPDATE OR IGNORE "{table.name}" SET signature = ? WHERE signature = ?'
            db.execute(change, [new, old])
            db.execute(f'DELETE FROM "{table.name}" WHERE signature = ?', [old])
    db.execute("DELETE FROM signature WHERE hash = ?", [old])
