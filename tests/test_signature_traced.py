"""Signatures of a real model: the same everywhere, and for all layers of one kind."""

from __future__ import annotations

import getpass
import hashlib
import json
import re
import socket
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

from conftest import Elsewhere
from engine_helpers import ATTENTION, LAYERS, MATRIX_PRODUCT

from dooly_backend.database.records import Signature
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.operations.callgraph import signatures
from dooly_backend.operations.runnable import Entry, resolve
from dooly_backend.operations.tree import any_layer
from dooly_backend.tracing import sizes as sizes_module
from dooly_backend.tracing.trace import Trace
from dooly_backend.tracing.tracer import trace_model

Signed = dict[Entry, Signature]


def by_path(signed: Signed) -> dict[str, str]:
    return {f"{entry.path}#{entry.ordinal}": s.hash for entry, s in signed.items()}


# -- of a real model ------------------------------------------------------------


def test_anyone_can_recompute_them(signed: Signed) -> None:
    for signature in signed.values():
        assert signature.hash == hashlib.sha256(signature.canonical.encode()).hexdigest()
        value = json.loads(signature.canonical)
        again = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        assert again == signature.canonical
        assert (value["name"], value["granularity"]) == (signature.name, signature.granularity)


def test_layers_of_one_kind_share_theirs(signed: Signed) -> None:
    found: dict[str, list[str]] = {}
    for entry, signature in signed.items():
        found.setdefault(any_layer(entry.path), []).append(signature.hash)
    for path, hashes in found.items():
        assert len(hashes) == (LAYERS if "*" in path else 1)
        if path == "model.layers.*.input_layernorm":
            first, *others = hashes  # the first layer has no residual to add
            assert first not in others
            assert len(set(others)) == 1
        else:
            assert len(set(hashes)) == 1, path
    norms = {s.hash for s in signed.values() if s.name == "RMSNorm"}
    assert len(norms) == 2  # with and without a residual, wherever they are
    counted = Counter(signature.hash for signature in signed.values())
    assert len(counted) == 12


def test_what_differs_has_another(signed: Signed) -> None:
    """Projections of one class and other sizes are other signatures."""
    paths = {entry.path: signature.hash for entry, signature in signed.items()}
    layer = "model.layers.1."
    rows = [paths[layer + name] for name in ("self_attn.o_proj", "mlp.down_proj")]
    assert len(set(rows)) == 2


def test_kinds(signed: Signed) -> None:
    kinds = {entry.path: signature.kind for entry, signature in signed.items()}
    assert {path for path, kind in kinds.items() if kind == "batch"} == set(ATTENTION)
    assert {path for path, kind in kinds.items() if kind == "requests"} == {
        "logits_processor",
        "sampler",
    }
    assert set(kinds.values()) == {"batch", "requests", "tokens"}


@pytest.mark.parametrize("sizes", [(331, 7), (1013, 23)])
@pytest.mark.parametrize("finer", [False, True], ids=["modules", "operations"])
def test_they_do_not_depend_on_the_traced_step(
    engine: VllmEngine,
    trace: Trace,
    sizes: tuple[int, int],
    finer: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = by_path(signatures(trace, resolve(trace, engine, finer), engine))
    monkeypatch.setattr(sizes_module, "CONTEXT", 37)
    again = trace_model(engine, sizes=sizes)
    assert (again.num_tokens, again.num_reqs) == sizes
    assert by_path(signatures(again, resolve(again, engine, finer), engine)) == expected


def test_they_are_the_same_in_another_process(signed: Signed, elsewhere: Elsewhere) -> None:
    """With other limits of the engine, other threads and another number of layers built."""
    mine = {entry.path: s.canonical for entry, s in signed.items()}
    for path, (_, canonical) in elsewhere.smollm.items():
        assert canonical == mine[path], path
    assert len(elsewhere.smollm) == 9 * 2 + 4
    assert {digest for digest, _ in elsewhere.smollm.values()} == {s.hash for s in signed.values()}


def test_attributes_that_matter(elsewhere: Elsewhere) -> None:
    """Another epsilon is another norm; another window another attention, where there is one."""
    sliding, full = "model.layers.2.self_attn.attn", "model.layers.1.self_attn.attn"
    for path, (digest, _) in elsewhere.tiny.items():
        differs = path.endswith("norm") or path in (sliding, ATTENTION[0])
        assert (elsewhere.changed[path][0] != digest) is differs, path
    assert elsewhere.tiny[sliding] == elsewhere.tiny[ATTENTION[0]]
    assert elsewhere.tiny[sliding][0] != elsewhere.tiny[full][0]


def test_they_do_not_depend_on_the_order_of_layers(elsewhere: Elsewhere) -> None:
    """Sliding, full, sliding against full, sliding, full."""
    hashes = {digest for digest, _ in elsewhere.tiny.values()}
    assert {digest for digest, _ in elsewhere.swapped.values()} == hashes
    first, second = ATTENTION[:2]
    assert elsewhere.swapped[first] == elsewhere.tiny[second]
    assert elsewhere.swapped[second] == elsewhere.tiny[first]


def test_nothing_of_the_request_or_the_machine(signed: Signed, trace: Trace) -> None:
    tokens, requests, context = trace.num_tokens, trace.num_reqs, sizes_module.CONTEXT
    forbidden = {tokens, requests, requests + 1, context, context + 1, tokens - requests + 1}

    def numbers(value: Any) -> set[int]:
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            return {number for item in value for number in numbers(item)}
        if isinstance(value, str):
            is_size = re.fullmatch(r"[TRE\d*+^-]+", value)
            return {int(part) for part in re.findall(r"\d+", value)} if is_size else set()
        return {value} if isinstance(value, int) and not isinstance(value, bool) else set()

    for signature in signed.values():
        value = json.loads(signature.canonical)
        assert not forbidden & numbers(value["operations"]), signature.name
        assert not forbidden & numbers(value["attributes"]), signature.name
        text = signature.canonical
        for machine in ("/tmp", "/home", "/work", "0x", socket.gethostname()):
            assert machine not in text, signature.name
        assert getpass.getuser() not in re.findall(r"\w+", text)
        assert not re.search(r"layers\.\d", text), signature.name


def test_what_it_says_of_a_projection(signed: Signed) -> None:
    (found,) = {s.canonical for s in signed.values() if s.name == "QKVParallelLinear"}
    value = json.loads(found)
    assert value["attributes"]["output_size_per_partition"] == 960
    assert value["stateful"] == {}
    assert set(value["kernels"]) == {"capability", "architecture", "libraries"}
    assert value["kernels"]["libraries"]
    name, inputs, _, _ = value["operations"][-1]
    assert name == MATRIX_PRODUCT
    output, source = (["float32", "contiguous", ["T", width]] for width in (960, 576))
    assert inputs[:2] == [output, source]


def test_what_it_says_of_attention(signed: Signed) -> None:
    (found,) = {s.canonical for s in signed.values() if s.name == "Attention"}
    value = json.loads(found)
    assert value["stateful"] == {
        "backend": "CPU_ATTN",
        "kv_cache_dtype": "auto",
        "block_size": 128,
        "execution_mode": "eager",
    }
    assert value["attributes"]["num_kv_heads"] == 3
    assert value["attributes"]["impl"]["scale"] == 0.125
