"""Quantised weights and KV caches: configurations like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sample_records import LINEAR, OCCURRENCES, QWEN, at, store

from dooly_backend.cli import cli
from dooly_backend.config import RunOptions, load_model
from dooly_backend.database import Database
from dooly_backend.database.records import ENGINE_QUANTIZATION, Configuration
from dooly_backend.errors import InputError
from dooly_backend.regression.bundle_fit import fit_bundle
from dooly_backend.regression.select import profile_options, select
from dooly_backend.simulation.limits import kv_blocks

LINEARS = OCCURRENCES[1:2]
FP8_CHECKPOINT = {"quant_method": "fp8", "activation_scheme": "static"}


def quantised(**config: Any) -> Configuration:
    return replace(QWEN, hf_config={**QWEN.hf_config, **config})


def test_how_the_weights_are_quantised() -> None:
    assert QWEN.quantization == "none"
    assert quantised(quantization_config=FP8_CHECKPOINT).quantization == "fp8"
    nested = {"text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}}
    assert quantised(**nested).quantization == "compressed-tensors"
    assert quantised(**{ENGINE_QUANTIZATION: "fp8"}).quantization == "fp8"


def test_the_format_of_the_weights() -> None:
    def groups(*kinds: tuple[str, int]) -> dict[str, Any]:
        found = {f"group_{i}": {"weights": {"type": t, "num_bits": n}}
                 for i, (t, n) in enumerate(kinds)}  # fmt: skip
        return {"quant_method": "compressed-tensors", "config_groups": found}

    assert QWEN.weight_dtype == "bfloat16"
    assert quantised(quantization_config=FP8_CHECKPOINT).weight_dtype == "fp8"
    assert quantised(**{ENGINE_QUANTIZATION: "int8_per_channel_weight_only"}).weight_dtype == "int8"
    for kinds, expected in (
        ([("float", 8)], "fp8"),
        ([("int", 8)], "int8"),
        ([("int", 4)], "bfloat16"),
        ([("float", 8), ("int", 8)], "bfloat16"),
    ):
        assert quantised(quantization_config=groups(*kinds)).weight_dtype == expected


def test_what_the_engine_quantises_is_another_configuration() -> None:
    made = quantised(**{ENGINE_QUANTIZATION: "fp8"})
    of_checkpoint = quantised(quantization_config=FP8_CHECKPOINT)
    assert len({c.digest for c in (QWEN, made, of_checkpoint)}) == 3


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """One model in bfloat16, and with weights and KV cache in fp8."""
    path = tmp_path / "both.db"
    hf_config = quantised(**{ENGINE_QUANTIZATION: "fp8"}).hf_config
    with Database.open(path, create=True) as database:
        for changes in ({}, {"hf_config": hf_config, "kv_cache_dtype": "fp8"}):
            store(database, {LINEAR: [at("tokens=8", 2.0)]}, occurrences=LINEARS, **changes)
    return path


def test_one_of_several_is_chosen_by_its_precision(both: Path) -> None:
    with Database.open(both, read_only=True) as database:
        stored = database.configurations()

        def chosen(**filters: str) -> Configuration:
            return stored[select(database, QWEN.model, None, filters)[0]]

        assert chosen(quantization="none").digest == QWEN.digest
        assert chosen(quantization="fp8") == chosen(kv_cache_dtype="fp8") != QWEN
        with pytest.raises(InputError, match=r"quantization=none.*quantization=fp8"):
            chosen()
        with pytest.raises(InputError, match="--quantization awq"):
            chosen(quantization="awq")


def test_with_graphs_where_nothing_else_is_said(tmp_path: Path) -> None:
    modes = ("eager", "full_graph")
    with Database.open(tmp_path / "modes.db", create=True) as database:
        ids = {
            mode: store(
                database, {LINEAR: [at("tokens=8", 2.0)]}, occurrences=LINEARS, execution_mode=mode
            )
            for mode in modes
        }
        bundle = fit_bundle(database)
        for filters in ({}, {"execution_mode": None}, {"backend": QWEN.backend}):
            assert select(database, QWEN.model, None, filters) == ids["full_graph"]
            found = bundle.configuration(QWEN.model, **filters)
            assert found.configuration.execution_mode == "full_graph"
        for mode in modes:
            assert select(database, QWEN.model, None, {"execution_mode": mode}) == ids[mode]
            found = bundle.configuration(QWEN.model, execution_mode=mode)
            assert found.configuration.execution_mode == mode


def test_dooly_db_info_shows_it(both: Path) -> None:
    result = CliRunner().invoke(cli, ["db", "info", "--db", str(both)], env={"COLUMNS": "200"})
    assert "weights fp8 KV cache fp8" in " ".join(result.output.split())


def test_what_is_missing_is_profiled_that_way() -> None:
    wanted = {"backend": "FLASH_ATTN", "tensor_parallel": None, "kv_cache_dtype": "fp8"}
    found = profile_options({**wanted, "quantization": "fp8"})
    assert " ".join(found) == "--backend FLASH_ATTN --kv-cache-dtype fp8 --quantization fp8"
    assert profile_options({"quantization": "none"}) == []


@pytest.mark.parametrize("command", ["trace", "plan", "profile", "simulate", "validate", "export"])
def test_every_command_takes_both(command: str) -> None:
    text = CliRunner().invoke(cli, [command, "--help"]).output
    assert "--quantization METHOD" in text
    assert "--kv-cache-dtype FORMAT" in text


def test_an_fp8_cache_holds_twice_as_much() -> None:
    llama = replace(QWEN, hf_config=dict(load_model("Llama-3.1-8B").hf_config), num_layers=32)
    halved = replace(llama, kv_cache_dtype="fp8")
    assert kv_blocks(halved, 16.0) == 2 * kv_blocks(llama, 16.0) == 16384


def test_the_gpu_runner_takes_a_precision() -> None:
    click = pytest.importorskip("click")
    from integration.gpu.run import precision_options

    model = load_model("Llama-3.1-8B")
    options = RunOptions(model=model, **precision_options("fp8+kv-fp8"))
    assert (options.quantization, options.kv_cache_dtype) == ("fp8", "fp8")
    assert precision_options("") == {}
    assert precision_options("kv-fp8") == {"kv_cache_dtype": "fp8"}
    with pytest.raises(click.BadParameter, match="fp8\\+kv-fp8"):
        precision_options("fp8+awq")
