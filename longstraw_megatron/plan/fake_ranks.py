"""Process groups of any size of which only one rank exists, on a device without memory.

Tensors are meta tensors: they have shapes and storages, and no bytes. (FakeTensorMode would keep up the device too, at
five to ten times the cost of an operation.) `LiveMemory` answers where a value or a collective's result is asked for.
"""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from longstraw_megatron.config import Config
from longstraw_megatron.mcore import cpu
from longstraw_megatron.mcore.parallel import ParallelContext, init_parallel
from longstraw_megatron.mcore.patching import Patch

_tensor_type = torch.Tensor.type
META = torch.device("meta")
MAKERS = tuple(name for name in cpu.FACTORIES if not name.endswith("_like") and name != "as_tensor")


def _all_gather_object(gathered: list, mine: object, group=None) -> None:
    gathered[:] = [mine] * len(gathered)


def _on_meta(maker: Callable) -> Callable:
    @functools.wraps(maker)
    def wrapper(*args, **kwargs):
        return maker(*args, **kwargs | {"device": META})

    return wrapper


def _type(tensor: torch.Tensor, dtype: object = None, *args, **kwargs):
    """What `Tensor.type` says on a GPU: the optimizers ask for the name (optimizer/optimizer.py:1033)."""
    out = _tensor_type(tensor, dtype, *args, **kwargs)
    return out.replace("torch.meta.", "torch.cuda.") if isinstance(out, str) else out


def no_memory() -> list[Patch]:
    """New tensors are meta tensors, whatever device they name. Apply when the CPU runtime is on."""
    reason = "a dry run makes no memory"
    # objects are pickled into tensors on their way: the others have what this rank has (optimizer/__init__.py:364)
    alone = Patch(dist, "all_gather_object", _all_gather_object, "no value travels")
    return [
        alone,
        Patch(torch.Tensor, "type", _type, reason),
        Patch(torch, "from_numpy", lambda array: torch.tensor(array), reason),
        *(Patch(torch, name, _on_meta(getattr(torch, name)), reason) for name in MAKERS),
    ]


def init_fake_ranks(config: Config, rank: int, world_size: int) -> ParallelContext:
    """The layout of `config` on `world_size` ranks, seen from `rank`."""
    cpu.CPU = META  # what Megatron takes for its GPU
    cpu.enable_cpu_runtime()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    return init_parallel(config.parallel, device=META, seed=config.seed, timeout_s=config.dist.timeout_s)
