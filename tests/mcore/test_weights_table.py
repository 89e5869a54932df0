"""The table of entries, its arithmetic and the files, without any process group."""

import json
import struct
import time

import pytest
import torch
from hf_models import GLM, QWEN
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.architectures import text_config
from longstraw_megatron.mcore.weights import Entry, Naming, Span, entries_of
from longstraw_megatron.mcore.weights.names import Location, unsharded_names
from longstraw_megatron.mcore.weights.safetensors_file import (
    SafetensorsWriter,
    TensorSpec,
    read_header,
    split_by_size,
)

QWEN_27B = {
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
}
GLM_5_2 = {"index_topk_freq": 4, "index_skip_topk_offset": 3}  # all else is transformers' default
MODELS = {
    "qwen": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, QWEN),
    "qwen3.6-27b": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, QWEN_27B),
    "glm": (GlmMoeDsaForCausalLM, GlmMoeDsaConfig, GLM),
    "glm-5.2": (GlmMoeDsaForCausalLM, GlmMoeDsaConfig, GLM_5_2),
}


@pytest.mark.parametrize("name", MODELS)
def test_table_has_every_tensor_of_transformers_in_its_shape(name):
    model_class, config_class, changes = MODELS[name]
    config = config_class(**changes)
    with torch.device("meta"):
        model = model_class(config)
    want = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    hf = text_config({**config.to_dict(), "architectures": [model_class.__name__]})
    begin = time.perf_counter()
    entries = entries_of(hf)
    assert time.perf_counter() - begin < 10
    assert Naming("model.", fused_experts=name.startswith("glm")).shapes(entries.values()) == want
    billions = sum(torch.Size(entry.shape).numel() for entry in entries.values()) / 1e9
    if name == "qwen3.6-27b":
        assert round(billions, 2) == 26.90
    if name == "glm-5.2":
        assert round(billions, 2) == 743.38


ENTRY = Entry("w", ((Span("a", 0, 4), Span("b", 2, 4)), (Span("a", 4, 8),)), (3,), "rows")


def _rows(entry: Entry, tp_rank: int, tp_size: int) -> list[tuple]:
    return [
        (block.source, block.source_rows.start, block.source_rows.stop, block.shard_rows.start, block.shard_rows.stop)
        for block in entry.blocks(tp_rank, tp_size)
    ]


def test_sections_are_cut_by_themselves():
    assert ENTRY.shape == (10, 3) and ENTRY.shard_shape(2) == (5, 3)
    assert ENTRY.source_shapes() == {"a": (8, 3), "b": (4, 3)}
    assert _rows(ENTRY, 0, 1) == [("a", 0, 4, 0, 4), ("b", 2, 4, 4, 6), ("a", 4, 8, 6, 10)]
    assert _rows(ENTRY, 0, 2) == [("a", 0, 3, 0, 3), ("a", 4, 6, 3, 5)]
    assert _rows(ENTRY, 1, 2) == [("a", 3, 4, 0, 1), ("b", 2, 4, 1, 3), ("a", 6, 8, 3, 5)]


def test_columns_and_whole_tensors():
    columns = Entry("w", ((Span("a", 0, 4),),), (6,), "columns")
    assert columns.shard_shape(3) == (4, 2)
    (block,) = columns.blocks(2, 3)
    assert (block.source_rows, block.source_columns, block.shard_rows) == (slice(0, 4), slice(4, 6), slice(0, 4))
    whole = Entry("w", ((Span("a", 0, 4),),), (6,))
    assert whole.shard_shape(3) == (4, 6) and _rows(whole, 2, 3) == [("a", 0, 4, 0, 4)]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_fill_and_unpack_are_inverse_and_gradients_are_not_shifted(tp_size):
    entry = Entry("w", ((Span("a", 0, 4), Span("b", 0, 4)), (Span("a", 4, 8),)), (3,), "rows", offset=-1.0)
    tensors = {"a": torch.rand(8, 3) + 0.5, "b": torch.rand(4, 3) + 0.5}
    for gradient in (False, True):
        shards = [torch.full(entry.shard_shape(tp_size), float("nan")) for _ in range(tp_size)]
        for tp_rank, shard in enumerate(shards):
            read = lambda source, rows, columns: tensors[source][rows]  # noqa: E731
            entry.fill(shard, read, tp_rank=tp_rank, tp_size=tp_size, gradient=gradient)
        total = sum(shard.sum() for shard in shards)
        want = sum(tensor.sum() - (0 if gradient else tensor.numel()) for tensor in tensors.values())
        assert torch.allclose(total, want, atol=1e-4)
        out = entry.unpack(shards, tp_size, gradient=gradient)
        assert out.keys() == tensors.keys() and all(torch.equal(out[name], tensors[name]) for name in tensors)


def test_uneven_cut_is_refused():
    with pytest.raises(RefusedError, match="w got tensor-parallel size 4, wanted a divisor of 6"):
        list(ENTRY.blocks(0, 4))


@pytest.mark.parametrize(
    "local, unsharded",
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.6.mlp.linear_fc1.weight"),
        ("decoder.layers.0.self_attention.A_log", "decoder.layers.2.self_attention.A_log"),
        # one module for each expert, and Transformer Engine's grouped linear
        ("decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight",
         "decoder.layers.6.mlp.experts.local_experts.11.linear_fc2.weight"),
        ("decoder.layers.1.mlp.experts.linear_fc1.weight3",
         "decoder.layers.6.mlp.experts.local_experts.11.linear_fc1.weight"),
    ],
)  # fmt: skip
def test_local_names_in_the_unsharded_model(local, unsharded):
    assert list(unsharded_names(local, layer_numbers=[3, 7], first_expert=8)) == [unsharded]


def test_norms_of_their_own_are_found_where_fused_layers_have_them():
    entries = entries_of(text_config({**Qwen3_5TextConfig(**QWEN).to_dict(), "architectures": ["Qwen3_5ForCausalLM"]}))
    for norm, fused in (
        ("decoder.layers.0.input_layernorm.weight", "decoder.layers.0.self_attention.in_proj.layer_norm_weight"),
        ("decoder.layers.1.input_layernorm.weight", "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"),
        ("decoder.layers.1.pre_mlp_layernorm.weight", "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"),
    ):
        names = unsharded_names(norm, layer_numbers=[1, 2], first_expert=0)
        assert [name for name in names if name in entries] == [fused]


def test_naming():
    plain, multimodal = Naming.of(["model.norm.weight"]), Naming.of(["model.language_model.norm.weight", "x"])
    fused = Naming.of(["model.layers.3.mlp.experts.gate_up_proj"])
    assert plain == Naming("model.", False) and fused == Naming("model.", True)
    assert multimodal.name("model.layers.0.mlp.up_proj.weight") == "model.language_model.layers.0.mlp.up_proj.weight"
    assert multimodal.name("lm_head.weight") == "lm_head.weight"
    expert = "model.layers.3.mlp.experts.12.{}_proj.weight"
    assert plain.locate(expert.format("up"), 16) == Location(expert.format("up"))
    assert fused.locate(expert.format("gate"), 16) == Location("model.layers.3.mlp.experts.gate_up_proj", 12, 0)
    assert fused.locate(expert.format("up"), 16) == Location("model.layers.3.mlp.experts.gate_up_proj", 12, 16)
    assert fused.locate(expert.format("down"), 32) == Location("model.layers.3.mlp.experts.down_proj", 12, 0)
    shared = "model.layers.3.mlp.shared_experts.up_proj.weight"
    assert fused.locate(shared, 16) == Location(shared)


def test_written_file_is_what_the_library_reads(tmp_path):
    tensors = {
        "odd": torch.randn(3, dtype=torch.float32).bfloat16(),  # 6 bytes: what comes after must still be aligned
        "wide": torch.randn(2, 5),
        "double": torch.randn(1, 1, 4, dtype=torch.float64),
        "half": torch.randn(7).half(),
        "empty": torch.zeros(0, 4),
    }
    file = tmp_path / "written.safetensors"
    specs = {name: TensorSpec.of(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with SafetensorsWriter(file, {**specs, "never": TensorSpec.of(torch.float32, (3,))}) as writer:
        writer.write("wide", tensors["wide"][1:], first=5)
        for name in ("half", "odd", "double", "empty"):
            writer.write(name, tensors[name])
        writer.write("wide", tensors["wide"][:1].t().contiguous().t())  # whatever the strides
    got = load_file(file)
    assert torch.equal(got.pop("never"), torch.zeros(3))
    assert got.keys() == tensors.keys() and all(torch.equal(got[name], tensors[name]) for name in tensors)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}

    stored = read_header(file)
    assert {name: tensor.shape for name, tensor in stored.items()} == {
        **{name: tuple(tensor.shape) for name, tensor in tensors.items()},
        "never": (3,),
    }
    with SafetensorsWriter(tmp_path / "copy.safetensors", {"a": specs["odd"]}) as writer:
        writer.copy("a", stored["odd"])
    assert torch.equal(load_file(tmp_path / "copy.safetensors")["a"], tensors["odd"])


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 10**12), struct.pack("<Q", 4) + b"null"])
def test_not_a_safetensors_file(content, tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(RefusedError, match="got no safetensors header"):
        read_header(file)


def test_header_is_json_padded_to_eight_bytes(tmp_path):
    file = tmp_path / "x.safetensors"
    SafetensorsWriter(file, {"a": TensorSpec.of(torch.float32, (1,))}).close()
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    assert length % 8 == 0 and file.stat().st_size == 8 + length + 4
    assert json.loads(file.read_bytes()[8 : 8 + length])["a"]["data_offsets"] == [0, 4]


def test_split_by_size():
    specs = {name: TensorSpec("F32", (size,), 4 * size) for name, size in zip("abcde", (1, 1, 9, 1, 1), strict=True)}
    assert [list(file) for file in split_by_size(specs, 12)] == [["a", "b"], ["c"], ["d", "e"]]
    assert [list(file) for file in split_by_size(specs, 4 * 13)] == [["a", "b", "c", "d", "e"]]
    assert split_by_size({}, 12) == []
