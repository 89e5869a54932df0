"""Resume through the training door: two steps, a new process, two more, against four straight ones, bit for bit."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from test_train import TINY, metrics_of, native, random_groups, run_main, write_rollouts

from longstraw_megatron.compose import load_config
from longstraw_megatron.mcore.checkpoint_folder import find_checkpoint
from longstraw_megatron.train import past_exports

STEPS = ["trainer.max_steps=4", "optimizer.lr_decay_style=cosine", "optimizer.lr_decay_steps=4"]
SHAPES = ((70, [9, 4]), (33, [5, 1, 7]), (20, [6, 2]))


@pytest.fixture
def rollouts(tmp_path):
    return write_rollouts(tmp_path / "rollouts.jsonl", native(random_groups(*SHAPES)))


def _numbers(run_dir) -> list[dict]:
    """What a step computed, without times and memory."""
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in metrics_of(run_dir)]


def _weights(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _train(rollouts, folder, *overrides, world_size=1):
    args = [f"rollouts.path={rollouts}", f"run_dir={folder / 'run'}", f"trainer.save_dir={folder / 'save'}", *TINY]
    return run_main([*args, *STEPS, *overrides], world_size=world_size)


CASES = {
    "one rank": (1, []),
    "one rank, two groups a step": (1, ["groups_per_step=2"]),
    "one rank, bf16": (1, ["precision=bf16"]),
    "data parallel": (2, []),
    "tensor parallel, bf16": (2, ["parallel.tp=2", "precision=bf16"]),
    "optimizer on the host, data parallel, bf16": (2, ["optimizer.optimizer_cpu_offload=true", "precision=bf16"]),
    "half of the optimizer on the host": (
        1,
        ["optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_fraction=0.5", "precision=bf16"],
    ),
    "experts": (2, ["model=tiny_glm_dsa", "model.hf_config.hidden_size=64", "parallel.ep=2"]),
}


@pytest.mark.parametrize("name", CASES)
def test_resume_is_bit_equal_to_going_straight_on(rollouts, tmp_path, name):
    world_size, overrides = CASES[name]
    done = [0] * world_size
    straight, parted = tmp_path / "straight", tmp_path / "parted"
    options = [*overrides, "trainer.resume=auto"]
    first = [*options, "trainer.max_steps=2"]
    assert _train(rollouts, parted, *first, world_size=world_size) == done
    assert find_checkpoint(parted / "save").step == 2
    assert [line["step"] for line in metrics_of(parted / "run")] == [1, 2]
    second = [*options, f"trainer.export_hf={parted / 'out'}"]
    assert _train(rollouts, parted, *second, world_size=world_size) == done
    whole = [*options, f"trainer.export_hf={straight / 'out'}"]
    assert _train(rollouts, straight, *whole, world_size=world_size) == done

    assert [line["step"] for line in metrics_of(parted / "run")] == [1, 2, 3, 4]
    assert _numbers(parted / "run") == _numbers(straight / "run")
    got, want = _weights(parted / "out"), _weights(straight / "out")
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
    learning_rates = {line["train/lr"] for line in metrics_of(straight / "run")}
    norms = {line["train/grad_norm"] for line in metrics_of(straight / "run")}
    assert len(learning_rates) > 2 and len(norms) == 4, "steps differ, so that equality says something"


def test_steps_after_the_checkpoint_are_done_again(rollouts, tmp_path):
    """A run that died at step 3 with a checkpoint of step 2: its later line of metrics is dropped."""
    assert _train(rollouts, tmp_path, "trainer.save_every=2") == [0]
    want = _numbers(tmp_path / "run")
    shutil.rmtree(tmp_path / "save" / "iter_0000004")
    assert _train(rollouts, tmp_path, f"trainer.resume={tmp_path / 'save'}") == [0]
    assert _numbers(tmp_path / "run") == want


def test_exports_of_the_first_step_are_said_to_be_past():
    config = load_config(["trainer.export_grads=grads.safetensors"])
    assert past_exports(config, 0) == []
    (warning,) = past_exports(config, 3)
    assert "trainer.export_grads is of the first step" in warning and "after step 3" in warning


def test_auto_starts_anew_without_a_checkpoint(rollouts, tmp_path):
    assert _train(rollouts, tmp_path, "trainer.resume=auto", "trainer.max_steps=1") == [0]
    assert len(metrics_of(tmp_path / "run")) == 1


def test_keep_and_save_every(rollouts, tmp_path):
    assert _train(rollouts, tmp_path, "trainer.save_every=1", "trainer.keep=2") == [0]
    kept = sorted(path.name for path in (tmp_path / "save").glob("iter_*"))
    assert kept == ["iter_0000003", "iter_0000004"]


def _refusal(capfd, code: list[int]) -> str:
    error = capfd.readouterr().err.strip()
    assert code == [2], error
    assert len(error.splitlines()) == 1 and "Traceback" not in error, error
    return error


def test_what_resume_refuses(rollouts, tmp_path, capfd):
    assert _train(rollouts, tmp_path, "trainer.max_steps=1") == [0]
    capfd.readouterr()
    resume = ["trainer.resume=auto"]

    other = write_rollouts(tmp_path / "other.jsonl", native(random_groups(*SHAPES, seed=1)))
    assert "other rollouts" in _refusal(capfd, _train(other, tmp_path, *resume))

    groups = [json.loads(line) for line in rollouts.read_text().splitlines()]
    groups[1]["branches"][0]["advantage"] += 1.0
    other = write_rollouts(tmp_path / "advantage.jsonl", groups)
    assert "other rollouts" in _refusal(capfd, _train(other, tmp_path, *resume))

    error = _refusal(capfd, _train(rollouts, tmp_path, *resume, "trainer.max_steps=1"))
    assert "is at step 1" in error and "trainer.max_steps" in error
    error = _refusal(capfd, _train(rollouts, tmp_path, *resume, "groups_per_step=1"))
    assert "groups_per_step=all, got groups_per_step=1" in error
    error = _refusal(capfd, _train(rollouts, tmp_path, *resume, "model.hf_config.hidden_size=64"))
    assert "does not fit the model" in error
    error = _refusal(capfd, _train(rollouts, tmp_path, *resume, "precision=bf16"))
    assert "FP32Optimizer" in error and "Float16OptimizerWithFloat16Params" in error
    error = _refusal(capfd, _train(rollouts, tmp_path, f"trainer.resume={tmp_path / 'run'}"))
    assert "complete checkpoint" in error


def test_the_wandb_run_is_continued(rollouts, tmp_path):
    """By the checkpoint's id, in another run_dir too."""
    offline = ["wandb.mode=offline", "trainer.resume=auto"]
    assert _train(rollouts, tmp_path, *offline, "trainer.max_steps=1") == [0]
    run_id = (tmp_path / "run" / "wandb_id").read_text()
    assert find_checkpoint(tmp_path / "save").extra["wandb_id"] == run_id.strip() != ""
    assert _train(rollouts, tmp_path, *offline, "trainer.max_steps=2", f"run_dir={tmp_path / 'elsewhere'}") == [0]
    assert (tmp_path / "elsewhere" / "wandb_id").read_text() == run_id
