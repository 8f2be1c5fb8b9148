"""Traces of requests that others have written down.

CSV with Vidur's columns (num_prefill_tokens, num_decode_tokens, arrived_at),
LLMServingSim's JSONL (input_toks, output_toks, arrival_time_ns), and
ShareGPT-like JSON: conversations, of which each answer of the model makes a
request with what was said before it as prompt. Their texts are counted as four
characters to the token: no tokenizer is at hand.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dooly_backend.errors import InputError

_PROMPT = ("prompt_tokens", "num_prefill_tokens", "input_toks", "prompt_len", "ContextTokens")
_OUTPUT = ("output_tokens", "num_decode_tokens", "output_toks", "output_len", "GeneratedTokens")
#: Fields that tell when a request comes, and how many of their units are a second.
_ARRIVAL = {"arrival_s": 1.0, "arrived_at": 1.0, "arrival_time_ns": 1e9, "timestamp": 1.0}
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class TraceRow:
    """One request of a trace; `arrival_s` is None where the trace does not say."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None = None


def read_trace(path: Path) -> list[TraceRow]:
    """The requests of a CSV, JSON or JSONL file, in order of arrival. Raises InputError."""
    try:
        rows = [row for number, record in _records(path) for row in _rows(record, path, number)]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, csv.Error, RecursionError) as error:
        raise InputError(f"{path} is no trace ({error})") from None
    if not rows:
        raise InputError(f"{path} holds no request")
    if all(row.arrival_s is not None for row in rows):
        rows.sort(key=lambda row: row.arrival_s or 0.0)
    return rows


def _records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The records of a file and their numbers from 1."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        values: Iterable[Any]
        if path.suffix.lower() == ".csv":
            values = csv.DictReader(file)
        elif path.suffix.lower() == ".jsonl":
            values = (json.loads(line) for line in file if line.strip())
        else:
            values = json.load(file)
            if not isinstance(values, list):
                raise ValueError("a JSON trace is a list of requests or conversations")
        for number, value in enumerate(values, 1):
            if not isinstance(value, Mapping):
                raise ValueError(f"record {number} is no object")
            yield number, value


def _rows(record: Mapping[str, Any], path: Path, number: int) -> Iterator[TraceRow]:
    where = f"{path}, record {number}"
    if "conversations" in record:
        yield from _conversation(record["conversations"], where)
        return
    prompt = _number(record, _PROMPT, where)
    output = _number(record, _OUTPUT, where)
    if prompt < 1 or output < 1:
        raise InputError(f"{where}: a request needs a prompt and output of at least one token")
    field = next((name for name in _ARRIVAL if record.get(name) not in (None, "")), None)
    arrival = None
    if field is not None:
        arrival = _value(record, field, where) / _ARRIVAL[field]
        if arrival < 0:
            raise InputError(f"{where}: {field} is negative")
    yield TraceRow(round(prompt), round(output), arrival)


def _conversation(turns: Any, where: str) -> Iterator[TraceRow]:
    if not isinstance(turns, list):
        raise InputError(f"{where}: 'conversations' is no list of turns")
    before = 0
    for turn in turns:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
            raise InputError(f"{where}: a turn needs 'from' and 'value'")
        tokens = math.ceil(len(turn["value"]) / _CHARACTERS_PER_TOKEN)
        if turn.get("from") in ("gpt", "assistant", "model") and before and tokens:
            yield TraceRow(before, tokens)
        before += tokens


def _number(record: Mapping[str, Any], names: Iterable[str], where: str) -> float:
    for name in names:
        if name in record:
            return _value(record, name, where)
    raise InputError(f"{where} has none of {', '.join(names)}")


def _value(record: Mapping[str, Any], name: str, where: str) -> float:
    try:
        value = float(record[name])
    except (TypeError, ValueError):
        raise InputError(f"{where}: {name} is {record[name]!r}, no number") from None
    if not math.isfinite(value):
        raise InputError(f"{where}: {name} is {record[name]!r}, no number")
    return value
