"""Process groups and devices: torch.distributed and Megatron's parallel state, initialised once per process."""

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from longstraw_megatron.config import ParallelConfig
from longstraw_megatron.mcore.cpu import enable_cpu_runtime


@dataclass(frozen=True, eq=False)
class ParallelContext:
    """Where this process stands. `groups` are Megatron's; everything below is passed down from here."""

    groups: ProcessGroupCollection
    device: torch.device
    parallel: ParallelConfig

    @property
    def global_rank(self) -> int:
        return dist.get_rank()

    @property
    def is_first(self) -> bool:
        """Whether this rank prints, logs and writes files."""
        return dist.get_rank() == 0

    @property
    def row_multiple(self) -> int:
        """What the rows of a shard must be a multiple of: sequence parallelism cuts them over TP."""
        return self.groups.tp.size() if self.parallel.sp else 1


def init_distributed(device: torch.device, *, timeout_s: float) -> None:
    """torch.distributed from torchrun's environment (a lone process needs none): NCCL on CUDA, gloo on a CPU."""
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(seconds=timeout_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def init_parallel(parallel: ParallelConfig, *, device: torch.device, seed: int, timeout_s: float) -> ParallelContext:
    """Megatron's parallel state for the sizes of `parallel`, and its RNG tracker."""
    if device.type == "cpu":
        enable_cpu_runtime()
    init_distributed(device, timeout_s=timeout_s)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=parallel.etp,
            distributed_timeout_minutes=max(timeout_s / 60, 1 / 60),
            create_gloo_process_groups=device.type == "cpu",
        )
    model_parallel_cuda_manual_seed(seed)
    return ParallelContext(ProcessGroupCollection.use_mpu_process_groups(), device, parallel)


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one; a CUDA device is this process's own by LOCAL_RANK."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def pipeline_ranks() -> list[list[int]]:
    """The global ranks of every pipeline of the job, in pipeline order; alike on all ranks."""
    mine = tuple(dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()))
    everyone: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return [list(pipeline) for pipeline in sorted(set(everyone))]
