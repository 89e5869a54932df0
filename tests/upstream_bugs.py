"""Three bugs of megatron-core 0.19.2, each measured on a small stock model; `python upstream_bugs.py` prints them.

Run with a patched copy of Megatron in front of the import path it measures that copy. The numbers are relative errors,
against the same model in one process, without recompute, or without the interruption.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

import longstraw_megatron.mcore.cpu as cpu
from longstraw_megatron.mcore.checkpoint import FOREGROUND
from longstraw_megatron.mcore.patching import applied
from longstraw_megatron.testing import compare_tensors, relative_error, run_ranks
from longstraw_megatron.testing.megatron import init_megatron
from longstraw_megatron.testing.shards import assemble, gradient_of, load_whole, local_pieces

sys.path.insert(0, str(Path(__file__).parent / "mcore"))
import stock_models  # noqa: E402

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def _gradient(rank, world_size, name, layout, config, weights, batch):
    """Pieces of the weights and of their gradients."""
    groups = init_megatron(**layout)
    model = stock_models.build(name, groups, **config)
    if weights is None:
        stock_models.seed_weights(model)
    else:
        load_whole([model], weights)
    ddp = stock_models.wrap(model, groups)
    stock_models.backward(ddp, groups, batch=batch)
    return local_pieces([model]), local_pieces([ddp], gradient_of)


def out_norm_error() -> float:
    """Gradient of GDN's out_norm under TP2 without sequence parallelism: the worst layer on the worst rank."""
    ((weights, gradient),) = run_ranks(1, _gradient, "qwen", {}, {}, None, 2)
    whole = assemble([weights])
    want = assemble([gradient])
    ranks = run_ranks(2, _gradient, "qwen", {"tp": 2}, {}, whole, 2)
    pieces = [piece for _, pieces in ranks for piece in pieces if "out_norm" in piece.name]
    assert pieces
    return max(relative_error(piece.tensor, want[piece.name][piece.cut]) for piece in pieces)


def index_share_error() -> float:
    """All gradients of DSA with index sharing under PP2 and full recompute, two microbatches in flight."""
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    ((weights, _),) = run_ranks(1, _gradient, "glm", {}, {}, None, 4)
    whole = assemble([weights])
    plain = run_ranks(2, _gradient, "glm", {"pp": 2}, {}, whole, 4)
    again = run_ranks(2, _gradient, "glm", {"pp": 2}, recompute, whole, 4)
    got, want = (assemble([gradient for _, gradient in ranks]) for ranks in (again, plain))
    return compare_tensors(got, want).overall


def _trainer(groups):
    model = stock_models.build("dense", groups)
    ddp = stock_models.wrap(model, groups, use_distributed_optimizer=True)
    config = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1, use_distributed_optimizer=True)
    return ddp, get_megatron_optimizer(config, [ddp], use_gloo_process_groups=False, pg_collection=groups)


def _step(ddp, optimizer, groups) -> None:
    stock_models.backward(ddp, groups)
    assert optimizer.step()[0]


def _resume(rank, world_size, mended):
    """The next update after a resume against the one without: relative error, or the exception."""
    patches = [patch for patch in cpu.resume_patches() if patch.name in mended]
    cpu.resume_patches = lambda: patches  # what is not mended is Megatron's own
    groups = init_megatron()
    ddp, optimizer = _trainer(groups)
    stock_models.seed_weights(ddp.module)
    optimizer.reload_model_params()
    for _ in range(2):
        _step(ddp, optimizer, groups)

    def state(model, optimizer, *, is_loading):
        shards = {"model": model.module.sharded_state_dict()}
        shards["optimizer"] = optimizer.sharded_state_dict(shards, is_loading=is_loading, metadata=METADATA)
        return shards

    before = torch.cat([parameter.detach().flatten().clone() for parameter in ddp.parameters()])
    with tempfile.TemporaryDirectory() as folder, applied(FOREGROUND):
        dist_checkpointing.save(state(ddp, optimizer, is_loading=False), folder)
        resumed_ddp, resumed = _trainer(groups)
        try:
            loaded = dist_checkpointing.load(state(resumed_ddp, resumed, is_loading=True), folder)
            resumed_ddp.module.load_state_dict(loaded["model"])
            resumed.load_state_dict(loaded["optimizer"])
        except (AssertionError, KeyError, RuntimeError) as error:
            return f"{type(error).__name__} {error}"
    updates = []
    for model, optim in ((resumed_ddp, resumed), (ddp, optimizer)):
        _step(model, optim, groups)
        updates.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) - before)
    return relative_error(*updates)


def resume_error(*mended: str) -> float | str:
    """With the plugin's repair of the methods `mended`."""
    return run_ranks(1, _resume, mended)[0]


MENDS = ("state_dict", "_set_main_param_and_optimizer_states", "load_state_dict")


def measure() -> dict:
    """All of them; `resume` without the plugin's repair, with its first part, the first two, and all three."""
    return {
        "megatron": dist_checkpointing.__file__,
        "out_norm": out_norm_error(),
        "index_share": index_share_error(),
        "resume": [resume_error(*MENDS[:count]) for count in range(4)],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure()))
