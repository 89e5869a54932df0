import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longstraw_megatron.functional.logprobs import logprobs
from longstraw_megatron.segments.logprobs import LOGITS_BYTES, blocked_logprobs, default_block_size
from longstraw_megatron.testing import relative_error, run_ranks

VOCAB, DIM = 30, 5


def _case(num_tokens, *, dtype=torch.float64, vocab=VOCAB, dim=DIM, pads=(), scale=1.0):
    """(hidden, weight, targets, gradient of the logprobs); hidden rows of padding hold NaN."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = scale * torch.randn(num_tokens, dim, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, dim, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    grad = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    for pad in pads:
        targets[pad] = -1
        hidden[pad] = torch.nan
    grad_dtype = torch.promote_types(dtype, torch.float32)
    return hidden.to(dtype), weight.to(dtype), targets, grad.to(grad_dtype)


def _dense(hidden, weight, targets, grad, **options):
    """Value and gradients by plain autograd, in float64, padding left out."""
    kept = targets >= 0
    rows = hidden[kept].double().requires_grad_()
    weight = weight.double().requires_grad_()
    value = logprobs(rows, weight, targets[kept], **options)
    value.backward(grad[kept].double())
    whole, grad_hidden = torch.zeros(len(targets)).double(), torch.zeros(hidden.shape).double()
    whole[kept], grad_hidden[kept] = value.detach(), rows.grad
    return whole, grad_hidden, weight.grad


def _blocked(hidden, weight, targets, grad, **options):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    value = blocked_logprobs(hidden, weight, targets, **options)
    value.backward(grad)
    return value.detach(), hidden.grad, weight.grad


# float64 and float32: the epsilon times some tens of operations. bfloat16 weights: products are rounded to 8 bits.
BOUNDS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("num_tokens", "block_size"), [(1, 1), (7, 3), (13, 4), (13, 13), (13, 100), (8, 1), (5, None)]
)
def test_value_and_gradients(dtype, num_tokens, block_size):
    case = _case(num_tokens, dtype=dtype)
    got, want = _blocked(*case, block_size=block_size), _dense(*case)
    assert got[0].dtype == torch.promote_types(dtype, torch.float32)
    assert (got[1].dtype, got[2].dtype) == (dtype, dtype)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) <= BOUNDS[dtype]


@pytest.mark.parametrize("pads", [(0,), (2, 3), (6,), (0, 1, 2, 3, 4, 5, 6)])
def test_padding_adds_nothing_even_when_it_holds_nan(pads):
    case = _case(7, pads=pads)
    value, grad_hidden, grad_weight = _blocked(*case, block_size=3)
    for got, want in zip((value, grad_hidden, grad_weight), _dense(*case), strict=True):
        assert relative_error(got, want) <= 1e-14
    assert not value[list(pads)].any() and not grad_hidden[list(pads)].any()


def test_no_tokens():
    value, grad_hidden, grad_weight = _blocked(*_case(0))
    assert value.shape == (0,) and grad_hidden.shape == (0, DIM)
    assert grad_weight.shape == (VOCAB, DIM) and not grad_weight.any()


def test_large_logits_do_not_overflow():
    case = _case(9, dtype=torch.float32, scale=300.0)
    for got, want in zip(_blocked(*case, block_size=2), _dense(*case), strict=True):
        # logits near 1000: float32 knows them to 6e-5, which is the relative error of a probability
        assert relative_error(got, want) <= 2e-4


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_temperature(temperature):
    case = _case(7)
    got, want = _blocked(*case, block_size=3, temperature=temperature), _dense(*case, temperature=temperature)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) <= 1e-14


def test_padded_vocabulary_takes_no_part():
    hidden, weight, targets, grad = _case(7)
    targets = targets.remainder(23)
    got = _blocked(hidden, weight, targets, grad, block_size=3, vocab_size=23)
    want = _dense(hidden, weight[:23], targets, grad)
    assert relative_error(got[0], want[0]) <= 1e-14 and relative_error(got[1], want[1]) <= 1e-14
    assert relative_error(got[2][:23], want[2]) <= 1e-14 and not got[2][23:].any()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs(frozen):
    hidden, weight, targets, grad = _case(7)
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    pieces = []
    value = blocked_logprobs(hidden, weight, targets, block_size=3, grad_weight_sink=pieces.append)
    value.backward(grad)
    want = _dense(hidden.detach(), weight.detach(), targets, grad)
    if frozen == "weight":
        assert weight.grad is None and not pieces
        assert relative_error(hidden.grad, want[1]) <= 1e-14
    else:
        assert hidden.grad is None
        assert relative_error(sum(pieces), want[2]) <= 1e-14


def test_both_frozen_and_no_grad():
    hidden, weight, targets, _ = _case(7)
    value = blocked_logprobs(hidden, weight, targets, block_size=3)
    assert not value.requires_grad
    with torch.no_grad():
        again = blocked_logprobs(hidden.requires_grad_(), weight.requires_grad_(), targets, block_size=3)
    assert not again.requires_grad and torch.equal(value, again)


@pytest.mark.parametrize("vocab_size", [VOCAB, 23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_take_the_gradient_of_the_weight(dtype, vocab_size):
    hidden, weight, targets, grad = _case(7, dtype=dtype)
    targets = targets.remainder(23)
    options = {"block_size": 3, "vocab_size": vocab_size}
    autograd = _blocked(hidden, weight, targets, grad, **options)
    main_grad, pieces = torch.ones(VOCAB, DIM), []
    for sink in (main_grad, pieces.append):
        leaf = weight.clone().requires_grad_()
        rows = hidden.clone().requires_grad_()
        blocked_logprobs(rows, leaf, targets, grad_weight_sink=sink, **options).backward(grad)
        assert leaf.grad is None
        assert torch.equal(rows.grad, autograd[1])
    assert len(pieces) == 3 and all(p.dtype == torch.float32 and p.shape == (vocab_size, DIM) for p in pieces)
    total = torch.zeros(VOCAB, DIM)
    total[:vocab_size] = sum(pieces)
    # both are float32 sums, so that neither is further from the other than float32 is, whatever the weight's dtype
    assert relative_error(main_grad - 1, total) <= 1e-6
    assert relative_error(autograd[2].float(), total) <= (1e-6 if dtype == torch.float32 else 2**-8)


def test_gradient_of_bfloat16_weight_is_summed_in_float32():
    """300 blocks whose pieces are each below half a unit of a bfloat16 sum's last bit would be lost in one."""
    torch.manual_seed(0)
    hidden = torch.ones(300, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    blocked_logprobs(hidden, weight, torch.zeros(300, dtype=torch.long), block_size=1).sum().backward()
    # d/dw of log softmax is +-1/2 per token; a bfloat16 sum of 0.5 would stop at 128
    assert weight.grad[:, 0].tolist() == [150.0, -150.0]


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes, views included."""

    def __init__(self):
        super().__init__()
        self.numel, self.num_matmuls = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.num_matmuls += func is torch.ops.aten.mm.default
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_larger_than_a_block_of_logits(dtype):
    num_tokens, vocab, block_size, dim = 1003, 64, 16, 8
    hidden, weight, targets, grad = _case(num_tokens, dtype=dtype, vocab=vocab, dim=dim)
    hidden.requires_grad_()
    weight.requires_grad_()
    bound = max(block_size * vocab, num_tokens * dim)  # a block, or the gradient of hidden
    with _Largest() as made:
        blocked_logprobs(hidden, weight, targets, block_size=block_size).backward(grad)
    assert made.num_matmuls >= 2 * 63, "backward was not seen"
    assert made.numel <= bound < num_tokens * vocab / 7
    with _Largest() as dense:
        logprobs(hidden, weight, targets).backward(grad)
    assert dense.numel == num_tokens * vocab, "the recorder sees what it should"

    wide, narrow = hidden[:, :1].detach().requires_grad_(), weight[:, :1].detach().requires_grad_()
    with _Largest() as made:
        blocked_logprobs(wide, narrow, targets, block_size=block_size).backward(grad)
    assert made.numel <= block_size * vocab  # with D = 1 nothing is larger than the block itself


def test_graph_keeps_no_logits():
    num_tokens, vocab = 50, 40
    hidden, weight, targets, _ = _case(num_tokens, vocab=vocab)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        blocked_logprobs(hidden.requires_grad_(), weight.requires_grad_(), targets, block_size=8)
    assert sorted(sizes) == sorted([num_tokens * DIM, vocab * DIM, num_tokens, num_tokens])


def test_default_block_size_fills_a_byte_budget():
    assert default_block_size(248320) == LOGITS_BYTES // (4 * 248320) == 540
    assert default_block_size(248320 // 4) == 2162
    assert (default_block_size(10), default_block_size(10**9)) == (8192, 16)


def _on_rank(rank, world_size, num_tokens, block_size, vocab_size, options):
    hidden, weight, targets, grad = _case(num_tokens, pads=(3,) if num_tokens > 3 else ())
    targets = targets.clamp_max(vocab_size - 1)
    rows = VOCAB // world_size
    group = dist.new_group(list(range(world_size)))
    shard = weight[rank * rows : (rank + 1) * rows]
    return _blocked(hidden, shard, targets, grad, block_size=block_size, tp_group=group, **options)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("num_tokens", "vocab_size", "options"),
    [(11, VOCAB, {}), (11, VOCAB, {"temperature": 0.7}), (11, 8, {"vocab_size": 8}), (0, VOCAB, {}), (1, VOCAB, {})],
    ids=["plain", "temperature", "padded", "empty", "one"],
)
def test_vocabulary_parallel(world_size, num_tokens, vocab_size, options):
    """vocab_size 8 of 30 rows: with three ranks only the first has any real token."""
    results = run_ranks(world_size, _on_rank, num_tokens, 4, vocab_size, options)
    hidden, weight, targets, grad = _case(num_tokens, pads=(3,) if num_tokens > 3 else ())
    dense = {key: value for key, value in options.items() if key != "vocab_size"}
    want = _dense(hidden, weight[:vocab_size], targets.clamp_max(vocab_size - 1), grad, **dense)
    for value, _, _ in results:
        assert relative_error(value, want[0]) <= 1e-14
        assert torch.equal(value, results[0][0])
    assert relative_error(sum(result[1] for result in results), want[1]) <= 1e-14
    grad_weight = torch.cat([result[2] for result in results])
    assert relative_error(grad_weight[:vocab_size], want[2]) <= 1e-14 and not grad_weight[vocab_size:].any()


def _reduced_on_rank(rank, world_size):
    return _on_rank(rank, world_size, 11, 4, VOCAB, {"reduce_grad_hidden": True})[1]


def test_gradient_of_hidden_can_be_reduced_here():
    want = _dense(*_case(11, pads=(3,)))[1]
    for got in run_ranks(2, _reduced_on_rank):
        assert relative_error(got, want) <= 1e-14


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4, DIM)}, r"got hidden \[4, 5\], weight \[30, 5\] and 3 targets"),
        ({"hidden": torch.zeros(3, DIM + 1)}, r"wanted \[T, D\], \[V/tp, D\] and \[T\]"),
        ({"targets": torch.tensor([0, 30, 1])}, r"got target 30, wanted ids below 30"),
        ({"vocab_size": 31}, r"vocab_size 31 and 1 x 30 weight rows, wanted no more tokens than rows"),
        ({"targets": torch.tensor([0, 20, 1]), "vocab_size": 20}, r"got target 20, wanted ids below 20"),
    ],
)
def test_refusals(change, message):
    arguments = {"hidden": torch.zeros(3, DIM), "weight": torch.zeros(VOCAB, DIM), "targets": torch.zeros(3).long()}
    with pytest.raises(ValueError, match=message):
        blocked_logprobs(**(arguments | change))
