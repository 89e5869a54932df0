"""Loading and saving in one process, against transformers' own models and files."""

import logging

import pytest
import torch
from hf_models import (
    KINDS,
    build,
    edit_config,
    hf_logits,
    make,
    make_kind,
    megatron_logits,
    rewrite,
    save,
    tensors_of,
    tokens,
)

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.hf_config import read_hf_config
from longstraw_megatron.mcore.weights import (
    HfFolder,
    check_hf_folder,
    load_hf_weights,
    megatron_state_from_hf,
    save_hf_weights,
)
from longstraw_megatron.mcore.weights.names import named_weights
from longstraw_megatron.mcore.weights.table import entries_of
from longstraw_megatron.testing import compare_tensors
from longstraw_megatron.testing.megatron import single_rank

# float32 logits of size ~0.1 after 4 layers: rounding is 1e-7, a wrong layout is 1e-1
LOGITS = 1e-5


@pytest.fixture(scope="module")
def groups():
    with single_rank() as groups:
        yield groups


@pytest.fixture(params=KINDS)
def model(request):
    return make_kind(request.param)


def test_logits_are_hugging_face_s(model, tmp_path, groups):
    folder = save(model, tmp_path / "hf")
    (chunk,) = build(read_hf_config(folder), groups)
    load_hf_weights([chunk], folder, groups=groups)
    with torch.no_grad():
        got = megatron_logits(chunk.eval(), tokens())
    want = hf_logits(model, tokens())
    assert want.std() > 0.05
    assert (got - want).abs().max() < LOGITS


def test_fused_experts_are_the_same_model(tmp_path, groups):
    model = make("glm")
    folder = save(model, tmp_path / "hf")
    single = tensors_of(folder)
    rewrite(folder, model.state_dict())  # the module's own form: experts.gate_up_proj [E, 2I, D]
    assert "model.layers.1.mlp.experts.gate_up_proj" in tensors_of(folder)
    hf = read_hf_config(folder)
    (chunk,) = build(hf, groups)
    load_hf_weights([chunk], folder, groups=groups)
    save_hf_weights([chunk], tmp_path / "out", groups=groups, hf_config=hf, source_hf_path=folder)
    got = tensors_of(tmp_path / "out")
    assert got.keys() == single.keys()
    assert not [name for name in single if not torch.equal(got[name], single[name])]


def test_in_memory_state_is_what_is_loaded(model, tmp_path, groups):
    folder = save(model, tmp_path / "hf")
    hf = read_hf_config(folder)
    (chunk,) = build(hf, groups)
    load_hf_weights([chunk], folder, groups=groups)
    loaded = {w.entry.megatron: w.tensor for w in named_weights([chunk], entries_of(hf), groups)}
    for tensors in (tensors_of(folder), model.state_dict()):
        state = megatron_state_from_hf(tensors, hf)
        assert loaded.keys() <= state.keys() and state.keys() - loaded.keys() <= {"output_layer.weight"}
        assert not [name for name in loaded if not torch.equal(loaded[name], state[name])]


def test_gradients_are_hugging_face_s(tmp_path, groups):
    for kind in ("qwen", "glm"):
        model = make(kind).train()
        folder = save(model, tmp_path / kind)
        hf = read_hf_config(folder)
        (chunk,) = build(hf, groups)
        load_hf_weights([chunk], folder, groups=groups)
        weight = torch.randn(1, tokens().shape[1], 96, generator=torch.Generator().manual_seed(5))
        (megatron_logits(chunk, tokens()) * weight).sum().backward()
        (model(input_ids=tokens()).logits * weight).sum().backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        want = megatron_state_from_hf(grads, hf, gradient=True)
        weights = named_weights([chunk], entries_of(hf), groups)
        got = {w.entry.megatron: w.tensor.grad for w in weights if w.tensor.grad is not None}
        comparison = compare_tensors(got, want)
        assert comparison.overall < 1e-5, comparison
        norms = [row for row in comparison.table if "norm" in row.name]
        assert norms and max(row.relative for row in norms) < 1e-4, comparison


@pytest.mark.parametrize("kind", ["qwen", "qwen_vl", "glm"])
def test_extra_tensors_are_carried_over(kind, tmp_path, groups, caplog):
    folder = save(make(kind), tmp_path / "hf")
    tensors = tensors_of(folder)
    mtp = "model.layers.4.eh_proj.weight" if kind == "glm" else "mtp.layers.0.self_attn.q_proj.weight"
    tensors |= {mtp: torch.arange(6, dtype=torch.int64).reshape(2, 3), "model.odd": torch.rand(3).half()}
    rewrite(folder, tensors)
    hf = read_hf_config(folder)
    with caplog.at_level(logging.WARNING):
        extra = check_hf_folder(folder, hf)
    assert {mtp, "model.odd"} <= set(extra)
    (message,) = [record.getMessage() for record in caplog.records if "not used" in record.getMessage()]
    assert "1 tensors" in message and "model.odd" in message and mtp not in message and "visual" not in message
    (chunk,) = build(hf, groups)
    load_hf_weights([chunk], folder, groups=groups)
    save_hf_weights([chunk], tmp_path / "out", groups=groups, hf_config=hf, source_hf_path=folder)
    got = tensors_of(tmp_path / "out")
    assert got.keys() == tensors.keys()
    assert not [name for name in tensors if not torch.equal(got[name], tensors[name])]


class TestRefused:
    @pytest.fixture
    def folder(self, tmp_path):
        return save(make("glm"), tmp_path / "hf")

    def refused(self, folder, match, groups):
        """By the check, and by the load before anything is copied."""
        hf = read_hf_config(folder)
        with pytest.raises(RefusedError, match=match):
            check_hf_folder(folder, hf)
        (chunk,) = build(hf, groups)
        for parameter in chunk.parameters():
            parameter.data.fill_(7.0)
        with pytest.raises(RefusedError, match=match):
            load_hf_weights([chunk], folder, groups=groups)
        assert all((parameter == 7.0).all() for parameter in chunk.parameters())

    def test_missing_tensors(self, folder, groups):
        tensors = tensors_of(folder)
        for name in ("model.layers.3.mlp.experts.2.up_proj.weight", "model.norm.weight"):
            del tensors[name]
        rewrite(folder, tensors)
        match = r"got no tensor model\.layers\.3\.mlp\.experts\.2\.up_proj\.weight and 1 more among its \d+, wanted all"
        self.refused(folder, match, groups)

    def test_wrong_shape(self, folder, groups):
        name = "model.layers.2.self_attn.kv_b_proj.weight"
        rewrite(folder, tensors_of(folder) | {name: torch.zeros(4, 16)})
        self.refused(folder, r"kv_b_proj\.weight got shape \[4, 16\], wanted \[128, 16\]", groups)

    def test_quantized_tensor(self, folder, groups):
        name = "model.layers.2.self_attn.kv_b_proj.weight"
        rewrite(folder, tensors_of(folder) | {name: torch.zeros(128, 16, dtype=torch.int8)})
        self.refused(folder, r"kv_b_proj\.weight got dtype I8, wanted one of F64, F32, F16, BF16", groups)

    def test_file_cut_short(self, folder, groups):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
        self.refused(folder, r"model\.safetensors got \d+ bytes, wanted \d+ by its header", groups)

    def test_not_safetensors(self, folder, groups):
        (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
        self.refused(folder, "got no safetensors header", groups)

    def test_no_weights(self, folder, groups):
        (folder / "model.safetensors").unlink()
        self.refused(folder, "without a safetensors file in it", groups)

    def test_file_of_the_index_is_missing(self, tmp_path, groups):
        folder = save(make("glm"), tmp_path / "split", max_shard_size="50KB")
        (folder / "model-00002-of-00005.safetensors").unlink(missing_ok=True)
        next(iter(sorted(folder.glob("model-00003*")))).unlink()
        self.refused(folder, r"index\.json names model-0000\d-of-\d+\.safetensors, wanted that file", groups)

    def test_model_of_another_shape(self, folder, groups):
        hf = read_hf_config(folder)
        (chunk,) = build({**hf, "moe_intermediate_size": 24}, groups)
        with pytest.raises(RefusedError, match=r"\.0\.linear_fc1\.weight got shape \[48, 32\], wanted \[32, 32\]"):
            load_hf_weights([chunk], folder, groups=groups)
        (chunk,) = build({**hf, "indexer_types": ["full"] * 4}, groups)
        with pytest.raises(RefusedError, match=r"indexer\.linear_wq_b\.weight got no place"):
            load_hf_weights([chunk], folder, groups=groups)
        (chunk,) = build({**hf, "indexer_types": ["full"] + ["shared"] * 3}, groups)
        with pytest.raises(RefusedError, match=r"no parameter for decoder\.layers\.2\.self_attention\.core_attention"):
            load_hf_weights([chunk], folder, groups=groups)

    def test_head_of_its_own_in_a_tied_model(self, tmp_path, groups):
        folder = save(make("qwen", tie_word_embeddings=True), tmp_path / "hf")
        tensors = tensors_of(folder)
        hf = read_hf_config(folder)
        (chunk,) = build(hf, groups)
        rewrite(folder, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
        load_hf_weights([chunk], folder, groups=groups)
        save_hf_weights([chunk], tmp_path / "out", groups=groups, hf_config=hf, source_hf_path=folder)
        assert tensors_of(tmp_path / "out").keys() == tensors.keys()
        rewrite(folder, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
        with pytest.raises(RefusedError, match="values of its own with tie_word_embeddings=true"):
            load_hf_weights([chunk], folder, groups=groups)

    def test_full_output_folder(self, folder, groups):
        hf = read_hf_config(folder)
        (chunk,) = build(hf, groups)
        with pytest.raises(RefusedError, match="wanted a new or empty one"):
            save_hf_weights([chunk], folder, groups=groups, hf_config=hf)
        assert not list(folder.parent.glob("*.partial"))

    def test_source_of_another_model(self, folder, tmp_path, groups):
        hf = read_hf_config(folder)
        (chunk,) = build(hf, groups)
        other = save(make("glm", moe_intermediate_size=24), tmp_path / "other")
        with pytest.raises(RefusedError, match=r"got shape \[24, 32\], wanted \[16, 32\]"):
            save_hf_weights([chunk], tmp_path / "out", groups=groups, hf_config=hf, source_hf_path=other)
        assert not (tmp_path / "out").exists()

    def test_unsupported_configuration(self, folder):
        config = edit_config(folder, n_group=2)
        with pytest.raises(RefusedError, match="n_group got 2"):
            check_hf_folder(folder, config)


def test_load_reads_each_element_once_and_in_pieces(tmp_path, groups, monkeypatch):
    folder = save(make("qwen"), tmp_path / "hf")
    (chunk,) = build(read_hf_config(folder), groups)
    read, sizes = HfFolder.read, []

    def recorded(self, *args):
        part = read(self, *args)
        sizes.append(part.numel())
        return part

    monkeypatch.setattr(HfFolder, "read", recorded)
    load_hf_weights([chunk], folder, groups=groups)
    assert sum(sizes) == sum(parameter.numel() for parameter in chunk.parameters())
    assert max(sizes) <= max(tensor.numel() for tensor in tensors_of(folder).values())
