"""Float64 against stock dense Megatron: what is left of the float32 comparison is rounding.

Megatron casts to float32 in some places (the output gate, the delta rule); those casts are patched in the child process
that runs both models. The stock model's delta rule is the token-by-token recurrence, not the one under test.
"""

import pytest
import torch
from harness import Layout, build_learner, make_groups, prompt_groups
from oracle import qwen_config

from longstraw_megatron.functional.delta_rule import recurrent_gated_delta_rule
from longstraw_megatron.mcore.architectures import architecture_of
from longstraw_megatron.mcore.model import BuildOptions, transformer_config
from longstraw_megatron.testing import compare_tensors, run_ranks

CASES = {
    "ragged": ((150, [20, 1, 33]), Layout()),
    "recompute": ((150, [20, 1, 33]), Layout(recompute="full", branches_per_microbatch=2)),
    "one-token prompt": ((1, [9, 1, 20]), Layout()),
    "two-token prompt": ((2, [9, 1, 20]), Layout()),
    "segment shorter than the convolution": ((21, [9, 1]), Layout(segment_length=2)),
}


def _stock_rule(query, key, value, *, g, beta, initial_state=None, output_final_state=False, **_):
    return recurrent_gated_delta_rule(query, key, value, g, beta, initial_state=initial_state)


def _both(rank, world_size, case, state, hf):
    import megatron.core.ssm.gated_delta_net.gdn as gdn
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_block_with_experimental_attention_variant_spec,
    )

    shape, layout = case
    groups = make_groups(shape)
    gdn.torch_chunk_gated_delta_rule = _stock_rule
    to_float = torch.Tensor.float
    torch.Tensor.float = lambda x: x.double() if x.is_floating_point() else to_float(x)

    learner, context = build_learner(layout, hf, detached=False, precision="fp64")
    config = transformer_config(hf, BuildOptions("fp64"), context)
    stock = GPTModel(
        config=config,
        transformer_layer_spec=get_transformer_block_with_experimental_attention_variant_spec(config),
        **architecture_of(hf).gpt_model_kwargs(hf),
    ).train()
    ours = learner.engine.chunks[0]
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert {n: v.shape for n, v in ours.named_parameters()} == {n: v.shape for n, v in stock.named_parameters()}
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            spread = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_norm = "norm" in name
            parameter.copy_(spread * 0.1 if is_norm else spread * (0.5 if parameter.dim() == 1 else 0.06))
        ours.load_state_dict(stock.state_dict())

    learner.compute_gradients(prompt_groups(groups))
    (group,) = groups
    for response, advantage in zip(group["responses"], group["advantages"], strict=True):
        tokens = torch.cat([group["prompt"], response[:-1]])
        mask = torch.triu(torch.ones(len(tokens), len(tokens), dtype=torch.bool), 1)[None, None]
        logits = stock(tokens[None], torch.arange(len(tokens))[None], mask)[0, len(group["prompt"]) - 1 :]
        logprobs = torch.log_softmax(logits, -1).gather(-1, response[:, None])[:, 0]
        (-advantage * logprobs.mean() / len(group["responses"])).backward()
    comparison = compare_tensors(
        {name: parameter.main_grad for name, parameter in ours.named_parameters()},
        {name: parameter.grad for name, parameter in stock.named_parameters()},
    )
    return comparison.overall, comparison.worst, comparison.worst_name


@pytest.mark.parametrize("name", CASES)
def test_exact_gradient_in_float64(name):
    hf = qwen_config().to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    ((overall, worst, worst_name),) = run_ranks(1, _both, CASES[name], None, hf)
    assert overall <= 1e-12, f"overall {overall:.1e}, worst {worst_name} {worst:.1e}"
    assert worst <= 1e-10, f"{worst_name} {worst:.1e}"
