"""A checkpoint's model in other layouts and in stock Megatron, bit for bit.

Random weights are drawn by name, alike in every layout: what was loaded is compared with what is drawn there.
"""

import pytest
import torch
from harness import Layout
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from oracle import glm_config, qwen_config

from longstraw_megatron.mcore.architectures import architecture_of
from longstraw_megatron.mcore.checkpoint import load_checkpoint, save_checkpoint
from longstraw_megatron.mcore.model import BuildOptions, build_model, transformer_config
from longstraw_megatron.mcore.parallel import init_parallel
from longstraw_megatron.mcore.weights import init_random_weights
from longstraw_megatron.testing import run_ranks

SEED = 5
ONE = Layout()


def _hf(name: str) -> dict:
    config, architecture = {
        "qwen": (qwen_config(), "Qwen3_5ForCausalLM"),
        "glm": (glm_config(), "GlmMoeDsaForCausalLM"),
    }[name]
    return config.to_dict() | {"architectures": [architecture]}


def _context(layout):
    return init_parallel(layout.parallel, device=torch.device("cpu"), seed=1, timeout_s=60)


def _build(hf, context, seed):
    chunks = build_model(hf, BuildOptions("fp32"), context)
    init_random_weights(chunks, hf, seed=seed, groups=context.groups)
    return chunks


def _tensors(chunks):
    """Parameters and persistent buffers."""
    return {
        (i, name): value.clone()
        for i, chunk in enumerate(chunks)
        for name, value in chunk.state_dict().items()
        if value is not None
    }


def _save(rank, world_size, folder, hf, layout):
    context = _context(layout)
    save_checkpoint(folder, 7, _build(hf, context, SEED), None, None, {}, groups=context.groups)


def _stock(hf, context) -> GPTModel:
    """Megatron's own model for the same config, with nothing of ours in it."""
    config = transformer_config(hf, BuildOptions("fp32"), context)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_transformer_block_with_experimental_attention_variant_spec(config),
        **architecture_of(hf).gpt_model_kwargs(hf),
    )


def _load_with_megatron_alone(model: GPTModel, folder) -> None:
    iteration = (folder / "latest_checkpointed_iteration.txt").read_text()
    path = str(folder / f"iter_{int(iteration):07d}")
    metadata = dist_checkpointing.load_content_metadata(path)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata)}, path)
    assert loaded["iteration"] == 7
    model.load_state_dict(loaded["model"])


def _load(rank, world_size, folder, hf, layout):
    """Names of what differs after the load; whether it differed before; the same of the stock model, in one rank."""
    context = _context(layout)
    want = _tensors(_build(hf, context, SEED))
    chunks = _build(hf, context, SEED + 1)
    found = load_checkpoint(folder, chunks, groups=context.groups)
    got = _tensors(chunks)
    assert list(got) == list(want)
    different = [name for name, value in got.items() if not torch.equal(value, want[name])]
    if layout == ONE:
        stock = _stock(hf, context)
        _load_with_megatron_alone(stock, folder)
        values = _tensors([stock])
        assert list(values) == list(want)
        different += [("stock", *name) for name, value in values.items() if not torch.equal(value, want[name])]
    return different, found.same_layout


CASES = {
    "qwen tp2 -> 1": ("qwen", Layout(tp=2), ONE),
    "qwen pp2 -> 1": ("qwen", Layout(pp=2), ONE),
    "qwen pp2 vpp2 -> 1": ("qwen", Layout(pp=2, vpp=2), ONE),
    "qwen tp2 pp2 -> cp2 dp2": ("qwen", Layout(tp=2, pp=2), Layout(cp=2, dp=2)),
    "qwen 1 -> pp2 vpp2": ("qwen", ONE, Layout(pp=2, vpp=2)),
    "qwen pp2 vpp2 -> tp2": ("qwen", Layout(pp=2, vpp=2), Layout(tp=2)),
    "glm ep2 -> 1": ("glm", Layout(ep=2, dp=2), ONE),
    "glm tp2 ep2 -> 1": ("glm", Layout(tp=2, ep=2), ONE),
    "glm 1 -> ep2": ("glm", ONE, Layout(ep=2, dp=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_model_loads_in_another_layout(name, tmp_path):
    model, saved, loaded = CASES[name]
    hf = _hf(model)
    run_ranks(saved.world_size, _save, tmp_path, hf, saved)
    for different, same_layout in run_ranks(loaded.world_size, _load, tmp_path, hf, loaded):
        assert different == []
        assert not same_layout


def test_the_comparison_sees_other_weights(tmp_path):
    hf = _hf("qwen")

    def two_draws(rank, world_size):
        context = _context(ONE)
        old, new = _tensors(_build(hf, context, SEED)), _tensors(_build(hf, context, SEED + 1))
        return sum(not torch.equal(old[name], new[name]) for name in old), len(old)

    ((different, total),) = run_ranks(1, two_draws)
    assert different > total / 2  # norms are drawn as ones
