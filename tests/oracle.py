"""The independent judge: Hugging Face models, full sequences, plain autograd, float32, on a CPU.

Nothing here knows segments, states or Megatron. The objective is written out once more from its formula.
"""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

VOCAB = 128


def qwen_config(**changes) -> Qwen3_5TextConfig:
    """8 layers, three gated delta nets to one gated attention."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": False,
        "architectures": ["Qwen3_5ForCausalLM"],
    }
    config = Qwen3_5TextConfig(**(settings | changes))
    config._attn_implementation = "eager"
    return config


def glm_config(**changes) -> GlmMoeDsaConfig:
    """11 layers, 3 of them dense, IndexShare every fourth; rms eps 1e-6, which HF hard-codes on two of its norms."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 11,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 24,
        "v_head_dim": 32,
        "index_topk": 16,
        "index_head_dim": 16,
        "index_n_heads": 32,
        "first_k_dense_replace": 3,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
        "pad_token_id": 0,
        "architectures": ["GlmMoeDsaForCausalLM"],
    }
    config = GlmMoeDsaConfig(**(settings | changes))
    config._attn_implementation = "eager"
    return config


def make_model(config, *, seed: int = 0, dtype: torch.dtype = torch.float32):
    """A random model at its plain initialisation; norms and biases moved off their constant start."""
    torch.manual_seed(seed)
    is_glm = isinstance(config, GlmMoeDsaConfig)
    model = (GlmMoeDsaForCausalLM if is_glm else Qwen3_5ForCausalLM)(config).to(dtype).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if "dt_bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.5)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.add_(torch.randn_like(buffer) * 0.05)
    return model


@dataclass
class DenseResult:
    logprobs: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (group, branch) -> [R]
    grads: dict[str, Tensor | None] = field(default_factory=dict)  # Hugging Face names
    loss: float = 0.0


def _own_copy(cache):
    """A branch's copy of the prompt's cache, whose recurrent states are not overwritten under autograd's feet."""
    cache = copy.deepcopy(cache)
    for layer in cache.layers:
        if hasattr(layer, "update_recurrent_state"):
            layer.update_recurrent_state = lambda recurrent_states, *args, **kwargs: recurrent_states
    return cache


def _branch_logprobs(model, prompt: Tensor, response: Tensor, cache) -> Tensor:
    """Logprobs of the response [R]; `cache` holds prompt[:-1] without a graph, or is None for the full sequence."""
    if cache is None:
        logits = model(torch.cat([prompt, response[:-1]])[None], use_cache=False).logits[0, len(prompt) - 1 :]
    else:
        positions = torch.arange(len(prompt) - 1, len(prompt) - 1 + len(response))[None]
        out = model(
            torch.cat([prompt[-1:], response[:-1]])[None],
            cache=_own_copy(cache),
            position_ids=positions,
            use_cache=True,
        )
        logits = out.logits[0]
    logprobs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
    return logprobs.gather(-1, response[:, None])[:, 0]


def dense_grpo(model, groups: list[dict], *, detached: bool = False) -> DenseResult:
    """Loss and gradient of the default objective over groups of {"prompt", "responses", "advantages", "masks"?,
    "old_logprobs"?}: mean over groups of -1/G sum_i 1/R_i sum_t A_i exp(logp - old), ratios within the clip; old
    logprobs are the present ones where they are not given."""
    result = DenseResult()
    model.zero_grad(set_to_none=True)
    for g, group in enumerate(groups):
        prompt = torch.as_tensor(group["prompt"])
        cache = None
        if detached and len(prompt) > 1:
            with torch.no_grad():
                cache = model(prompt[None, :-1], use_cache=True)
                cache = getattr(cache, "cache", None) or cache.past_key_values
        for b, (response, advantage) in enumerate(zip(group["responses"], group["advantages"], strict=True)):
            response = torch.as_tensor(response)
            mask = torch.as_tensor(group["masks"][b]) if "masks" in group else torch.ones(len(response))
            logprobs = _branch_logprobs(model, prompt, response, cache)
            result.logprobs[g, b] = logprobs.detach()
            if mask.sum() == 0:
                continue
            old = torch.as_tensor(group["old_logprobs"][b]) if "old_logprobs" in group else logprobs.detach()
            ratio = torch.exp(logprobs - old)
            loss = -(advantage * ratio * mask).sum() / mask.sum() / len(group["responses"]) / len(groups)
            loss.backward()
            result.loss += float(loss.detach())
    result.grads = {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
    return result
