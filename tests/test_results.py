"""What a run leaves on disk, read back by the readers that others would use."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dooly_backend.simulation.metrics import Metrics
from dooly_backend.simulation.records import Run
from dooly_backend.simulation.results import write_results
from dooly_backend.simulation.timeline import ENGINE, trace_events
from tests.run_records import RUN, step

PARTS = pd.DataFrame({"attention": [1.0, 2.0, 3.0, 4.0], "host": [4.0, 3.0, 2.0, 1.0]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "new" / "folder"
    write_results(path, Metrics(RUN), {"model": "smollm <135m>"}, PARTS)
    return path


def test_tables_come_back(folder: Path) -> None:
    requests = pd.read_parquet(folder / "requests.parquet").set_index("id")
    assert requests.loc[1, "token_s"].tolist() == [2.0, 3.0]
    assert requests.loc[1, "ttft_s"] == 1.5
    steps = pd.read_parquet(folder / "steps.parquet")
    assert [ids.tolist() for ids in steps["ids"]] == [[0], [0, 1], [0, 1], [1]]
    assert [c.tolist() for c in steps["context"]] == [[0], [100, 0], [101, 50], [51]]
    assert steps["part_attention_us"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_the_summary_is_strict_json(folder: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    summary = json.loads((folder / "summary.json").read_text(), parse_constant=refuse)
    assert summary["model"] == "smollm <135m>"
    assert summary["latencies"]["ttft"]["p50"] == 1.25


def test_the_page_needs_no_network_and_shows_every_part(folder: Path) -> None:
    class Scripts(HTMLParser):
        sources: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attributes: Any) -> None:
            self.sources += [
                value for name, value in attributes if (tag, name) == ("script", "src")
            ]

    text = (folder / "plots.html").read_text()
    reader = Scripts()
    reader.feed(text)
    assert reader.sources == []
    assert "<title>smollm &lt;135m&gt;</title>" in text
    for name in ("TTFT", "TPOT", "attention", "host", "prefill tokens"):
        assert name in text


# -- the trace ------------------------------------------------------------------


def test_the_trace_is_written(folder: Path) -> None:
    assert json.loads((folder / "trace.json").read_text()) == trace_events(RUN)


def test_events_have_what_the_format_wants() -> None:
    """Required keys per phase, times in order, and every begun event ended in its process."""
    events = trace_events(RUN)["traceEvents"]
    needed = {
        "M": {"pid", "name", "args"},
        "X": {"pid", "tid", "ts", "dur", "name"},
        "b": {"pid", "ts", "id", "cat", "name"},
        "e": {"pid", "ts", "id", "cat", "name"},
        "C": {"pid", "ts", "name", "args"},
    }
    open_: dict[Any, list[str]] = defaultdict(list)
    last = 0.0
    for event in events:
        assert needed[event["ph"]] <= set(event)
        if event["ph"] == "M":
            continue
        assert event["ts"] >= last
        last = event["ts"]
        key = (event.get("pid"), event.get("cat"), event.get("id"), event["name"])
        if event["ph"] == "b":
            open_[key].append(event["name"])
        elif event["ph"] == "e":
            open_[key].pop()
    assert not any(open_.values())


def test_steps_of_the_trace() -> None:
    steps = [e for e in trace_events(RUN)["traceEvents"] if e["ph"] == "X"]
    assert [s["name"] for s in steps] == ["prefill", "mixed", "decode", "decode"]
    assert [s["dur"] for s in steps] == [1e6, 1e6, 5e5, 2.5e5]
    assert steps[1]["args"]["batch"] == "1x50+0,1x1+100"


def test_steps_that_overlap_lie_on_tracks_of_their_own() -> None:
    run = Run((step(0, 2, (0, 1, 5)), step(1, 3, (1, 1, 5)), step(2, 4, (0, 1, 6))), RUN.requests)
    tracks = [e["tid"] for e in trace_events(run)["traceEvents"] if e["ph"] == "X"]
    assert tracks == [0, 1, 0]


def test_counters_end_at_nothing() -> None:
    counters = [e["args"] for e in trace_events(RUN)["traceEvents"] if e["ph"] == "C"]
    assert counters[0] == {"running": 1, "waiting": 0}
    assert {"running": 1, "waiting": 1} in counters
    assert counters[-1] == {"running": 0, "waiting": 0}


def test_a_live_run_has_a_trace_too() -> None:
    live = Run(tuple(replace(s, time=None) for s in RUN.steps), RUN.requests)
    steps = [e for e in trace_events(live)["traceEvents"] if e["pid"] == ENGINE and e["ph"] == "X"]
    assert "device_us" not in steps[0]["args"]
