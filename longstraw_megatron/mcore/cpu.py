"""Megatron-Core 0.19 on a CPU with gloo: the one place that makes it run there.

`cpu_runtime()` holds for a block, `enable_cpu_runtime()` for the life of the process. Importing this file changes
nothing, and both refuse where CUDA is available, so the GPU path is never touched. What is replaced, and why, is data:
`cpu_patches()`; files in the reasons are those of megatron/core 0.19.2.

Megatron caches streams, masks and permutations per process: do not mix CPU and CUDA mode in one.
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator

import megatron.core.models.gpt.experimental_attention_variant_module_specs as variant_specs
import megatron.core.models.gpt.gpt_layer_specs as layer_specs
import megatron.core.ssm.gated_delta_net.common as gdn_common
import megatron.core.ssm.gated_delta_net.gdn as gdn
import megatron.core.tensor_parallel.random as megatron_random
import megatron.core.transformer.experimental_attention_variant.absorbed_mla as absorbed_mla
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import megatron.core.transformer.multi_latent_attention as mla
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore import cpu_modules
from longstraw_megatron.mcore.host_optimizer import cpu_host_optimizer_patches
from longstraw_megatron.mcore.optimizer_resume import resume_patches
from longstraw_megatron.mcore.patching import Patch, applied

CPU = torch.device("cpu")
FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones"),
    *("ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like"),
)


class _Stream:
    """A CUDA stream or event: CPU work is done when the call returns, and any two streams are the same."""

    def __init__(self, *args, **kwargs):
        pass

    def _nothing(self, *args, **kwargs) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, event: "_Stream | None" = None) -> "_Stream":
        return event or _Stream()

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exc) -> None:
        pass


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def _nothing(*args, **kwargs) -> None:
    pass


def _itself(self, *args, **kwargs):
    return self


def _on_cpu(factory: Callable) -> Callable:
    @functools.wraps(factory)
    def wrapper(*args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapper


def _to_cpu(to: Callable) -> Callable:
    @functools.wraps(to)
    def wrapper(self, *args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return to(self, *(CPU if _is_cuda(arg) else arg for arg in args), **kwargs)

    return wrapper


def _cuda_type_name(type_: Callable) -> Callable:
    @functools.wraps(type_)
    def wrapper(self, *args, **kwargs):
        out = type_(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(out, str) and ".cuda." not in out and caller.startswith("megatron.core.optimizer"):
            return out.replace("torch.", "torch.cuda.", 1)
        return out

    return wrapper


def _splits_to_numpy(move: Callable) -> Callable:
    @functools.wraps(move)
    def wrapper(tensor, as_numpy=False, record_stream=False):
        tensor = move(tensor, as_numpy=as_numpy, record_stream=record_stream)
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return wrapper


def _cuda_patches() -> Iterator[Patch]:
    """torch.cuda, and the device arguments that name it."""
    cuda = torch.cuda
    reason = "work on a CPU is done when the call returns (pipeline_parallel/p2p_communication.py:263)"
    for name in ("synchronize", "empty_cache"):
        yield Patch(cuda, name, _nothing, reason)
    for name in ("current_stream", "default_stream", "Stream", "Event"):
        yield Patch(cuda, name, _Stream, reason)
    yield Patch(cuda, "stream", contextlib.nullcontext, reason)
    yield Patch(cuda, "is_current_stream_capturing", lambda: False, reason)
    yield Patch(torch.Tensor, "record_stream", _nothing, reason)

    reason = "the random state is the CPU generator's (tensor_parallel/random.py:303)"
    yield Patch(cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state(), reason)
    yield Patch(cuda, "set_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state), reason)
    yield Patch(cuda, "manual_seed", lambda seed: torch.manual_seed(seed), reason)

    reason = "device='cuda' means the CPU (tensor_parallel/layers.py:305, optimizer/clip_grads.py:96)"
    yield Patch(cuda, "current_device", lambda: CPU, reason)
    yield Patch(torch.Tensor, "cuda", _itself, reason)
    yield Patch(torch.Tensor, "to", _to_cpu(torch.Tensor.to), reason)
    yield Patch(torch.nn.Module, "cuda", _itself, reason)
    # a TorchFunctionMode would be shorter but is off in backward, where recompute makes masks (transformer/utils.py:39)
    for name in FACTORIES:
        yield Patch(torch, name, _on_cpu(getattr(torch, name)), reason)
    reason = "there is no pinned memory (models/common/embeddings/rope_utils.py:63)"
    yield Patch(torch.Tensor, "pin_memory", _itself, reason)

    reason = "the optimizers ask for 'torch.cuda.FloatTensor' (optimizer/distrib_optimizer.py:466, clip_grads.py:174)"
    yield Patch(torch.Tensor, "type", _cuda_type_name(torch.Tensor.type), reason)


def _megatron_patches() -> Iterator[Patch]:
    """Megatron's own functions that know CUDA only."""
    reason = "the tracker of random states reads and writes CUDA's (tensor_parallel/random.py:104, 135)"
    yield Patch(megatron_random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state(), reason)
    yield Patch(
        megatron_random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state), reason
    )

    reason = "all_to_all_single refuses sizes in a tensor, and only a CUDA tensor is converted (moe/moe_utils.py:1184)"
    move = _splits_to_numpy(token_dispatcher.maybe_move_tensor_to_cpu)
    yield Patch(token_dispatcher, "maybe_move_tensor_to_cpu", move, reason)


def _stand_in_patches() -> Iterator[Patch]:
    """Local modules for Transformer Engine's and torch functions for fla's, where those are not installed."""
    if not HAVE_TE:
        reason = "TE specs and parameter names without TE (models/gpt/gpt_layer_specs.py:233, 578)"
        yield Patch(layer_specs, "TESpecProvider", cpu_modules.CpuSpecProvider, reason)
        yield Patch(layer_specs, "TENorm", cpu_modules.Norm, reason)
        yield Patch(variant_specs, "TESpecProvider", cpu_modules.CpuSpecProvider, reason)

        reason = "the class that a spec names is built with TE's arguments only if it is this one (absorbed_mla.py:282)"
        yield Patch(absorbed_mla, "TELinear", cpu_modules.DuplicatedLinear, reason)
        yield Patch(mla, "TELinear", cpu_modules.DuplicatedLinear, reason)
    if not gdn_common.HAVE_FLA:
        reason = "the gated delta rule without fla (ssm/gated_delta_net/common.py:141, 411, gdn.py:62, 214)"
        yield Patch(gdn_common, "HAVE_FLA", True, reason)
        yield Patch(gdn_common, "l2norm", cpu_modules.l2norm, reason)
        yield Patch(gdn, "causal_conv1d", cpu_modules.causal_conv1d, reason)
        yield Patch(gdn, "chunk_gated_delta_rule", gdn_common.torch_chunk_gated_delta_rule, reason)


def cpu_patches() -> list[Patch]:
    """Everything that the CPU runtime replaces, made anew from what is there now."""
    megatron = (*_megatron_patches(), *_stand_in_patches(), *resume_patches(), *cpu_host_optimizer_patches())
    return [*_cuda_patches(), *megatron]


def _is_not_rng_warning(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


_applied = contextlib.ExitStack()  # what the outermost block or the process has to undo
_users = 0
_enabled = False


def _acquire() -> None:
    global _users
    if torch.cuda.is_available():
        raise RefusedError("The CPU runtime got a machine with CUDA, wanted one without: use device=cuda or hide it.")
    if _users == 0:
        # jit_fuser is torch.compile (jit.py): run what it decorates eagerly instead of compiling in every process
        _applied.enter_context(torch.compiler.set_stance("force_eager"))
        # the tracker warns where the CPU's random state changes; here it is the very state that must (random.py:332)
        logger = logging.getLogger(megatron_random.__name__)
        logger.addFilter(_is_not_rng_warning)
        _applied.callback(logger.removeFilter, _is_not_rng_warning)
        _applied.enter_context(applied(cpu_patches()))
    _users += 1


def _release() -> None:
    global _users
    _users -= 1
    if _users == 0:
        _applied.close()


@contextlib.contextmanager
def cpu_runtime() -> Iterator[None]:
    """Megatron-Core runs on the CPU inside the block. Blocks nest; the last one to end undoes the patches.

    Raises:
        RefusedError: where CUDA is available.
    """
    _acquire()
    try:
        yield
    finally:
        _release()


def enable_cpu_runtime() -> None:
    """`cpu_runtime()` for the life of the process; calling it again changes nothing."""
    global _enabled
    if not _enabled:
        _acquire()
        _enabled = True


@contextlib.contextmanager
def fake_rng() -> Iterator[None]:
    """Under FakeTensorMode: the tracker's fork leaves the random state alone, since a fake one has no value."""

    def fork(self, *args, **kwargs):
        return contextlib.nullcontext()

    reason = ".item() of a comparison of fake states (tensor_parallel/random.py:332)"
    with applied([Patch(megatron_random.CudaRNGStatesTracker, "fork", fork, reason)]):
        yield
