"""The full gradient of a step in one file, under the checkpoint's names."""

from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.architectures import text_config
from longstraw_megatron.mcore.weights.entry import Entry
from longstraw_megatron.mcore.weights.gather import Hop, fail_together, gather_shards, is_first_replica, tensor_group
from longstraw_megatron.mcore.weights.hf_folder import HfFolder
from longstraw_megatron.mcore.weights.names import Location, NamedWeight, Naming, named_weights
from longstraw_megatron.mcore.weights.safetensors_file import SafetensorsWriter, TensorSpec
from longstraw_megatron.mcore.weights.table import entries_of


def complete_gradients(model_chunks: Sequence[nn.Module]) -> None:
    """Make `main_grad` whole again where a distributed optimizer's reduce-scatter left one shard of it.

    The optimizer reads its own shard, which stays as it is; what is overwritten was of no use any more.
    """
    for chunk in model_chunks:
        if not isinstance(chunk, DistributedDataParallel) or not chunk.ddp_config.use_distributed_optimizer:
            continue
        for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            group = bucket_group.intra_distributed_optimizer_instance_group
            for bucket in bucket_group.buckets:
                mine = shard_buffer(bucket.grad_data, group.size())[group.rank()]
                dist.all_gather_into_tensor(bucket.grad_data, mine.clone(), group=group)


def export_grads(
    model_chunks: Sequence[nn.Module],
    file: str | Path,
    *,
    groups: ProcessGroupCollection,
    hf_config: dict,
    hf_path: str | Path | None = None,
) -> None:
    """Write the unsharded gradient, float32, in one safetensors file of global rank 0. Every rank calls this.

    It is called after `finalize_model_grads` and before clipping: each rank's gradients (`main_grad`, or `grad` without
    DDP) are then those of all data, with or without a distributed optimizer. Frozen parameters are absent; a trainable
    one that no backward reached is zero. Names are those of the checkpoint at `hf_path` (fused experts included), or
    `model.layers...` without one. Gradients of norms that Megatron zero-centres are the same as Hugging Face's.

    One shard of one tensor travels at a time. The file is written beside its place and renamed at the end.

    Raises:
        RefusedError: the model or the folder is not of this configuration.
        RuntimeError: the file could not be written; on every rank.
    """
    hf, file = text_config(hf_config), Path(file)
    entries = entries_of(hf)
    complete_gradients(model_chunks)
    error, naming, weights = None, Naming(), []
    try:
        if hf_path is not None:
            with HfFolder(hf_path) as folder:
                naming = folder.naming
        weights = [w for w in named_weights(model_chunks, entries, groups) if not w.entry.duplicate]
    except (RefusedError, OSError) as caught:
        error = caught
    fail_together(error)

    stages = _stages_of_trainable(weights, groups)
    trained = [entry for name, entry in entries.items() if name in stages]
    partial_file, writer, error = file.with_name(f".{file.name}.partial"), None, None
    if dist.get_rank() == 0:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            shapes = naming.shapes(trained)
            specs = {name: TensorSpec.of(torch.float32, shape) for name, shape in shapes.items()}
            writer = SafetensorsWriter(partial_file, specs)
        except OSError as caught:
            error = caught
    fail_together(error)
    fail_together(_write(trained, stages, weights, naming, groups, writer, hf.get("n_routed_experts", 0)))
    if dist.get_rank() == 0:
        partial_file.rename(file)
    dist.barrier()


def _stages_of_trainable(weights: list[NamedWeight], groups: ProcessGroupCollection) -> dict[str, int]:
    """The trainable tensors of all ranks -> the pipeline rank that has them."""
    mine = [w.entry.megatron for w in weights if w.tensor.requires_grad and is_first_replica(w.entry, groups)]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (groups.pp.rank(), mine))
    return {name: stage for stage, names in everyone for name in names}


def _gradient(parameter: Tensor) -> Tensor:
    """float32, zero where nothing was accumulated."""
    grad = getattr(parameter, "main_grad", None)
    grad = parameter.grad if grad is None else grad
    return torch.zeros_like(parameter, dtype=torch.float32) if grad is None else grad.to(torch.float32)


def _hops(entry: Entry, stage: int, groups: ProcessGroupCollection, num_experts: int) -> tuple[Hop, ...]:
    """The way from the tensor-parallel rank 0 that has the entry to global rank 0, first in all its groups."""
    if entry.expert is None:
        return ((groups.pp, stage),)
    return ((groups.ep, entry.expert // (num_experts // groups.ep.size())), (groups.pp, stage))


def _write_at(writer: SafetensorsWriter, place: Location, full: Tensor) -> None:
    first = 0
    if place.index is not None:
        _, rows, *row_shape = writer.specs[place.name].shape
        first = (place.index * rows + place.start) * prod(row_shape)
    writer.write(place.name, full, first=first)


@torch.no_grad()
def _write(
    trained: list[Entry],
    stages: dict[str, int],
    weights: list[NamedWeight],
    naming: Naming,
    groups: ProcessGroupCollection,
    writer: SafetensorsWriter | None,
    num_experts: int,
) -> Exception | None:
    """Gather and write. If rank 0 fails to write it keeps gathering, so that the others do not wait for it."""
    error: Exception | None = None
    local = {weight.entry.megatron: weight.tensor for weight in weights}
    device = weights[0].tensor.device
    for entry in trained:
        if not is_first_replica(entry, groups):
            continue
        hops = _hops(entry, stages[entry.megatron], groups, num_experts)
        shards = gather_shards(
            entry,
            hops,
            groups,
            dtype=torch.float32,
            device=device,
            load=lambda entry=entry: _gradient(local[entry.megatron]),
        )
        for source, full in entry.unpack(shards, tensor_group(entry, groups).size(), gradient=True).items():
            if error is None:
                try:
                    _write_at(writer, naming.locate(source, full.shape[0]), full)
                except OSError as caught:
                    error = caught
    if writer is not None:
        writer.close()
    return error
