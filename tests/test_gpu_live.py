"""The commands of live engines that share a device."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from integration.gpu.live import command
from integration.live_vllm import run


def test_what_a_configuration_says() -> None:
    found = command(
        "org/Model-8B:FLASHINFER:eager:fp8:rate=3",
        Path("out"),
        ("paper-small:requests=9,rate=6", "fixed:rate=1"),
        {"kv_cache_gib": 40.0, "repeats": 2},
    )
    assert found[:4] == ["integration.live_vllm.run", "org/Model-8B", "--backend", "FLASHINFER"]
    rest = " ".join(found[4:])
    assert "-o out/Model-8B-FLASHINFER-eager-fp8.json.xz" in rest
    assert "--workload paper-small:requests=9,rate=3 --workload fixed:rate=3" in rest
    assert "--kv-cache-gib 40.0 --repeats 2 --eager --quantization fp8" in rest
    # The program that gets it knows every word.
    taken = run.main.make_context("run", found[1:]).params
    assert (taken["quantization"], taken["eager"], taken["repeats"]) == ("fp8", True, 2)


def test_a_word_that_means_nothing_is_refused() -> None:
    with pytest.raises(click.UsageError, match="'quick' is not eager, fp8 or rate=N"):
        command("org/Model:FLASH_ATTN:quick", Path("out"), ("w:rate=1",), {})
