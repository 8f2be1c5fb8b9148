"""Runs survive being written and read; what is no run is refused in one line."""

from __future__ import annotations

import json
import lzma
import random
from dataclasses import replace
from pathlib import Path

import pytest

from dooly_backend.errors import InputError
from dooly_backend.simulation.records import (
    KvCacheGroup,
    RequestRecord,
    Run,
    ScheduledRequest,
    ServingLimits,
    ServingRequest,
    StepRecord,
    StepTime,
)
from dooly_backend.simulation.run_file import load_run, save_run

LIMITS = ServingLimits(
    8, 64, 512, 100, 16, policy="priority", kv_groups=(KvCacheGroup(16), KvCacheGroup(16, 40))
)


def random_run(seed: int, timed: bool = True) -> Run:
    """Steps with arrivals, chunks, preemptions and changed orders; times are whole nanoseconds."""
    rng = random.Random(seed)
    steps, contexts, tokens, first = [], {}, {}, {}
    now = 0
    for _ in range(60):
        for identity in list(contexts):
            if rng.random() < 0.05:
                del contexts[identity]  # finished or preempted
        if rng.random() < 0.3 or not contexts:
            contexts[len(first) if rng.random() < 0.8 or not first else rng.choice([*first])] = 0
        order = [*contexts]
        if rng.random() < 0.1:
            rng.shuffle(order)
        scheduled = []
        for identity in order:
            query = 1 if rng.random() < 0.9 else rng.randint(2, 20)
            scheduled.append(ScheduledRequest(identity, query, contexts[identity]))
            contexts[identity] += query
        start, now = now, now + rng.randint(2000, 10**7)
        preempted = tuple(sorted(rng.sample(range(50), 2))) if rng.random() < 0.1 else ()
        time = StepTime(rng.random() * 1e4, 5.5, 0.25, rng.random() < 0.5) if timed else None
        ready = None if timed else (now - 500) / 1e9
        launched = None if timed else (start + 700) / 1e9
        steps.append(
            StepRecord(start / 1e9, now / 1e9, tuple(scheduled), preempted, launched, ready, time)
        )
        for part in scheduled:
            first.setdefault(part.id, start / 1e9)
            if rng.random() < 0.9:
                tokens.setdefault(part.id, []).append(now / 1e9)
    requests = tuple(
        RequestRecord(
            ServingRequest(identity, 0.25, 30, 7, identity % 3 or None, 16, identity % 2),
            first[identity],
            tuple(tokens.get(identity, ())),
            16,
            3,
            identity,
        )
        for identity in sorted(first)
    )
    return Run(tuple(steps), requests, LIMITS if timed else None, {"engine": "test"})


@pytest.mark.parametrize("name", ["run.json", "run.json.gz", "run.json.xz"])
@pytest.mark.parametrize("timed", [True, False])
def test_a_run_survives_the_file(tmp_path: Path, name: str, timed: bool) -> None:
    for seed in range(20):
        run = random_run(seed, timed)
        save_run(run, tmp_path / name)
        assert load_run(tmp_path / name) == run


def test_an_empty_run_survives(tmp_path: Path) -> None:
    save_run(Run((), ()), tmp_path / "run.json")
    assert load_run(tmp_path / "run.json") == Run((), ())


def test_decodes_take_little_room(tmp_path: Path) -> None:
    steps = tuple(
        StepRecord(
            step / 1e3,
            (step + 1) / 1e3,
            tuple(ScheduledRequest(i, 1, 100 + step) for i in range(64)),
        )
        for step in range(2000)
    )
    save_run(Run(steps, ()), tmp_path / "run.json.xz")
    assert (tmp_path / "run.json.xz").stat().st_size < 5000
    assert load_run(tmp_path / "run.json.xz").steps == steps


def test_tokens_that_came_at_no_steps_end_are_refused(tmp_path: Path) -> None:
    run = random_run(1)
    record = replace(run.requests[0], token_s=(1e6,))
    with pytest.raises(InputError, match="no step"):
        save_run(replace(run, requests=(record,)), tmp_path / "run.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no whole run"),
        (b"[]", "is no run"),
        (b'{"format": "dooly-run", "version": 99}', "version 99"),
        (b'{"format": "dooly-run", "version": 1}', "is no whole run"),
        (b"\xfd7zXZ\x00broken", "cannot read"),
        (b"\x1f\x8bbroken", "cannot read"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_run(path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json.xz"
    save_run(random_run(0), path)
    whole = path.read_bytes()
    for kept in (10, len(whole) // 2, len(whole) - 20):
        path.write_bytes(whole[:kept])
        with pytest.raises(InputError):
            load_run(path)


def test_steps_that_are_not_there_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json.xz"
    save_run(random_run(0), path)
    values = json.loads(lzma.decompress(path.read_bytes()))
    values["requests"]["first_step"][0] = 10**6
    path.write_bytes(json.dumps(values).encode())
    with pytest.raises(InputError, match="no whole run"):
        load_run(path)


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        load_run(tmp_path / "none.json")
