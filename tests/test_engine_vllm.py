"""The vLLM adapter: injected steps, captured calls, and what they leave behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from engine_helpers import ATTENTION, LAYERS, inside_modules, leaf_paths, live_outputs
from engine_helpers import state as state_of
from torch.utils._pytree import tree_leaves

from dooly_backend.engines.base import copied, hooks
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.errors import EngineError
from dooly_backend.operations.cover import recorded
from dooly_backend.tracing.trace import Trace
from dooly_backend.workload import Batch

BATCHES = (
    "1x1+0",
    "1x16+0",
    "1x100+30",
    "1x2047+0",
    "1x1+16",
    "1x1+2046",
    "64x1+40",
    "4x1+128,3x1+127,2x1+129",  # around a block's end
    "1x64+64,5x1+300",
    "2x32+0,1x17+256,3x1+100,1x1+1000",
)


@pytest.fixture(autouse=True)
def nothing_left(engine: VllmEngine) -> Iterator[None]:
    """Every test gives back what it took of the engine, whatever happened in it."""
    before = state_of(engine)
    yield
    assert state_of(engine) == before


def run(step: Callable[[], None]) -> None:
    """What `live_steps` runs a step with when nothing is timed."""
    step()


def lengths(metadata: Any) -> list[tuple[int, int]]:
    """(query, context) of every request of a step, by the engine's own metadata."""
    starts = metadata.query_start_loc.tolist()
    ends = metadata.seq_lens.tolist()
    queries = [end - start for start, end in pairwise(starts)]
    return sorted(
        ((q, total - q) for q, total in zip(queries, ends, strict=False) if q), reverse=True
    )


# -- what the engine says of itself ---------------------------------------------


def test_the_instance_and_the_model(engine: VllmEngine) -> None:
    assert (engine.num_layers, len(engine.layer_kinds)) == (LAYERS, 30)
    assert set(engine.layer_kinds) == {"attention/dense"}
    configuration = engine.configuration
    assert (configuration.num_layers, configuration.backend) == (30, "CPU_ATTN")
    assert (configuration.dtype, configuration.tensor_parallel) == ("float32", 1)
    assert (engine.max_model_len, engine.max_request_len, engine.vocab_size) == (2048, 2047, 49152)
    assert (engine.max_num_tokens, engine.max_num_reqs) == (2048, 64)
    assert engine.stateful == frozenset(ATTENTION)
    assert engine.environment.device_kind == "cpu"
    assert engine.environment.facts["threads"] == 1


def test_nothing_of_the_machine_is_in_the_configuration(engine: VllmEngine) -> None:
    assert "/tmp" not in repr(engine.configuration)
    assert engine.configuration.hf_config["num_hidden_layers"] == 30


def test_shared_modules_answer_under_every_caller(engine: VllmEngine) -> None:
    first = engine.module("model.layers.0.self_attn.rotary_emb")
    assert engine.module("model.layers.2.self_attn.rotary_emb") is first
    assert engine.module("model.layers.2.mlp") is not engine.module("model.layers.1.mlp")
    assert engine.module("sampler") is engine.modules["sampler"]


# -- injected steps -------------------------------------------------------------


@pytest.mark.parametrize("key", BATCHES)
def test_a_step_runs_the_batch_that_was_named(engine: VllmEngine, key: str) -> None:
    batch = Batch.parse(key)
    paths = (*ATTENTION, "model.norm", "logits_processor", "sampler")
    with engine.capture(batch, paths) as calls:
        assert [call.path for call in calls] == list(paths)
        for call in calls[:LAYERS]:
            metadata = call.context.attn_metadata[call.path]
            assert lengths(metadata) == [(r.query, r.context) for r in batch.requests]
        norm, logits, sampler = calls[LAYERS:]
        assert norm.args[0].shape == (batch.num_tokens, 576)
        assert [t.shape[0] for t in tree_leaves(logits.args) if isinstance(t, torch.Tensor)][
            -1
        ] == batch.num_reqs
        sampled = [t for t in tree_leaves((sampler.args, sampler.kwargs)) if hasattr(t, "shape")]
        assert (batch.num_reqs, engine.vocab_size) in [tuple(t.shape) for t in sampled]


def test_requests_of_a_step_do_not_share_blocks(engine: VllmEngine) -> None:
    with engine.capture(Batch.parse("2x200+0,3x1+500,1x1+128"), ATTENTION[:1]) as calls:
        metadata = calls[0].context.attn_metadata[ATTENTION[0]]
        size = engine.configuration.block_size
        used: list[int] = []
        for row, length in zip(
            metadata.block_table.tolist(), metadata.seq_lens.tolist(), strict=False
        ):
            used += row[: -(-length // size)]
        assert len(used) == len(set(used))
        assert 0 not in used  # vLLM's null block
        slots = metadata.slot_mapping.tolist()
        assert len(slots) == len(set(slots))
        assert {slot // size for slot in slots} <= set(used)


def test_prompts_are_spread_over_the_vocabulary(engine: VllmEngine) -> None:
    with engine.capture(Batch.prefill(512), ["model.embed_tokens"]) as calls:
        tokens = calls[0].args[0]
    assert len(set(tokens.tolist())) == 512
    assert tokens.float().std() > engine.vocab_size / 5


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("2x1025+0", "has 2050 tokens a step, the engine takes 2048"),
        ("65x1+16", "has 65 requests a step, the engine takes 64"),
        ("1x1+2047", "has 2048 tokens a request, the engine takes 2047"),
        ("1x16+5000", "has 5016 tokens a request, the engine takes 2047"),
    ],
)
def test_a_batch_that_is_too_large_is_refused(engine: VllmEngine, key: str, message: str) -> None:
    batch = Batch.parse(key)
    for attempt in (
        lambda: engine.step(batch),
        lambda: engine.capture(batch, ATTENTION).__enter__(),
    ):
        with pytest.raises(EngineError, match=rf"^batch {key.replace('+', '[+]')} {message}$"):
            attempt()
    with pytest.raises(EngineError, match=r"^batch [^\n]+, the engine takes \d+$"):
        engine.live_steps(batch, 2, run)


def test_a_full_kv_cache_is_one_clear_line(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine._steps, "_free", engine._steps._free[:5])
        before = sorted(engine._steps._free)
        with pytest.raises(EngineError, match=r"^the KV cache has 1 free blocks [^\n]+$"):
            engine.step(Batch.decode(3, 200))
        assert sorted(engine._steps._free) == before  # also those of the requests that did fit
        engine.step(Batch.decode(2, 200))


def test_many_steps_leak_nothing(engine: VllmEngine) -> None:
    before = state_of(engine)
    free = Counter(engine._steps._free)
    for _ in range(5):
        for key in ("1x64+64,5x1+300", "1x500+0", "16x1+100"):
            engine.step(Batch.parse(key))
            assert state_of(engine) == before
    assert Counter(engine._steps._free) == free


# -- captured calls -------------------------------------------------------------


def test_calls_come_in_the_order_of_the_pass(engine: VllmEngine, trace: Trace) -> None:
    paths = leaf_paths(trace)
    with engine.capture(Batch.parse("1x16+0,3x1+60"), set(paths)) as calls:
        assert [call.path for call in calls] == paths
        moments = [call.moment for call in calls]
    assert moments == sorted(moments)
    assert [p for p in paths if p.endswith("rotary_emb")] == [
        f"model.layers.{i}.self_attn.rotary_emb" for i in range(LAYERS)
    ]


def test_only_the_wanted_calls_are_captured(engine: VllmEngine) -> None:
    with engine.capture(Batch.prefill(16), ["model.layers.1.self_attn.rotary_emb"]) as calls:
        assert [call.path for call in calls] == ["model.layers.1.self_attn.rotary_emb"]


def equal(mine: Any, theirs: Any) -> bool:
    """Whether two outputs are the same to the last bit."""
    mine, theirs = tree_leaves(mine), tree_leaves(theirs)
    return len(mine) == len(theirs) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else True
        for a, b in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize("key", ["1x48+0", "6x1+200", "1x33+64,1x20+0,4x1+150,1x1+700"])
def test_repeated_calls_give_the_live_outputs(engine: VllmEngine, trace: Trace, key: str) -> None:
    """The whole forward pass, call by call: projections, norms, rotary embedding, attention."""
    paths = frozenset(leaf_paths(trace)) - {"sampler"}
    with (
        live_outputs(engine, paths) as outputs,
        engine.capture(Batch.parse(key), paths) as calls,
    ):
        live = list(outputs)
        assert [path for path, _ in live] == [call.path for call in calls]
        # The largest disagreement would be visible: outputs are neither constant nor NaN.
        for path, output in live:
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    assert torch.isfinite(tensor).all(), path
                    assert tensor.float().std() > 0, path
        for call, (path, output) in zip(calls, live, strict=True):
            # Calls may overwrite their arguments: each gets copies of them.
            with engine.running(call.context):
                again = call.target(*copied(call.args), **copied(dict(call.kwargs)))
            assert equal(again, output), path


def test_a_repeated_call_has_no_context_of_its_own(engine: VllmEngine) -> None:
    with engine.capture(Batch.decode(2, 64), ATTENTION[:1]) as calls:
        engine.call(calls[0])
        with pytest.raises(AssertionError, match=r"[Ff]orward context"), engine.running(None):
            calls[0]()


def test_arguments_are_kept_as_they_were_before_the_call(engine: VllmEngine) -> None:
    """The rotary embedding writes into its arguments: the captured ones are the earlier ones."""
    path = "model.layers.0.self_attn.rotary_emb"
    with engine.capture(Batch.prefill(40), [path, ATTENTION[0]]) as calls:
        rotary, attention = calls
        query, rotated = rotary.args[1], attention.args[0]
        assert query.shape == rotated.shape
        assert not torch.equal(query, rotated)
        engine.call(rotary)
        assert torch.equal(query, rotated)


def test_strides_are_kept(engine: VllmEngine) -> None:
    """Queries are a slice of the QKV projection: 576 of 960 columns."""
    with engine.capture(Batch.prefill(40), ["model.layers.0.self_attn.rotary_emb"]) as calls:
        assert calls[0].args[1].stride() == (960, 1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4),
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(24).reshape(4, 6)[:, 1:3],
        torch.arange(3).reshape(3, 1).expand(3, 5),
        torch.ones(1).expand(2, 3, 4),
        torch.empty(0, 4),
        torch.tensor(7),
    ],
    ids=["plain", "transposed", "slice", "expanded", "expanded from one", "empty", "scalar"],
)
def test_copies(tensor: torch.Tensor) -> None:
    (copy,), rest = copied(([tensor], {"kept": "as it is"}))
    assert rest == {"kept": "as it is"}
    assert torch.equal(copy, tensor)
    assert (copy.stride(), copy.dtype) == (tensor.stride(), tensor.dtype)
    if tensor.numel():
        assert copy.data_ptr() != tensor.data_ptr()


def test_parameters_are_not_copied() -> None:
    weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    assert copied((weight,))[0] is weight


# -- live steps -----------------------------------------------------------------


def test_live_steps(engine: VllmEngine) -> None:
    """Decodes continue, prefills are new each time; the first step warms up."""
    seen: list[list[tuple[int, int]]] = []
    before: list[int] = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata[ATTENTION[0]]
        seen.append(lengths(metadata))

    handle = engine.modules[ATTENTION[0]].register_forward_pre_hook(look, with_kwargs=True)

    def run_later(step: Callable[[], None]) -> None:
        before.append(len(seen))
        step()

    with hooks([handle]):
        engine.live_steps(Batch.parse("1x32+8,2x1+126"), 4, run_later)
    assert seen[0] == [(1, 126), (1, 126)]  # the decodes are brought in
    assert seen[1:] == [[(32, 8), (1, 127 + i), (1, 127 + i)] for i in range(5)]
    assert before == [2, 3, 4, 5]


@pytest.mark.parametrize("key", ["1x32+0", "3x1+100", "2x16+32,2x1+64"])
def test_live_steps_forget_their_requests(engine: VllmEngine, key: str) -> None:
    before = state_of(engine)
    engine.live_steps(Batch.parse(key), 3, run)
    assert state_of(engine) == before


def test_live_steps_of_fewer_layers(engine: VllmEngine) -> None:
    ran: Counter[str] = Counter()

    def count(path: str) -> Any:
        return lambda *_: ran.update([path])

    paths = [f"model.layers.{i}" for i in range(LAYERS)]
    handles = [engine.modules[p].register_forward_pre_hook(count(p)) for p in paths]
    with hooks(handles):
        engine.live_steps(Batch.prefill(16), 2, run, layers=1)
        assert ran == {paths[0]: 3}
        engine.live_steps(Batch.prefill(16), 2, run, layers=LAYERS)
        engine.step(Batch.prefill(16))
        assert ran == {paths[0]: 7, paths[1]: 4, paths[2]: 4}


def test_live_decodes_need_room_to_continue(engine: VllmEngine) -> None:
    engine.live_steps(Batch.decode(1, engine.max_request_len - 6), 4, run)
    with pytest.raises(EngineError, match=r"^[^\n]*tokens a request, the engine takes 2047$"):
        engine.live_steps(Batch.decode(1, engine.max_request_len - 2), 4, run)


# -- exceptions -----------------------------------------------------------------


def test_an_exception_while_calls_are_held(engine: VllmEngine) -> None:
    before = state_of(engine)
    with pytest.raises(KeyError), engine.capture(Batch.decode(3, 64), ATTENTION) as calls:
        raise KeyError(len(calls))
    assert state_of(engine) == before


@pytest.mark.parametrize(
    "path", ["model.layers.1.mlp", "logits_processor", "sampler", ATTENTION[2]]
)
def test_an_exception_inside_a_step(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no more memory")

    before = state_of(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.modules[path], "forward", fails)
        for attempt in (
            lambda: engine.step(Batch.parse("1x16+0,2x1+30")),
            lambda: engine.live_steps(Batch.parse("1x16+0,2x1+30"), 2, run),
        ):
            with pytest.raises(RuntimeError, match=r"^no more memory$"):
                attempt()
            assert state_of(engine) == before
    # And the engine goes on as if nothing had been.
    batch = Batch.parse("1x16+0,2x1+30")
    assert len(inside_modules(recorded(engine, batch))) > 100
    assert state_of(engine) == before


def test_hooks_are_gone_after_a_failed_capture(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.nn.modules.module as torch_module

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no more memory")

    module = engine.modules["model.norm"]
    monkeypatch.setattr(module, "forward", fails)
    with pytest.raises(RuntimeError, match="no more memory"):
        engine.capture(Batch.prefill(16), ["model.norm"]).__enter__()
    assert not module._forward_pre_hooks
    assert not torch_module._global_forward_pre_hooks
    assert not torch_module._global_forward_hooks
