"""`trainable`: the chosen parameters get the same gradient as ever, the others cost nothing."""

import pytest
import torch
from glm_oracle import glm_truth
from harness import Layout, assert_equals_oracle, build_learner, make_groups, run_layout
from oracle import dense_grpo, glm_config, make_model, qwen_config

from longstraw_megatron.compose import load_config
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.optimizer import build_optimizer
from longstraw_megatron.mcore.trainable import trainable_names
from longstraw_megatron.testing import run_ranks


def hf_of(config, architecture: str) -> dict:
    return config.to_dict() | {"architectures": [architecture]}


QWEN = hf_of(qwen_config(), "Qwen3_5ForCausalLM")
GLM = hf_of(glm_config(), "GlmMoeDsaForCausalLM")
REFUSED = {
    "no such name": (QWEN, ["decoder.layers.8.*"], "the pattern 'decoder.layers.8.*' matches no parameter"),
    "one of two": (QWEN, ["*mlp*", "*lora*"], "the pattern '\\*lora\\*' matches no parameter"),
    "indexer": (GLM, ["*.indexer.*"], "matches the frozen indexer's parameters only"),
    "nothing": (QWEN, [], "trainable got an empty list"),
    "router bias": (GLM, ["*.router.expert_bias"], "matches no parameter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_patterns_that_would_train_nothing_are_refused(name):
    hf, patterns, message = REFUSED[name]
    with pytest.raises(RefusedError, match=message):
        trainable_names(patterns, hf)


def test_a_tied_head_goes_with_the_embedding():
    tied = QWEN | {"tie_word_embeddings": True}
    both = {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert trainable_names(["embedding.*"], tied) == trainable_names(["output_layer.*"], tied) == both
    assert trainable_names(["embedding.*"], QWEN) == {"embedding.word_embeddings.weight"}


CASES = {
    "frozen embedding, recompute": (
        "qwen",
        Layout(recompute="full", trainable=("decoder.layers.*", "output_layer.*")),
        lambda name: not name.startswith("embedding") and "final_layernorm" not in name,
    ),
    "one layer at the bottom": (
        "qwen",
        Layout(recompute="full", trainable=("decoder.layers.0.*",)),
        lambda name: name.startswith("decoder.layers.0."),
    ),
    "a stage without any": (
        "qwen",
        Layout(pp=2, recompute="full", trainable=("decoder.layers.1.*",)),
        lambda name: name.startswith("decoder.layers.1."),
    ),
    "attention of the sparse model, experts frozen": (
        "glm",
        Layout(segment_length=16, recompute="full", trainable=("*self_attention*",)),
        lambda name: "self_attention" in name and "indexer" not in name,
    ),
    "experts only, over ranks": (
        "glm",
        Layout(cp=2, ep=2, segment_length=16, trainable=("*.mlp.experts.*",)),
        lambda name: ".mlp.experts." in name,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_chosen_ones_have_the_gradient_of_full_sequences(name):
    kind, layout, chosen = CASES[name]
    model = make_model(
        qwen_config(num_hidden_layers=4) if kind == "qwen" else glm_config(index_n_heads=4, num_hidden_layers=4)
    )
    groups = make_groups((70, [12, 5]))
    truth = (dense_grpo if kind == "qwen" else glm_truth)(model, groups)
    results = run_layout(layout, model, truth, groups)
    assert all(chosen(name) for result in results for name in result.errors)
    assert any(result.errors for result in results)
    for result in results:
        if not result.errors:
            result.errors["nothing"] = (0.0, 1.0)
    assert_equals_oracle(results, truth)


def _costs(rank, world_size, hf, patterns):
    """What a frozen parameter costs: main gradients and optimizer state, by whether it is in them."""
    learner, context = build_learner(Layout(trainable=patterns, frozen=("linear_fc2",)), hf, detached=True)
    optimizer = build_optimizer(
        load_config([]).optimizer, learner.chunks, context, precision="fp32", use_distributed_optimizer=False
    )
    for chunk in learner.chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(0.5)
            if parameter.requires_grad:
                parameter.main_grad.fill_(1e-3)
    before = {name: p.detach().clone() for name, p in learner.chunks[0].named_parameters()}
    optimizer.step()
    parameters = dict(learner.chunks[0].named_parameters())
    states = sum(len(part.optimizer.state) for part in getattr(optimizer, "chained_optimizers", [optimizer]))
    return (
        {name for name, p in parameters.items() if p.requires_grad},
        {name for name, p in parameters.items() if hasattr(p, "main_grad")},
        {name for name, p in parameters.items() if not torch.equal(p, before[name])},
        states,
        sum(buffer.grad_data.numel() for buffer in learner.chunks[0].buffers),
        sum(p.numel() for p in parameters.values() if p.requires_grad),
    )


def test_frozen_parameters_have_no_gradient_and_no_optimizer_state():
    """Also what was frozen by someone else (a LoRA base) stays so, though a pattern names it."""
    ((trained, with_grad, updated, states, grad_numel, numel),) = run_ranks(1, _costs, QWEN, ("*mlp*",))
    assert trained and all("mlp" in name and "linear_fc2" not in name for name in trained)
    assert trained == with_grad == updated and states == len(trained) and grad_numel == numel
