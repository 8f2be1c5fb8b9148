"""Execution modes and padding, against vLLM's own code where it is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dooly_backend.errors import InputError
from dooly_backend.simulation.execution import Execution, Mode, capture_sizes

SIZES = (1, 2, 4, 8, 16, 24, 32)


def modes(execution: Execution, *steps: tuple[int, int, int]) -> list[tuple[str, int]]:
    tokens, requests, longest = np.array(steps).T
    found, padded = execution.modes(tokens, requests, longest)
    return [(Mode(m).name, int(p)) for m, p in zip(found, padded, strict=True)]


def test_decodes_replay_whole_graphs_and_the_rest_pieces() -> None:
    execution = Execution("FULL_AND_PIECEWISE", SIZES, max_num_seqs=16)
    assert modes(
        execution,
        (3, 3, 1),  # three decodes
        (16, 16, 1),
        (20, 1, 20),  # a prefill
        (20, 10, 11),  # mixed
        (33, 1, 33),  # above the largest captured size
    ) == [("FULL", 4), ("FULL", 16), ("PIECEWISE", 24), ("PIECEWISE", 24), ("EAGER", 33)]


def test_a_decode_beyond_the_sizes_of_whole_graphs_runs_in_pieces() -> None:
    """97 of at most 100 requests: 104 is no size of a decode graph, 96 is too small."""
    sizes = capture_sizes(100, 2048, "0.25.1")
    assert modes(Execution("FULL_AND_PIECEWISE", sizes, 100), (97, 97, 1)) == [("PIECEWISE", 104)]
    newer = capture_sizes(100, 2048, "0.32.0")
    assert modes(Execution("FULL_AND_PIECEWISE", newer, 100), (97, 97, 1)) == [("FULL", 100)]


def test_modes_without_one_of_the_graphs() -> None:
    step, prefill = (3, 3, 1), (20, 1, 20)
    assert modes(Execution("FULL_DECODE_ONLY", SIZES, 16), step, prefill) == [
        ("FULL", 4),
        ("EAGER", 20),
    ]
    assert modes(Execution("PIECEWISE", SIZES, 16), step, prefill) == [
        ("PIECEWISE", 4),
        ("PIECEWISE", 24),
    ]
    assert modes(Execution("FULL", SIZES, 16), step, prefill) == [("FULL", 4), ("FULL", 24)]
    assert modes(Execution(), step, prefill) == [("EAGER", 3), ("EAGER", 20)]


def test_a_server_tells_its_rule_itself() -> None:
    about = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4]}
    assert Execution.served(about, 8) == Execution("PIECEWISE", (1, 2, 4), 8)
    assert Execution.served({"cudagraph_mode": "NONE", "cudagraph_capture_sizes": []}, 8) == (
        Execution()
    )
    assert Execution.served({}, 8) == Execution()


def test_bad_settings_are_refused() -> None:
    with pytest.raises(InputError, match="FULL_AND_PIECEWISE"):
        Execution("GRAPH", SIZES, 16)
    with pytest.raises(InputError, match="captured"):
        Execution("FULL", (), 16)


# -- against vLLM ---------------------------------------------------------------


def vllm_config(mode: Any, max_num_seqs: int, max_num_batched_tokens: int) -> Any:
    """The fields of a VllmConfig that the choice of sizes and graphs reads."""
    from vllm.config import VllmConfig

    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode,
            max_cudagraph_capture_size=None,
            cudagraph_capture_sizes=None,
            compile_sizes=None,
            pass_config=SimpleNamespace(enable_sp=False),
            post_init_cudagraph_sizes=lambda: None,
            is_attention_compiled_piecewise=lambda: True,
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        speculative_config=None,
        num_speculative_tokens=0,
        uniform_decode_query_len=1,
        performance_mode="balanced",
        lora_config=None,
    )
    VllmConfig._set_cudagraph_sizes(config)
    return config


@pytest.mark.engine
@pytest.mark.usefixtures("needs_engine")
@pytest.mark.parametrize(("seqs", "batched"), [(1, 2048), (100, 2048), (128, 64), (1024, 8192)])
def test_modes_and_sizes_are_vllms(seqs: int, batched: int) -> None:
    from vllm import __version__
    from vllm.config import CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    for name in ("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        mode = CUDAGraphMode[name]
        config = vllm_config(mode, seqs, batched)
        sizes = config.compilation_config.cudagraph_capture_sizes
        assert capture_sizes(seqs, batched, __version__) == tuple(sizes)
        dispatcher = CudagraphDispatcher(config)
        dispatcher.initialize_cudagraph_keys(mode)
        execution = Execution(name, sizes, seqs)
        names = {Mode.EAGER: "NONE", Mode.PIECEWISE: "PIECEWISE", Mode.FULL: "FULL"}
        for tokens in range(1, min(batched, 530) + 1):
            for requests, longest in ((tokens, 1), (1, tokens)):
                if requests > seqs or (requests == 1 and tokens == 1 and longest != 1):
                    continue
                array = np.array([[tokens], [requests], [longest]])
                found, padded = execution.modes(*array)
                uniform = longest == 1 and tokens == requests
                theirs, descriptor = dispatcher.dispatch(tokens, uniform_decode=uniform)
                assert (names[Mode(found[0])], int(padded[0])) == (
                    theirs.name,
                    descriptor.num_tokens,
                ), (name, tokens, requests)
