"""Log-probabilities of a segment's targets without its logits.

Logits are made for one block of tokens at a time, reduced to their log-sum-exp and the target's logit, and dropped;
backward makes them again. The output weight may be cut over the vocabulary (tensor parallelism): then each rank makes
its columns, and two all-reduces of [T] numbers join them. `functional/logprobs.py` is the dense reference.

    T tokens, D model dim, V vocabulary, tp ranks that share it; rank r holds rows [r V/tp, (r+1) V/tp) of the weight
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function

from longstraw_megatron.comm.collectives import ProcessGroup, all_reduce

LOGITS_BYTES = 512 * 2**20  # float32 logits of one block
WEIGHT_ROWS = 8192  # rows of a low-precision weight's gradient that are made at once on an accelerator

GradSink = Tensor | Callable[[Tensor], None]


@dataclass(frozen=True, eq=False)
class _Options:
    block_size: int
    temperature: float
    vocab_start: int  # token id of the weight's first row
    vocab_rows: int  # rows of this rank's weight that are real tokens
    tp_group: ProcessGroup | None
    reduce_grad_hidden: bool
    grad_weight_sink: GradSink | None


def default_block_size(vocab_rows: int) -> int:
    """Tokens of a block whose float32 logits against `vocab_rows` rows fill LOGITS_BYTES, from 16 to 8192."""
    return min(max(LOGITS_BYTES // (4 * max(vocab_rows, 1)), 16), 8192)


def _blocks(num_tokens: int, block_size: int) -> Iterator[slice]:
    for start in range(0, num_tokens, block_size):
        yield slice(start, min(start + block_size, num_tokens))


def _hidden_block(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Rows in the weight's dtype; padding is cleared, since it may hold anything and 0 * NaN is NaN."""
    return hidden.to(weight.dtype).masked_fill((targets < 0)[:, None], 0)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """A fresh [block, V/tp] in float32 (float64 for float64)."""
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(weight.dtype, torch.float32))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _owned(targets: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    """(row of each target in this rank's weight, clamped into it; whether it is there, and no padding), [block]."""
    local = targets - options.vocab_start
    owned = (local >= 0) & (local < options.vocab_rows)
    return local.clamp(0, options.vocab_rows - 1), owned


def _add_outer(accumulator: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """accumulator [V/tp, D] += grad_logits^T [V/tp, block] hidden [block, D], without rounding the sum down."""
    if hidden.dtype == accumulator.dtype or not hidden.is_cuda:
        accumulator.addmm_(grad_logits.to(accumulator.dtype).T, hidden.to(accumulator.dtype))
        return
    # Tensor cores multiply in low precision and sum in float32; row by row so that no second [V/tp, D] exists.
    low = grad_logits.to(hidden.dtype).T
    for rows in _blocks(low.shape[0], WEIGHT_ROWS):
        accumulator[rows] += torch.mm(low[rows], hidden, out_dtype=torch.float32)


def blocked_logprobs_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: _Options
) -> tuple[Tensor, Tensor]:
    """(logprobs [T], lse [T]), both float32 (float64 for float64), the same on every rank of the group.

    `weight` [V/tp, D] holds real tokens only; a rank may have none.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    maxima = hidden.new_full(targets.shape, -torch.inf, dtype=dtype)
    sums, chosen = torch.zeros_like(maxima), torch.zeros_like(maxima)
    for rows in _blocks(len(targets), options.block_size) if len(weight) else ():
        block = _hidden_block(hidden[rows], weight, targets[rows])
        logits = _logits(block, weight, options.temperature)
        local, owned = _owned(targets[rows], options)
        chosen[rows] = torch.where(owned, logits.gather(1, local[:, None])[:, 0], 0.0)
        maxima[rows] = logits.amax(dim=1)
        sums[rows] = logits.sub_(maxima[rows][:, None]).exp_().sum(dim=1)
    if options.tp_group is not None and options.tp_group.size() > 1:
        local_maxima = maxima.clone()
        all_reduce(maxima, options.tp_group, maximum=True, purpose="logprobs")
        both = torch.stack((sums * (local_maxima - maxima).exp(), chosen))
        all_reduce(both, options.tp_group, purpose="logprobs")
        sums, chosen = both.unbind()
    lse = maxima + sums.log()
    return torch.where(targets >= 0, chosen - lse, 0.0), lse


def blocked_logprobs_backward(
    grad_logprobs: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    options: _Options,
    *,
    grad_hidden: Tensor | None,
    add_grad_weight: Callable[[Tensor, Tensor], None] | None,
) -> None:
    """Fill `grad_hidden` [T, D] with this rank's part, and hand (grad_logits [block, V/tp], hidden [block, D]) of
    every block to `add_grad_weight`; either may be None.

    d logprobs[t] / d logits[t, v] = [v is target[t]] - exp(logits[t, v] - lse[t])
    """
    scale = torch.where(targets >= 0, grad_logprobs.to(lse.dtype), 0.0)
    for rows in _blocks(len(targets), options.block_size) if len(weight) else ():
        block = _hidden_block(hidden[rows], weight, targets[rows])
        grad_logits = _logits(block, weight, options.temperature).sub_(lse[rows][:, None]).exp_()
        grad_logits.mul_(-scale[rows][:, None])
        local, owned = _owned(targets[rows], options)
        grad_logits[torch.arange(len(local), device=local.device), local] += torch.where(owned, scale[rows], 0.0)
        if options.temperature != 1.0:
            grad_logits.div_(options.temperature)
        if grad_hidden is not None:
            grad_hidden[rows] = (grad_logits.to(weight.dtype) @ weight).to(grad_hidden.dtype)
        if add_grad_weight is not None:
            add_grad_weight(grad_logits, block)


class _BlockedLogprobs(Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, options):
        logprobs, lse = blocked_logprobs_forward(hidden, weight[: options.vocab_rows], targets, options)
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.options = options
        return logprobs

    @staticmethod
    def backward(ctx, grad_logprobs):
        hidden, weight, targets, lse = ctx.saved_tensors
        options, (needs_hidden, needs_weight) = ctx.options, ctx.needs_input_grad[:2]
        real_weight, sink = weight[: options.vocab_rows], options.grad_weight_sink
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if needs_weight and sink is None else None

        def add_grad_weight(grad_logits, block):
            if callable(sink):
                piece = torch.zeros_like(real_weight, dtype=lse.dtype)
                _add_outer(piece, grad_logits, block)
                sink(piece)
            else:
                _add_outer((grad_weight if sink is None else sink)[: options.vocab_rows], grad_logits, block)

        blocked_logprobs_backward(
            grad_logprobs,
            hidden,
            real_weight,
            targets,
            lse,
            options,
            grad_hidden=grad_hidden,
            add_grad_weight=add_grad_weight if needs_weight else None,
        )
        if grad_hidden is not None and options.reduce_grad_hidden and options.tp_group is not None:
            all_reduce(grad_hidden, options.tp_group, purpose="logprobs")
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def blocked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    block_size: int | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    tp_group: ProcessGroup | None = None,
    reduce_grad_hidden: bool = False,
    grad_weight_sink: GradSink | None = None,
) -> Tensor:
    """Logprobs [T] of `targets` [T] int64 (global token ids) under hidden [T, D] and this rank's weight [V/tp, D].

    The result is float32 (float64 for a float64 weight) and the same on every rank of `tp_group`. Products are in
    the weight's dtype, the softmax and the sum of the weight's gradient in float32. Memory beyond the inputs and
    their gradients: [T] numbers and one block of [block_size, V/tp]. A target of -1 is padding: logprob 0, no
    gradient, whatever `hidden` holds there.

    `block_size` tokens per block (default: `default_block_size`). `vocab_size` is the number of real rows of the
    whole weight, where it is padded at the end; padding rows take no part in the softmax. Logits are divided by
    `temperature`, the one that the rollouts were sampled with.

    With `tp_group`, the gradient of `hidden` is this rank's PARTIAL sum over its part of the vocabulary, as Megatron's
    copy and gather regions around an output layer expect; `reduce_grad_hidden` all-reduces it here instead. All
    ranks of the group must call with the same T and targets.

    `grad_weight_sink` takes the weight's gradient, and autograd gets none: a tensor [V/tp, D] (such as Megatron's
    main_grad) is added to in place; a function is called once per block with a float32 piece [rows, D] to add to the
    first `rows` rows. A weight that needs no gradient gets none either way.

    Raises ValueError for shapes that do not fit, or a target outside the vocabulary when on the CPU.
    """
    num_tokens, vocab_rows = len(targets), weight.shape[0]
    if hidden.shape != (num_tokens, weight.shape[1]):
        raise ValueError(
            f"blocked_logprobs got hidden {list(hidden.shape)}, weight {list(weight.shape)} and {num_tokens} targets, "
            "wanted [T, D], [V/tp, D] and [T]."
        )
    tp_rank, tp_size = (tp_group.rank(), tp_group.size()) if tp_group is not None else (0, 1)
    vocab_start = tp_rank * vocab_rows
    vocab_size = tp_size * vocab_rows if vocab_size is None else vocab_size
    if not 0 < vocab_size <= tp_size * vocab_rows:
        raise ValueError(
            f"blocked_logprobs got vocab_size {vocab_size} and {tp_size} x {vocab_rows} weight rows, wanted no more "
            "tokens than rows."
        )
    if targets.device.type == "cpu" and num_tokens and int(targets.max()) >= vocab_size:
        raise ValueError(f"blocked_logprobs got target {int(targets.max())}, wanted ids below {vocab_size}.")
    options = _Options(
        block_size=block_size or default_block_size(vocab_rows),
        temperature=temperature,
        vocab_start=vocab_start,
        vocab_rows=min(max(vocab_size - vocab_start, 0), vocab_rows),
        tp_group=tp_group,
        reduce_grad_hidden=reduce_grad_hidden,
        grad_weight_sink=grad_weight_sink,
    )
    return _BlockedLogprobs.apply(hidden, weight, targets, options)
