"""Options of prompt groups in a pipeline, and what its model must be for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.layout import Style
from longstraw_megatron.mcore.core_attention import SegmentCoreAttention
from longstraw_megatron.mcore.gated_delta_net import SegmentGatedDeltaNet
from longstraw_megatron.mcore.model import unwrap
from longstraw_megatron.mcore.rotary import SegmentRotaryEmbedding
from longstraw_megatron.mcore.sparse_attention import SegmentDSAttention

_OWN_SCHEDULE = "it belongs to Megatron's own schedules"
_RANDOM = "prefill and the prompt's backward must compute the same"
# field -> (value it must have, why); a false value stands for all false values
_WANTED = {
    "cuda_graph_impl": ("none", _OWN_SCHEDULE),
    "defer_embedding_wgrad_compute": (False, _OWN_SCHEDULE),
    "enable_autocast": (False, "weights have the model's precision"),
    "fine_grained_activation_offloading": (False, _OWN_SCHEDULE),
    "hybrid_context_parallel": (False, _OWN_SCHEDULE),
    "moe_paged_stash": (False, _OWN_SCHEDULE),
    "mtp_num_layers": (None, "multi-token prediction knows no segments"),
    "num_microbatches_with_partial_activation_checkpoints": (None, _OWN_SCHEDULE),
    "overlap_moe_expert_parallel_comm": (False, _OWN_SCHEDULE),
}
_WANTED_IN_TRAINING = {"hidden_dropout": (0.0, _RANDOM), "attention_dropout": (0.0, _RANDOM)}


def _one_item(sample: Any) -> Any:
    return iter((sample,))


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How `get_forward_backward_func` runs prompt groups."""

    segment_length: int = 1024  # prompt tokens per segment
    exact: bool = True  # False: the gradient stops at the prompt's state
    divide_by: Literal["microbatches", "branches"] = "microbatches"  # see forward_backward.py
    style: Style = "zigzag"  # how the pipeline cuts a sample over context-parallel ranks
    # The pipeline pads a sample at its end to a multiple of so many tokens before that cut; its forward step's fixed
    # sequence length, where it has one. None: two pieces per CP rank (one in the contiguous style), each a multiple of
    # TP under sequence parallelism. Without context parallelism any padding at the end will do.
    sample_multiple: int | None = None
    make_iterator: Callable[[Any], Any] = _one_item  # of a sample, for forward_step_func
    page_length: int = 65536  # rows of a page of prefix state; of latents on the device up to 2**20
    grad_dtype: torch.dtype | None = None  # of its gradient; None: float32
    location: Literal["device", "host"] = "device"  # where it rests between uses
    max_live_prefixes: int = 1

    def __post_init__(self):
        for name in ("segment_length", "page_length", "max_live_prefixes", "sample_multiple"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RefusedError(f"{name} is {value}, wanted 1 or more.")
        for name, legal in (
            ("divide_by", ("microbatches", "branches")),
            ("style", ("zigzag", "contiguous")),
            ("location", ("device", "host")),
        ):
            if getattr(self, name) not in legal:
                raise RefusedError(f"{name} is {getattr(self, name)!r}, wanted one of {list(legal)}.")


def agree(has_groups: bool, model_groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """See that all ranks that wait for each other were given prompt groups, or none: a collective.

    Raises:
        RefusedError: some were and some were not, on all of them.
    """
    seen = torch.tensor([has_groups, not has_groups], dtype=torch.int32, device=device)
    for group in model_groups:
        dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=group)
    if model_groups and bool(seen.all()):
        raise RefusedError(
            f"data_iterator yields {'prompt groups' if has_groups else 'no prompt groups'} on this rank and not on "
            "others, wanted the same on all ranks of the model's TP, CP, PP and EP groups; give each rank an iterator."
        )


def check_chunks(chunks: Sequence[nn.Module], config: TransformerConfig, *, forward_only: bool) -> None:
    """Refuse a model that cannot run segments, or a setting under which its gradients would be wrong.

    Raises:
        RefusedError: one sentence with what was found and what was wanted.
    """
    wanted = _WANTED if forward_only else _WANTED | _WANTED_IN_TRAINING
    for name, (value, reason) in wanted.items():
        got = getattr(config, name, value)
        if got != value and (got or value):
            raise RefusedError(
                f"{name} got {got} with prompt groups, wanted {value}, since {reason}; set it to {value}."
            )
    for chunk in chunks:
        if not any(isinstance(module, GPTModel) for module in chunk.modules()):
            raise RefusedError(f"The model is a {type(chunk).__name__}, wanted a GPTModel in Megatron's wrappers.")
        strange = next((type(m).__name__ for m in unwrap(chunk).modules() if _knows_no_segments(m)), None)
        if strange is not None:
            raise RefusedError(
                f"The model has a {strange}, wanted layers that run segments, for prompt groups; build it with "
                "segment_block_spec and prepare_chunk."
            )
        if not forward_only and not isinstance(chunk, DistributedDataParallel):
            raise RefusedError(
                f"The model is a {type(chunk).__name__}, wanted Megatron's DistributedDataParallel to train on prompt "
                "groups, since its buffers hold the gradient until the step's end; wrap it."
            )


def _knows_no_segments(module: nn.Module) -> bool:
    """Whether a module of Megatron's stands where one of ours should."""
    core = getattr(module, "core_attention", None)
    if core is not None:
        return not isinstance(core, (SegmentCoreAttention, SegmentDSAttention))
    if isinstance(module, GatedDeltaNet):
        return not isinstance(module, SegmentGatedDeltaNet)
    return isinstance(module, RotaryEmbedding) and not isinstance(module, SegmentRotaryEmbedding)


def switch_off_overlap(chunks: Sequence[nn.Module]) -> bool:
    """Let DDP reduce gradients at the end only; True where it would have done so during backward."""
    overlapping = [chunk for chunk in chunks if chunk.ddp_config.overlap_grad_reduce]
    for chunk in overlapping:
        chunk.ddp_config.overlap_grad_reduce = False  # one object, shared with the chunk's buckets
    return bool(overlapping)
