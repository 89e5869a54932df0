"""Gradients of embedding and output layer go into main_grad, and no tensor of the vocabulary's size is made for them.

That they are right is what the oracle's tests say (all of them run with main_grad): tied, frozen, TP, PP.
"""

import pytest
import torch
from harness import Layout, build_learner, fill_from_hf, make_groups, prompt_groups
from oracle import make_model, qwen_config
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw_megatron.mcore.model import BuildOptions, build_model
from longstraw_megatron.mcore.parallel import init_parallel
from longstraw_megatron.mcore.weight_grads import SegmentEmbedding, add_rows, main_grad_of
from longstraw_megatron.testing import run_ranks
from longstraw_megatron.testing.memory import _made

VOCAB = 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_with_repetitions_add_up(dtype):
    """A token that comes 4,000 times: low precision must not stand still at a sum that swamps its terms."""
    generator = torch.Generator().manual_seed(0)
    index = torch.cat((torch.zeros(4000, dtype=torch.long), torch.randint(0, 50, (300,), generator=generator)))
    index = index[torch.randperm(len(index), generator=generator)]
    rows = (1 + torch.rand(len(index), 8, generator=generator)).to(dtype)
    total = torch.ones(60, 8, dtype=dtype)
    add_rows(total, index, rows)
    want = torch.ones(60, 8, dtype=torch.float64).index_add_(0, index, rows.double())
    bound = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2 * 2**-8}[dtype]
    assert ((total.double() - want).abs() <= bound * want).all()


class Shapes(TorchDispatchMode):
    """Counts the tensors of one shape that operations make."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.ops = tuple(shape), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.ops += [str(func) for tensor in _made(out, (args, kwargs or {})) if tuple(tensor.shape) == self.shape]
        return out


def _ops(rank, world_size, layout, hf, weights, raw, precision):
    """Operations of a step that made a tensor as large as this rank's embedding."""
    learner, context = build_learner(layout, hf, detached=False, precision=precision)
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    with Shapes((VOCAB // layout.tp, 64)) as shapes:
        learner.compute_gradients(prompt_groups(raw))
    return shapes.ops


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_no_dense_gradient_of_the_vocabulary(tied, precision):
    layout = Layout(tp=2, segment_length=32, recompute="full", grad_reduce_in_fp32=precision == "fp32")
    model = make_model(qwen_config(num_hidden_layers=4, vocab_size=VOCAB, tie_word_embeddings=tied))
    hf = model.config.to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    args = layout, hf, dict(model.state_dict()), make_groups((70, [12, 5]), vocab=VOCAB), precision
    for ops in run_ranks(2, _ops, *args):
        assert ops == []


def _without_ddp(rank, world_size, hf, ids):
    """The embedding's gradient with and without a main_grad, and of a frozen weight."""
    context = init_parallel(Layout().parallel, device=torch.device("cpu"), seed=1, timeout_s=60)
    (model,) = build_model(hf, BuildOptions(), context)
    embedding = model.embedding.word_embeddings
    assert type(embedding) is SegmentEmbedding
    weight = embedding.weight
    torch.nn.init.normal_(weight)
    weight.main_grad = torch.zeros_like(weight)
    embedding(ids).square().sum().backward()
    direct, left = weight.main_grad, weight.grad
    del weight.main_grad
    embedding(ids).square().sum().backward()
    weight.requires_grad_(False)
    return direct.numpy(), left, weight.grad.numpy(), main_grad_of(weight), embedding(ids).requires_grad


def test_without_main_grad_autograd_carries_it():
    hf = qwen_config(num_hidden_layers=4).to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    ids = torch.tensor([[3, 5, 3, 127, 0]])
    ((direct, left, carried, frozen, requires),) = run_ranks(1, _without_ddp, hf, ids)
    assert left is None and frozen is None and not requires
    assert direct.any() and abs(direct - carried).max() <= 1e-6 * abs(carried).max()
