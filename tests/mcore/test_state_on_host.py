"""State in host memory: the gradient is that of state on the device in the same pages, bit for bit.

On a CPU the same copies are made at the same moments as on a GPU, values in before they are read and sums out behind
them, so that one that is missing or comes too late shows.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from glm_oracle import glm_truth
from harness import (
    Layout,
    after_updates,
    assert_equals_oracle,
    build_learner,
    fill_from_hf,
    make_groups,
    prompt_groups,
    run_exact_and_detached,
)
from oracle import glm_config, make_model, qwen_config

from longstraw_megatron.ops.staging import HostStaging
from longstraw_megatron.state import OnDevice, prefix
from longstraw_megatron.testing import run_ranks

SHORT = [(60, [9, 1, 12]), (1, [5])]
CUT = {"segment_length": 16, "page_length": 12}
LAYOUTS = {
    "one process": Layout(**CUT),
    "cp2": Layout(cp=2, **CUT),
    "tp2 sp": Layout(tp=2, **CUT),
    "tp2 sp cp2": Layout(tp=2, cp=2, **CUT),
    "pp2": Layout(pp=2, **CUT),
    "dp2": Layout(dp=2, **CUT),
    "blocks": Layout(response_block=5, recompute="full", **CUT),
    "bf16 sums": Layout(grad_dtype=torch.bfloat16, **CUT),
    "bf16 sums, stochastic": Layout(grad_dtype=torch.bfloat16, grad_rounding="stochastic", **CUT),
}
QWEN = LAYOUTS | {
    "cp3 relayed": Layout(cp=3, **CUT),
    "pp2 vpp2": Layout(pp=2, vpp=2, **CUT),
    "pp2, bf16 sums": Layout(pp=2, grad_dtype=torch.bfloat16, recompute="full", stage_inputs="host", **CUT),
}
GLM = LAYOUTS | {
    "ep2 in lockstep": Layout(dp=2, ep=2, **CUT),
    "pp2 vpp2": Layout(pp=2, vpp=2, stages=(1, 1, 4, 1), **CUT),
}
WIDE = {"qwen tp2 sp cp2", "glm tp2 sp cp2", "glm dp2", "glm pp2 vpp2", "qwen pp2, bf16 sums"}
CASES = [
    pytest.param(model, name, marks=[pytest.mark.wide] if f"{model} {name}" in WIDE else [], id=f"{model}-{name}")
    for model, layouts in (("qwen", QWEN), ("glm", GLM))
    for name in layouts
]


@pytest.fixture(scope="module")
def models():
    """Four layers of Qwen and seven of GLM have every kind."""
    return {
        "qwen": make_model(qwen_config(num_hidden_layers=4)),
        "glm": make_model(glm_config(index_n_heads=4, num_hidden_layers=7)),
    }


def _compare(rank, world_size, hf, weights, groups, layout):
    """For the exact and the detached gradient: how many tensors have one, and which differ between both places."""
    prefix.GATHERED_PAGE_LENGTH = layout.page_length  # on the device too: several pages merge in another order than one
    learner, context = build_learner(layout, hf, detached=False)
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    found = []
    for exact in (True, False):
        grads = []
        for residence in (OnDevice(), HostStaging(torch.device("cpu"))):
            state = replace(learner.options.state, exact=exact, residence=residence)
            learner.options = replace(learner.options, state=state)
            learner.compute_gradients(prompt_groups(groups))
            named = [pair for chunk in learner.chunks for pair in chunk.named_parameters() if pair[1].requires_grad]
            grads.append([(name, parameter.main_grad.clone()) for name, parameter in named])
        differ = [name for (name, a), (_, b) in zip(*grads, strict=True) if not torch.equal(a, b)]
        found.append((sum(bool(grad.any()) for _, grad in grads[0]), differ))
    return found


def _arguments(model, groups, layout):
    hf = model.config.to_dict() | {"architectures": [type(model).__name__]}
    return hf, dict(model.state_dict()), groups, layout


@pytest.mark.parametrize(("model", "name"), CASES)
def test_gradients_are_the_same_bits(models, model, name):
    layout = {"qwen": QWEN, "glm": GLM}[model][name]
    arguments = _arguments(models[model], make_groups(*SHORT), layout)
    for rank, found in enumerate(run_ranks(layout.world_size, _compare, *arguments, timeout=400)):
        for gradient, (num_grads, differ) in zip(("exact", "detached"), found, strict=True):
            assert num_grads and not differ, (rank, gradient, differ)


def test_latents_in_several_pages_on_the_host_give_the_true_gradient(models):
    """On the device they are one page: the bits are not the same."""
    model, groups = models["glm"], make_groups(*SHORT)
    groups = after_updates(groups, glm_truth(model, groups))
    dense = glm_truth(model, groups), glm_truth(model, groups, detached=True)
    layout = Layout(residence=HostStaging(torch.device("cpu")), **CUT)
    for results, truth in zip(run_exact_and_detached(layout, model, *dense, groups), dense, strict=True):
        assert_equals_oracle(results, truth)


class _Counted(HostStaging):
    """Asserts, on one process, that state is staged in both directions."""

    counts: Counter = Counter()

    def fetch(self, *tensors):
        self.counts["fetched"] += len(tensors)
        return super().fetch(*tensors)

    def store(self, target, source):
        self.counts["stored"] += 1
        super().store(target, source)

    def gather(self, *tensors, rows):
        self.counts["gathered"] += len(tensors)
        return super().gather(*tensors, rows=rows)

    def scatter(self, tensor, rows, source):
        self.counts["scattered"] += 1
        super().scatter(tensor, rows, source)


def _count(rank, world_size, hf, weights, groups, layout):
    learner, context = build_learner(layout, hf, detached=False)
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    learner.compute_gradients(prompt_groups(groups))
    return dict(layout.residence.counts)


@pytest.mark.parametrize("model", ["qwen", "glm"])
def test_state_is_staged_and_selected_rows_are_gathered(models, model):
    layout = Layout(residence=_Counted(torch.device("cpu")), **CUT)
    # few queries behind a long prompt select few of its rows
    arguments = _arguments(models[model], make_groups((120, [1, 1])), layout)
    (counts,) = run_ranks(1, _count, *arguments, timeout=400)
    assert counts["fetched"] > 100 and counts["stored"] > 100
    is_glm = model == "glm"
    assert (counts.get("gathered", 0) > 0, counts.get("scattered", 0) > 0) == (is_glm, is_glm)
