"""Steps as an engine runs them by default, of one batch at a time (regression/whole_steps.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import measured
import numpy as np
import pytest
from stream_records import TRUTH

from dooly_backend.database.records import PartCost
from dooly_backend.errors import InputError
from dooly_backend.regression.baseline import SignatureLatency
from dooly_backend.regression.whole_steps import StepShape, execution_of
from dooly_backend.simulation.execution import Mode
from dooly_backend.simulation.own_cost import own_cost
from dooly_backend.simulation.records import Batches
from dooly_backend.simulation.step_time import Predicted, StepModel, parts_of
from dooly_backend.workload import Batch, Request
from shims.common import random_batches
from shims.times import CallTimes

H200 = measured.models(measured.LARGE[0])[0]


@dataclass(frozen=True)
class AsMeasured:
    """A latency model's own times, in the place of a bundle's regressors."""

    signatures: Mapping[str, SignatureLatency]

    def predict(self, signature: str, batches: Batches) -> Predicted:
        ends = [*batches.starts[1:], len(batches.query)]
        each = [
            Batch(tuple(map(Request, batches.query[a:b].tolist(), batches.context[a:b].tolist())))
            for a, b in zip(batches.starts, ends, strict=True)
        ]
        us = [self.signatures[signature].at(b)[0].statistics.median_us for b in each]
        return np.array(us), np.zeros(len(us), bool)


def test_it_is_what_a_simulation_takes_for_one_of_many_equal_steps() -> None:
    launching = [part for part in H200.stream_cost if part.mode != "any"]
    simulated = StepModel(
        parts_of(H200.occurrences),
        AsMeasured(H200.signatures),
        own_cost(None, H200.configuration.layers_run, launching),
        execution_of(H200.configuration, H200.environment.engine_version),
    )
    batches = random_batches(60, max_tokens=2048, max_seqs=64, max_length=8192, prefills=3)
    times = simulated.times(Batches.of(batches))
    assert times.launch_us is not None
    launch_us = times.host_us + times.launch_us
    expected = np.maximum(times.device_us, launch_us)
    calls = CallTimes(H200)
    for batch, us in zip(batches, expected, strict=True):
        assert H200.step_us(batch) == pytest.approx(us), batch.key
        assert calls.step_us(batch) == pytest.approx(us), batch.key
    # Some are bound by the device, some by the host.
    assert 0 < (times.device_us > launch_us).sum() < len(batches)


@pytest.mark.parametrize(
    ("batch", "mode", "tokens"),
    [("9x1+500", Mode.FULL, 16), ("1x300+0", Mode.PIECEWISE, 304), ("1x600+0", Mode.EAGER, 600)],
)
def test_its_mode_decides_padding_and_share(batch: str, mode: Mode, tokens: int) -> None:
    shape = H200.step_rules.of_batch(Batch.parse(batch))
    name = {Mode.FULL: "full", Mode.PIECEWISE: "piecewise", Mode.EAGER: "eager"}[mode]
    device = next(p for p in H200.stream_cost if (p.mode, p.part) == (name, "device"))
    launch = next(p for p in H200.stream_cost if (p.mode, p.part) == (name, "launch"))
    requests = Batch.parse(batch).num_reqs
    assert (shape.mode, shape.tokens, shape.share) == (mode, tokens, device.share)
    assert shape.launch_us == pytest.approx(launch.step_us + launch.request_us * requests)


def test_the_slower_of_device_and_host_decides() -> None:
    shape = StepShape(tokens=8, own_us=10.0, share=0.5, launch_us=200.0)
    assert shape.time_us(operations_us=300.0, whole_us=100.0) == 210.0
    assert shape.time_us(operations_us=200.0, whole_us=100.0) == 200.0


def test_collectives_are_taken_whole() -> None:
    """What one rank alone was measured with says nothing of communication."""
    model = measured.models(measured.LLAMA)[1]  # two ranks
    assert model.configuration.execution_mode == "eager"
    stream = (PartCost("eager", "device", share=0.5),)
    batch = Batch.parse("1x64+0,2x1+100")
    whole = sum(
        o.count * model.occurrence(o, batch).median_us
        for o in model.occurrences
        if o.signature.is_attention or o.signature.is_collective
    )
    assert any(o.signature.is_collective for o in model.occurrences)
    halved = replace(model, stream_cost=stream).step_us(batch)
    assert halved == pytest.approx(whole + (model.operations_us(batch) - whole) / 2)


def test_without_whole_steps_a_step_is_its_sum_and_its_own_cost() -> None:
    model = measured.models(measured.LLAMA)[0]
    batch = Batch.parse("1x60+0,3x1+100")
    assert model.step_cost is not None
    own = model.step_cost.time_us(model.configuration.layers_run, 4)
    assert model.step_us(batch) == pytest.approx(model.operations_us(batch) + own)
    assert model.step_rules.described() is None


def test_a_profile_that_lacks_the_engines_limits_says_so() -> None:
    configuration = replace(H200.configuration, facts={})
    model = replace(H200, configuration=configuration, stream_cost=tuple(TRUTH.values()))
    with pytest.raises(InputError, match="max_num_seqs and max_num_batched_tokens"):
        model.step_us(Batch.prefill(8))
