"""What of vLLM's refusals reaches the user, and which of its libraries was loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from dooly_backend.config import RunOptions, load_model
from dooly_backend.engines import boot
from dooly_backend.engines.vllm_boot import import_vllm, one_line
from dooly_backend.engines.vllm_configs import register_config
from dooly_backend.engines.vllm_instance import mapped_libraries
from dooly_backend.errors import InputError


def test_the_reason_in_a_validation_error():
    error = ValueError("1 validation error for X\n  Value error, no such thing [type=value_error]")
    assert one_line(error) == "no such thing"


def test_a_list_behind_the_reason_is_cut_off():
    names = ", ".join(f"'Model{n}ForCausalLM'" for n in range(300))
    reason = "Model architectures ['NoSuch'] are not supported for now."
    assert one_line(ValueError(f"{reason} Supported architectures: {names}")) == reason


def test_a_long_message_without_sentences_ends_somewhere():
    text = one_line(ValueError("x" * 5000))
    assert text.startswith("xxx")
    assert len(text) < 500


def test_an_error_without_words_gives_its_name():
    assert one_line(ValueError()) == "ValueError()"


@pytest.mark.parametrize(
    ("model", "layers", "message"),
    [
        ("smollm-135m", 1, "--layers 1 does not show every kind of layer: .*at least --layers 2$"),
        ("gemma-2-9b", 2, "sliding_attention/dense would be missing; build at least --layers 3$"),
    ],
)
def test_too_few_layers_are_refused_before_vllm_starts(
    needs_engine: None, monkeypatch: pytest.MonkeyPatch, model: str, layers: int, message: str
) -> None:
    import_vllm(threads=1)
    monkeypatch.setattr("vllm.v1.engine.core.EngineCore", None)
    with pytest.raises(InputError, match=message) as refused:
        boot(RunOptions(model=load_model(model), layers=layers, threads=1))
    assert "\n" not in str(refused.value)


def test_a_model_type_that_only_vllm_knows_gets_a_configuration_class(needs_engine: None) -> None:
    """DeepSeek-MoE brings its class as code on the hub, which is never fetched."""
    import_vllm(threads=1)
    from transformers import AutoConfig

    hf_config = load_model("deepseek-moe-16b-base").hf_config
    register_config(hf_config)
    config = AutoConfig.for_model(**hf_config)
    assert config.model_type == "deepseek"
    assert config.n_routed_experts == 64
    register_config({"model_type": "nosuch", "architectures": ["NoSuchForCausalLM"]})
    with pytest.raises(ValueError, match="nosuch"):
        AutoConfig.for_model("nosuch")


def test_libraries_that_are_only_mapped_are_named(tmp_path: Path) -> None:
    """Without AVX-512 or its bf16, vLLM's library is loaded but is no module by its name."""
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r--p 00000000 fd:00 11 /lib/site-packages/vllm/_C_AVX2.abi3.so\n"
        "7f01-7f02 r-xp 00001000 fd:00 11 /lib/site-packages/vllm/_C_AVX2.abi3.so\n"
        "7f03-7f04 r-xp 00001000 fd:00 12 /lib/site-packages/vllm/spinloop.abi3.so\n"
        "7ffc-7ffd rw-p 00000000 00:00 0 [stack]\n"
    )
    assert mapped_libraries(maps) == ["vllm._C_AVX2"]
    assert mapped_libraries(tmp_path / "none") == []
