"""One rank of a TP, PP or EP group on one device: shapes, collectives, stages, refusals.

The ranks run one after the other in one process (`parallel_ranks.py`), which
also shows that an emulated engine leaves nothing behind for the next one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Dooly
from pydantic import ValidationError

from dooly_backend.config import ModelDescription, RunOptions
from dooly_backend.engines.layers import layers_needed, layers_represented
from dooly_backend.engines.parallel import Rank, define_operations, is_collective
from dooly_backend.errors import InputError

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
RUNS: Mapping[str, tuple[dict[str, Any], dict[str, int]]] = {
    "whole": (DENSE, {}),
    "tp 2": (DENSE, {"tensor_parallel": 2}),
    "tp 4": (DENSE, {"tensor_parallel": 4, "rank": 3}),
    "tp 3": (DENSE, {"tensor_parallel": 3}),
    "stage 0": (DENSE, {"pipeline_parallel": 3, "rank": 0}),
    "stage 1": (DENSE, {"pipeline_parallel": 3, "rank": 1}),
    "stage 2": (DENSE, {"pipeline_parallel": 3, "rank": 2}),
    "tp 2 pp 2": (DENSE, {"tensor_parallel": 2, "pipeline_parallel": 2, "rank": 3}),
    "half the heads": (DENSE | {"num_attention_heads": 4, "num_key_value_heads": 1}, {}),
    "moe tp 2": (MOE, {"tensor_parallel": 2}),
    "moe tp 4 ep 4": (MOE, {"tensor_parallel": 4, "expert_parallel": 4, "rank": 3}),
    "moe ep 4": (MOE, {"expert_parallel": 4, "rank": 1}),
    "fails": (DENSE, {"tensor_parallel": 2, "fails": True}),
    "no experts": (DENSE, {"expert_parallel": 2}),
    "too many stages": (DENSE, {"pipeline_parallel": 11}),
    "whole again": (DENSE, {}),
}
REFUSED = {
    "tp 3": "vLLM refuses tiny: Total number of attention heads (8) must be divisible",
    "no experts": "the model has no experts to divide",
    "too many stages": "10 layers cannot be divided into 11 stages",
}
RUNNING = [name for name in RUNS if name not in REFUSED and name != "fails"]


@pytest.fixture(scope="session")
def ranks(needs_engine: None) -> dict[str, dict[str, Any]]:
    """What every run of `RUNS` showed; "left behind" is what it did not put back."""
    arguments = [json.dumps({"hf_config": config, **options}) for config, options in RUNS.values()]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("parallel_ranks.py")), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip((*RUNS, "left behind"), lines, strict=True))


def counts(rank: Mapping[str, Any], path: str) -> int:
    """Calls of one module in a step of the whole stage."""
    return sum(count for p, _, count, _, _ in rank["occurrences"] if p.endswith(path))


@pytest.mark.engine
def test_an_engine_that_fails_once_vllm_runs_leaves_nothing_behind(
    ranks: dict[str, dict[str, Any]],
) -> None:
    assert ranks["fails"] == {
        "error": "no configuration",
        "folders": 0,
        "left behind": [],
        "shut down": True,
    }


# -- the ranks --------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.parametrize("name", RUNNING)
def test_a_rank_is_traced_as_well_as_a_whole_model(
    ranks: dict[str, dict[str, Any]], name: str
) -> None:
    rank = ranks[name]
    assert (rank["accuracy"], rank["predicted"], rank["unlabelled"]) == (1.0, True, 0)
    assert rank["steps"] == 3


@pytest.mark.engine
@pytest.mark.parametrize("name", RUNNING)
def test_every_kernel_of_a_rank_lies_under_one_entry(
    ranks: dict[str, dict[str, Any]], name: str
) -> None:
    """In bfloat16, with the conversions that it needs and float32 does not."""
    kernels, is_exact = ranks[name]["cover"]
    assert is_exact
    assert kernels > 20 * ranks[name]["built"]


@pytest.mark.engine
@pytest.mark.parametrize("name", RUNNING)
def test_collectives_are_recorded_and_never_timed(
    ranks: dict[str, dict[str, Any]], name: str
) -> None:
    assert ranks[name]["timed"] == []
    assert bool(ranks[name]["collectives"]) == (
        name not in {"whole", "half the heads", "whole again"}
    )


@pytest.mark.engine
def test_parameters_have_the_shapes_of_a_rank(ranks: dict[str, dict[str, Any]]) -> None:
    shapes = {name: ranks[name]["parameters"] for name in RUNNING}
    embedding, experts = "model.embed_tokens.weight", "model.layers.1.mlp.experts.routed_experts."
    assert shapes["whole"][embedding] == [1024, 512]
    assert shapes["tp 2"][embedding] == [512, 512]
    assert shapes["tp 4"][embedding] == [256, 512]
    assert shapes["moe tp 2"][experts + "w13_weight"] == [8, 128, 256]
    assert shapes["moe tp 2"][experts + "w2_weight"] == [8, 256, 64]


@pytest.mark.engine
def test_operations_have_the_shapes_of_a_rank(ranks: dict[str, dict[str, Any]]) -> None:
    layer = "model.layers.1."
    columns = {
        name: [
            ranks[name]["outputs"][layer + path]
            for path in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj")
        ]
        for name in ("whole", "tp 2", "tp 4")
    }
    assert columns == {
        "whole": [(8 + 2 * 2) * 64, 512, 2 * 768],
        "tp 2": [(4 + 2 * 1) * 64, 512, 768],
        "tp 4": [(2 + 2 * 1) * 64, 512, 384],  # two KV heads on four ranks: each has one
    }
    assert [ranks[name]["queries"][1:] for name in columns] == [[8, 64], [4, 64], [2, 64]]


@pytest.mark.engine
def test_tensor_parallel_ranks_reduce_twice_a_layer_and_gather_logits(
    ranks: dict[str, dict[str, Any]],
) -> None:
    for name, degree in (("tp 2", 2), ("tp 4", 4)):
        tokens, requests = ranks[name]["tokens"], ranks[name]["requests"]
        hidden = f"{tokens}:num_toks,512:model_config"
        part = f"{requests}:num_reqs,{1024 // degree}:model_config"
        assert ranks[name]["collectives"] == {
            f"dooly::all_reduce.tp {hidden} -> {hidden}": 1 + 2 * ranks[name]["built"],
            f"dooly::all_gather.tp {part} -> {requests}:num_reqs,1024:model_config": 1,
        }


@pytest.mark.engine
def test_stages_divide_the_layers_and_what_is_around_them(
    ranks: dict[str, dict[str, Any]],
) -> None:
    stages = [ranks[f"stage {i}"] for i in range(3)]
    assert [stage["stage"] for stage in stages] == [[0, 3], [3, 7], [7, 10]]
    assert [stage["built"] for stage in stages] == [2, 2, 2]
    for path in ("self_attn.attn", "mlp.down_proj"):
        assert [counts(stage, path) for stage in stages] == [3, 4, 3]
    assert [counts(stage, "embed_tokens") for stage in stages] == [1, 0, 0]
    assert [counts(stage, "logits_processor") for stage in stages] == [0, 0, 1]
    assert [counts(stage, "sampler") for stage in stages] == [0, 0, 1]
    assert counts(ranks["whole"], "self_attn.attn") == 10


@pytest.mark.engine
def test_stages_together_are_the_whole_model(ranks: dict[str, dict[str, Any]]) -> None:
    def work(*names: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in names:
            for _, _, count, _, signature in ranks[name]["occurrences"]:
                found[signature] = found.get(signature, 0) + count
        return found

    assert work("stage 0", "stage 1", "stage 2") == work("whole")


@pytest.mark.engine
def test_the_layers_of_a_stage_keep_their_numbers(ranks: dict[str, dict[str, Any]]) -> None:
    (layers,) = {tuple(o[3]) for o in ranks["stage 1"]["occurrences"] if "layers" in o[0]}
    assert layers == (3, 4, 5, 6)
    assert "model.layers.3.self_attn.attn" in ranks["stage 1"]["modules"]


@pytest.mark.engine
def test_stages_send_and_receive_hidden_states_and_residual(
    ranks: dict[str, dict[str, Any]],
) -> None:
    hidden = f"{ranks['stage 1']['tokens']}:num_toks,512:model_config"
    receive, send = f"dooly::recv.pp {hidden} -> {hidden}", f"dooly::send.pp {hidden} -> "
    assert ranks["stage 0"]["collectives"] == {send: 2}
    assert ranks["stage 1"]["collectives"] == {receive: 2, send: 2}
    assert ranks["stage 2"]["collectives"] == {receive: 2}


@pytest.mark.engine
def test_tensor_parallel_stages_send_a_part_each(ranks: dict[str, dict[str, Any]]) -> None:
    rank = ranks["tp 2 pp 2"]
    names = {text.split()[0]: count for text, count in rank["collectives"].items()}
    sizes = {text.split()[0]: text.split()[1] for text in rank["collectives"]}
    assert names["dooly::recv.pp"] == 2
    assert int(sizes["dooly::recv.pp"].split(":")[0]) == rank["tokens"] * 512 // 2
    assert rank["degrees"] == [2, 2]
    assert rank["stage"] == [5, 10]


@pytest.mark.engine
def test_expert_parallel_ranks_own_their_share_of_the_experts(
    ranks: dict[str, dict[str, Any]],
) -> None:
    experts = "model.layers.1.mlp.experts.routed_experts.w13_weight"
    for name in ("moe tp 4 ep 4", "moe ep 4"):
        assert ranks[name]["parameters"][experts] == [2, 256, 256]
    assert ranks["moe tp 4 ep 4"]["queries"][1:] == [2, 64]
    assert ranks["moe ep 4"]["queries"][1:] == [8, 64]  # every replica has all heads


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "experts"),
    [("moe tp 2", range(8)), ("moe tp 4 ep 4", range(6, 8)), ("moe ep 4", range(2, 4))],
)
def test_exactly_so_many_experts_fire(
    ranks: dict[str, dict[str, Any]], name: str, experts: range
) -> None:
    """In both layers, of those that the rank owns, as the kernel is told."""
    fired = dict(ranks[name]["fired"])
    many = len(experts)
    assert fired.pop("more") == f"{many + 1} experts cannot fire where a rank has {many}"
    assert fired == {str(n): [list(experts[:n])] * 2 for n in range(1, many + 1)}


@pytest.mark.engine
def test_replicas_dispatch_tokens_to_the_experts_and_combine_them(
    ranks: dict[str, dict[str, Any]],
) -> None:
    rank = ranks["moe ep 4"]
    tokens, found = rank["tokens"], rank["collectives"]
    mine, all_of_them = f"{tokens}:num_toks,256:model_config", f"{4 * tokens}:num_toks,256"
    assert found[f"dooly::all_gather.dp {mine} -> {all_of_them}:model_config"] == 2
    assert found[f"dooly::reduce_scatter.dp {all_of_them}:model_config -> {mine}"] == 2


@pytest.mark.engine
def test_equal_geometry_gives_equal_signatures(ranks: dict[str, dict[str, Any]]) -> None:
    def attention(name: str) -> set[str]:
        return {o[4] for o in ranks[name]["occurrences"] if o[1] == "Attention"}

    assert attention("tp 2") == attention("half the heads")
    assert attention("tp 2") != attention("whole")


@pytest.mark.engine
def test_stages_and_degrees_are_configurations_of_their_own(
    ranks: dict[str, dict[str, Any]],
) -> None:
    digests = [ranks[name]["configuration"] for name in RUNNING if name != "whole again"]
    assert len(set(digests)) == len(digests)
    assert ranks["tp 4"]["degrees"] == [4, 1]
    assert ranks["stage 1"]["degrees"] == [1, 3]


@pytest.mark.engine
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused(ranks: dict[str, dict[str, Any]], name: str) -> None:
    assert ranks[name]["error"].startswith(REFUSED[name])
    assert "\n" not in ranks[name]["error"]


@pytest.mark.engine
def test_nothing_is_left_behind(ranks: dict[str, dict[str, Any]]) -> None:
    assert ranks["left behind"] == []
    assert ranks["whole again"] == ranks["whole"]


@pytest.mark.engine
def test_the_command_line_refuses_in_one_line(
    needs_engine: None, dooly: Dooly, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    result = dooly("trace", tmp_path, "--tp", 3)
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "must be divisible by tensor parallel size (3)" in errors[0]
    assert "Traceback" not in result.stderr


# -- without an engine --------------------------------------------------------------------------


def test_ranks_are_numbered_as_vllm_numbers_them() -> None:
    rank = Rank(tensor=2, pipeline=3, rank=5)
    assert (rank.world, rank.data, rank.stage, rank.rank_in_replica) == (6, 1, 2, 5)
    replica = Rank(tensor=1, pipeline=2, expert=4, rank=5)
    assert (replica.world, replica.data, replica.data_rank, replica.stage) == (8, 4, 2, 1)
    assert Rank(tensor=4, expert=4).data == 1


def test_tensor_parallel_ranks_share_an_identity() -> None:
    assert Rank(tensor=4, rank=0).identity == Rank(tensor=4, rank=3).identity == {}
    assert Rank(pipeline=2, rank=1).identity == {"stage": 1}
    assert Rank(tensor=2, expert=2).identity == {"expert_parallel": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2, "rank": 2}, "rank 2 is beyond the 2 ranks"),
        ({"tensor_parallel": 2, "expert_parallel": 3}, "no multiple of tensor_parallel 2"),
        ({"pipeline_parallel": 0}, "pipeline_parallel: "),
    ],
)
def test_options_that_make_no_group_are_refused(options: dict[str, int], message: str) -> None:
    model = ModelDescription(name="tiny", hf_config=DENSE)
    with pytest.raises(InputError, match=message):
        RunOptions.checked(model=model, **options)
    with pytest.raises(ValidationError):
        RunOptions(model=model, **options)


@pytest.mark.parametrize(
    ("name", "communicates"),
    [
        ("dooly::all_reduce.tp", True),
        ("dooly::recv", True),
        ("vllm::all_gather.default", True),
        ("c10d::allreduce_.default", True),
        ("dooly::experts_owned.default", False),
        ("aten::add.Tensor", False),
        ("vllm::moe_forward.default", False),
    ],
)
def test_collectives_are_known_by_name(name: str, communicates: bool) -> None:
    assert is_collective(name) is communicates


def test_layers_of_a_stage() -> None:
    kinds = ["a", "a", "a", "b", "a", "a"]
    assert layers_needed(kinds) == 4
    assert layers_needed(kinds, range(3, 6)) == 2
    assert layers_needed(kinds, range(4, 6)) == 2
    assert layers_needed(kinds, range(5, 6)) == 1
    assert layers_represented(kinds, 2, range(3, 6)) == {3: (3,), 4: (4, 5)}
    assert layers_represented(kinds, 2, range(4, 6)) == {4: (4, 5), 5: ()}
    with pytest.raises(InputError, match="does not show every kind of layer: b would"):
        layers_represented(kinds, 2, range(0, 6))


def test_collectives_have_the_shapes_that_they_would_give() -> None:
    torch = pytest.importorskip("torch")
    operations = define_operations()
    x = torch.arange(12.0).reshape(4, 3)
    assert operations.all_reduce.tp(x, 4).data_ptr() == x.data_ptr()
    assert operations.all_gather.tp(x, 1, 4).shape == (4, 12)
    gathered = operations.all_gather.dp(x, 0, 2)
    assert gathered.shape == (8, 3)
    assert torch.equal(gathered[:4], x)  # this rank's rows, and back
    assert torch.equal(operations.reduce_scatter.dp(gathered, 0, 2), x)
    ids = torch.arange(6, dtype=torch.int32).reshape(3, 2)
    assert operations.all_gather.ep(ids, 0, 2).tolist() == [*ids.tolist(), *ids.tolist()]
    assert operations.send.pp(x) is None
