"""A run that does not fit is refused by name, with what would fit, and what it names does."""

import dataclasses
import re

import numpy as np
import pytest
import yaml

from longstraw_megatron import train
from longstraw_megatron.batch import Branch, PromptGroup
from longstraw_megatron.compose import config_dir, load_config, run_hardware
from longstraw_megatron.config import resolve_auto
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.plan.enforce import refuse_too_big
from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.remedies import Budget, other_keys
from longstraw_megatron.plan.workload import Workload

WORDS = ["model=tiny_qwen_hybrid", "segment_length=1024"]
GROUPS = [PromptGroup("g", np.zeros(8192, np.int64), (Branch(np.zeros(64, np.int64), reward=1.0),) * 4)]


def _config(*words: str):
    return resolve_auto(load_config([*WORDS, *words]), cuda_available=False)


def _total(config, num_gpus: int = 1) -> int:
    return _worst(config, Workload.of_groups(GROUPS), num_gpus).total


def _worst(config, workloads, num_gpus):
    return Budget(workloads, num_gpus, 0).worst_plan(config).worst


def test_what_fits_passes():
    train.check_memory(_config(), GROUPS, 1, _total(_config()))


def test_refusal_names_the_item_and_a_key_that_fits():
    config = _config()
    memory = _total(config) - 1
    with pytest.raises(RefusedError) as refusal:
        train.check_memory(config, GROUPS, 1, memory)
    message = str(refusal.value)
    assert "most of it for graph" in message and "plan.enforce=false" in message
    remedy = re.search(r"(\S+) would fit", message)[1]
    assert remedy == "recompute=full"
    train.check_memory(_config(remedy), GROUPS, 1, memory)


def test_refusal_names_a_layout_where_no_key_is_enough():
    words = ("parallel.cp=4", "recompute=full", "segment_length=256", "gradient=detached")
    config = _config(*words)
    memory = _total(config, 4) - 1
    with pytest.raises(RefusedError, match=r"parallel\.\S+=\d.* would fit") as refusal:
        train.check_memory(config, GROUPS, 4, memory)
    layout = re.findall(r"parallel\.\S+=\d+", str(refusal.value))
    train.check_memory(_config(*words, *layout), GROUPS, 4, memory)


def test_refusal_says_so_where_nothing_fits():
    with pytest.raises(RefusedError, match="no single key and no layout of 1 GPUs would fit"):
        train.check_memory(_config(), GROUPS, 1, 1000)


def test_enforce_false_tries_it():
    train.check_memory(_config("plan.enforce=false"), GROUPS, 1, 1000)


def test_training_leaves_with_2_before_a_weight_is_made(tmp_path, capsys):
    rollouts = tmp_path / "groups.jsonl"
    rollouts.write_text('{"group_id": "g", "prompt_tokens": [1, 2], "branches": [{"tokens": [3], "reward": 1.0}]}\n')
    # 743 billion parameters with gradients and moments in float32 are 12 TB
    assert train.main(["model=glm_5_2", f"rollouts.path={rollouts}", f"run_dir={tmp_path}", "device=cpu"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "most of it for optimizer" in message


def test_prefixes_that_are_used_again_are_counted():
    """Ten steps of two groups on two ranks: three steps' states, and that of the sample that drift is measured on."""
    words = ("gradient=detached", "groups_per_step=2", "recompute=full")
    groups = Workload.of_groups(GROUPS * 20)

    def state(*more: str) -> int:
        return _worst(_config(*words, *more), groups, 2).phases["replay"][Item.STATE]

    assert state("state.reuse_steps=2") == 4 * state()
    assert state("state.reuse_steps=2", "state.reuse_check_every=null") == 3 * state()
    config = _config(*words, "state.reuse_steps=2")
    with pytest.raises(RefusedError, match="state.reuse_steps=0 would fit"):
        train.check_memory(config, GROUPS * 20, 2, _worst(config, groups, 2).total - 1)


GLM = ["model=glm_5_2", "parallel=glm_32gpu_tp8_pp4_ep8", "recompute=full", "segment_length=16384", "device=cuda"]
LONG = [Workload(2_097_152, (2048, 2048))]
H200 = 150_754_820_096  # bytes


def _on_cuda(*words: str):
    config = resolve_auto(load_config([*GLM, *words]), cuda_available=True)
    return dataclasses.replace(config, hardware=run_hardware(config))


def test_refusal_names_keys_that_fit_together():
    """No key is enough: GLM-5.2 on 32 GPUs needs its optimizer on the host, and gradients in bf16."""
    with pytest.raises(RefusedError) as refusal:
        refuse_too_big(_on_cuda(), LONG, num_gpus=32, memory_bytes=H200)
    message = str(refusal.value)
    keys = re.search(r": (\S+=.*) together would fit", message)[1].split()
    assert set(keys) == {"optimizer.optimizer_cpu_offload=true", "optimizer.grad_reduce_in_fp32=false"}
    for fewer in (keys[:1], keys[1:]):
        assert not Budget(LONG, 32, H200).fits(_on_cuda(*fewer))
    refuse_too_big(_on_cuda(*keys), LONG, num_gpus=32, memory_bytes=H200)
    plan = Budget(LONG, 32, H200).worst_plan(_on_cuda(*keys))
    rank, node = plan.host_total / 2**30, 8 * plan.host_total / 2**30
    assert f"{rank:.2f} GiB of host memory a rank, {node:.2f} GiB a node" in message


def test_another_gradient_is_offered_last_and_said_to_be_one():
    together = ("recompute=full", "segment_length=256")
    memory = _total(_config(*together))
    assert _total(_config("gradient=detached")) < memory  # a single key, and yet
    with pytest.raises(RefusedError, match=f"GiB: {' '.join(together)} together would fit") as refusal:
        train.check_memory(_config(), GROUPS, 1, memory)
    assert "detached" not in str(refusal.value)
    words = (*together, "response_block=64")
    memory = _total(_config(*words, "gradient=detached"))
    assert memory < _total(_config(*words))
    with pytest.raises(RefusedError, match="GiB: gradient=detached would fit, but detached is another gradient"):
        train.check_memory(_config(*words), GROUPS, 1, memory)


def test_the_allowance_is_that_of_the_device():
    """A run on a GPU takes it from the file of such devices, whatever it plans with; its own if that is one."""
    shared = yaml.safe_load((config_dir() / "hardware" / "_cuda.yaml").read_text())
    hardware = _on_cuda().hardware
    assert hardware.device == "cuda" and hardware.reserved_bytes == float(shared["reserved_bytes"]) > 0
    assert hardware.fragmentation == shared["fragmentation"] > 0 and hardware.gpus_per_node == shared["gpus_per_node"]
    assert _on_cuda("hardware=h100", "hardware.reserved_bytes=7e9").hardware.reserved_bytes == 7e9
    config = resolve_auto(load_config([*WORDS, "hardware=h100"]), cuda_available=False)
    assert run_hardware(config).reserved_bytes == 0


def test_a_refused_key_is_no_advice():
    """bf16 gradients are not offered where they may not stand beside a kept prefix."""
    words = ("precision=bf16", "gradient=detached", "recompute=full")

    def advice(*more: str) -> list[str]:
        return [str(key) for key in other_keys(_config(*words, *more))]

    low = "optimizer.grad_reduce_in_fp32=false"
    assert low in advice() and low not in advice("state.reuse_steps=2")
    assert low in advice("state.reuse_steps=2", "state.location=host")


def test_the_update_copies_what_the_device_updates():
    """bf16 gradients in float32: of all parameters, of half of them, of none."""
    words = ("precision=bf16", "optimizer.grad_reduce_in_fp32=false")

    def gradients(*more: str) -> int:
        phases = _worst(_config(*words, *more), Workload.of_groups(GROUPS), 1).phases
        return phases["update"][Item.GRADIENTS] - phases["replay"][Item.GRADIENTS]

    host = "optimizer.optimizer_cpu_offload=true"
    assert gradients() > 0 and gradients(host) == 0
    assert gradients(host, "optimizer.optimizer_offload_fraction=0.5") == pytest.approx(gradients() / 2, rel=1e-3)
