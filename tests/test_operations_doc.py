"""The canonical serialisation of docs/operations.md: committed, and still what the engine gives."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from conftest import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text()


def example() -> tuple[str, str]:
    """The text of the page's example, and the hash that the page gives it."""
    (text,) = re.findall(r"^```json\n(.*)\n```$", PAGE, re.MULTILINE)
    (digest,) = re.findall(r"^    ([0-9a-f]{64})  -$", PAGE, re.MULTILINE)
    return text, digest


def test_the_example_has_the_hash_that_the_page_gives() -> None:
    text, digest = example()
    assert hashlib.sha256(text.encode()).hexdigest() == digest
    again = json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert again == text


def test_the_engine_still_gives_the_example(signed: dict[Any, Any]) -> None:
    (found,) = {s for entry, s in signed.items() if entry.path.endswith("mlp.act_fn")}
    text, digest = example()
    mine, documented = json.loads(found.canonical), json.loads(text)
    if mine["kernels"] == documented["kernels"]:
        assert found.hash == digest
    assert mine | {"kernels": {}} == documented | {"kernels": {}}
