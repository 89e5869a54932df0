"""Tiny Hugging Face models at plain initialisation, saved as checkpoint folders, and stock Megatron around them."""

import json
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from safetensors.torch import load_file, save_file
from transformers import (
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

from longstraw_megatron.mcore.architectures import architecture_of, text_config

VOCAB, LENGTH = 96, 40
QWEN = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
GLM = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "index_topk": 8,
    "index_head_dim": 8,
    "index_n_heads": 32,  # with few heads whole rows of index scores are 0, and ties are broken differently
    "first_k_dense_replace": 1,
    "index_topk_freq": 2,
    "index_skip_topk_offset": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,  # as Hugging Face has it in two norms whatever the configuration says
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    "pad_token_id": 0,
}
# name -> kind of model and changes to its configuration
KINDS = {
    "qwen": ("qwen", {}),
    "qwen_default_layers": ("qwen", {"layer_types": None, "num_hidden_layers": 5}),
    "qwen_tied": ("qwen", {"tie_word_embeddings": True}),
    "qwen_vl": ("qwen_vl", {}),
    "glm": ("glm", {}),
    "glm_every_layer_full": ("glm", {"index_topk_freq": 1}),
    "glm_tied": ("glm", {"tie_word_embeddings": True}),
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}


def make(kind: str, **changes) -> PreTrainedModel:
    """`qwen`, `qwen_vl` or `glm` at plain initialisation; norms and correction biases moved so that each counts."""
    torch.manual_seed(0)
    if kind == "glm":
        model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**(GLM | changes)))
    elif kind == "qwen":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(QWEN | changes)))
    else:
        tied = changes.get("tie_word_embeddings", False)
        text = Qwen3_5TextConfig(**(QWEN | changes)).to_dict()
        config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
        model = Qwen3_5ForConditionalGeneration(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name or "dt_bias" in name:
                tensor.add_(torch.randn_like(tensor) * 0.1)
            if "e_score" in name:
                tensor.add_(torch.randn_like(tensor) * 0.05)
    return model.float().eval()


def make_kind(name: str) -> PreTrainedModel:
    """The model of one of KINDS."""
    kind, changes = KINDS[name]
    return make(kind, **changes)


def save(model: PreTrainedModel, folder: Path, **kwargs) -> Path:
    model.save_pretrained(folder, **kwargs)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the tensors of a folder by these, in one file."""
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


def edit_config(folder: Path, **changes) -> dict:
    """Change keys of a folder's config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return config


def build(hf_config: dict, groups, *, vpp: int = 1, **overrides) -> list[GPTModel]:
    """This rank's chunks of the stock Megatron model, in the layout of `groups`."""
    architecture, hf = architecture_of(hf_config), text_config(hf_config)
    layout = {
        "tensor_model_parallel_size": groups.tp.size(),
        "sequence_parallel": groups.tp.size() > 1,
        "pipeline_model_parallel_size": groups.pp.size(),
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "expert_model_parallel_size": groups.ep.size(),
        "expert_tensor_parallel_size": groups.expt_tp.size(),
        "pipeline_dtype": torch.float32,
        "deterministic_mode": True,
    }
    config = architecture.transformer_config(hf, **(layout | overrides))
    chunks = []
    for vp_stage in range(vpp):
        stage, pp_rank = vp_stage if vpp > 1 else None, groups.pp.rank()
        chunks.append(
            GPTModel(
                config,
                get_transformer_block_with_experimental_attention_variant_spec(config, stage, pp_rank),
                pre_process=vp_stage == 0 and pp_rank == 0,
                post_process=vp_stage == vpp - 1 and pp_rank == groups.pp.size() - 1,
                pg_collection=groups,
                vp_stage=stage,
                **architecture.gpt_model_kwargs(hf),
            )
        )
    return chunks


def tokens() -> torch.Tensor:
    """Token ids [1, LENGTH]."""
    return torch.randint(1, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(3))


def megatron_logits(chunk: GPTModel, ids: torch.Tensor) -> torch.Tensor:
    """[1, LENGTH, VOCAB] of a model in one stage, gathered over TP."""
    length = ids.shape[1]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    return chunk(ids, torch.arange(length)[None], mask, runtime_gather_output=True)


def hf_logits(model, ids: torch.Tensor) -> torch.Tensor:
    """[1, LENGTH, VOCAB] of a Hugging Face model."""
    with torch.no_grad():
        return model(input_ids=ids).logits
