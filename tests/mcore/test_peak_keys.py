"""What takes memory off the device: bf16 main gradients whose float32 copies are gone behind the step, stage inputs on
the host, no state when weights change."""

import gc
import weakref

import numpy as np
import pytest
import torch
from harness import Layout, build_learner, fill_from_hf, make_groups, prompt_groups
from oracle import glm_config, make_model, qwen_config

from longstraw_megatron.compose import load_config
from longstraw_megatron.mcore import engine
from longstraw_megatron.mcore.model import BuildOptions, build_model, wrap_ddp
from longstraw_megatron.mcore.parallel import init_parallel
from longstraw_megatron.mcore.session import build_trainer
from longstraw_megatron.testing import run_ranks
from longstraw_megatron.testing.memory import peak_memory


def hf_of(model) -> dict:
    return model.config.to_dict() | {"architectures": [type(model).__name__]}


def _main_grads(rank, world_size, hf, weights, raw, in_fp32):
    """(dtypes of the main gradients, bytes of their buffers, their values as float64) of bf16 weights."""
    layout = Layout(segment_length=32, grad_reduce_in_fp32=in_fp32)
    learner, context = build_learner(layout, hf, detached=False, precision="bf16")
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    learner.compute_gradients(prompt_groups(raw))
    grads = [p.main_grad for p in learner.chunks[0].parameters() if p.requires_grad]
    flat = torch.cat([grad.flatten().double() for grad in grads])
    return {grad.dtype for grad in grads}, sum(b.grad_data.nbytes for b in learner.chunks[0].buffers), flat.numpy()


def test_bf16_main_gradients_take_half_the_memory():
    """A sum of 5 terms (3 walk segments, 2 branches), each addition rounded to 2^-9 of the sum at most."""
    model = make_model(qwen_config(num_hidden_layers=4))
    args = hf_of(model), dict(model.state_dict()), make_groups((90, [12, 5]))
    ((dtypes, whole, truth),) = run_ranks(1, _main_grads, *args, True)
    assert dtypes == {torch.float32}
    ((dtypes, half, rounded),) = run_ranks(1, _main_grads, *args, False)
    assert dtypes == {torch.bfloat16} and 2 * half == whole
    assert 0 < np.linalg.norm(rounded - truth) <= 5 * 2**-9 * np.linalg.norm(truth)


def _states_left(rank, world_size, layout, hf, weights, raw, detached):
    """How many prefix states are alive at the optimizer's step, without the help of the garbage collector."""
    learner, context = build_learner(layout, hf, detached=detached)
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    alive, prepare = [], learner.prepare

    def watch(*args, **kwargs):
        result = prepare(*args, **kwargs)
        alive.extend(weakref.ref(state) for work in result[1] for state in work.states)
        return result

    learner.prepare = watch
    gc.disable()
    learner.compute_gradients(prompt_groups(raw))
    left = sum(ref() is not None for ref in alive)
    gc.enable()
    return len(alive), left


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("config", [qwen_config, glm_config])
def test_no_prefix_state_is_left_when_the_optimizer_steps(config, detached):
    """The distributed optimizer makes float32 copies of bf16 gradients then (distrib_optimizer.py:2782)."""
    model = make_model(config(num_hidden_layers=4))
    raw = make_groups((30, [5, 3]), (20, [4]))
    layout, weights = Layout(segment_length=16, recompute="full"), dict(model.state_dict())
    ((made, left),) = run_ranks(1, _states_left, layout, hf_of(model), weights, raw, detached)
    assert made == 2 and left == 0


def _copies_left(rank, world_size, raw, words):
    """How many gradients the device's AdamW has in the update, and behind the step."""
    config = load_config(["precision=bf16", "device=cpu", "optimizer.grad_reduce_in_fp32=false", *words])
    context = init_parallel(config.parallel, device=torch.device("cpu"), seed=1, timeout_s=60)
    trainer = build_trainer(config, prompt_groups(raw), context)
    (megatron,) = trainer.optimizer.chained_optimizers
    adamw = getattr(megatron.optimizer, "gpu_optimizer", megatron.optimizer)

    def copies() -> int:
        return sum(p.grad is not None for group in adamw.param_groups for p in group["params"])

    in_update = []
    adamw.register_step_pre_hook(lambda *_: in_update.append(copies()))
    weights = [p.detach().clone() for p in trainer.learner.chunks[0].parameters()]
    trainer.train_step(0, [0])
    now = trainer.learner.chunks[0].parameters()
    assert any(not torch.equal(p, before) for p, before in zip(now, weights, strict=True))
    assert all(p.main_grad.dtype == torch.bfloat16 for p in trainer.learner.chunks[0].parameters())
    return *in_update, copies()


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (1, []),
        (2, []),
        (1, ["optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_fraction=0.5"]),
    ],
    ids=["one rank", "distributed", "half of it on the host"],
)
def test_float32_copies_of_gradients_are_gone_behind_the_step(world_size, words):
    """Megatron keeps them to the next step's zero_grad: they would lie beside the next prompt's prefix."""
    for in_update, left in run_ranks(
        world_size, _copies_left, make_groups((20, [4, 3])), ["optimizer.lr=1e-2", *words]
    ):
        assert in_update > 0 and left == 0


def _with_inputs_at(rank, world_size, layout, hf, weights, raw):
    """A step's gradients, and the shapes of what went to the host."""
    moved = []

    def to_host(tensor):
        moved.append(tuple(tensor.shape))
        return tensor.clone()

    engine.to_host = to_host
    learner, context = build_learner(layout, hf, detached=False)
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    learner.compute_gradients(prompt_groups(raw))
    grads = [p.main_grad.flatten() for p in learner.chunks[0].parameters() if p.requires_grad]
    return torch.cat(grads).numpy(), moved


def test_stage_inputs_on_the_host_change_no_bit():
    model = make_model(qwen_config())
    args = hf_of(model), dict(model.state_dict()), make_groups((70, [12, 5]))
    device, host = (
        run_ranks(2, _with_inputs_at, Layout(pp=2, segment_length=32, stage_inputs=place), *args)
        for place in ("device", "host")
    )
    assert all(np.array_equal(a, b) for (a, _), (b, _) in zip(device, host, strict=True))
    assert [moved for _, moved in device] == [[], []]
    assert [moved for _, moved in host] == [[], [(32, 1, 64), (32, 1, 64), (5, 1, 64)]]  # the first stage has ids


def _build_peak(rank, world_size, hf, keep_weights):
    """Peak bytes of building a model and its DDP with the distributed optimizer; weights; gradients."""
    context = init_parallel(Layout().parallel, device=torch.device("cpu"), seed=1, timeout_s=60)
    with peak_memory() as memory:
        chunks = build_model(hf, BuildOptions("bf16"), context)
        chunks = wrap_ddp(chunks, context, use_distributed_optimizer=True, keep_weights=keep_weights)
    (buffer,) = chunks[0].buffers
    assert all(p.is_contiguous() and p.numel() for p in chunks[0].parameters())
    return memory.peak, buffer.param_data.nbytes, buffer.grad_data.nbytes


def test_ddp_is_built_without_a_second_copy_of_the_weights():
    hf = qwen_config(num_hidden_layers=4, intermediate_size=512).to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    ((peak, weights, grads),) = run_ranks(1, _build_peak, hf, False)
    assert weights + grads <= peak <= 1.05 * (weights + grads)
    ((peak, weights, grads),) = run_ranks(1, _build_peak, hf, True)
    assert peak >= 0.95 * (2 * weights + grads), "what Megatron does by itself"
