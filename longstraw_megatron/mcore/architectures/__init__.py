"""From a Hugging Face config.json to Megatron: one module for each architecture, found by `architecture_of`."""

from collections.abc import Sequence
from types import ModuleType

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.hf_config import text_config
from longstraw_megatron.layout.stages import split_layers, stage_starts
from longstraw_megatron.mcore.architectures import glm_dsa, qwen_hybrid

ARCHITECTURES = {
    "Qwen3_5ForCausalLM": qwen_hybrid,
    "Qwen3_5ForConditionalGeneration": qwen_hybrid,
    "GlmMoeDsaForCausalLM": glm_dsa,
}


def _architecture_name(hf_config: dict) -> str:
    names = hf_config.get("architectures")
    name = names[0] if isinstance(names, list | tuple) and names else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise RefusedError(
            f"config.json: architectures got {hf_config.get('architectures')!r}, wanted one of "
            f"{', '.join(ARCHITECTURES)}; choose such a model."
        )
    return name


def architecture_of(hf_config: dict) -> ModuleType:
    """The module with `check`, `transformer_config` and `gpt_model_kwargs` for this configuration.

    Raises:
        RefusedError: an architecture that is not known, naming those that are.
    """
    return ARCHITECTURES[_architecture_name(hf_config)]


__all__ = ["ARCHITECTURES", "architecture_of", "glm_dsa", "qwen_hybrid", "text_config"]


def pipeline_layout(hf: dict, *, pp: int, vpp: int, stages: Sequence[int] | None = None) -> list[list[str]] | None:
    """Megatron's pipeline_model_parallel_layout: the layers of each virtual stage, `stages` or as even as is legal.

    None for one stage. `hf` is a text config.

    Raises:
        RefusedError: stages that do not add up, or that begin at a layer that cannot begin one, naming those that can.
    """
    if pp * vpp == 1 and stages is None:
        return None
    num_layers, legal = hf["num_hidden_layers"], architecture_of(hf).legal_stage_starts(hf)
    sizes = list(stages) if stages is not None else split_layers(num_layers, pp * vpp, legal)
    if sizes is None:
        raise RefusedError(
            f"parallel.pp={pp} with parallel.vpp={vpp} got {num_layers} layers of which {len(legal)} can begin a stage "
            f"({legal}, from 0), wanted at least {pp * vpp}; choose fewer stages."
        )
    if sum(sizes) != num_layers or min(sizes) < 1:
        raise RefusedError(
            f"parallel.stages got {sizes}, wanted {pp * vpp} numbers of at least 1 that add up to the {num_layers} "
            "layers; leave it to parallel.stages=null."
        )
    illegal = sorted(set(stage_starts(sizes)) - set(legal))
    if illegal:
        raise RefusedError(
            f"parallel.stages got {sizes}, where stages begin at layers {illegal} (from 0), which take their top-k "
            f"from an earlier one, wanted some of {legal}; {split_layers(num_layers, pp * vpp, legal)} "
            "does."
        )
    if pp * vpp == 1:
        return None
    layout = [["decoder"] * size for size in sizes]
    return [["embedding", *layout[0]], *layout[1:-1], [*layout[-1], "loss"]]
