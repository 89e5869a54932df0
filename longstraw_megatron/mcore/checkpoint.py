"""Checkpoints of a run: model, optimizer, scheduler, random states, and what the caller adds.

The format is Megatron's distributed checkpoint with its own state-dict keys: stock Megatron loads the model, and so
does any other layout. A layout that is the same resumes bit-equal. The distributed optimizer is saved fully
reshardable, so it follows the model into other layouts. `checkpoint_folder` has the order of things on disk.
"""

import functools
import json
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore import checkpoint_state as parts
from longstraw_megatron.mcore.checkpoint_folder import Checkpoint, find_checkpoint, publish, start_partial
from longstraw_megatron.mcore.model import unwrap
from longstraw_megatron.mcore.optimizer_resume import resume_patches
from longstraw_megatron.mcore.patching import Patch, applied
from longstraw_megatron.mcore.quiet import quiet_megatron_load

_write_bucket = filesystem_async.FileSystemWriterAsync.write_preloaded_data


@functools.wraps(_write_bucket)
def _write_or_raise(*args, **kwargs):
    output = _write_bucket(*args, **kwargs)
    if output is not None and isinstance(output[1], Exception):
        raise output[1]
    return output


# What Megatron does for saving in the background, this saves in the foreground
FOREGROUND = (
    Patch(
        filesystem_async.FileSystemWriterAsync,
        "write_preloaded_data",
        staticmethod(_write_or_raise),
        "tells the type of a failed write, not its reason (dist_checkpointing/strategies/filesystem_async.py:291)",
    ),
    Patch(
        filesystem_async,
        "get_write_results_queue",
        queue.Queue,
        "starts a server process, which imports __main__ anew (dist_checkpointing/strategies/filesystem_async.py:53)",
    ),
    Patch(
        torch_strategy,
        "_logged_mcore_async_deprecation",
        True,
        "warns of saving in the background whatever one does (dist_checkpointing/strategies/torch.py:747)",
    ),
)


@dataclass(frozen=True)
class Resumed:
    """What was loaded. Without `same_layout` the random states were left as they are."""

    checkpoint: Checkpoint
    same_layout: bool


def _on_first_rank(work: Callable[[], object], failure: str) -> object:
    """`work()` on rank 0; its result, or a RuntimeError with its reason, on every rank."""
    outcome: list[object] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except OSError as error:
            outcome[1] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise RuntimeError(f"{failure}: {outcome[1]}; earlier checkpoints are untouched.")
    return outcome[0]


def _write(state: dict, folder: Path, groups: ProcessGroupCollection, failure: str) -> None:
    """Write all ranks' shards; replicas are shared out over the data- and context-parallel ranks."""
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), groups.dp_cp)
    reason = None
    try:
        with applied(FOREGROUND):
            dist_checkpointing.save(state, str(folder), strategy, content_metadata=parts.content_metadata())
    except CheckpointException as error:  # a BaseException; only rank 0's has the reasons
        reason = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())
    reasons = [reason]
    dist.broadcast_object_list(reasons, src=0)
    if reasons[0] is not None:
        raise RuntimeError(f"{failure}: {reasons[0]}; earlier checkpoints are untouched.")


def _read(state: dict, checkpoint: Checkpoint) -> dict:
    try:
        with quiet_megatron_load():
            return dist_checkpointing.load(state, str(checkpoint.path))
    except (CheckpointException, CheckpointingException, KeyError) as error:
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        raise RefusedError(
            f"The checkpoint {str(checkpoint.path)!r} does not fit the model: {causes[0]}; "
            "resume with the model that was saved."
        ) from error


def _refuse_optimizer(checkpoint: Checkpoint, kind: str | None, *, same_layout: bool) -> None:
    if kind is not None and checkpoint.optimizer != kind:
        raise RefusedError(
            f"The checkpoint {str(checkpoint.path)!r} has optimizer state of {checkpoint.optimizer}, wanted {kind}'s; "
            "resume with the optimizer that was saved, or load the model alone."
        )
    if kind not in (None, "DistributedOptimizer") and not same_layout:
        raise RefusedError(
            f"The checkpoint {str(checkpoint.path)!r} was saved in layout {checkpoint.layout}, and the state of {kind} "
            "resumes in the same layout only; use the distributed optimizer, or load the model alone."
        )


def save_checkpoint(
    directory: str | Path,
    step: int,
    model_chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    extra: dict,
    *,
    groups: ProcessGroupCollection,
    keep: int | None = None,
) -> Path:
    """Save on all ranks, after an optimizer step; the new folder in `directory`. `extra` is JSON, rank 0's is saved.

    However the job dies in here, the checkpoint before is complete and found.

    Raises:
        RuntimeError: on every rank, with the reason, where one cannot write.
        ValueError, TypeError: `keep` is less than 1, `extra` is no JSON.
    """
    directory = Path(directory)
    if keep is not None and keep < 1:
        raise ValueError(f"save_checkpoint got keep={keep}, wanted at least 1, or None to keep all.")
    manifest = {
        "extra": json.loads(json.dumps(extra)),
        "layout": parts.layout_of(groups, model_chunks),
        "optimizer": parts.optimizer_kind(optimizer),
    }
    failure = f"Saving step {step} to {str(directory)!r} failed"
    folder = Path(str(_on_first_rank(lambda: str(start_partial(directory, step)), failure)))
    with applied(resume_patches()):
        state = parts.model_state(model_chunks, groups)
        if optimizer is not None:
            tensors, param_groups = parts.split_optimizer(optimizer, state, groups, is_loading=False)
            state |= {"optimizer": tensors, "optimizer_groups": parts.unite_groups(param_groups)}
    if scheduler is not None:
        state["opt_param_scheduler"] = scheduler.state_dict()
    state |= {"rng_state": parts.rng_object(parts.rng_state()), "iteration": step, "checkpoint_version": 3.0}
    _write(state, folder, groups, failure)
    return Path(str(_on_first_rank(lambda: str(publish(directory, step, manifest, keep=keep)), failure)))


def load_checkpoint(
    path: str | Path,
    model_chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None = None,
    scheduler: OptimizerParamScheduler | None = None,
    *,
    groups: ProcessGroupCollection,
) -> Resumed:
    """Load a checkpoint, or the latest one in the folder `path`, into the model, and optimizer and scheduler if given.

    With an optimizer a run goes on, and random states are restored where the layout is the same. Without one the model
    alone is loaded; an optimizer that was built before has to reload its main weights then (`reload_model_params`).

    Raises:
        RefusedError: no complete checkpoint, or one that does not fit the model or the optimizer.
    """
    checkpoint = find_checkpoint(path)
    same_layout = checkpoint.layout == parts.layout_of(groups, model_chunks)
    _refuse_optimizer(checkpoint, parts.optimizer_kind(optimizer), same_layout=same_layout)
    with applied(resume_patches()):
        state, param_groups = parts.model_state(model_chunks, groups), []
        if optimizer is not None:
            tensors, param_groups = parts.split_optimizer(optimizer, state, groups, is_loading=True)
            state["optimizer"] = tensors
            if same_layout:
                state["rng_state"] = parts.rng_object(None)
        loaded = _read(state, checkpoint)
        if optimizer is not None:
            parts.load_optimizer(optimizer, loaded["optimizer"], param_groups, loaded["optimizer_groups"])
        # after the optimizer: one on the host makes its state by a step with random gradients (dummy_step)
        for key, chunk in zip(parts.model_keys(model_chunks), model_chunks, strict=True):
            unwrap(chunk).load_state_dict(loaded[key])
    if scheduler is not None:
        if "opt_param_scheduler" not in loaded:
            raise RefusedError(f"The checkpoint {str(checkpoint.path)!r} has no schedule; resume without a scheduler.")
        scheduler.load_state_dict(loaded["opt_param_scheduler"])
    if optimizer is not None and same_layout:
        parts.restore_rng(loaded["rng_state"])
    return Resumed(checkpoint, same_layout)
