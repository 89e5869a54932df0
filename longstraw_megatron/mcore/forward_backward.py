"""`get_forward_backward_func` in the place of Megatron-Core's, for pipelines of their own making.

The function it returns has the signature of Megatron's schedules. Where the caller's data_iterator yields
`PromptMicrobatch`es, it plans and runs prompts and branches as everything else here does, and calls the caller's
forward_step_func once for each branch on each stage, with an iterator over that branch's sample and with a model that
carries the branch's pass (`BranchModel`). For anything else it is Megatron's own schedule.

**Loss scaling.** M = `num_microbatches` counts prompt groups; K >= M are their branches on this data-parallel rank.
What is equal (to rounding) to the gradient of Megatron's schedule over the K full sequences, each a microbatch:

* `calculate_per_token_loss` with 3-tuples (sum, num_tokens, data): always; finalize divides by the sum of num_tokens.
* `divide_by="microbatches"`: where the caller multiplies its loss by its own number of microbatches, since Megatron
  will divide by it: times M here, times K there. So do slime, verl, NeMo-RL and ROLL. Their losses have global
  denominators, so it is the gradient of M microbatches of whole groups just as well.
* `divide_by="branches"`: where the loss of a sample is a mean that knows nothing of other samples (Megatron's own
  training, Megatron-RL): the mean over K samples. Data-parallel ranks of different K weigh their own means alike.

A 2-tuple's loss is multiplied by the CP size, and a 3-tuple's divided by its num_tokens, as Megatron does; DDP then
averages or sums as the caller's config has it. Returned are K items, by group and branch; Megatron would return M.

**Gradients** are synchronised once, by the caller's `finalize_model_grads_func`: nothing before it sends any, so
`no_sync_func` and `grad_sync_func` are not called. Where it is None (a caller that accumulates over several calls),
gradients stay local until the caller finalizes. What Megatron's reductions forget is reduced in each call.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import nn

from longstraw_megatron.comm.counters import Traffic
from longstraw_megatron.comm.pipeline import StageLink
from longstraw_megatron.config import ParallelConfig
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.group_work import CutOptions, GroupWork
from longstraw_megatron.mcore.model import moe_layer_numbers, unwrap
from longstraw_megatron.mcore.monitor import Monitor
from longstraw_megatron.mcore.parallel import ParallelContext
from longstraw_megatron.mcore.prompt_batch import PromptMicrobatch, SampleCut, cut_step, peek, replayed_group, take
from longstraw_megatron.mcore.prompt_checks import PromptOptions, agree, check_chunks, switch_off_overlap
from longstraw_megatron.mcore.reductions import forgotten_grads_reduced
from longstraw_megatron.mcore.sample_engine import ForwardStep, SampleEngine
from longstraw_megatron.mcore.session import make_link, make_residence
from longstraw_megatron.mcore.step_plan import plan_step
from longstraw_megatron.state import StateOptions

logger = logging.getLogger(__name__)

_MODEL_GROUPS = ("tp", "cp", "pp", "ep")

# A model's communicators between its stages; they live as long as its first chunk. Kept here since pipelines ask for
# the function anew in every step, and making communicators is a collective of all ranks.
_links: WeakKeyDictionary[nn.Module, StageLink | None] = WeakKeyDictionary()


@functools.cache
def _say_once(message: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(message)


def _as_list(value: Any) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _device_of(chunk: nn.Module) -> torch.device:
    parameter = next(chunk.parameters(), None)
    if parameter is not None:
        return parameter.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _groups_of(pg_collection: ProcessGroupCollection | None) -> ProcessGroupCollection:
    """The caller's process groups, or those of Megatron's parallel state."""
    if pg_collection is None:
        return ProcessGroupCollection.use_mpu_process_groups()
    missing = [name for name in ("tp", "cp", "pp", "dp") if getattr(pg_collection, name, None) is None]
    if missing:
        raise RefusedError(f"pg_collection has no {missing}, wanted tp, cp, pp and dp for prompt groups; set them.")
    return pg_collection


def _model_groups(pg_collection: ProcessGroupCollection | None) -> list[dist.ProcessGroup]:
    """The groups whose ranks wait for each other in a schedule: all of them run prompt groups, or none does."""
    if pg_collection is None and not parallel_state.model_parallel_is_initialized():
        return []
    if pg_collection is None:
        pg_collection = ProcessGroupCollection.use_mpu_process_groups(list(_MODEL_GROUPS))
    groups = [getattr(pg_collection, name, None) for name in _MODEL_GROUPS]
    return [group for group in groups if group is not None and group.size() > 1]


def _lockstep_group(groups: ProcessGroupCollection, config: TransformerConfig) -> dist.ProcessGroup | None:
    """The data-parallel ranks, where an expert group spans them: every MoE layer is then a collective over them."""
    if config.num_moe_experts is None or groups.dp.size() == 1:
        return None
    ep_group = getattr(groups, "ep", None) or parallel_state.get_expert_model_parallel_group(check_initialized=False)
    return groups.dp if ep_group is not None and ep_group.size() > 1 else None


def _parallel_config(groups: ProcessGroupCollection, vpp: int, config: TransformerConfig) -> ParallelConfig:
    return ParallelConfig(
        tp=groups.tp.size(),
        cp=groups.cp.size(),
        pp=groups.pp.size(),
        vpp=vpp,
        ep=config.expert_model_parallel_size,
        etp=config.expert_tensor_parallel_size,
        sp=bool(config.sequence_parallel),
    )


def _link_of(chunk: nn.Module, context: ParallelContext) -> StageLink | None:
    model = unwrap(chunk)
    if model not in _links:
        _links[model] = make_link(context)
    return _links[model]


def _run_groups(
    *,
    options: PromptOptions,
    forward_step_func: Callable,
    data_iterators: Sequence[Any],
    chunks: list[nn.Module],
    num_microbatches: int,
    forward_only: bool,
    collect_non_loss_data: bool,
    first_val_step: bool | None,
    groups: ProcessGroupCollection,
) -> tuple[list[Any], torch.Tensor]:
    """The step of prompt groups, gradients left local: (what the schedule returns, summed num_tokens)."""
    config = get_model_config(chunks[0])
    device = _device_of(chunks[0])
    context = ParallelContext(groups, device, _parallel_config(groups, len(chunks), config))
    microbatches = [take(iterator, num_microbatches) for iterator in data_iterators]
    segments = CutOptions(options.segment_length, style=options.style, row_multiple=context.row_multiple)
    multiple = options.sample_multiple or segments.row_multiple * _pieces(groups.cp.size(), options.style)
    cut = SampleCut(segments, groups.cp.size(), multiple)
    prompt_groups = [replayed_group(microbatch.group) for microbatch in microbatches[0]]
    exact = options.exact and not forward_only
    traffic = Traffic()
    state_options = StateOptions(
        exact=exact,
        page_length=options.page_length,
        grad_dtype=options.grad_dtype,
        residence=make_residence(options.location, device),
    )
    works = [
        GroupWork(
            group,
            group_cut,
            state_options,
            cp_rank=groups.cp.rank(),
            tp_rank=groups.tp.rank(),
            tp_size=groups.tp.size(),
            num_chunks=len(chunks),
            device=device,
            traffic=traffic,
            moe_layers=moe_layer_numbers(config),
        )
        for group, group_cut in cut_step(prompt_groups, cut, lockstep_group=_lockstep_group(groups, config))
    ]
    step_plan = plan_step(
        works,
        config=config,
        pp_size=groups.pp.size(),
        vpp_size=len(chunks),
        exact=exact,
        forward_only=forward_only,
        max_live_prefixes=options.max_live_prefixes,
    )
    link = _link_of(chunks[0], context)
    if link is not None:
        link.max_pending_sends = step_plan.max_pending_sends
    if schedules.check_first_val_step(first_val_step, forward_only, True):
        for chunk in chunks:
            unwrap(chunk).set_is_first_microbatch()
    engine = SampleEngine(chunks, context, config, monitor=Monitor(device), link=link)
    num_branches = sum(group.group_size for group in prompt_groups)
    step = ForwardStep(
        func=forward_step_func,
        samples=[[microbatch.samples for microbatch in of_chunk] for of_chunk in microbatches],
        divisor=num_microbatches if options.divide_by == "microbatches" else num_branches,
        make_iterator=options.make_iterator,
        padded_length=cut.padded_length,
        collect_non_loss_data=collect_non_loss_data,
    )
    result = engine.run_samples(step_plan.plan[groups.pp.rank()], works, step, forward_only=forward_only)
    return [result.data[key] for key in sorted(result.data)], result.num_tokens


def _pieces(cp_size: int, style: str) -> int:
    """How many pieces of equal length a sample is cut into."""
    return cp_size if cp_size == 1 or style == "contiguous" else 2 * cp_size


def _forward_backward_groups(
    *,
    options: PromptOptions,
    chunks: list[nn.Module],
    num_microbatches: int,
    forward_only: bool,
    pg_collection: ProcessGroupCollection | None,
    force_all_reduce: bool | None,
    adjust_tensor_shapes_fn: Callable | None,
    **step: Any,
) -> list[Any]:
    """Around the step: what Megatron's schedules do before and after theirs."""
    if num_microbatches < 1:
        raise RefusedError(f"num_microbatches is {num_microbatches}, wanted the number of prompt groups, 1 or more.")
    if adjust_tensor_shapes_fn is not None:
        raise RefusedError(
            "adjust_tensor_shapes_fn was given with prompt groups, wanted none: every stage knows the lengths of "
            "segments and branches; leave it out."
        )
    config = get_model_config(chunks[0])
    check_chunks(chunks, config, forward_only=forward_only)
    groups = _groups_of(pg_collection)
    if not forward_only and switch_off_overlap(chunks):
        _say_once(
            "overlap_grad_reduce was switched off for the life of this model: the last backward of a step, the walk of "
            "a prompt's first segment, never reaches the output layer, so DDP would wait for it in vain."
        )
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    run = functools.partial(
        _run_groups,
        options=options,
        chunks=chunks,
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        groups=groups,
        **step,
    )
    if forward_only:
        data, _ = run()
    else:
        with forgotten_grads_reduced(chunks, groups.tp):
            data, num_tokens = run()
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func(
                chunks,
                num_tokens if config.calculate_per_token_loss else None,
                pg_collection=groups,
                force_all_reduce=force_all_reduce,
            )
    if config.timers is not None:
        config.timers("forward-backward").stop()
    return data


def get_forward_backward_func(*args: Any, options: PromptOptions | None = None, **kwargs: Any) -> Callable[..., list]:
    """A function with the signature of Megatron's schedules that also runs prompt groups.

    `args` and `kwargs` are those of Megatron's `get_forward_backward_func` (pp_size, vp_size, schedule_pg_collection)
    and choose its schedule for ordinary batches. `options` are ours; a pipeline whose name is rebound gets them by
    `functools.partial(get_forward_backward_func, options=...)`.

    The returned function takes Megatron's keywords; with prompt groups `num_microbatches` is their number, and
    seq_length, micro_batch_size, decoder_seq_length and p2p_communicator have no meaning: lengths are those of segments
    and branches, and stages have our own links. All ranks of a model's TP, CP and PP groups must be given the same
    groups. It returns a list on the last stage, an empty one elsewhere.

    Raises (the returned function):
        RefusedError: the model, its config or the microbatches are not what prompt groups need.
        NonFiniteError: NaN or Inf in a loss or a gradient, except in fp16, whose loss scaler expects them.
    """
    megatron_func = schedules.get_forward_backward_func(*args, **kwargs)
    options = options or PromptOptions()

    def forward_backward(
        *,
        forward_step_func: Callable,
        data_iterator: Any,
        model: nn.Module | list[nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable | None = None,
        p2p_communicator: Any = None,
        pg_collection: ProcessGroupCollection | MultiModuleProcessGroupCollection | None = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        chunks, iterators = _as_list(model), _as_list(data_iterator)
        first = None
        if not isinstance(pg_collection, MultiModuleProcessGroupCollection):
            first, iterators[0] = peek(iterators[0])
            agree(isinstance(first, PromptMicrobatch), _model_groups(pg_collection), _device_of(chunks[0]))
        if isinstance(first, PromptMicrobatch):
            return _forward_backward_groups(
                options=options,
                forward_step_func=forward_step_func,
                data_iterators=iterators,
                chunks=chunks,
                num_microbatches=num_microbatches,
                forward_only=forward_only,
                collect_non_loss_data=bool(collect_non_loss_data),
                first_val_step=first_val_step,
                adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
                pg_collection=pg_collection,
                force_all_reduce=force_all_reduce,
            )
        _say_once(
            f"Microbatches are {type(first).__name__}, not PromptMicrobatch: Megatron's own schedule runs them, and no "
            "prompt is shared."
        )
        return megatron_func(
            forward_step_func=forward_step_func,
            data_iterator=iterators if isinstance(data_iterator, (list, tuple)) else iterators[0],
            model=model,
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
            p2p_communicator=p2p_communicator,
            pg_collection=pg_collection,
            force_all_reduce=force_all_reduce,
        )

    return forward_backward
