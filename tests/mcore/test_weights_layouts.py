"""Every layout: a rank holds the right slices, and what the ranks write together is the whole model again."""

import pytest
import torch
from hf_models import build, make, megatron_logits, rewrite, save, tensors_of, tokens
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

from longstraw_megatron.hf_config import read_hf_config
from longstraw_megatron.mcore.weights import (
    HfFolder,
    export_grads,
    load_hf_weights,
    megatron_state_from_hf,
    save_hf_weights,
)
from longstraw_megatron.testing import compare_tensors, largest_tensor, run_ranks
from longstraw_megatron.testing.megatron import init_megatron, single_rank

# name -> kind of model, world size, parallel sizes
LAYOUTS = {
    "qwen_tp2": ("qwen", 2, {"tp": 2}),
    "qwen_tp4_two_key_heads": ("qwen", 4, {"tp": 4}),
    "qwen_pp2_dp2": ("qwen", 4, {"pp": 2}),
    "qwen_pp2_vpp2": ("qwen", 2, {"pp": 2, "vpp": 2}),
    "qwen_cp2_tp2": ("qwen", 4, {"cp": 2, "tp": 2}),
    "qwen_vl_tp2_pp2": ("qwen_vl", 4, {"tp": 2, "pp": 2}),
    "qwen_tied_pp2": ("qwen_tied", 2, {"pp": 2}),
    "glm_tp2": ("glm", 2, {"tp": 2}),
    "glm_ep2": ("glm", 2, {"ep": 2}),
    "glm_pp2": ("glm", 2, {"pp": 2}),
    "glm_tp2_etp2": ("glm", 2, {"tp": 2, "etp": 2}),
    "glm_ep2_etp2_tp2_dp2": ("glm", 4, {"tp": 2, "ep": 2, "etp": 2}),
    "glm_tp2_ep2_pp2_dp2": ("glm", 8, {"tp": 2, "ep": 2, "pp": 2}),
}


def _make(kind: str):
    return make("qwen", tie_word_embeddings=True) if kind == "qwen_tied" else make(kind)


def _sections(name: str, hf: dict) -> list[int] | None:
    """Rows that tensor parallelism cuts by themselves, written down once more."""
    if name.endswith("linear_fc1.weight"):
        size = hf["intermediate_size"]
        if "shared_experts" in name:
            size = hf["moe_intermediate_size"] * hf["n_shared_experts"]
        elif "experts" in name:
            size = hf["moe_intermediate_size"]
        return [size, size]
    if name.endswith(("in_proj.weight", "conv1d.weight")):
        keys = hf["linear_key_head_dim"] * hf["linear_num_key_heads"]
        values = hf["linear_value_head_dim"] * hf["linear_num_value_heads"]
        heads = hf["linear_num_value_heads"]
        return [keys, keys, values] + ([values, heads, heads] if name.endswith("in_proj.weight") else [])
    return None


def _shard(full: torch.Tensor, name: str, parameter: torch.Tensor, hf: dict, groups) -> torch.Tensor:
    """By the attributes that Megatron gives to its parameters."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    group = groups.expt_tp if "local_experts" in name else groups.tp
    dim = parameter.partition_dim
    sections = _sections(name, hf) if dim == 0 else None
    parts = [full] if sections is None else full.split(sections)
    return torch.cat([part.chunk(group.size(), dim)[group.rank()] for part in parts], dim)


def _global_name(name: str, model, hf: dict, groups) -> str:
    words = name.split(".")
    if words[:2] == ["decoder", "layers"]:
        words[2] = str(model.decoder.layers[int(words[2])].layer_number - 1)
    if "local_experts" in words:
        at = words.index("local_experts") + 1
        words[at] = str(int(words[at]) + groups.ep.rank() * hf["n_routed_experts"] // groups.ep.size())
    return ".".join(words)


def _wrong_slices(chunks, state: dict[str, torch.Tensor], hf: dict, groups) -> list[str]:
    wrong = []
    for chunk in chunks:
        biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("expert_bias"))
        for local, tensor in (*chunk.named_parameters(), *biases):
            name = _global_name(local, chunk, hf, groups)
            if not torch.equal(tensor, _shard(state[name], name, tensor, hf, groups)):
                wrong.append(local)
    return wrong


def _on_rank(rank, world_size, folder, out, sizes):
    groups = init_megatron(**sizes)
    hf = read_hf_config(folder)
    chunks = build(hf, groups, vpp=sizes.get("vpp", 1))
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        parameter.data.fill_(float("nan"))
    sizes_read = []
    read = HfFolder.read
    HfFolder.read = lambda *args: sizes_read.append((part := read(*args)).numel()) or part
    with largest_tensor() as largest:
        load_hf_weights(chunks, folder, groups=groups)
    HfFolder.read = read
    tensors = [t for c in chunks for t in (*c.parameters(), *(b for n, b in c.named_buffers() if "expert_bias" in n))]
    held = sum(tensor.numel() for tensor in tensors)
    wrong = _wrong_slices(chunks, megatron_state_from_hf(tensors_of(folder), hf), hf, groups)
    save_hf_weights(chunks, out / "saved", groups=groups, hf_config=hf, source_hf_path=folder, max_shard_bytes=30_000)
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        parameter.main_grad = 2 * parameter.data
    export_grads(chunks, out / "grads.safetensors", groups=groups, hf_config=hf, hf_path=folder)
    biggest = max(tensor.nbytes for tensor in tensors)
    return wrong, sum(sizes_read), held, largest.nbytes, biggest


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name, tmp_path):
    kind, world_size, sizes = LAYOUTS[name]
    folder = save(_make(kind), tmp_path / "hf")
    results = run_ranks(world_size, _on_rank, folder, tmp_path, sizes)
    for wrong, read, held, largest, biggest in results:
        assert wrong == []
        assert read == held  # every element that the rank holds, once, and none besides
        assert largest <= biggest  # in no larger piece than its largest parameter
    want, got = tensors_of(folder), tensors_of(tmp_path / "saved")
    assert got.keys() == want.keys()
    assert not [tensor for tensor in want if not torch.equal(got[tensor], want[tensor])]

    grads = tensors_of(tmp_path)
    besides = ("e_score_correction_bias", ".visual.")
    assert grads.keys() == {tensor for tensor in want if not any(word in tensor for word in besides)}
    for tensor, grad in grads.items():
        # main_grad was twice Megatron's weight, which is Hugging Face's but for the delta rule's norm: w - 1
        weight = want[tensor] - 1 if tensor.endswith("linear_attn.norm.weight") else want[tensor]
        assert torch.equal(grad, 2 * weight), tensor


def _logits_on_rank(rank, world_size, folder):
    groups = init_megatron(tp=world_size)
    (chunk,) = build(read_hf_config(folder), groups)
    load_hf_weights([chunk], folder, groups=groups)
    with torch.no_grad():
        return megatron_logits(chunk, tokens())


@pytest.mark.parametrize("tp", [2, 4])
def test_more_ranks_than_key_heads_gives_the_same_logits(tp, tmp_path):
    """With 2 key-value heads and TP=4 Megatron cuts the fused rows inside a head's group and gathers them again."""
    model = make("qwen")
    folder = save(model, tmp_path / "hf")
    with torch.no_grad():
        want = model(input_ids=tokens()).logits
    for got in run_ranks(tp, _logits_on_rank, folder):
        assert (got - want).abs().max() < 1e-5


def _backward(chunk, ids) -> None:
    weight = torch.randn(1, ids.shape[1], 96, generator=torch.Generator().manual_seed(5))
    (megatron_logits(chunk, ids) * weight).sum().backward()


def _ddp_gradients(rank, world_size, folder, out, kind, distributed_optimizer):
    groups = init_megatron(ep=world_size if kind == "glm" else 1)
    hf = read_hf_config(folder)
    (chunk,) = build(hf, groups, calculate_per_token_loss=True)
    load_hf_weights([chunk], folder, groups=groups)
    config = DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(chunk.config, config, chunk, pg_collection=groups)
    ids = torch.roll(tokens(), rank, dims=1)
    _backward(ddp, ids)
    finalize_model_grads([ddp], pg_collection=groups)
    export_grads([ddp], out / f"grads_{distributed_optimizer}.safetensors", groups=groups, hf_config=hf)


@pytest.mark.parametrize("kind", ["qwen", "glm"])
def test_gradients_of_all_data_with_either_optimizer(kind, tmp_path):
    """Two data-parallel ranks (for GLM also expert-parallel) with samples of their own, against Hugging Face's sum."""
    model = make(kind).train()
    folder = save(model, tmp_path / "hf")
    for rank in range(2):
        ids = torch.roll(tokens(), rank, dims=1)
        weight = torch.randn(1, ids.shape[1], 96, generator=torch.Generator().manual_seed(5))
        (model(input_ids=ids).logits * weight).sum().backward()
    for distributed_optimizer in (False, True):
        run_ranks(2, _ddp_gradients, folder, tmp_path, kind, distributed_optimizer)
    hf = read_hf_config(folder)
    want = megatron_state_from_hf({n: p.grad for n, p in model.named_parameters()}, hf, gradient=True)
    files = {flag: tmp_path / f"grads_{flag}.safetensors" for flag in (False, True)}
    for file in files.values():
        folder_of_one = tmp_path / file.stem
        folder_of_one.mkdir()
        file.rename(folder_of_one / file.name)
        got = megatron_state_from_hf(tensors_of(folder_of_one), hf, gradient=True)
        untouched = got.keys() - want.keys()
        assert all("indexer" in name and not got[name].any() for name in untouched)
        comparison = compare_tensors({name: got[name] for name in want}, want)
        assert comparison.overall < 1e-5, comparison


def _frozen_export(folder, out) -> None:
    with single_rank() as groups:
        hf = read_hf_config(folder)
        (chunk,) = build(hf, groups)
        load_hf_weights([chunk], folder, groups=groups)
        chunk.embedding.requires_grad_(False)
        chunk.decoder.layers[1].self_attention.requires_grad_(False)
        _backward(chunk, tokens())
        chunk.decoder.final_layernorm.weight.grad = None
        export_grads([chunk], out, groups=groups, hf_config=hf, hf_path=folder)


@pytest.mark.parametrize("fused", [False, True])
def test_frozen_parameters_are_absent_and_names_are_the_checkpoint_s(fused, tmp_path):
    model = make("glm")
    folder = save(model, tmp_path / "hf")
    if fused:
        rewrite(folder, model.state_dict())
    _frozen_export(folder, tmp_path / "new" / "grads.safetensors")
    grads = tensors_of(tmp_path / "new")
    frozen = {"model.embed_tokens.weight"}
    frozen |= {name for name in tensors_of(folder) if name.startswith("model.layers.1.self_attn.")}
    biases = {name for name in tensors_of(folder) if "e_score" in name}
    assert grads.keys() == tensors_of(folder).keys() - frozen - biases
    assert not grads["model.norm.weight"].any()  # nothing reached it
    assert ("model.layers.1.mlp.experts.gate_up_proj" in grads) == fused

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    weight = torch.randn(1, tokens().shape[1], 96, generator=torch.Generator().manual_seed(5))
    (model(input_ids=tokens()).logits * weight).sum().backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and n != "model.norm.weight"}
    if not fused:
        want = {n: g for n, g in want.items() if ".mlp.experts." not in n}
    comparison = compare_tensors({name: grads[name] for name in want}, want)
    assert comparison.overall < 1e-5, comparison


def _full_disk(rank, world_size, folder, out):
    groups = init_megatron(pp=world_size)
    hf = read_hf_config(folder)
    chunks = build(hf, groups)
    load_hf_weights(chunks, folder, groups=groups)
    out_dir = out / "saved"
    writer = "longstraw_megatron.mcore.weights.save.SafetensorsWriter"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="Rank 1 failed: .*No space left"):
        if rank == 1:
            patch.setattr(writer, _raise_no_space)
        save_hf_weights(chunks, out_dir, groups=groups, hf_config=hf)
    return out_dir.exists()


def _raise_no_space(*args):
    raise OSError(28, "No space left on device")


def test_a_rank_that_cannot_write_fails_the_save_everywhere(tmp_path):
    folder = save(make("qwen"), tmp_path / "hf")
    assert run_ranks(2, _full_disk, folder, tmp_path) == [False, False]
