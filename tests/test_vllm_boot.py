"""What of vLLM's refusals reaches the user."""

from __future__ import annotations

from dooly_backend.engines.vllm_boot import one_line


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
