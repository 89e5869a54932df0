"""Every key has a default, every default is of its type, and whatever doesn't fit is refused by name."""

import dataclasses
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from longstraw_megatron.batch import Branch, PromptGroup
from longstraw_megatron.compose import config_dir, load_config
from longstraw_megatron.config import Config, build_config, check_world_size, get_key, resolve_auto
from longstraw_megatron.config_effect import MAX_BF16_TERMS, gradient_terms, keys_without_effect, rounding_advice
from longstraw_megatron.config_tree import leaf_keys
from longstraw_megatron.errors import RefusedError

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("tiny_qwen_hybrid", "tiny_glm_dsa", "qwen3_6_27b", "glm_5_2")
HF_CLASSES = {
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
}


def test_defaults_are_those_of_the_design():
    config = load_config([])
    expected = {
        "model.name": "tiny_qwen_hybrid",
        "model.hf_path": None,
        "gradient": "exact",
        "objective.name": "grpo",
        "objective.clip_low": 0.2,
        "objective.aggregation": "seq-mean-token-mean",
        "parallel.etp": 1,
        "parallel.sp": False,
        "recompute": "none",
        "groups_per_step": "all",
        "schedule.max_live_prefixes": 1,
        "wandb.mode": "offline",
        "optimizer.betas": (0.9, 0.999),
    }
    assert {key: get_key(config, key) for key in expected} == expected
    assert all(get_key(config, key) is not NotImplemented for key in leaf_keys(Config))


def test_a_config_can_not_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config([]).seed = 3


def test_overrides_reach_their_keys():
    words = [
        "parallel=qwen_8gpu_tp4_cp2",
        "parallel.cp=1",
        "segment_length=77",
        "groups_per_step=3",
        "wandb.tags=[a,b]",
    ]
    words += ["objective=dr_grpo", "objective.kl_coef=1", "run_dir=runs/${model.name}", "wandb.name=2026"]
    config = load_config([*words, "model.hf_config.num_hidden_layers=4", "optimizer={lr: 0.5}"])
    assert (config.parallel.tp, config.parallel.cp, config.parallel.sp) == (4, 1, True)
    assert (config.segment_length, config.groups_per_step, config.wandb.tags) == (77, 3, ("a", "b"))
    assert (config.objective.divide_by_std, config.objective.kl_coef) == (False, 1.0)
    assert (config.run_dir, config.wandb.name) == ("runs/tiny_qwen_hybrid", "2026")
    assert (config.model.hf_config["num_hidden_layers"], config.optimizer.lr, config.optimizer.eps) == (4, 0.5, 1e-8)


@pytest.mark.parametrize("group", ["model", "objective", "parallel"])
def test_every_named_choice_composes(group):
    names = [path.stem for path in (config_dir() / group).glob("[!_]*.yaml")]
    assert len(names) >= 3
    for name in names:
        config = load_config([f"{group}={name}"])
        assert isinstance(config, Config)
        assert group == "parallel" or getattr(config, group).name == name


# The word on the command line, and what the one sentence must say.
REFUSALS = {
    "segment_lenght=3": "Unknown key 'segment_lenght'; nearest: segment_length",
    "parallel.dp=2": "Unknown key 'parallel.dp'; nearest: parallel.",
    "tp=2": "Unknown key 'tp'; nearest: parallel.tp.",
    "state.location=disk": "state.location must be one of device, host, got 'disk'",
    "state.reuse_steps=1": "state.reuse_steps=1 needs gradient=detached, got exact",
    "state.reuse_steps=-1": "state.reuse_steps must be at least 0",
    "state.reuse_check_every=0": "state.reuse_check_every must be at least 1",
    "state.grad_rounding=stochastic": "state.grad_rounding=stochastic needs state.grad_dtype=bf16, got auto",
    "state.grad_rounding=up": "state.grad_rounding must be one of nearest, stochastic",
    "response_block=0": "response_block must be at least 1, got 0",
    "hydra.run.dir=x": "Unknown key 'hydra.run.dir'",
    "model.hf_config.num_hiden_layers=3": "nearest: model.hf_config.num_hidden_layers",
    "model=foo": "Unknown choice of model 'foo'; choose from: glm_5_2, qwen3_6_27b, tiny_glm_dsa, tiny_qwen_hybrid",
    "objective=ppo": "choose from: cispo, dapo, dr_grpo, grpo, gspo",
    "objective=_base": "Unknown choice of objective '_base'",
    "parallel=[a]": "Unknown choice of parallel",
    "optimizer.optimizer_offload_fraction=0": "must lie in (0, 1], got 0.0",
    "optimizer.optimizer_offload_fraction=2": "must lie in (0, 1], got 2.0",
    "optimizer.optimizer_offload_fraction=0.5": "needs optimizer.optimizer_cpu_offload=true, got false",
    "trainable=some": "trainable must be all or a list, got 'some'",
    "state.stage_inputs=disk": "state.stage_inputs must be one of device, host",
    "optimizer.grad_reduce_in_fp32=1": "optimizer.grad_reduce_in_fp32 must be true or false, got 1",
    "segment_length=0": "segment_length must be at least 1, got 0",
    "segment_length=-5": "segment_length must be at least 1, got -5",
    "segment_length=1.5": "segment_length must be a whole number, got 1.5",
    "segment_length=true": "segment_length must be a whole number, got True",
    "segment_length=null": "segment_length must be a whole number, got None",
    "segment_length=many": "segment_length must be a whole number, got 'many'",
    "branches_per_microbatch=0": "branches_per_microbatch must be at least 1",
    "groups_per_step=0": "groups_per_step must be at least 1, got 0",
    "groups_per_step=some": "groups_per_step must be a whole number or all, got 'some'",
    "logprob_block=0": "logprob_block must be at least 1",
    "state.page_length=0": "state.page_length must be at least 1",
    "schedule.max_live_prefixes=0": "schedule.max_live_prefixes must be at least 1",
    "dist.timeout_s=0": "dist.timeout_s must be at least 1",
    "dist.timeout_s=99999999999": "dist.timeout_s must be at most 2000000, got 99999999999",
    "seed=2147483648": "seed must be at most 2147483647",
    "trainer.max_steps=0": "trainer.max_steps must be at least 1",
    "parallel.tp=0": "parallel.tp must be at least 1",
    "parallel.etp=0": "parallel.etp must be at least 1",
    "parallel.sp=true": "parallel.sp=true needs parallel.tp above 1",
    "parallel.sp=maybe": "parallel.sp must be true or false, got 'maybe'",
    "parallel.vpp=2": "parallel.vpp=2 needs parallel.pp above 1",
    "gradient=full": "gradient must be one of exact, detached, got 'full'",
    "recompute=some": "recompute must be one of none, full, selective",
    "precision=fp16": "precision must be one of auto, bf16, fp32, fp64",
    "device=tpu": "device must be one of auto, cpu, cuda",
    "wandb.mode=on": "wandb.mode must be one of offline, online, disabled, got 'on'",
    "wandb.tags=a": "wandb.tags must be a list",
    "wandb.id=1e5": "wandb.id must be a text",
    "rollouts.path=''": "rollouts.path must be a text",
    "rollouts.format=csv": "rollouts.format must be one of auto, jsonl",
    "optimizer.lr=nan": "optimizer.lr must be a finite number, got nan",
    "optimizer.lr=-1": "optimizer.lr must be at least 0",
    "optimizer.min_lr=1": "optimizer.min_lr must not exceed optimizer.lr",
    "optimizer.betas=[0.9]": "optimizer.betas must be a list of 2",
    "optimizer.betas=[0.9,1.0]": "optimizer.betas must lie in [0, 1)",
    "optimizer.eps=0": "optimizer.eps must be above 0",
    "optimizer=3": "optimizer must be a group of keys",
    "optimizer={lrr: 1}": "can't be put together",
    "objective.kl_type=k4": "objective.kl_type must be one of k1, k2, k3",
    "objective.clip_low=-1": "objective.clip_low is -1.0",
    "trainer.save_every=3": "trainer.save_every=3 needs trainer.save_dir",
    "trainer.keep=3": "trainer.keep=3 needs trainer.save_dir",
    "trainer.resume=auto": "trainer.resume=auto looks in trainer.save_dir",
    "model.hf_path=/nowhere": "/nowhere' without a config.json in it",
    "seed=1,2": "names several values",
    "seed=${nope}": "Interpolation key 'nope' not found",
    "+seed=1": "must be KEY=VALUE without +",
    "~seed": "must be KEY=VALUE",
    "seed": "can't be read as KEY=VALUE",
    "run_dir=a b=c": "can't be read as KEY=VALUE",
}


@pytest.mark.parametrize("word", REFUSALS)
def test_refused_in_one_sentence(word):
    with pytest.raises(RefusedError) as refusal:
        load_config([word])
    message = str(refusal.value)
    assert REFUSALS[word] in message
    assert message.endswith(".") and "\n" not in message


def test_combinations_that_are_refused():
    for words, message in (
        (["precision=fp64", "device=cuda"], "precision=fp64 runs on device=cpu only"),
        (["precision=fp32", "optimizer.optimizer_cpu_offload=true"], "others., got precision=fp32; set precision=bf16"),
        (["model.hf_path=/nowhere", "model.hf_config.vocab_size=8"], "model.hf_path"),
    ):
        with pytest.raises(RefusedError, match=message):
            load_config(words)


def test_a_tree_without_a_key_is_refused():
    with pytest.raises(RefusedError, match="model has no value"):
        build_config({})


def test_a_checkpoint_folder_gives_the_shape(tmp_path):
    text = {"vocab_size": 99, "hidden_size": 8}
    multimodal = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    for name, tree in (("flat", {"architectures": ["GlmMoeDsaForCausalLM"], **text}), ("nested", multimodal)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(tree))
        model = load_config([f"model.hf_path={folder}"]).model
        assert model.hf_config.items() >= {**text, "architectures": tree["architectures"]}.items()
        assert (model.name, model.hf_path) == (name, str(folder))
        with pytest.raises(RefusedError, match="can't change the shape that model.hf_path gives"):
            load_config([f"model.hf_path={folder}", "model.hf_config.vocab_size=8"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "wanted a JSON object; repair the file"),
        ("[]", "got a JSON list"),
        ("{}", "no vocab_size"),
        ('{"text_config": 3}', "text_config got a int"),
    ],
)
def test_a_broken_config_json_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RefusedError, match=message):
        load_config([f"model.hf_path={tmp_path}"])


def test_world_size():
    layout = ["parallel.tp=2", "parallel.cp=2", "parallel.pp=2", "parallel.ep=4"]
    assert check_world_size(load_config(layout), 16) == 2
    assert check_world_size(load_config(["parallel.ep=2"]), 4) == 4
    with pytest.raises(RefusedError, match=r"multiple of parallel.{tp \* cp \* pp} = 8, got 12"):
        check_world_size(load_config(layout), 12)
    with pytest.raises(RefusedError, match=r"multiple of parallel.{ep \* etp \* pp} = 3, got 4"):
        check_world_size(load_config(["parallel.ep=3"]), 4)


def test_auto_is_resolved_by_what_the_machine_has():
    def resolved(words: list[str], cuda_available: bool) -> tuple[str, str]:
        config = resolve_auto(load_config(words), cuda_available=cuda_available)
        return config.device, config.precision

    assert resolved([], True) == ("cuda", "bf16")
    assert resolved([], False) == ("cpu", "fp32")
    assert resolved(["device=cpu"], True) == ("cpu", "fp32")
    assert resolved(["precision=fp64"], False) == ("cpu", "fp64")
    assert resolved(["parallel.ep=2", "parallel.etp=2"], True) == ("cuda", "bf16")
    with pytest.raises(RefusedError, match=r"parallel\.etp=2 with parallel\.ep=2 .* got device=cpu"):
        resolved(["parallel.ep=2", "parallel.etp=2"], False)
    assert resolved(["precision=fp32"], True) == ("cuda", "fp32")
    with pytest.raises(RefusedError, match="device=cuda needs a GPU"):
        resolved(["device=cuda"], False)
    with pytest.raises(RefusedError, match="precision=fp64 runs on device=cpu only"):
        resolved(["precision=fp64"], True)


@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_reads_the_shape_as_it_is_written(name):
    """No key is lost or misspelt, and the released models have their published number of parameters."""
    shape = load_config([f"model={name}"]).model.hf_config
    config_class, model_class = HF_CLASSES[shape["model_type"]]
    hf = config_class(**shape)
    if name.startswith("tiny_qwen"):
        assert hf.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    if name == "tiny_glm_dsa":
        full = [i for i, kind in enumerate(hf.indexer_types) if kind == "full"]
        assert full == [0, 1, 2, 6, 10] and hf.mlp_layer_types == ["dense"] * 3 + ["sparse"] * 8
    for key, value in shape.items():
        if key == "rope_parameters":
            assert {k: hf.rope_parameters[k] for k in value} == value
        elif hasattr(hf, key):
            assert getattr(hf, key) == value, key
    with torch.device("meta"):
        model = model_class(hf)
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    published = {"qwen3_6_27b": 26.90, "glm_5_2": 743.38}
    assert billions == pytest.approx(published[name], abs=0.01) if name in published else billions < 0.001


def test_an_installed_wheel_composes_too(tmp_path):
    """The files are inside the package there; nothing of the checkout is on the path."""
    command = [sys.executable, "setup.py", "-q", "build", "-b", str(tmp_path / "b"), "bdist_wheel", "-d", str(tmp_path)]
    egg = ["egg_info", "-e", str(tmp_path)]
    subprocess.run([*command[:3], *egg, *command[3:]], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import longstraw_megatron.compose as c, longstraw_megatron.hydra_configs as h;"
        "print(c.config_dir()); print(c.load_config(['model=glm_5_2']).model.name)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert result.stdout.split() == [str(site / "longstraw_megatron" / "hydra_configs"), "glm_5_2"], result.stderr


LOW_BESIDE_PREFIX = ["gradient=detached", "state.reuse_steps=2", "optimizer.grad_reduce_in_fp32=false"]


@pytest.mark.parametrize(
    "more", [[], ["optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_fraction=0.5"]]
)
def test_no_float32_copies_of_gradients_beside_a_kept_prefix(more):
    """The prefix is on the device, and so is what the optimizer copies, whether all of it or half."""
    with pytest.raises(RefusedError, match=r"state.reuse_steps=2 needs an update without float32 copies"):
        load_config([*LOW_BESIDE_PREFIX, "precision=bf16", *more])


@pytest.mark.parametrize(
    "words",
    [
        ["precision=bf16", "optimizer.optimizer_cpu_offload=true"],
        ["precision=bf16", "state.location=host"],
        ["precision=bf16", "optimizer.grad_reduce_in_fp32=true"],
        ["precision=bf16", "state.reuse_steps=0"],
        ["precision=fp32"],
    ],
)
def test_what_the_refusal_advises_is_taken(words):
    load_config([*LOW_BESIDE_PREFIX, *words])


def test_auto_precision_is_judged_when_it_is_known():
    config = load_config(LOW_BESIDE_PREFIX)
    assert resolve_auto(config, cuda_available=False).precision == "fp32"
    with pytest.raises(RefusedError, match="float32 copies of gradients"):
        resolve_auto(config, cuda_available=True)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["optimizer.grad_reduce_in_fp32=false"], "optimizer.grad_reduce_in_fp32=false"),
        (["state.stage_inputs=host"], "state.stage_inputs=host"),
        (["gradient=detached", "state.grad_dtype=bf16"], "state.grad_dtype=bf16"),
        (["reference.hf_path=/nowhere"], "reference.hf_path=/nowhere"),
        (["response_block=16"], "response_block=16"),
        (["state.reuse_check_every=3"], "state.reuse_check_every=3"),
        (["state.reuse_check_every=null"], "state.reuse_check_every=null"),
    ],
)
def test_a_key_without_effect_is_said(words, key):
    def said(*more: str) -> list[str]:
        return keys_without_effect(resolve_auto(load_config([*words, *more]), cuda_available=False), 16)

    (sentence,) = said()
    assert sentence.startswith(f"{key} has no effect: ")
    has_effect = ["precision=bf16", "parallel.pp=2", "response_block=8", "objective.kl_coef=0.1"]
    has_effect += ["state.reuse_steps=1", "gradient=detached"] if "reuse" in key else []
    assert said(*has_effect) == []


def _group(prompt: int, *responses: int) -> PromptGroup:
    branches = tuple(Branch(np.zeros(length, np.int64), reward=0.0) for length in responses)
    return PromptGroup("g", np.zeros(prompt, np.int64), branches)


@pytest.mark.parametrize(
    ("words", "groups", "dp_size", "terms"),
    [
        ([], [_group(1001, 5, 5, 5)], 1, 10 + 3),
        (["branches_per_microbatch=2"], [_group(1001, 5, 5, 5)], 1, 10 + 2),
        (["gradient=detached"], [_group(1001, 5, 5, 5)], 1, 3),
        (["response_block=4"], [_group(1002, 9, 4, 1)], 1, 11 + 3 + 1 + 1),
        ([], [_group(1001, 5), _group(201, 5), _group(101, 5)], 1, 11 + 3 + 2),
        ([], [_group(1001, 5), _group(201, 5), _group(101, 5)], 2, 11),
        ([], [_group(1, 5)], 4, 1),
    ],
)
def test_terms_of_a_gradient(words, groups, dp_size, terms):
    assert gradient_terms(load_config(["segment_length=100", *words]), groups, dp_size) == terms


def test_bf16_gradients_of_many_terms_are_warned_of():
    """By the step with most terms, and only where gradients are in bf16 and those are too many."""
    low = ["precision=bf16", "optimizer.grad_reduce_in_fp32=false", "segment_length=100"]
    few, many = [_group(100 * MAX_BF16_TERMS - 99, 5)], [_group(100 * MAX_BF16_TERMS + 1, 5)]
    assert rounding_advice(load_config(low), [few, few], 1) == []
    (sentence,) = rounding_advice(load_config(low), [few, many], 1)
    assert f"sums of {MAX_BF16_TERMS + 1} gradients" in sentence and "docs/precision.md" in sentence
    for words in (["precision=fp32"], ["optimizer.grad_reduce_in_fp32=true"], ["segment_length=200"]):
        assert rounding_advice(load_config([*low, *words]), [few, many], 1) == []
