"""What the product makes in the middle of a phase is counted under its item, and on the host what lies there."""

import sys
from collections.abc import Callable

from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor

from longstraw_megatron.comm.ring import Ring
from longstraw_megatron.config import OptimizerConfig
from longstraw_megatron.mcore import session
from longstraw_megatron.mcore.patching import Patch
from longstraw_megatron.ops import host
from longstraw_megatron.ops.staging import HostStaging
from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.live import LiveMemory
from longstraw_megatron.segments.logprobs import _BlockedLogprobs
from longstraw_megatron.state import BoundaryStates, PagedRows

REASON = "bytes by item"


def _counted(live: LiveMemory, owner: object, name: str, item: Item | None, *, on_host: bool = False) -> Patch:
    method = vars(owner)[name]
    is_static = isinstance(method, staticmethod)
    function = method.__func__ if is_static else method

    def wrapper(*args, **kwargs):
        with live.counted_as(item, on_host=on_host):
            return function(*args, **kwargs)

    return Patch(owner, name, staticmethod(wrapper) if is_static else wrapper, REASON)


def counted_build(live: LiveMemory, optimizer: OptimizerConfig) -> list[Patch]:
    """Weights, DDP's buffers and the optimizer, as a session makes them."""
    on_host = optimizer.optimizer_cpu_offload and optimizer.optimizer_offload_fraction == 1.0
    wrap_ddp = session.wrap_ddp

    def counted_ddp(*args, **kwargs):
        with live.counted_as(Item.GRADIENTS):
            chunks = wrap_ddp(*args, **kwargs)
        # a distributed optimizer's DDP moves the weights into a buffer of its own
        live.recount((p.data for chunk in chunks for p in chunk.parameters()), Item.WEIGHTS)
        return chunks

    return [
        _counted(live, session, "build_model", Item.WEIGHTS),
        Patch(session, "wrap_ddp", counted_ddp, REASON),
        _counted(live, session, "build_optimizer", Item.OPTIMIZER, on_host=on_host),
    ]


def counted_state(live: LiveMemory) -> list[Patch]:
    """Rows, boundaries and their accumulators."""
    put = BoundaryStates.put

    def counted_put(self, boundary: int, *values: Tensor) -> None:
        live.recount(values, Item.BOUNDARIES)
        with live.counted_as(Item.BOUNDARIES):
            put(self, boundary, *values)

    return [
        _counted(live, PagedRows, "append", Item.STATE),
        _counted(live, PagedRows, "_accumulators", Item.STATE_GRADIENTS),
        Patch(BoundaryStates, "put", counted_put, REASON),
        _counted(live, BoundaryStates, "add_grad", Item.BOUNDARY_GRADIENTS),
    ]


def counted_buffers(live: LiveMemory) -> list[Patch]:
    """Blocks of logits and what is made of them, and buffers of communication."""
    return [
        _counted(live, _BlockedLogprobs, "forward", Item.LOGITS),
        _counted(live, _BlockedLogprobs, "backward", Item.LOGITS),
        _counted(live, GlobalMemoryBuffer, "get_tensor", Item.COMMUNICATION),
        _counted(live, Ring, "send_recv", Item.COMMUNICATION),
    ]


def _everywhere(function: Callable, replacement: Callable, reason: str) -> list[Patch]:
    """In every module of ours that has imported `function`."""
    ours = [module for name, module in sys.modules.items() if name.startswith("longstraw_megatron")]
    return [
        Patch(module, name, replacement, reason)
        for module in ours
        for name, value in list(vars(module).items())
        if value is function
    ]


def counted_host(live: LiveMemory) -> list[Patch]:
    """Copies between the device and the host, which on a CPU are the same."""

    def to_host(tensor: Tensor) -> Tensor:
        with live.counted_as(live.item_of(tensor), on_host=True):
            return tensor.clone()

    def to_device(tensor: Tensor, device: object) -> Tensor:
        with live.counted_as(live.item_of(tensor)):
            return tensor.clone()

    return [
        *_everywhere(host.to_host, to_host, REASON),
        *_everywhere(host.to_device, to_device, REASON),
        _counted(live, HostStaging, "empty", None, on_host=True),
    ]
