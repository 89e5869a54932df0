"""A run that does not fit is refused by name, with what would fit, and what it names does."""

import re

import numpy as np
import pytest

from longstraw_megatron import train
from longstraw_megatron.batch import Branch, PromptGroup
from longstraw_megatron.compose import load_config
from longstraw_megatron.config import resolve_auto
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.plan.enforce import worst_stage
from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.workload import Workload

WORDS = ["model=tiny_qwen_hybrid", "segment_length=1024"]
GROUPS = [PromptGroup("g", np.zeros(8192, np.int64), (Branch(np.zeros(64, np.int64), reward=1.0),) * 4)]


def _config(*words: str):
    return resolve_auto(load_config([*WORDS, *words]), cuda_available=False)


def _total(config, num_gpus: int = 1) -> int:
    return worst_stage(config, Workload.of_groups(GROUPS), num_gpus).total


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
        return worst_stage(_config(*words, *more), groups, 2).phases["replay"][Item.STATE]

    assert state("state.reuse_steps=2") == 4 * state()
    assert state("state.reuse_steps=2", "state.reuse_check_every=null") == 3 * state()
    config = _config(*words, "state.reuse_steps=2")
    with pytest.raises(RefusedError, match="state.reuse_steps=0 would fit"):
        train.check_memory(config, GROUPS * 20, 2, worst_stage(config, groups, 2).total - 1)
