"""vLLM as one rank of a group whose other ranks do not exist.

Imported only once vLLM is. Everything that reaches into vLLM's internals for
the sake of emulation is here:

- torch.distributed is initialised with its "fake" backend for the whole world,
  which vLLM then uses as it uses one that torchrun has made;
- `EmulatedGroup` and `EmulatedCommunicator` take the place of vLLM's group
  coordinator and device communicator and record instead of communicating;
- `EmulatedExecutor` is an executor with one worker, which has this rank.

`emulated` holds the few patches that vLLM offers no setting for, and undoes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm import envs
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.parallel_state import GraphCaptureContext, GroupCoordinator
from vllm.distributed.utils import get_pp_indices
from vllm.forward_context import DPMetadata
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from dooly_backend.engines.parallel import GROUPS, Rank, define_operations
from dooly_backend.errors import EngineError

_FAKE = "fake"


def stage_layers(kinds: Sequence[str], rank: Rank) -> range:
    """The layers of the whole model that vLLM gives to the rank's pipeline stage.

    Raises EngineError for a group that cannot be emulated, or that vLLM would refuse
    with less clear words.
    """
    _check(kinds, rank)
    try:
        return range(*get_pp_indices(len(kinds), rank.stage, rank.pipeline))
    except ValueError as error:  # the user's own VLLM_PP_LAYER_PARTITION
        raise EngineError(f"vLLM cannot divide {len(kinds)} layers: {error}") from error


def _check(kinds: Sequence[str], rank: Rank) -> None:
    if rank.pipeline > len(kinds):
        raise EngineError(f"{len(kinds)} layers cannot be divided into {rank.pipeline} stages")
    if rank.expert > 1 and not any(kind.endswith("/moe") for kind in kinds):
        raise EngineError("the model has no experts to divide: leave out --ep")
    if rank.data > 1 and rank.tensor > 1:
        # vLLM then gives each rank ceil(T / tp) tokens of a padded batch, which
        # no formula of the tokens predicts.
        raise EngineError(
            f"--ep {rank.expert} with --tp {rank.tensor} is not emulated: "
            "use --ep equal to --tp, or --tp 1"
        )


@contextmanager
def emulated(rank: Rank, stage: range, built: int) -> Iterator[dict[str, Any]]:
    """The world of `rank`, for as long as its engine lives; yields arguments for EngineArgs.

    Of its `stage` only the first `built` layers are made: vLLM is told that
    the earlier stages have the layers before it, as they do, and the later ones
    none. A group of one needs nothing of this.
    """
    if rank.world == 1:
        yield {}
        return
    if torch.distributed.is_initialized():
        raise EngineError("another engine of this process is in a parallel group: close it first")
    partition = [0] * rank.pipeline
    partition[0], partition[rank.stage] = stage.start, built
    with ExitStack() as stack:
        # A module attribute, because vLLM caches its environment at the first start.
        division = ",".join(map(str, partition))
        if rank.pipeline > 1:
            stack.enter_context(patch.object(envs, "VLLM_PP_LAYER_PARTITION", division))
        stack.enter_context(patch.object(DPMetadata, "make", _same_on_every_replica))
        if rank.expert > 1 and current_platform.is_cpu():
            from dooly_backend.engines.parallel_cpu import experts_owned

            stack.enter_context(experts_owned())
        _init_fake_world(rank)
        stack.callback(_leave)
        yield _arguments(rank)


@contextmanager
def groups_emulated(rank: Rank) -> Iterator[None]:
    """VLLM makes emulated groups while the block runs; they stay what they are."""
    if rank.world == 1:
        yield
        return
    with (
        patch.object(parallel_state, "GroupCoordinator", EmulatedGroup),
        # It asks the other ranks by shared memory.
        patch.object(parallel_state, "in_the_same_node_as", _in_one_node),
    ):
        yield


def _arguments(rank: Rank) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "tensor_parallel_size": rank.tensor,
        "pipeline_parallel_size": rank.pipeline,
        "enable_expert_parallel": rank.expert > 1,
        "distributed_executor_backend": executor_for(rank),
    }
    if rank.data > 1:
        arguments |= {"data_parallel_size": rank.data, "data_parallel_rank": rank.data_rank}
    if rank.pipeline > 1:
        # Sampled tokens would come from the last stage while the next step runs.
        arguments["async_scheduling"] = False
    return arguments


def _init_fake_world(rank: Rank) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    define_operations()
    torch.distributed.init_process_group(
        _FAKE, store=FakeStore(), rank=rank.rank, world_size=rank.world
    )


def _leave() -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _in_one_node(group: Any, source_rank: int = 0) -> list[bool]:
    return [True] * torch.distributed.get_world_size(group)


def _same_on_every_replica(
    parallel_config: Any, num_tokens: int, num_tokens_across_dp_cpu: torch.Tensor
) -> DPMetadata:
    """Every data-parallel replica runs as many tokens as this one."""
    return DPMetadata(torch.full_like(num_tokens_across_dp_cpu, num_tokens))


# -- groups -------------------------------------------------------------------------------


class EmulatedGroup(GroupCoordinator):
    """A group of which this process is one rank and the others never answer."""

    def __init__(
        self,
        group_ranks: list[list[int]],
        local_rank: int,
        torch_distributed_backend: Any,
        use_device_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        **options: Any,
    ) -> None:
        # vLLM's own constructor, without communicator and message queue, and
        # with fake groups also where it asks for gloo.
        with patch.object(torch.distributed, "new_group", _fake_group):
            super().__init__(group_ranks, local_rank, _FAKE, False, group_name=group_name)
        # Collectives show up once, as dooly's operations, on every platform.
        self.use_custom_op_call = False
        self.use_cpu_custom_send_recv = False
        self.runner: Any = None
        self.use_device_communicator = use_device_communicator
        if use_device_communicator and self.world_size > 1:
            self.device_communicator = EmulatedCommunicator(
                cpu_group=self.cpu_group,
                device=self.device,
                device_group=self.device_group,
                unique_name=self.unique_name,
                **options,
            )

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        if self.world_size == 1 or self.device_communicator is None:
            return input_
        return self.device_communicator.broadcast(input_, src)

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        return obj

    def broadcast_object_list(self, obj_list: list[Any], src: int = 0, group: Any = None) -> Any:
        return obj_list

    def broadcast_tensor_dict(self, tensor_dict: Any = None, *_: Any, **__: Any) -> Any:
        return tensor_dict

    def isend_tensor_dict(self, tensor_dict: Any, *_: Any, **__: Any) -> list[Any]:
        return []

    def irecv_tensor_dict(self, *_: Any, **__: Any) -> tuple[Any, list[Any], list[Any]]:
        """What vLLM's worker asks for while it warms up; steps use `received`.

        It does not say for how many tokens and takes as many as it needs.
        """
        return self.runner.intermediate_tensors.tensors, [], []

    def barrier(self) -> None:
        return None

    @contextmanager
    def graph_capture(self, graph_capture_context: Any = None) -> Iterator[Any]:
        """As vLLM's, without the communicators that a capture must prepare."""
        context = graph_capture_context or GraphCaptureContext(torch.cuda.Stream())
        current = torch.cuda.current_stream()
        if current != context.stream:
            context.stream.wait_stream(current)
        with torch.cuda.stream(context.stream):
            yield context


def _fake_group(ranks: Any = None, backend: Any = None, **options: Any) -> Any:
    del backend
    return _new_group(ranks, backend=_FAKE, **options)


_new_group = torch.distributed.new_group


class EmulatedCommunicator(DeviceCommunicatorBase):
    """Records collectives as ``dooly::`` operations with the shapes they would give."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        kind = self.unique_name.split(":")[0]
        self._kind = kind if kind in GROUPS else "world"
        if self.use_all2all:
            # What vLLM uses by default, and whose operations are collectives:
            # dispatch gathers tokens and routes, combine scatters the sums.
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)

    def _call(self, name: str, *args: Any) -> Any:
        return getattr(getattr(torch.ops.dooly, name), self._kind)(*args)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return self._call("all_reduce", input_, self.world_size)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        return self._call("broadcast", tensor, self.world_size)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self._call("all_gather", input_, dim % input_.dim(), self.world_size)

    def all_gatherv(self, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        _refuse_uneven(sizes)
        if isinstance(input_, list):
            return [self.all_gather(tensor, dim) for tensor in input_]
        return self.all_gather(input_, dim)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self._call("reduce_scatter", input_, dim % input_.dim(), self.world_size)

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        _refuse_uneven(sizes)
        return self.reduce_scatter(input_, dim)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        whole = self._call("gather", input_, dim % input_.dim(), self.world_size)
        return whole if self.rank_in_group == dst else None

    def dispatch(self, *args: Any, **options: Any) -> Any:
        assert self.all2all_manager is not None
        return self.all2all_manager.dispatch(*args, **options)

    def dispatch_router_logits(self, *args: Any, **options: Any) -> Any:
        assert self.all2all_manager is not None
        return self.all2all_manager.dispatch_router_logits(*args, **options)

    def combine(self, *args: Any, **options: Any) -> Any:
        assert self.all2all_manager is not None
        return self.all2all_manager.combine(*args, **options)

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        self._call("send", tensor)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        return self._call("recv", torch.zeros(size, dtype=dtype, device=self.device))


def _refuse_uneven(sizes: Sequence[int] | None) -> None:
    if sizes is not None and len(set(sizes)) > 1:
        raise EngineError(f"ranks with different numbers of tokens ({sizes}) are not emulated")


# -- the worker and its pipeline ------------------------------------------------------------


def executor_for(rank: Rank) -> type[UniProcExecutor]:
    """An executor with one worker, the one of `rank`, on the first device."""

    class EmulatedExecutor(UniProcExecutor):
        supports_pp = True

        def _distributed_args(self) -> tuple[str, int, int]:
            return "env://", rank.rank_in_replica, 0  # the method is not used

        def _init_executor(self) -> None:
            # Or a GPU worker takes the device of its replica's number.
            self.vllm_config.parallel_config.data_parallel_rank_local = 0
            super()._init_executor()
            group = parallel_state.get_pp_group()
            group.runner = self.driver_worker.worker.model_runner
            _complete_pipeline(group.runner, group)

    return EmulatedExecutor


def received(runner: Any, num_tokens: int) -> IntermediateTensors | None:
    """What a step of `num_tokens` receives from the stage before; None at the first one."""
    group = parallel_state.get_pp_group()
    if group.is_first_rank:
        return None
    # Into the runner's own buffers: it copies what arrives there, here onto itself.
    buffers = runner.intermediate_tensors.tensors
    return IntermediateTensors(
        {name: _arrive(buffer[:num_tokens]) for name, buffer in buffers.items()}
    )


def sent(output: Any) -> bool:
    """Record that a stage's result goes to the next one; whether it is such a result."""
    if not isinstance(output, IntermediateTensors):
        return False
    for tensor in output.tensors.values():
        part = _part(tensor)
        torch.ops.dooly.send.pp(tensor if part is None else part)
    return True


def _arrive(tensor: torch.Tensor) -> torch.Tensor:
    """Received in parts, one by each tensor-parallel rank, which then share them."""
    part = _part(tensor)
    if part is None:
        return torch.ops.dooly.recv.pp(tensor)
    tp = parallel_state.get_tp_group()
    return tp.all_gather(torch.ops.dooly.recv.pp(part), dim=0).reshape(tensor.shape)


def _part(tensor: torch.Tensor) -> torch.Tensor | None:
    """The part of `tensor` that a tensor-parallel rank sends, None where it sends all of it."""
    tp = parallel_state.get_tp_group()
    if tp.world_size == 1 or tensor.numel() % tp.world_size:
        return None
    return tensor.reshape(tp.world_size, -1)[tp.rank_in_group]


def _complete_pipeline(runner: Any, group: EmulatedGroup) -> None:
    """What a runner lacks without the neighbours of its stage, and without their warm-up."""
    if not group.is_first_rank and runner.intermediate_tensors is None:
        # V1 makes this buffer in a dummy run, which an eager CPU engine skips.
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            runner.max_num_tokens, runner.dtype, runner.device
        )
    handler = getattr(runner, "pp_handler", None)
    if handler is not None and not group.is_last_rank:
        # V2 would take the tokens that the last stage samples, uninitialised,
        # out of a fake broadcast; without them it repeats the last ones.
        handler.receive = lambda input_batch: False
