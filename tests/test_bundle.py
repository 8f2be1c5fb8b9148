"""Bundles: what comes back is what was fitted, and a stranger's file runs nothing."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import joblib
import numpy as np
import pytest
from sample_records import ATTENTION, CPU, LINEAR, OCCURRENCES, QWEN, SAMPLER, at, store
from test_regressors import OF_KIND

from dooly_backend.database import Database
from dooly_backend.database.records import KvCapacity, KvGroup, StepCost
from dooly_backend.errors import InputError
from dooly_backend.regression import container
from dooly_backend.regression.bundle import Bundle, BundleError, load_bundle
from dooly_backend.regression.bundle_fit import fit_bundle
from dooly_backend.workload import Batch

BATCHES = [Batch.parse(t) for t in ("1x512+0,8x1+1024", "16x1+300", "2x100+50", "1x9000+9000")]

CAPACITY = KvCapacity(
    block_bytes=4096,
    groups=(KvGroup("FullAttentionSpec", 24, 16, 128), KvGroup("SlidingWindow", 4, 16, 64, 512)),
    weight_bytes=10**9,
    device_bytes=141 * 10**9,
    max_num_batched_tokens=8192,
)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database.open(tmp_path / "latency.db", create=True) as database:
        yield database


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    with Database.open(tmp_path_factory.mktemp("db") / "latency.db", create=True) as database:
        measured = {s: OF_KIND[s] for s in (o.signature for o in OCCURRENCES)}
        ids = store(database, measured)
        store(database, {}, backend="FLASHINFER")
        database.set_step_cost(*ids, StepCost(100.0, 2.0, 3.0))
        database.set_kv_capacity(*ids, CAPACITY)
        return fit_bundle(database)


@pytest.fixture
def saved(bundle: Bundle, tmp_path: Path) -> Path:
    path = tmp_path / "bundle.joblib"
    bundle.save(path)
    return path


# -- there and back ------------------------------------------------------------


def test_what_comes_back_predicts_the_same(bundle: Bundle, saved: Path) -> None:
    loaded = load_bundle(saved)
    assert loaded == bundle
    for signature in bundle.signatures:
        before = bundle.predict_batches(signature, BATCHES)
        after = loaded.predict_batches(signature, BATCHES)
        np.testing.assert_array_equal(before, after)


def test_it_holds_what_a_simulation_needs(saved: Path) -> None:
    loaded = load_bundle(saved)
    configuration = loaded.configuration("Qwen3-0.6B", backend="FLASH_ATTN")
    assert configuration.configuration == replace(
        QWEN, hf_config=json.loads(json.dumps(QWEN.hf_config))
    )
    assert configuration.configuration.digest == QWEN.digest
    assert configuration.occurrences == OCCURRENCES
    assert configuration.counts[LINEAR.hash] == 28
    assert configuration.step_cost == StepCost(100.0, 2.0, 3.0)
    assert configuration.kv_capacity == CAPACITY
    assert loaded.configuration(backend="FLASHINFER").step_cost is None
    assert loaded.configuration(backend="FLASHINFER").kv_capacity is None
    assert loaded.environment.device == "NVIDIA H200"
    assert loaded.metadata["features"]["tokens"]["num_tokens"]["unit"] == "tokens"
    assert set(loaded.metadata["versions"]) >= {"dooly", "numpy", "scikit-learn"}
    assert loaded.signatures[ATTENTION.hash].errors["corrected"] < 0.1


def test_a_step_is_the_sum_of_its_operations(bundle: Bundle) -> None:
    configuration = bundle.configuration(backend="FLASH_ATTN")
    one_by_one = sum(
        o.count * configuration.predict(o.signature.hash, BATCHES).us
        for o in configuration.occurrences
    )
    np.testing.assert_allclose(configuration.operations_us(BATCHES), one_by_one)
    predictions = configuration.predict_all(BATCHES)
    assert predictions[ATTENTION.hash].extrapolated.tolist() == [False, False, False, True]


def test_ways_to_ask_for_a_prediction(bundle: Bundle) -> None:
    one = bundle.predict(LINEAR, {"num_tokens": 100})
    assert one.us == pytest.approx(30)
    assert one.low_us <= one.us <= one.high_us
    assert one == bundle.predict(LINEAR.hash, {"num_tokens": 100})
    assert one == bundle.predict(LINEAR.hash[:10], {"num_tokens": 100})
    assert one == bundle.predict("QKVParallelLinear", {"num_tokens": 100})
    many = bundle.predict(LINEAR, {"num_tokens": np.array([100, 200])})
    np.testing.assert_allclose(many.us, [30, 40])
    np.testing.assert_array_equal(many, bundle.predict(LINEAR, np.array([[100.0], [200.0]])))
    assert bundle.features(SAMPLER) == ("num_reqs",)
    columns = SimpleNamespace(query=[60, 40, 200], context=[0, 0, 0], starts=[0, 2])
    np.testing.assert_array_equal(many, bundle.predict_batches(LINEAR, columns))
    with pytest.raises(InputError, match="no signature 'Moon', only Attention"):
        bundle.predict("Moon", {})


def test_the_configuration_that_is_meant(bundle: Bundle) -> None:
    with pytest.raises(InputError, match=r"2 configurations that fit: .*FLASHINFER"):
        bundle.configuration("Qwen3-0.6B")
    with pytest.raises(InputError, match=r"no configuration Llama, only Qwen/Qwen3-0\.6B"):
        bundle.configuration("Llama")
    with pytest.raises(TypeError, match="colour"):
        bundle.configuration(colour="red")


def test_one_environment_is_chosen(database: Database) -> None:
    points = {s: [at("tokens=1" if s is LINEAR else "requests=1", 1.0)] for s in (LINEAR, SAMPLER)}
    graph = [o for o in OCCURRENCES if o.signature in points]
    for environment in (CPU, None):
        changes: dict[str, Any] = {"environment": environment} if environment else {}
        store(database, points, occurrences=graph, **changes)
    with pytest.raises(InputError, match="2 environments"):
        fit_bundle(database)
    assert fit_bundle(database, environment="AMD").environment == CPU
    with pytest.raises(InputError, match="no model 'Llama'"):
        fit_bundle(database, ["Llama"], "AMD")


def test_a_model_that_is_not_measured_to_the_end_is_left_out(database: Database) -> None:
    linear = [o for o in OCCURRENCES if o.signature is LINEAR]
    store(database, {LINEAR: OF_KIND[LINEAR]}, occurrences=linear)
    store(database, {}, occurrences=OCCURRENCES, model="half/measured")
    assert [c.configuration.model for c in fit_bundle(database).configurations] == [QWEN.model]
    with pytest.raises(InputError, match="not complete: half/measured has 1 of 4"):
        fit_bundle(database, ["half/measured"])


# -- files from strangers ---------------------------------------------------------


def test_joblib_reads_the_file_too(saved: Path) -> None:
    read = joblib.load(saved)
    assert sorted(read) == ["content", "format", "sha256", "version"]
    assert json.loads(zlib.decompress(read["content"])) == container.read(saved)


def test_every_changed_byte_is_noticed(saved: Path) -> None:
    whole = saved.read_bytes()
    container.read(saved)
    for place in [*range(220), *range(220, len(whole), 97), *range(len(whole) - 3, len(whole))]:
        for bit in (1, 128):
            changed = bytearray(whole)
            changed[place] ^= bit
            saved.write_bytes(changed)
            with pytest.raises(BundleError):
                container.read(saved)


def test_every_missing_byte_is_noticed(saved: Path) -> None:
    whole = saved.read_bytes()
    for length in [*range(220), *range(220, len(whole), 97), len(whole) - 1]:
        saved.write_bytes(whole[:length])
        with pytest.raises(BundleError):
            load_bundle(saved)
    saved.write_bytes(whole + b"x")
    with pytest.raises(BundleError, match="damaged"):
        load_bundle(saved)


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def bombs(saved: Path, mark: Path) -> dict[str, bytes]:
    """Files that run something where they are unpickled, some of them dressed as bundles."""
    whole, bomb = saved.read_bytes(), Bomb(mark)
    read = joblib.load(saved)
    found = {f"protocol {p}": pickle.dumps(bomb, protocol=p) for p in range(6)}
    found["in a dict"] = pickle.dumps({**read, "bomb": bomb}, protocol=4)
    found["as content"] = pickle.dumps({**read, "content": bomb}, protocol=4)
    found["before"] = pickle.dumps(bomb) + whole
    found["after"] = whole + pickle.dumps(bomb)
    found["instead of the end"] = whole[:-1] + b"0" + pickle.dumps(bomb, protocol=0)
    found["array"] = pickle.dumps(np.array([bomb], dtype=object))
    for compress in (("zlib", 3), ("gzip", 3), ("lzma", 3)):
        path = saved.with_suffix(".bomb")
        joblib.dump(bomb, path, compress=compress)
        found[compress[0]] = path.read_bytes()
    return found


def test_a_bomb_does_not_go_off(saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for name, content in bombs(saved, mark).items():
        path = tmp_path / "stranger.joblib"
        path.write_bytes(content)
        with pytest.raises(BundleError):
            load_bundle(path)
        assert not mark.exists(), name
        if name in ("protocol 4", "in a dict", "as content", "array", "zlib"):  # it is armed
            joblib.load(path)
            assert mark.is_dir(), name
            mark.rmdir()


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"SQLite format 3\x00", b"PK\x03\x04", bytes(range(256)) * 40]
)
def test_foreign_files_are_no_bundles(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "foreign.joblib"
    path.write_bytes(content)
    with pytest.raises(BundleError, match="is no bundle"):
        load_bundle(path)


def test_what_is_no_file_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="there is no bundle"):
        load_bundle(tmp_path / "none.joblib")
    with pytest.raises(BundleError, match="cannot be read"):
        load_bundle(tmp_path)


def test_content_that_swells_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "_LARGEST", 1000)
    container.write(tmp_path / "large.joblib", {"a": "0" * 10_000})
    with pytest.raises(BundleError, match="larger than"):
        load_bundle(tmp_path / "large.joblib")


def changed(saved: Path, change: Any) -> Path:
    """A bundle whose checksum is right and whose content is not."""
    content = container.read(saved)
    change(content)
    container.write(saved, content)
    return saved


def test_an_unknown_feature_is_an_error(saved: Path) -> None:
    def change(content: dict) -> None:
        content["signatures"][LINEAR.hash]["features"] = ["phase_of_the_moon"]

    with pytest.raises(InputError, match=r"unknown feature 'phase_of_the_moon'.*num_tokens"):
        load_bundle(changed(saved, change))


def test_an_unknown_regressor_is_an_error(saved: Path) -> None:
    def change(content: dict) -> None:
        content["signatures"][LINEAR.hash]["model"] = "oracle"

    with pytest.raises(InputError, match="unknown regressor 'oracle'"):
        load_bundle(changed(saved, change))


#: Replacements that a bundle may hold.
VALID: list[tuple[str, Any]] = [("configurations", []), ("occurrences", []), ("kv_capacity", None)]


@pytest.mark.parametrize(
    "path",
    [
        ("metadata",),
        ("environment",),
        ("environment", "device"),
        ("signatures",),
        ("signatures", LINEAR.hash),
        ("signatures", LINEAR.hash, "canonical"),
        ("signatures", LINEAR.hash, "parameters"),
        ("signatures", LINEAR.hash, "domain"),
        ("signatures", ATTENTION.hash, "domain"),
        ("signatures", LINEAR.hash, "interval"),
        ("signatures", LINEAR.hash, "features"),
        ("configurations",),
        ("configurations", 0, "occurrences"),
        ("configurations", 0, "configuration", "model"),
        ("configurations", 0, "kv_capacity"),
    ],
)
def test_content_of_another_shape_is_an_error(saved: Path, path: tuple) -> None:
    """Each part replaced by what it is not, and left out."""
    whole = container.read(saved)
    replacements: tuple[Any, ...] = ("x", 3, None, [], {"x": 1})
    if path[-1] in ("model", "device", "metadata"):
        replacements = ()  # any value is a value
    for value in (*replacements, KeyError):
        content = json.loads(json.dumps(whole))
        *above, last = path
        part = content
        for key in above:
            part = part[key]
        if value is KeyError:
            del part[last]
        elif part[last] == value or (last, value) in VALID:
            continue
        else:
            part[last] = value
        container.write(saved, content)
        with pytest.raises(InputError):
            load_bundle(saved)


def test_reading_one_needs_neither_scikit_learn_nor_torch(saved: Path) -> None:
    script = (
        "import sys\n"
        "from dooly_backend.regression.bundle import load_bundle\n"
        f"bundle = load_bundle({str(saved)!r})\n"
        "bundle.predict('QKVParallelLinear', {'num_tokens': 3})\n"
        "print([m for m in ('sklearn', 'torch', 'pickle5', 'vllm') if m in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
