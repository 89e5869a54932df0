"""Saving in one process, and transformers reading what was saved."""

import json

import pytest
import torch
from hf_models import KINDS, build, hf_logits, make, make_kind, save, tensors_of, tokens
from transformers import AutoModelForCausalLM, Qwen3_5ForConditionalGeneration

from longstraw_megatron.hf_config import read_hf_config
from longstraw_megatron.mcore.weights import load_hf_weights, save_hf_weights
from longstraw_megatron.testing.megatron import single_rank


@pytest.fixture(params=KINDS)
def model(request):
    return make_kind(request.param)


def _load_and_save(folder, out, *, dtype=torch.float32, **kwargs) -> None:
    """Through Megatron, which is left before transformers loads: with a process group its rotary buffers stay unset."""
    with single_rank() as groups:
        hf = read_hf_config(folder)
        (chunk,) = build(hf, groups, params_dtype=dtype)
        load_hf_weights([chunk], folder, groups=groups)
        save_hf_weights([chunk], out, groups=groups, hf_config=hf, **kwargs)


def test_saved_folder_is_the_one_loaded(model, tmp_path):
    folder = save(model, tmp_path / "hf")
    (folder / "tokenizer.json").write_text("{}")
    out = tmp_path / "out" / "step_1"
    # small files, so that they are many and entries are split between them
    _load_and_save(folder, out, source_hf_path=folder, max_shard_bytes=20_000)
    want, got = tensors_of(folder), tensors_of(out)
    assert got.keys() == want.keys()
    assert not [name for name in want if not torch.equal(got[name], want[name])]
    assert (out / "tokenizer.json").read_text() == "{}"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == want.keys() and len(set(index["weight_map"].values())) > 5
    assert list(out.parent.iterdir()) == [out]
    again = type(model).from_pretrained(out).eval()
    assert torch.equal(hf_logits(again, tokens()), hf_logits(model, tokens()))


@pytest.mark.parametrize("kind", ["qwen_vl", "glm"])
def test_saved_without_a_source_loads_in_transformers(kind, tmp_path):
    model = make(kind)
    _load_and_save(save(model, tmp_path / "hf"), tmp_path / "out")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert not isinstance(again, Qwen3_5ForConditionalGeneration)
    assert (hf_logits(again.eval(), tokens()) - hf_logits(model, tokens())).abs().max() < 1e-6


def test_bfloat16(tmp_path):
    folder = save(make("qwen").bfloat16(), tmp_path / "hf")
    _load_and_save(folder, tmp_path / "out", dtype=torch.bfloat16, source_hf_path=folder)
    want, got = tensors_of(folder), tensors_of(tmp_path / "out")
    assert {tensor.dtype for tensor in got.values()} == {torch.bfloat16}
    # w - 1 is exact in bfloat16 for w in [0.5, 2], where a trained norm is
    assert not [name for name in want if not torch.equal(got[name], want[name])]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
