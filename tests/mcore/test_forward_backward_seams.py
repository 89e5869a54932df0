"""Where a pipeline and `get_forward_backward_func` meet: what falls through, what is said, what is refused."""

import logging
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as get_megatron_func
from megatron.core.timers import Timers
from pipeline_steps import LENGTH, Loss, Pipeline, forward_step, full_samples, grads, make_microbatches, run_step

import longstraw_megatron
from longstraw_megatron.batch import Branch, PromptGroup
from longstraw_megatron.errors import NonFiniteError, RefusedError
from longstraw_megatron.layout import cut_sequences
from longstraw_megatron.mcore.prompt_batch import PromptMicrobatch, peek, replayed_group, sample_layout
from longstraw_megatron.testing import assert_gradients_close, run_ranks
from longstraw_megatron.testing.megatron import init_megatron

GROUP = (13, [5, 1, 9])


class Messages(logging.Handler):
    """What was logged from here on."""

    def __init__(self):
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("longstraw_megatron.mcore.forward_backward").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Named:
    """A pipeline's own iterator, with something besides."""

    def __init__(self, items):
        self.items, self.asked = iter(items), 0

    def __next__(self):
        return next(self.items)

    def count(self):
        self.asked += 1


def get_func(**changes):
    options = longstraw_megatron.PromptOptions(**{"segment_length": 5, "page_length": 8} | changes)
    return longstraw_megatron.get_forward_backward_func(options=options)


def call(func, chunks, data_iterator, step, num_microbatches=1, **kwargs):
    return func(
        forward_step_func=step,
        data_iterator=data_iterator,
        model=chunks,
        num_microbatches=num_microbatches,
        seq_length=LENGTH,
        micro_batch_size=1,
        **kwargs,
    )


def test_the_package_is_cheap_to_import():
    code = (
        "import sys, longstraw_megatron; assert 'torch' not in sys.modules and 'megatron' not in sys.modules;"
        "assert 'get_forward_backward_func' in longstraw_megatron.__all__"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'get_forward'"):
        _ = longstraw_megatron.get_forward


def _ordinary(rank, world_size, sizes):
    groups = init_megatron(**sizes)
    messages = Messages()
    samples = full_samples(make_microbatches(GROUP))
    loss = Loss("scaled", 3, 3)
    stock, chunks = Pipeline().build(groups, ours=False), Pipeline().build(groups, ours=False)
    want = run_step(get_megatron_func(), stock, samples, loss, multiple=LENGTH)

    def step(data_iterator, model):
        data_iterator.count()
        return forward_step(data_iterator, model, loss=loss, multiple=LENGTH)

    iterator = Named([*samples, *samples])
    got = call(get_func(), chunks, [iterator], step, 3)
    equal = all(torch.equal(grad, grads(stock)[name]) for name, grad in grads(chunks).items())
    equal &= [data["loss"].item() for data in got] == [data["loss"].item() for data in want]
    call(get_func(segment_length=7), chunks, iterator, step, 2, forward_only=True)
    return equal, iterator.asked, messages.texts


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}])
def test_ordinary_batches_are_megatrons_and_it_is_said_once(sizes):
    results = run_ranks(2 if sizes else 1, _ordinary, sizes)
    assert all(equal and asked == 5 for equal, asked, _ in results)
    assert len(results[0][2]) == 1 and "Megatron's own schedule" in results[0][2][0]
    assert not any(texts for _, _, texts in results[1:])


def test_an_iterator_is_looked_into_once_and_left_as_it_was():
    first, iterator = peek(Named([1, 2, 3]))
    assert first == 1 and iter(iterator) is iterator
    iterator.count()
    assert iterator.asked == 1
    assert [next(iterator) for _ in range(3)] == [1, 2, 3]
    for other in (iter(()), None, [1, 2], {"get_next": 1}):
        assert peek(other) == (None, other)


def _overlapped(rank, world_size):
    groups = init_megatron()
    messages = Messages()
    ddp = {"overlap_grad_reduce": True, "bucket_size": 4000}
    results = []
    for settings in (ddp, {}):
        chunks = Pipeline(ddp=settings).build(groups, ours=True)
        for shape in (GROUP, (24, [3, 4]), (9, [7])):  # another number of backwards in each step
            run_step(get_func(), chunks, make_microbatches(shape, seed=rank), Loss("scaled", 1, 6))
        results.append(grads(chunks))
    assert_gradients_close(*results)
    return messages.texts


def test_overlapped_reductions_are_switched_off_and_it_is_said_once():
    texts, others = run_ranks(2, _overlapped)
    assert len(texts) == 1 and "overlap_grad_reduce was switched off" in texts[0] and not others


def _constant_loss(rank, world_size, sizes):
    """A branch whose loss is no function of the model, against one whose tokens are all masked."""
    groups = init_megatron(**sizes)
    (microbatch,) = make_microbatches(GROUP)
    masked = replace(microbatch.samples[2], mask=torch.zeros(9))
    microbatch = PromptMicrobatch(microbatch.group, (*microbatch.samples[:2], masked))
    loss = Loss("scaled", 1, 3)

    def step(data_iterator, model):
        output, loss_func = forward_step(data_iterator, model, loss=loss, multiple=2)
        constant = loss_func.args[0].mask.sum() == 0
        return output, (lambda logits: (torch.zeros(1), {"name": "constant"})) if constant else loss_func

    results = []
    for func in (step, partial(forward_step, loss=loss, multiple=2)):
        chunks = Pipeline().build(groups, ours=True)
        data = call(get_func(), chunks, iter([microbatch]), func)
        results.append(grads(chunks))
    assert_gradients_close(*results)
    return [item["name"] for item in data]


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}])
def test_a_loss_of_nothing_adds_nothing_and_hangs_nobody(sizes):
    results = run_ranks(2 if sizes else 1, _constant_loss, sizes)
    assert results[-1] == ["0.0.0", "0.0.1", "0.0.2"]


def _labels(rank, world_size):
    """Megatron's own way: labels into the model, token losses out of it, with right padding that ours has not."""
    groups = init_megatron()
    (microbatch,) = make_microbatches(GROUP)

    def step(data_iterator, model):
        sample = next(data_iterator)
        assert model.pre_process and model.config is model.module.config and model.module.decoder is not None
        length = len(sample.tokens)
        tokens, weights = torch.zeros(1, LENGTH, dtype=torch.int64), torch.zeros(1, LENGTH)
        tokens[0, :length], weights[0, sample.prompt_length - 1 : length - 1] = sample.tokens, 1.0
        # positional, and through a wrapper's module, as some pipelines do
        return model.module(tokens, None, None, None, tokens.roll(-1)), partial(_weigh, weights)

    stock, ours = Pipeline().build(groups, ours=False), Pipeline().build(groups, ours=True)

    def stock_step(data_iterator, model):
        sample = next(data_iterator)
        tokens, weights = torch.zeros(1, LENGTH, dtype=torch.int64), torch.zeros(1, LENGTH)
        tokens[0, : len(sample.tokens)] = sample.tokens
        weights[0, sample.prompt_length - 1 : len(sample.tokens) - 1] = 1.0
        return model(tokens, torch.arange(LENGTH)[None], None, labels=tokens.roll(-1)), partial(_weigh, weights)

    want = call(get_megatron_func(), stock, iter(full_samples([microbatch])), stock_step, 3)
    got = call(get_func(divide_by="branches"), ours, iter([microbatch]), step)
    assert_gradients_close(grads(ours), grads(stock))
    return got, want


def _weigh(weights, losses):
    loss = (losses * weights).sum() / weights.sum()
    return loss, loss.item()


def test_labels_give_token_losses():
    ((got, want),) = run_ranks(1, _labels)
    assert got == pytest.approx(want, rel=1e-5)


def _half(rank, world_size):
    groups = init_megatron()
    microbatches = make_microbatches(GROUP)
    half = Pipeline(overrides={"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16})
    losses = []
    for pipeline in (half, Pipeline()):
        chunks = pipeline.build(groups, ours=True)
        # the loss itself asserts float32 logits
        losses.append([data["loss"].item() for data in run_step(get_func(), chunks, microbatches, Loss("mean", 1))])
    return losses


def test_megatrons_wrapper_for_half_precision_gives_float32_logits():
    ((got, want),) = run_ranks(1, _half)
    assert got == pytest.approx(want, rel=0.05)


def _refused(rank, world_size, sizes, case):
    groups = init_megatron(**sizes)
    overrides = {"hidden_dropout": 0.1} if case == "dropout" else {}
    chunks = Pipeline(overrides=overrides).build(groups, ours=case != "stock")
    (microbatch,) = make_microbatches(GROUP)
    loss = Loss("scaled", 1, 3)
    step, data, changes, multiple, kwargs = forward_step, [microbatch], {}, 2, {}
    if case == "tokens":
        data = [PromptMicrobatch(microbatch.group, microbatch.samples[::-1])]
    elif case == "twice":
        step = partial(_twice)
    elif case == "never":
        step = partial(_never)
    elif case == "mixed":
        data, kwargs = [microbatch, 3], {"num_microbatches": 2}
    elif case == "cut":
        changes, multiple = {"sample_multiple": 16}, 4
    elif case == "one rank":
        data = [microbatch] if rank else full_samples([microbatch])
    elif case == "bare":
        chunks = [chunk.module for chunk in chunks]
    elif case == "shapes":
        kwargs = {"adjust_tensor_shapes_fn": lambda receive, send: (receive, send)}
    elif case == "no microbatches":
        kwargs = {"num_microbatches": 0}
    elif case == "nan":
        chunks[-1].module.output_layer.weight.data[0, 0] = torch.nan
    step = partial(step, loss=loss, multiple=multiple)
    kwargs = {"num_microbatches": 1} | kwargs
    try:
        call(get_func(**changes), chunks, iter(data), step, **kwargs)
    except (RefusedError, NonFiniteError) as error:
        return str(error)
    return "nothing"


def _twice(iterator, model, **kwargs):
    sample = next(iterator)
    forward_step(iter([sample]), model, **kwargs)
    return forward_step(iter([sample]), model, **kwargs)


def _never(iterator, model, *, loss, multiple):
    return torch.zeros(1, 6, 96), partial(loss, next(iterator))


def _timed(rank, world_size):
    groups = init_megatron()
    timers = Timers(log_level=2, log_option="all")
    (chunk,) = Pipeline(overrides={"timers": timers, "barrier_with_L1_time": False}).build(groups, ours=True)
    run_step(get_func(), [chunk], make_microbatches(GROUP), Loss("scaled", 1, 3))
    return [timers(name).active_time() for name in ("forward-backward", "forward-compute")]


def test_megatrons_timers_run():
    ((whole, branches),) = run_ranks(1, _timed)
    assert whole > branches > 0


REFUSALS = {
    "stock": ({}, "layers that run segments"),
    "dropout": ({}, "hidden_dropout got 0.1"),
    "bare": ({}, "wanted Megatron's DistributedDataParallel"),
    "tokens": ({}, "Group g0, branch 0 got other input_ids than its sample's 6"),
    "twice": ({}, "forward_step_func called its model 2 times"),
    "never": ({}, "forward_step_func called its model 0 times"),
    "mixed": ({}, "Microbatch 1 of 2 is a int"),
    "shapes": ({}, "adjust_tensor_shapes_fn"),
    "no microbatches": ({}, "num_microbatches is 0"),
    "nan": ({}, "NaN or Inf in the loss in group g0, branch 0"),
    "cut": ({"cp": 2}, "got a sample of 8 tokens with its padding, wanted 16; set sample_multiple"),
    "one rank": ({"pp": 2}, "data_iterator yields (no )?prompt groups on this rank and not on others"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_right_is_refused_in_a_sentence(case):
    sizes, message = REFUSALS[case]
    results = run_ranks(2 if sizes else 1, _refused, sizes, case)
    with pytest.raises(RefusedError, match=message):
        raise RefusedError(results[0])


def test_a_microbatch_has_a_sample_for_each_branch_of_one_prompt():
    group = PromptGroup("g", np.array([1, 2]), (Branch([3], reward=0.0), Branch([4], reward=0.0)))
    with pytest.raises(RefusedError, match="has 1 samples, wanted one for each of its 2 branches"):
        PromptMicrobatch(group, (1,))
    with pytest.raises(RefusedError, match="Sequence 1 of group g has another prompt"):
        PromptMicrobatch.from_sequences("g", [[1, 2, 3], [1, 3, 3]], [1, 1], [0, 0])
    microbatch = PromptMicrobatch.from_sequences("g", [[1, 2, 3], [1, 2, 5, 6]], [1, 2], ["a", "b"])
    assert microbatch.group.prompt_tokens.tolist() == [1, 2]
    assert [branch.tokens.tolist() for branch in microbatch.group.branches] == [[3], [5, 6]]


def test_a_replayed_branch_takes_in_its_whole_response():
    experts = np.arange(2 * 3 * 2).reshape(2, 3, 2)
    branches = (Branch([7, 8], reward=1.0, routed_experts=experts), Branch([], reward=0.0))
    group = replayed_group(PromptGroup("g", np.array([5, 6]), branches))
    assert group.input_tokens(0).tolist() == [6, 7, 8] and group.input_tokens(1).tolist() == [6]
    assert group.branches[0].routed_experts.tolist() == [*experts.tolist(), experts[1].tolist()]
    assert group.branches[1].routed_experts is None


def test_a_sample_is_cut_as_the_pipeline_pads_it():
    """Six tokens padded to 16, four pieces of 4 on two ranks in zigzag: 0..3 on rank 0, 4 and 5 on rank 1."""
    layout = sample_layout(6, padded_length=16, cp_size=2, style="zigzag", row_multiple=1)
    assert [layout.token_offsets(rank) for rank in range(2)] == [[0, 1, 2, 3, 0, 0, 0, 0], [4, 5, 0, 0, 0, 0, 0, 0]]
    contiguous = sample_layout(6, padded_length=8, cp_size=2, style="contiguous", row_multiple=4)
    assert [contiguous.token_offsets(rank) for rank in range(2)] == [[0, 1, 2, 3], [4, 5, 0, 0]]
    # padded to no more than the cut itself needs, it is the cut of everything else here
    assert sample_layout(8, padded_length=8, cp_size=2, style="zigzag", row_multiple=1) == cut_sequences(
        [8], cp_size=2, style="zigzag"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segment_length": 0}, "segment_length is 0"),
        ({"divide_by": "groups"}, "divide_by is 'groups'"),
        ({"location": "disk"}, "location is 'disk'"),
    ],
)
def test_options_are_checked(changes, message):
    with pytest.raises(RefusedError, match=message):
        longstraw_megatron.PromptOptions(**changes)
