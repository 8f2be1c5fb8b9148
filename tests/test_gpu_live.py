"""The commands of live engines that share a device."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import click
import pytest

from dooly_backend.simulation.live import step_sizes
from integration.gpu.live import command
from integration.live_vllm import run


def test_what_a_configuration_says() -> None:
    found = command(
        "org/Model-8B:FLASHINFER:eager:fp8:rate=3",
        Path("out"),
        ("paper-small:requests=9,rate=6", "fixed:rate=1"),
        {"kv_cache_gib": 40.0, "repeats": 2, "warm_up_sizes": True, "hold": False},
    )
    assert found[:4] == ["integration.live_vllm.run", "org/Model-8B", "--backend", "FLASHINFER"]
    rest = " ".join(found[4:])
    assert "-o out/Model-8B-FLASHINFER-eager-fp8.json.xz" in rest
    assert "--workload paper-small:requests=9,rate=3 --workload fixed:rate=3" in rest
    assert "--kv-cache-gib 40.0 --repeats 2 --warm-up-sizes --eager --quantization fp8" in rest
    assert "--hold" not in rest
    # The program that gets it knows every word.
    taken = run.main.make_context("run", found[1:]).params
    assert (taken["quantization"], taken["eager"], taken["repeats"]) == ("fp8", True, 2)


def test_a_word_that_means_nothing_is_refused() -> None:
    with pytest.raises(click.UsageError, match="'quick' is not eager, fp8 or rate=N"):
        command("org/Model:FLASH_ATTN:quick", Path("out"), ("w:rate=1",), {})


def test_prompts_of_all_sizes_reach_every_kernel() -> None:
    sizes = step_sizes(8192)
    assert sizes[0] == 16
    assert sizes[-1] == 8192
    assert all(b <= 1.25 * a for a, b in pairwise(sizes[3:]))
    for power in range(6, 13):  # of each doubling some that 16 divides, that 8 does, odd ones
        here = [size for size in sizes if 2**power <= size < 2 ** (power + 1)]
        assert {size % 16 for size in here} >= {0, 8, 1}
    assert step_sizes(20) == [16, 17, 20]
    assert step_sizes(7) == [7]
