"""Model, sweep and hardware descriptions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pydantic
import pytest

from dooly_backend import config
from dooly_backend.config import (
    RunOptions,
    Sweep,
    configs_folder,
    hardware_for,
    known_models,
    load_hardware,
    load_model,
    load_sweep,
)
from dooly_backend.errors import InputError
from dooly_backend.workload import Batch

SMOLLM = "HuggingFaceTB/SmolLM-135M"
MINIMAL = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}


def write_json(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def one_line(error: pytest.ExceptionInfo[InputError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


# -- models -------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        SMOLLM,
        "HuggingFaceTB__SmolLM-135M",
        "SmolLM-135M",
        "smollm-135m",
        "huggingfacetb/SMOLLM-135M",
    ],
)
def test_a_known_model_has_several_spellings(text: str) -> None:
    model = load_model(text)
    assert model.name == SMOLLM
    assert model.num_layers == 30
    assert model.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("name", known_models())
def test_every_shipped_model_is_sound(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    hidden = model.hf_config["hidden_size"]
    heads = model.hf_config["num_attention_heads"]
    assert "head_dim" in model.hf_config or hidden % heads == 0
    assert heads % model.hf_config.get("num_key_value_heads", heads) == 0


def test_every_shipped_model_has_a_source() -> None:
    sources = (configs_folder() / "models" / "SOURCES.md").read_text()
    listed = re.findall(r"^- ([^\s:]+):", sources, re.MULTILINE)
    assert sorted(listed) == sorted(known_models())


def test_a_folder_is_named_after_itself(tmp_path: Path) -> None:
    write_json(tmp_path / "my-model" / "config.json", MINIMAL | {"_name_or_path": "/some/where"})
    assert load_model(str(tmp_path / "my-model")).name == "my-model"


def test_a_folder_of_the_hubs_cache_is_named_after_its_repository(tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "0123abcd"
    write_json(folder / "config.json", MINIMAL)
    assert load_model(str(folder)).name == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("file", "name"),
    [("org__name.json", "org/name"), ("plain.json", "plain"), ("folder/config.json", "folder")],
)
def test_a_file_names_its_model(tmp_path: Path, file: str, name: str) -> None:
    assert load_model(str(write_json(tmp_path / file, MINIMAL))).name == name


def test_layers_of_a_multimodal_model_are_its_text_models(tmp_path: Path) -> None:
    nested = {"architectures": ["X"], "text_config": {"num_hidden_layers": 7}}
    assert load_model(str(write_json(tmp_path / "m.json", nested))).num_layers == 7


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json in ") as error:
        load_model(str(tmp_path))
    one_line(error)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"architectures": [', "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1, 2]", "is not a JSON object"),
        (b'{"num_hidden_layers": 2}', "no 'architectures'"),
        (b'{"num_hidden_layers": 2, "architectures": []}', "no 'architectures'"),
        (b'{"architectures": ["X"]}', "no 'num_hidden_layers'"),
        (b'{"architectures": ["X"], "num_hidden_layers": 0}', "no 'num_hidden_layers'"),
        (b'{"architectures": ["X"], "num_hidden_layers": true}', "no 'num_hidden_layers'"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        load_model(str(tmp_path))
    assert str(tmp_path / "config.json") in one_line(error)


def test_an_unknown_name_gets_suggestions() -> None:
    with pytest.raises(InputError, match=r"did you mean .*Qwen/Qwen3-8B") as error:
        load_model("qwen3-8")
    assert "dooly models" in one_line(error)


def test_a_name_like_nothing_gets_none() -> None:
    with pytest.raises(InputError, match="unknown model 'zzzz'") as error:
        load_model("zzzz")
    assert "did you mean" not in one_line(error)


@pytest.mark.parametrize("text", ["/no/such/folder", "./nothing", "nothing.json"])
def test_a_path_that_does_not_exist(text: str) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        load_model(text)


def test_a_basename_that_two_organisations_use(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"a/twin": Path("a"), "b/twin": Path("b")}
    monkeypatch.setattr(config, "known_models", lambda: models)
    with pytest.raises(InputError, match="names several models: a/twin, b/twin"):
        load_model("twin")


# -- sweeps -------------------------------------------------------------------


def sweep(**changes: Any) -> dict[str, Any]:
    return {
        "name": "s",
        "tokens": [1, 2],
        "requests": [1],
        "prefill": {"chunk": [4, 8], "history": [0, 8]},
        "decode": {"batch": [1, 2], "context": [7, 15]},
    } | changes


@pytest.mark.parametrize("name", ["quick", "smoke"])
def test_shipped_sweeps(name: str) -> None:
    assert load_sweep(name).name == name


def test_axes_are_sorted_and_unique() -> None:
    assert Sweep.model_validate(sweep(tokens=[8, 1, 8])).tokens == (1, 8)


def test_points_of_a_sweep() -> None:
    points = Sweep.model_validate(sweep())
    assert [p.key for p in points.token_points()] == ["tokens=1", "tokens=2"]
    assert [p.key for p in points.request_points()] == ["requests=1"]
    batches = [p.batch for p in points.batch_points(max_model_len=16)]
    assert Batch.prefill(8, 8) in batches
    assert Batch.decode(2, 15) in batches
    assert len(batches) == 8


def test_points_beyond_the_models_length_are_dropped() -> None:
    points = Sweep.model_validate(sweep()).batch_points(max_model_len=8)
    assert {p.key for p in points} == {
        "batch=1x4+0",
        "batch=1x8+0",
        "batch=1x1+7",
        "batch=2x1+7",
    }


def test_a_chunk_of_one_token_is_the_decode_that_it_is() -> None:
    grids = sweep(prefill={"chunk": [1], "history": [7]}, decode={"batch": [1], "context": [7]})
    assert len(Sweep.model_validate(grids).batch_points(100)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": []}, "tokens"),
        ({"tokens": [0]}, "tokens.0"),
        ({"tokens": [True]}, "tokens.0"),
        ({"requests": ["many"]}, "requests.0"),
        ({"prefill": {"chunk": [1], "history": [-1]}}, "prefill.history.0"),
        ({"token": [1]}, "token: Extra inputs"),
    ],
)
def test_a_sweep_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_json(tmp_path / "sweep.yaml", sweep(**changes))  # JSON is YAML
    with pytest.raises(InputError, match=re.escape(message)) as error:
        load_sweep(str(path))
    one_line(error)


@pytest.mark.parametrize(
    ("content", "message"),
    [("a: [1", r"is not YAML \(line 1\)"), ("- 1", "is not a YAML mapping"), ("", "not a YAML")],
)
def test_a_sweep_file_that_is_none(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(content)
    with pytest.raises(InputError, match=message) as error:
        load_sweep(str(path))
    one_line(error)


def test_an_unknown_sweep() -> None:
    with pytest.raises(InputError, match="did you mean quick") as error:
        load_sweep("quik")
    one_line(error)


# -- hardware -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("AMD EPYC (2 threads)", "cpu"),
        ("Intel(R) Xeon(R) Platinum 8470", "cpu"),
    ],
)
def test_a_device_is_known_by_its_drivers_name(device: str, name: str) -> None:
    hardware = hardware_for(device)
    assert hardware is not None
    assert hardware.name == name


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA H200 NVL",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 PCIe",
        "NVIDIA A100-SXM4-40GB",
        "A10",
    ],
)
def test_a_variant_with_other_figures_is_not_taken_for_it(device: str) -> None:
    assert hardware_for(device) is None


@pytest.mark.parametrize("path", sorted((configs_folder() / "hardware").glob("*.yaml")))
def test_every_figure_has_a_source(path: Path) -> None:
    hardware = load_hardware(path.stem)
    assert hardware.name == path.stem
    described = {"name", "kind", "match", "unless", "sources"}
    figures = hardware.model_dump(exclude_none=True).keys() - described
    assert figures == hardware.sources.keys()


def test_unknown_hardware() -> None:
    with pytest.raises(InputError, match="did you mean h100"):
        load_hardware("h1000")


# -- runs ---------------------------------------------------------------------


def test_run_options_have_defaults() -> None:
    options = RunOptions.checked(model=load_model(SMOLLM))
    assert options.engine == "vllm"
    assert options.tensor_parallel == 1
    assert options.execution_mode == "eager"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"layers": -1}, "layers"),
        ({"execution_mode": "lazy"}, "execution_mode"),
        ({"bloc_size": 16}, "bloc_size"),
    ],
)
def test_run_options_that_cannot_be(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field) as error:
        RunOptions.checked(model=load_model(SMOLLM), **values)
    one_line(error)


def test_descriptions_are_frozen() -> None:
    options = RunOptions.checked(model=load_model(SMOLLM))
    with pytest.raises(pydantic.ValidationError):
        options.engine = "sglang"  # type: ignore[misc]


# -- files --------------------------------------------------------------------


def test_configs_of_a_checkout_come_first() -> None:
    assert configs_folder() == Path(config.__file__).resolve().parent.parent / "configs"
