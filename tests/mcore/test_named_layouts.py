"""The layouts of `hydra_configs/parallel/` fit the released models that they are for: heads, experts, stages."""

import re

import pytest
import torch

from longstraw_megatron.compose import config_dir, load_config
from longstraw_megatron.config import check_world_size
from longstraw_megatron.mcore.architectures import pipeline_layout, text_config
from longstraw_megatron.mcore.model import BuildOptions, transformer_config
from longstraw_megatron.mcore.parallel import ParallelContext

MODELS = {"glm": "glm_5_2", "qwen": "qwen3_6_27b"}
# what is written in a name, and what follows: data-parallel size and layers of each stage
LAYOUTS = {
    "glm_32gpu_cp32_ep32": (1, [78]),
    "glm_32gpu_pp4_cp8_ep8": (1, [18, 20, 20, 20]),
    "glm_32gpu_tp2_pp4_cp4_ep8": (1, [18, 20, 20, 20]),
    "glm_32gpu_tp8_pp4_ep8": (1, [18, 20, 20, 20]),
    "qwen_8gpu_tp4_pp2": (1, [32, 32]),
    "qwen_8gpu_tp4_cp2": (1, [64]),
    "qwen_32gpu_tp2_cp4_pp4": (1, [16, 16, 16, 16]),
    "qwen_32gpu_tp4_cp2_pp2": (2, [32, 32]),
}


def test_every_named_layout_is_known():
    assert {path.stem for path in (config_dir() / "parallel").glob("*.yaml")} == {*LAYOUTS, "single"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_fits_its_model(name):
    dp, stages = LAYOUTS[name]
    config = load_config([f"model={MODELS[name.split('_')[0]]}", f"parallel={name}"])
    parallel = config.parallel
    sizes = {size: int(number) for size, number in re.findall(r"_(tp|cp|pp|ep)(\d+)", name)}
    assert {size: getattr(parallel, size) for size in ("tp", "cp", "pp", "ep")} == {
        size: sizes.get(size, 1) for size in ("tp", "cp", "pp", "ep")
    }
    assert (parallel.vpp, parallel.etp, parallel.sp) == (1, 1, parallel.tp > 1)
    num_gpus = int(re.search(r"_(\d+)gpu", name)[1])
    assert check_world_size(config, num_gpus) == dp

    hf = config.model.hf_config
    layout = pipeline_layout(text_config(hf), pp=parallel.pp, vpp=parallel.vpp, stages=parallel.stages)
    if parallel.pp == 1:
        assert layout is None
    else:
        assert [stage.count("decoder") for stage in layout] == stages
        assert (layout[0][0], layout[-1][-1]) == ("embedding", "loss")

    # Megatron's own assertions about heads, experts and stages
    context = ParallelContext(groups=None, device=torch.device("cpu"), parallel=parallel)
    megatron = transformer_config(hf, BuildOptions("bf16", "full"), context)
    assert megatron.num_layers == sum(stages)
    assert megatron.pipeline_model_parallel_size == len(stages)
    assert megatron.num_attention_heads % parallel.tp == 0
    assert (megatron.num_moe_experts or 1) % parallel.ep == 0
