"""The Qwen hybrid in every parallel layout: every parameter's gradient on every rank, loss and gradient norm, against
Hugging Face's, with old logprobs that are not the present ones."""

import pytest
from harness import (
    Layout,
    after_updates,
    assert_equals_oracle,
    make_groups,
    names_of,
    run_exact_and_detached,
    run_layout,
)
from oracle import dense_grpo, make_model, qwen_config

FEW_HEADS, MANY_HEADS = (
    {"linear_num_key_heads": 2, "linear_num_value_heads": 6},
    {
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
)
GROUPS = ((150, [20, 1, 33]), (37, [5, 9]))

TENSOR_AND_DATA = {
    "tp2 sp": Layout(tp=2),
    "tp2 without sp": Layout(tp=2, sp=False),
    "tp2 sp, packed, recompute": Layout(tp=2, branches_per_microbatch=2, recompute="full"),
    "dp2": Layout(dp=2),
    "dp3: more ranks than groups": Layout(dp=3),
}
CONTEXT = {
    "cp2": Layout(cp=2),
    "cp2, packed, recompute": Layout(cp=2, branches_per_microbatch=3, recompute="full"),
    "cp2 contiguous": Layout(cp=2, style="contiguous"),
    "cp3": Layout(cp=3),
    "cp4": Layout(cp=4),
    "cp8, segments shorter than the ranks": Layout(cp=8, segment_length=50),
    "tp2 cp2 without sp": Layout(tp=2, cp=2, sp=False),
    "tp2 sp cp2": Layout(tp=2, cp=2, branches_per_microbatch=2),
    "cp2 dp2": Layout(cp=2, dp=2),
}
PIPELINE = {
    "pp2": Layout(pp=2),
    "pp4, recompute": Layout(pp=4, recompute="full"),
    "pp2 vpp2": Layout(pp=2, vpp=2),
    "pp2, two prefixes alive, packed": Layout(pp=2, max_live_prefixes=2, branches_per_microbatch=2),
    "pp3, uneven": Layout(pp=3, stages=(1, 5, 2)),
    "pp2 vpp3, uneven by itself": Layout(pp=2, vpp=3),
    "pp2 tp2": Layout(pp=2, tp=2),
    "pp2 cp2": Layout(pp=2, cp=2),
    "pp2 dp2": Layout(pp=2, dp=2),
    "tp2 sp pp2 cp2": Layout(tp=2, pp=2, cp=2),
}


@pytest.fixture(scope="module")
def truths():
    made = {}

    def truth(heads: str, shapes, num_layers: int):
        """Model, groups, and what dense training gives: (exact, detached)."""
        key = (heads, repr(shapes), num_layers)
        if key not in made:
            changes = FEW_HEADS if heads == "few" else MANY_HEADS
            model = make_model(qwen_config(num_hidden_layers=num_layers, **changes))
            groups = make_groups(*shapes)
            groups = after_updates(groups, dense_grpo(model, groups))
            made[key] = model, groups, (dense_grpo(model, groups), dense_grpo(model, groups, detached=True))
        return made[key]

    return truth


def _check(truths, layout, heads="few", shapes=GROUPS):
    """Both gradients of a layout, the exact one and that of a detached prompt."""
    # four layers have every kind; pipelines cut eight
    model, groups, dense = truths(heads, shapes, 8 if layout.pp > 1 else 4)
    for results, truth in zip(run_exact_and_detached(layout, model, *dense, groups), dense, strict=True):
        assert_equals_oracle(results, truth)


@pytest.mark.parametrize("name", TENSOR_AND_DATA)
def test_tensor_and_data_parallel(truths, name):
    _check(truths, TENSOR_AND_DATA[name])


WIDE = [(name, "many") for name in ("cp2, packed, recompute", "cp2 contiguous")]


# state relayed over ranks where heads are few, sharded by heads where they are many
@pytest.mark.parametrize(
    ("name", "heads"),
    [
        pytest.param(name, heads, marks=[pytest.mark.wide] if (name, heads) in WIDE else [])
        for name in CONTEXT
        for heads in ("few", "many")
    ],
)
def test_context_parallel(truths, name, heads):
    _check(truths, CONTEXT[name], heads)


def test_more_ranks_than_tokens(truths):
    _check(truths, Layout(cp=4, segment_length=3, page_length=2), shapes=((8, [2, 1]), (1, [3])))


@pytest.mark.parametrize("name", names_of(PIPELINE, wide=("pp2, two prefixes alive, packed",)))
def test_pipeline_parallel(truths, name):
    _check(truths, PIPELINE[name])


def test_pipeline_parallel_with_a_tied_embedding():
    model = make_model(qwen_config(tie_word_embeddings=True))
    groups = make_groups(*GROUPS)
    truth = dense_grpo(model, groups)
    assert_equals_oracle(run_layout(Layout(pp=2), model, truth, groups), truth)
