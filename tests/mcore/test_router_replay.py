"""Experts that come with the rollouts are taken, keyed by microbatch; the gates stay those of the present weights."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from glm_oracle import glm_truth
from harness import Layout, assert_equals_oracle, build_learner, fill_from_hf, make_groups, prompt_groups, run_layout
from oracle import DenseResult, glm_config, make_model

from longstraw_megatron.testing import compare_tensors, run_ranks


def _with_experts(groups, experts):
    """The groups with `experts[group, branch]` [R, MoE layers, top-k] on their branches."""
    return [
        dataclasses.replace(
            group,
            branches=tuple(
                dataclasses.replace(branch, routed_experts=experts[g, b]) for b, branch in enumerate(group.branches)
            ),
        )
        for g, group in enumerate(groups)
    ]


def _rank(rank, world_size, layout, hf, weights, raw):
    """Gradients: routed freely, told the free choice, told another choice; each by parameter."""
    learner, context = build_learner(layout, hf, detached=False)
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    groups, chosen = prompt_groups(raw), {}
    engine, run = learner.engine, learner.engine._judge

    def spy(action, work, segment, logprobs):
        moe = torch.stack([segment.experts[layer].long() for layer in sorted(segment.experts)], dim=1)
        start = 0
        for branch, length in zip(work.microbatches[action.unit], segment.layout.lengths, strict=True):
            chosen[action.group, branch] = moe[start : start + length].numpy()
            start += length
        return run(action, work, segment, logprobs)

    engine._judge = spy

    def gradient(groups):
        learner.compute_gradients(groups)
        return {name: p.main_grad.clone() for name, p in learner.chunks[0].named_parameters() if p.requires_grad}

    free = gradient(groups)
    engine._judge = run
    # groups are run costliest first, so place and index are the same here
    told = gradient(_with_experts(groups, chosen))
    others = {key: np.stack([(value[..., 0] + 1) % 8, (value[..., 0] + 3) % 8], -1) for key, value in chosen.items()}
    other = gradient(_with_experts(groups, others))
    cut = dataclasses.replace(learner.options.cut, response_block=5)
    learner.options = dataclasses.replace(learner.options, cut=cut)
    return free, told, other, gradient(_with_experts(groups, others))


def test_given_experts_are_taken_in_every_microbatch_and_in_recompute():
    model = make_model(glm_config(num_hidden_layers=7))
    hf = model.config.to_dict() | {"architectures": ["GlmMoeDsaForCausalLM"]}
    raw = make_groups((60, [12, 1, 17]), (37, [8, 3]))
    for layout in (Layout(segment_length=16), Layout(segment_length=16, branches_per_microbatch=2, recompute="full")):
        ((free, told, other, in_blocks),) = run_ranks(1, _rank, layout, hf, dict(model.state_dict()), raw)
        # the same experts in another order sum in another order
        assert compare_tensors(told, free).overall < 1e-6
        assert compare_tensors(other, free).overall > 1e-2
        assert compare_tensors(in_blocks, other).overall < 1e-5  # DESIGN section 8: float32's own error


@contextlib.contextmanager
def _told(model, experts):
    """Hugging Face's routers take `experts` [R, MoE layers, top-k] for the last R tokens."""

    def hook(layer):
        def replace(gate, _args, out):
            logits, _, chosen = out
            chosen, scores = chosen.clone(), logits.sigmoid()
            chosen[-len(experts) :] = experts[:, layer]
            weights = scores.gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True) * gate.routed_scaling_factor, chosen

        return replace

    gates = [module.gate for module in model.modules() if hasattr(module, "gate")]
    handles = [gate.register_forward_hook(hook(layer)) for layer, gate in enumerate(gates)]
    yield
    for handle in handles:
        handle.remove()


def _truth(model, groups) -> DenseResult:
    """The oracle's sum over branches, each told its own experts."""
    total = DenseResult()
    for g, group in enumerate(groups):
        for b, experts in enumerate(group["experts"]):
            alone = {"prompt": group["prompt"], "responses": group["responses"][b : b + 1]}
            share = len(group["responses"]) * len(groups)
            with _told(model, experts):
                one = glm_truth(model, [alone | {"advantages": [group["advantages"][b] / share]}])
            total.logprobs[g, b] = one.logprobs[0, 0]
            total.loss += one.loss
            for name, grad in one.grads.items():
                before = total.grads.get(name)
                total.grads[name] = grad if before is None else before if grad is None else before + grad
    return total


REPLAYED = {
    "packed, recompute": Layout(segment_length=8, branches_per_microbatch=2, recompute="full"),
    "cp2 packed": Layout(cp=2, segment_length=8, branches_per_microbatch=3),
    "tp2 sp packed": Layout(tp=2, segment_length=8, branches_per_microbatch=2),
    "pp2 vpp2": Layout(pp=2, vpp=2, segment_length=8),
    "ep2 over dp2": Layout(ep=2, dp=2, segment_length=8, recompute="full"),
}


@pytest.mark.parametrize("name", REPLAYED)
def test_given_experts_equal_hugging_face_told_the_same(name):
    model = make_model(glm_config(num_hidden_layers=7))
    groups = make_groups((20, [7, 1, 4]), (9, [3, 2]), (1, [5]))
    generator = torch.Generator().manual_seed(3)
    for group in groups:
        group["experts"] = [torch.rand(len(r), 4, 8, generator=generator).topk(2).indices for r in group["responses"]]
    truth = _truth(model, groups)
    assert_equals_oracle(run_layout(REPLAYED[name], model, truth, groups), truth)
