"""What a checkpoint holds, as sharded state dicts: model, optimizers, random states.

Of Megatron's optimizer state dicts only the tensors are saved as they are. Their parameter groups differ from rank to
rank (a stage without experts has no optimizer for them) while Megatron saves rank 0's, so the groups of all ranks are
united, saved once, and matched by what distinguishes them. That lets the distributed optimizer follow the model into
any layout.
"""

import random
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import nn

from longstraw_megatron.mcore.host_optimizer import LOCAL_KEYS
from longstraw_megatron.mcore.model import unwrap

SHARDING = "fully_reshardable"


def layout_of(groups: ProcessGroupCollection, model_chunks: Sequence[nn.Module]) -> dict[str, int]:
    """The parallel sizes that a bit-equal resume needs."""
    sizes = {name: getattr(groups, name).size() for name in ("tp", "cp", "pp", "ep", "dp")}
    return {"world_size": dist.get_world_size(), "vpp": len(model_chunks), "etp": groups.expt_tp.size(), **sizes}


def content_metadata() -> dict:
    """Megatron's switches of how state dicts are sharded; saved too, since its own loaders ask the checkpoint."""
    return {
        "distrib_optim_sharding_type": SHARDING,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }


def _metadata(groups: ProcessGroupCollection) -> dict:
    return {**content_metadata(), "dp_cp_group": groups.dp_cp}


def model_keys(model_chunks: Sequence[nn.Module]) -> list[str]:
    """Megatron's names of the model chunks in a checkpoint."""
    return ["model"] if len(model_chunks) == 1 else [f"model{i}" for i in range(len(model_chunks))]


def model_state(model_chunks: Sequence[nn.Module], groups: ProcessGroupCollection) -> dict:
    """Sharded state dict of all chunks, by key."""
    states = [unwrap(chunk).sharded_state_dict(metadata=_metadata(groups)) for chunk in model_chunks]
    return dict(zip(model_keys(model_chunks), states, strict=True))


def optimizers_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers of a chain (dense and expert parameters have one each), but for those without parameters."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chain if not getattr(part, "is_stub_optimizer", False)]


def optimizer_kind(optimizer: MegatronOptimizer | None) -> str | None:
    """The class of the optimizers, the same on all ranks; None without trainable parameters anywhere."""
    parts = [] if optimizer is None else optimizers_of(optimizer)
    kinds: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(kinds, type(parts[0]).__name__ if parts else None)
    return next((kind for kind in kinds if kind is not None), None)


def _inner(part: dict) -> dict:
    """Where an optimizer's state dict has its parameter groups."""
    return part.get("optimizer", part)


def _unwrap_values(group: dict) -> dict:
    return {
        key: value.unwrap() if isinstance(value, LocalNonpersistentObject) else value for key, value in group.items()
    }


def split_optimizer(
    optimizer: MegatronOptimizer, model: dict, groups: ProcessGroupCollection, *, is_loading: bool
) -> tuple[dict[int, dict], list[list[dict]]]:
    """The tensors of each optimizer, and its parameter groups; each group with its `step`, if a step was made."""
    tensors, param_groups = {}, []
    for i, part in enumerate(optimizers_of(optimizer)):
        state = part.sharded_state_dict(model, is_loading, metadata=_metadata(groups))
        inner = _inner(state)
        step = inner.get("state", {}).pop("common_step", None)
        own = [_unwrap_values(group) for group in inner.pop("param_groups")]
        param_groups.append(own if step is None else [{**group, "step": float(step)} for group in own])
        state.pop("param_state_sharding_type", None)
        tensors[i] = state
    return tensors, param_groups


def _identity(group: dict, *, experts: bool) -> tuple:
    """What tells parameter groups apart; with `experts` also whether they are cut over the expert-parallel ranks."""
    keys = [key for key in param_group_identifier_keys if experts or key != "is_expert_parallel"]
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in keys)


def unite_groups(param_groups: list[list[dict]]) -> list[dict]:
    """The different parameter groups of all ranks, without their parameters; the same list on every rank."""
    dropped = {"params", *LOCAL_KEYS}
    own = [
        {key: value for key, value in group.items() if key not in dropped} for part in param_groups for group in part
    ]
    everyone: list[list[dict]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    united = {_identity(group, experts=True): group for rank_groups in reversed(everyone) for group in rank_groups}
    return [united[identity] for identity in sorted(united, key=repr)]


def _matching(group: dict, saved: list[dict]) -> dict:
    """The saved group that `group` continues; experts may have been cut over ranks then, or not."""
    for experts in (True, False):
        for candidate in saved:
            if _identity(candidate, experts=experts) == _identity(group, experts=experts):
                # what the layout says, not what it said
                local = {key: group[key] for key in LOCAL_KEYS if key in group}
                return {**candidate, **local, "is_expert_parallel": group.get("is_expert_parallel")}
    raise KeyError(f"the checkpoint has no parameter group like {_identity(group, experts=True)}")


def load_optimizer(
    optimizer: MegatronOptimizer, tensors: dict[int, dict], current: list[list[dict]], saved: list[dict]
) -> None:
    """Load the tensors of each optimizer and, for each of its `current` parameter groups, the saved one's values."""
    for i, part in enumerate(optimizers_of(optimizer)):
        state, own = tensors[i], current[i]
        loaded = [_matching(group, saved) for group in own]
        if "param_state" in state:  # the distributed optimizer, which finds its parameters itself
            state["optimizer"] = {"param_groups": loaded}
            state["param_state_sharding_type"] = SHARDING
        else:
            inner = _inner(state)
            steps = [group.pop("step") for group in loaded if "step" in group]
            inner["param_groups"] = [
                {**group, "params": mine["params"]} for group, mine in zip(loaded, own, strict=True)
            ]
            if steps:
                inner["state"]["common_step"] = torch.tensor(steps[0])
        part.load_state_dict(state)


def rng_state() -> dict:
    """Every random state of this process, as plain values and tensors."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": dict(get_cuda_rng_tracker().get_states()),
    }


def restore_rng(state: dict) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def rng_object(state: dict | None) -> ShardedObject:
    """One random state for each rank; None to load it."""
    return ShardedObject("rng_state", state, (dist.get_world_size(),), (dist.get_rank(),))
