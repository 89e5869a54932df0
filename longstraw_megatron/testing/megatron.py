"""Megatron's process groups and random states in a test's ranks, on the CPU runtime."""

import contextlib
import gc
from collections.abc import Iterator

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from longstraw_megatron.mcore.cpu import cpu_runtime, enable_cpu_runtime

MEGATRON_ORDER = "tp-cp-ep-dp-pp"


def _is_group_table(name: str) -> bool:
    return name.startswith("_") and name[1:2].isupper()


def init_megatron(
    *,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    etp: int = 1,
    order: str = MEGATRON_ORDER,
    seed: int = 1234,
) -> ProcessGroupCollection:
    """Megatron's groups over the ranks of this job (data parallel follows), seeded; the CPU runtime stays enabled."""
    enable_cpu_runtime()
    return _init_groups(tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp, order=order, seed=seed)


def _init_groups(*, tp=1, cp=1, pp=1, vpp=None, ep=1, etp=1, order=MEGATRON_ORDER, seed=1234) -> ProcessGroupCollection:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        order=order,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return ProcessGroupCollection.use_mpu_process_groups()


@contextlib.contextmanager
def single_rank(*, seed: int = 1234) -> Iterator[ProcessGroupCollection]:
    """Megatron in this very process, as the only rank, for a block; `run_ranks` can fork again after it."""
    # destroy_model_parallel forgets some of its tables, and a forked process that clears one later dies in gloo
    tables = {name: value for name, value in vars(parallel_state).items() if _is_group_table(name)}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with cpu_runtime():
            yield _init_groups(seed=seed)
    finally:
        parallel_state.destroy_model_parallel()
        vars(parallel_state).update(tables)
        dist.destroy_process_group()
        gc.collect()
