"""Process groups of any size of which only one rank exists: collectives have their shapes and do nothing."""

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # noqa: F401  gives the collectives' operators fake forms
from megatron.core import parallel_state
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_impls import register_op_impl
from torch.testing._internal.distributed.fake_pg import FakeStore

from longstraw_megatron.config import Config
from longstraw_megatron.mcore.cpu import enable_cpu_runtime
from longstraw_megatron.mcore.parallel import ParallelContext, init_parallel
from longstraw_megatron.mcore.patching import Patch

_c10d = torch.ops.c10d


@register_op_impl(
    [
        _c10d.reduce_scatter_tensor_coalesced_.default,
        _c10d.allgather_into_tensor_coalesced_.default,
        _c10d.allreduce_coalesced_.default,
    ]
)
def _coalesced(mode, func, *args, **kwargs):
    return FakeWork().boxed()


def _all_gather_object(gathered: list, mine: object, group=None) -> None:
    gathered[:] = [mine] * len(gathered)


def alone() -> list[Patch]:
    """Objects are pickled into tensors on their way, which fake ones can't hold: the others have what this rank has."""
    return [Patch(dist, "all_gather_object", _all_gather_object, "optimizer/__init__.py:364")]


def init_fake_ranks(config: Config, rank: int, world_size: int) -> ParallelContext:
    """The layout of `config` on `world_size` ranks, seen from `rank`."""
    enable_cpu_runtime()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        create_gloo_process_groups=False,
    )
    return init_parallel(parallel, device=torch.device("cpu"), seed=config.seed, timeout_s=config.dist.timeout_s)
