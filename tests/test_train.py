"""The training door: what it refuses, and what a run leaves behind."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import dense_grpo, make_model, qwen_config
from safetensors.torch import load_file

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.testing import assert_gradients_close, run_ranks
from longstraw_megatron.train import main

TINY = [
    "model.hf_config.num_hidden_layers=4",
    "model.hf_config.hidden_size=32",
    "segment_length=32",
    "wandb.mode=disabled",
    "optimizer.lr=1e-3",
]


def write_rollouts(path: Path, groups: list[dict]) -> Path:
    path.write_text("".join(json.dumps(group) + "\n" for group in groups))
    return path


def native(groups: list[dict]) -> list[dict]:
    """The oracle's groups in the native format."""
    return [
        {
            "group_id": f"g{g}",
            "prompt_tokens": [int(t) for t in group["prompt"]],
            "branches": [
                {"tokens": [int(t) for t in response], "reward": float(b), "advantage": float(advantage)}
                for b, (response, advantage) in enumerate(zip(group["responses"], group["advantages"], strict=True))
            ],
        }
        for g, group in enumerate(groups)
    ]


def random_groups(*shapes, vocab=128, seed=0) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "prompt": torch.randint(0, vocab, (prompt,), generator=generator),
            "responses": [torch.randint(0, vocab, (n,), generator=generator) for n in responses],
            "advantages": torch.linspace(-1, 1.2, len(responses)).tolist(),
        }
        for prompt, responses in shapes
    ]


def run_main(args: list[str], world_size: int = 1):
    """`main` in forked processes, as torchrun would start it; exit codes."""

    def rank_main(rank, world_size, args, port_file):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{port_file}", rank=rank, world_size=world_size
        )
        return main(args)

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(world_size, rank_main, args, str(Path(folder, "store")), init=False)


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def rollouts(tmp_path):
    return write_rollouts(tmp_path / "rollouts.jsonl", native(random_groups((70, [9, 4]), (33, [5, 1, 7]))))


REFUSALS = {
    "no rollouts named": ([], "rollouts.path is not set"),
    "unknown key": (["segmnt_length=3"], "segment_length"),
    "segment of no token": (["segment_length=0"], "segment_length must be at least 1, got 0"),
    "layout that the world does not divide": (["parallel.tp=2"], "multiple of parallel.{tp * cp * pp} = 2, got 1"),
    "reference needed and absent": (["objective.kl_coef=0.1"], "ref_logprobs"),
    "unknown architecture": (["model.hf_config.architectures=[GptForCausalLM]"], "wanted one of"),
    "sizes that don't fit": (["model.hf_config.num_attention_heads=5"], "num_attention_heads"),
    "no checkpoint to resume": (["trainer.resume=nowhere"], "nowhere"),
    "a checkpoint folder that is none": (["model.hf_path=nowhere"], "nowhere"),
    "more groups a step than there are": (["groups_per_step=3"], "groups_per_step is 3"),
    "gradients to a folder": (["trainer.export_grads=/"], "trainer.export_grads=/ must name a file"),
    "logprobs below a file": (["trainer.export_logprobs=/dev/null/x"], "lies in /dev/null, which is no folder"),
    "checkpoints in a file": (["trainer.save_dir=/dev/null"], "trainer.save_dir=/dev/null lies in /dev/null"),
    "a run in a file": (["run_dir=/dev/null"], "run_dir=/dev/null lies in /dev/null, which is no folder"),
    "stages of other layers": (["parallel.stages=[7]"], "parallel.stages got [7]"),
    "architectures that are no list": (["model.hf_config.architectures=3"], "architectures got 3"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_are_one_sentence_and_exit_code_2(name, rollouts, tmp_path, capfd, monkeypatch):
    overrides, words = REFUSALS[name]
    monkeypatch.setattr("longstraw_megatron.mcore.session.build_model", None)  # before any weight is made
    path = [f"rollouts.path={rollouts}"] if name != "no rollouts named" else []
    (code,) = run_main([*path, f"run_dir={tmp_path / 'run'}", "wandb.mode=disabled", *overrides])
    error = capfd.readouterr().err.strip()
    assert code == 2, error
    assert words in error and len(error.splitlines()) == 1, error
    assert "Traceback" not in error


def test_refusal_comes_from_one_rank_only(rollouts, tmp_path, capfd):
    codes = run_main([f"rollouts.path={rollouts}", "parallel.tp=4", "wandb.mode=disabled"], world_size=2)
    assert codes == [2, 2]
    assert capfd.readouterr().err.count("longstraw_megatron:") == 1


def test_a_refusal_that_only_a_later_rank_meets_is_told(rollouts, tmp_path, capfd, monkeypatch):
    """Such as a file that one machine lacks: the job must not end without a reason."""
    import longstraw_megatron.train as train

    def check(config, world_size):
        if os.environ["RANK"] == "1":
            raise RefusedError("This machine lacks the file, got none, wanted it; copy it.")
        return []

    monkeypatch.setattr(train, "check", check)
    monkeypatch.setattr(train, "check_memory", lambda *args: None)
    monkeypatch.setattr(train, "run", lambda config, groups: None)
    assert run_main([f"rollouts.path={rollouts}"], world_size=2) == [0, 2]
    assert (
        capfd.readouterr().err.strip()
        == "longstraw_megatron: This machine lacks the file, got none, wanted it; copy it."
    )


def test_a_run_exports_the_oracles_gradient_and_logprobs(tmp_path):
    hf_model = make_model(qwen_config(num_hidden_layers=4))
    hf_model.save_pretrained(tmp_path / "hf")
    groups = random_groups((70, [9, 4]), (33, [5, 1, 7]))
    truth = dense_grpo(hf_model, groups)
    path = write_rollouts(tmp_path / "r.jsonl", native(groups))
    codes = run_main(
        [
            f"model.hf_path={tmp_path / 'hf'}",
            f"rollouts.path={path}",
            f"run_dir={tmp_path / 'run'}",
            "segment_length=32",
            "wandb.mode=disabled",
            f"trainer.export_grads={tmp_path / 'grads.safetensors'}",
            f"trainer.export_logprobs={tmp_path / 'logprobs.jsonl'}",
            f"trainer.export_hf={tmp_path / 'out'}",
            "optimizer.lr=0.0",
        ],
        world_size=2,
    )
    assert codes == [0, 0]
    grads = load_file(tmp_path / "grads.safetensors")
    assert_gradients_close(grads, truth.grads)
    for line in (tmp_path / "logprobs.jsonl").read_text().splitlines():
        entry = json.loads(line)
        want = truth.logprobs[int(entry["group_id"][1:]), entry["branch"]].numpy()
        assert np.abs(np.asarray(entry["logprobs"]) - want).max() <= 1e-5
    saved = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    for name, tensor in hf_model.state_dict().items():  # lr 0: the weights went through load and save unchanged
        assert torch.equal(saved[name], tensor), name
    (metrics,) = metrics_of(tmp_path / "run")
    assert abs(metrics["train/loss"] - truth.loss) < 1e-5
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in truth.grads.values()))
    assert abs(metrics["train/grad_norm"] - norm) < 1e-5 * norm


def test_ratio_is_one_in_the_first_step_and_old_logprobs_stay(rollouts, tmp_path):
    """Old logprobs that the file lacks are those of before the first update, in every later step too."""
    run_dir = tmp_path / "run"
    args = [f"rollouts.path={rollouts}", f"run_dir={run_dir}", *TINY, "trainer.max_steps=3"]
    assert run_main(args) == [0]
    first, second, third = metrics_of(run_dir)
    assert first["train/ratio_min"] == first["train/ratio_max"] == 1.0
    assert second["train/ratio_max"] > 1.0 and third["train/ratio_max"] > second["train/ratio_max"]
    assert third["train/logprobs_preferred"] > first["train/logprobs_preferred"]


def test_old_logprobs_are_scored_up_front_when_the_file_makes_several_steps(rollouts, tmp_path):
    args = [f"rollouts.path={rollouts}", *TINY, "groups_per_step=1", "trainer.max_steps=2"]
    assert run_main([*args, f"run_dir={tmp_path / 'a'}"]) == [0]
    first, second = metrics_of(tmp_path / "a")
    assert first["train/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert abs(second["train/ratio_max"] - 1.0) > 1e-4, "the second group's old policy is that of before the first step"


def test_reference_logprobs_come_from_the_reference_folder(rollouts, tmp_path):
    hf_model = make_model(qwen_config(num_hidden_layers=4, vocab_size=264))
    hf_model.save_pretrained(tmp_path / "hf")
    args = [
        f"rollouts.path={rollouts}",
        f"model.hf_path={tmp_path / 'hf'}",
        f"reference.hf_path={tmp_path / 'hf'}",
        "objective.kl_coef=0.1",
        "optimizer.lr=1e-2",
        "segment_length=32",
        "wandb.mode=disabled",
        "trainer.max_steps=2",
        f"run_dir={tmp_path / 'run'}",
    ]
    assert run_main(args) == [0]
    first, second = metrics_of(tmp_path / "run")
    assert first["train/ref_kl"] == pytest.approx(0.0, abs=1e-6), "the policy starts as the reference"
    assert second["train/ref_kl"] > 1e-5


def test_data_parallel_ranks_take_the_same_step(rollouts, tmp_path):
    args = [f"rollouts.path={rollouts}", *TINY, "trainer.max_steps=2"]
    assert run_main([*args, f"run_dir={tmp_path / 'one'}"]) == [0]
    assert run_main([*args, f"run_dir={tmp_path / 'two'}"], world_size=2) == [0, 0]
    for one, two in zip(metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two"), strict=True):
        assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-4, abs=1e-6)
        assert two["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-5)


def test_nan_weights_stop_before_the_optimizer_and_name_the_branch(rollouts, tmp_path, capfd):
    hf_model = make_model(qwen_config(num_hidden_layers=4, vocab_size=264))
    with torch.no_grad():
        hf_model.lm_head.weight[3, 3] = float("nan")
    hf_model.save_pretrained(tmp_path / "hf")
    args = [f"rollouts.path={rollouts}", f"model.hf_path={tmp_path / 'hf'}", "wandb.mode=disabled"]
    assert run_main([*args, "segment_length=32", f"run_dir={tmp_path / 'run'}"]) == [1]
    error = capfd.readouterr().err
    assert "NaN or Inf in logprobs in group g" in error and "branch" in error, error


def test_torchrun_and_offline_wandb(rollouts, tmp_path):
    """The real launcher; W&B's offline file has the metrics."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    args = [f"rollouts.path={rollouts}", f"run_dir={run_dir}", *TINY[:3], "parallel.cp=2"]
    root = str(Path(__file__).parent.parent)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = subprocess.run(
        [*command, "longstraw_megatron.train", *args], capture_output=True, text=True, timeout=240, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "phase of the last step" in done.stdout
    (metrics,) = metrics_of(run_dir)
    by_purpose = {n: v for n, v in metrics.items() if n.startswith("perf/sent_") and n != "perf/sent_bytes"}
    assert metrics["perf/sent_bytes"] == sum(by_purpose.values()) > 0
    (file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    assert str(metrics["train/grad_norm"])[:8].encode() in file.read_bytes()


@pytest.mark.parametrize("lr", ["0.0", "1e-3"])
def test_a_prompts_state_is_kept_over_steps_and_its_drift_logged(rollouts, tmp_path, lr):
    """In host memory, and with responses in blocks."""
    run_dir = tmp_path / "run"
    overrides = [f"rollouts.path={rollouts}", f"run_dir={run_dir}", *TINY, f"optimizer.lr={lr}", "trainer.max_steps=4"]
    overrides += ["gradient=detached", "state.reuse_steps=2", "state.location=host", "response_block=4"]
    assert run_main(overrides) == [0]
    steps = metrics_of(run_dir)
    assert [step["state/reuse_age"] for step in steps] == [0, 1, 2, 0]
    change = [step.get("state/reuse_logprob_change") for step in steps]
    drift = [step.get("state/reuse_loss_drift") for step in steps]
    assert change[0] is change[3] is drift[0] is drift[3] is None
    if lr == "0.0":
        assert change[1:3] == drift[1:3] == [0, 0]
    else:
        assert 0 < change[1] < change[2] and drift[1] and drift[2]
