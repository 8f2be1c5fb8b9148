"""The launching thread held on one processor, the others kept off it."""

import os
import threading

import pytest

from integration.gpu import processors
from integration.gpu.processors import held_if, holding, quickest, siblings, speeds


def affinity_of(thread: threading.Thread) -> set[int]:
    assert thread.native_id is not None
    return os.sched_getaffinity(thread.native_id)


@pytest.fixture
def waiting():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    yield thread
    done.set()
    thread.join()


def test_every_allowed_processor_is_timed_and_none_kept():
    allowed = os.sched_getaffinity(0)
    taken = speeds()
    assert set(taken) == allowed
    assert all(us > 0 for us in taken.values())
    assert os.sched_getaffinity(0) == allowed


def test_the_quickest_takes_the_least():
    assert quickest({0: 3.0, 1: 2.0, 2: 2.0}) == 1


@pytest.mark.parametrize(
    ("text", "told"), [("0-1\n", {0, 1}), ("0,64", {0, 64}), ("2-3,6", {2, 3, 6})]
)
def test_processors_of_a_core(text, told, tmp_path, monkeypatch):
    (tmp_path / "core-0").write_text(text)
    monkeypatch.setattr(processors, "_SIBLINGS", tmp_path / "core-{}")
    assert siblings(0) == told
    assert siblings(7) == {7}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_others_are_kept_off_and_let_back(waiting, monkeypatch):
    monkeypatch.setattr(processors, "siblings", lambda processor: {processor})
    allowed = os.sched_getaffinity(0)
    here = min(allowed)
    with holding() as held:
        held.hold(here)
        assert os.sched_getaffinity(0) == {here}
        assert affinity_of(waiting) == allowed - {here}
        done = threading.Event()
        late = threading.Thread(target=done.wait)
        late.start()
        assert affinity_of(late) == {here}  # inherited
        held.spread()
        assert affinity_of(late) == allowed - {here}
        done.set()
        late.join()
    assert os.sched_getaffinity(0) == allowed
    assert affinity_of(waiting) == allowed


def test_without_another_core_the_others_stay(waiting, monkeypatch):
    allowed = os.sched_getaffinity(0)
    monkeypatch.setattr(processors, "siblings", lambda processor: set(allowed))
    with holding() as held:
        held.hold(min(allowed))
        assert affinity_of(waiting) == allowed


def test_what_is_said_of_a_held_thread():
    with held_if(False) as where:
        assert where.about == {}
    with held_if(True) as where:
        assert os.sched_getaffinity(0) == {where.about["held_on"]}
        assert where.about["slowest"] >= 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_a_held_thread_goes_to_what_is_the_quickest_by_now(waiting, monkeypatch):
    allowed = os.sched_getaffinity(0)
    first, *_, last = sorted(allowed)
    taken = {first: 1.0, last: 2.0}
    monkeypatch.setattr(processors, "speeds", lambda *_: taken)
    monkeypatch.setattr(processors, "siblings", lambda processor: {processor})
    with held_if(True) as where:
        assert os.sched_getaffinity(0) == {first}
        taken[first] = 3.0
        where.again()
        assert where.about == {"held_on": last, "work_us": 2, "slowest": 1.5}
        assert os.sched_getaffinity(0) == {last}
        assert affinity_of(waiting) == allowed - {last}
    assert os.sched_getaffinity(0) == affinity_of(waiting) == allowed
    with held_if(False) as where:
        where.again()
        assert os.sched_getaffinity(0) == allowed
