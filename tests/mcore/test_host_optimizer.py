"""The optimizer on the host against the one on the device: the same updates, and nothing of it on the device."""

import pytest
import torch
from harness import Layout, build_learner
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from oracle import qwen_config

from longstraw_megatron.compose import load_config
from longstraw_megatron.mcore.model import wrap_ddp
from longstraw_megatron.mcore.optimizer import build_optimizer
from longstraw_megatron.testing import run_ranks

HF = qwen_config(num_hidden_layers=4).to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}

KEYS = ["optimizer.lr=1e-2", "optimizer.weight_decay=0.1", "optimizer.clip_grad=0.5"]


def _three_steps(rank, world_size, words, grads_in_fp32):
    """Weights after three steps with drawn gradients; and what the optimizer made."""
    learner, context = build_learner(Layout(dp=world_size), HF, detached=True, precision="bf16")
    chunks = [chunk.module for chunk in learner.chunks]
    chunks = wrap_ddp(chunks, context, use_distributed_optimizer=True, grad_reduce_in_fp32=grads_in_fp32)
    parameters = [p for p in chunks[0].parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)
    for p in parameters:
        p.data.copy_(torch.randn(p.shape, generator=generator))
    config = load_config([*KEYS, *words]).optimizer
    optimizer = build_optimizer(config, chunks, context, precision="bf16", use_distributed_optimizer=True)
    norms = []
    for _ in range(3):
        for p in parameters:
            p.main_grad.copy_(torch.randn(p.shape, generator=generator))
        success, norm, _ = optimizer.step()
        assert success
        norms.append(float(norm))
    inner = optimizer.chained_optimizers[0]
    on_host = isinstance(inner.optimizer, HybridDeviceOptimizer)
    # what the distributed optimizer holds of its own in float32, on the device
    copies = [p for group in inner.shard_fp32_from_float16_groups for p in group if p is not None]
    shares = [sum(p.numel() for g in o.param_groups for p in g["params"]) for o in
              (inner.optimizer.sub_optimizers if on_host else [])]  # fmt: skip
    return [p.detach().float().numpy() for p in parameters], norms, len(copies), shares


def _same(a, b):
    """The update is computed in float32 by other kernels: a weight at a tie may round to the next bf16."""
    return all(abs(x - y).max() <= 2**-7 * abs(y).max() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("fraction", ["1.0", "0.5"])
def test_updates_are_those_of_the_device(fraction):
    words = ["optimizer.optimizer_cpu_offload=true", f"optimizer.optimizer_offload_fraction={fraction}"]
    ((weights, norms, copies, shares),) = run_ranks(1, _three_steps, [], True)
    assert copies and not shares
    ((host_weights, host_norms, host_copies, host_shares),) = run_ranks(1, _three_steps, words, True)
    assert host_norms == pytest.approx(norms, rel=1e-6)
    assert _same(host_weights, weights)
    assert not host_copies, "float32 weights of its own on the device"
    assert len(host_shares) == (1 if fraction == "1.0" else 2)
    assert host_shares[0] >= float(fraction) * sum(host_shares)


def test_over_data_parallel_ranks_with_bf16_gradients():
    words = ["optimizer.optimizer_cpu_offload=true"]
    device = run_ranks(2, _three_steps, [], False)
    host = run_ranks(2, _three_steps, words, False)
    for mine, theirs in zip(host, device, strict=True):
        assert _same(mine[0], theirs[0])
    assert all((x == y).all() for x, y in zip(host[0][0], host[1][0], strict=True))
