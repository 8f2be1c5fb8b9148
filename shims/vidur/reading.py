"""Vidur's tables as data frames, checked: nothing that is not understood goes by unseen."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from dooly_backend.errors import InputError

from .ranges import TOKEN_STEP, round_up
from .tables import COPY_COLUMN, STATISTICS

MODEL_COLUMNS = (
    "n_head",
    "n_kv_head",
    "n_embd",
    "n_expanded_embd",
    "vocab_size",
    "use_gated_mlp",
)
DEGREE = "num_tensor_parallel_workers"
MLP_COLUMNS = (*MODEL_COLUMNS, "num_tokens", DEGREE)
ATTENTION_COLUMNS = (
    "n_embd",
    "n_q_head",
    "n_kv_head",
    "block_size",
    DEGREE,
    "max_model_len",
    "batch_size",
    "prefill_chunk_size",
    "kv_cache_size",
    "is_prefill",
    "attention_backend",
)
NETWORK_COLUMNS = ("num_workers", "size", "devices_per_node")
#: Not in every file, and of no use here.
_MAY_LACK = {"is_prefill", "max_model_len", "attention_backend"}
_MAY_HAVE = {
    COPY_COLUMN,
    "Unnamed: 0",
    "rank",
    "collective",
    "max_devices_per_node",
    "profile_method",
}


def read_table(path: Path, root: Path, columns: Iterable[str], ops: Iterable[str]) -> pd.DataFrame:
    """The rows of a table, copies of an export once.

    Raises InputError for a file that cannot be read, and for columns that are
    missing or not known: they may tell rows apart that would be mixed.
    """
    name = path.relative_to(root)
    try:
        frame = pd.read_csv(path)  # .xz by its name
    except (OSError, ValueError, EOFError) as error:  # pandas' own are ValueErrors
        raise InputError(f"{name} cannot be read: {str(error).splitlines()[0]}") from None
    columns, ops = tuple(columns), tuple(ops)
    times = {f"time_stats.{op}.{statistic}" for op in ops for statistic in STATISTICS}
    unknown = [c for c in frame if c not in times and c not in columns and c not in _MAY_HAVE]
    if unknown:
        raise InputError(f"{name} has a column that is not known: {unknown[0]}")
    missing = [c for c in columns if c not in frame and c not in _MAY_LACK]
    if missing:
        raise InputError(f"{name} has no column {missing[0]}: is it a table of Vidur's?")
    if not any(median_column(op) in frame for op in ops):
        raise InputError(f"{name} has no times: none of {', '.join(map(median_column, ops))}")
    if frame.empty:
        raise InputError(f"{name} has no rows")
    if COPY_COLUMN in frame:
        frame = frame[frame[COPY_COLUMN] == 0]
    return frame


def median_column(op: str) -> str:
    return f"time_stats.{op}.median"


def times_by(frame: pd.DataFrame, op: str, keys: list[str]) -> pd.DataFrame:
    """Smallest, median and largest milliseconds of `op` at each place; rows without are left out.

    Rows of one place are one: Vidur's profiler measures some more than once.
    """
    column = median_column(op)
    known = frame[frame[column].notna()] if column in frame else frame.iloc[:0]
    if known.empty:
        return pd.DataFrame(columns=["min", "median", "max"])
    low, high = (f"time_stats.{op}.{statistic}" for statistic in ("min", "max"))
    grouped = known.groupby(keys)
    median = grouped[column].median()
    smallest = grouped[low].min() if low in known else median
    largest = grouped[high].max() if high in known else median
    return pd.DataFrame({"min": smallest, "median": median, "max": largest}).sort_index()


def rounded_up(tokens: int) -> int:
    """Tokens of a step as Vidur looks them up."""
    return round_up(tokens, TOKEN_STEP)
