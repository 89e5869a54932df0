"""Measures how far a kept prefix drifts from a fresh capture: `python tests/reuse_drift.py`, minutes on a CPU.

The tiny Qwen hybrid with random weights trains for five steps on one prompt of 2,048 bytes of Python's manual with 8
responses of 64, `gradient=detached state.reuse_steps=4`, once for each learning rate. Prints the table of
docs/precision.md from the runs' own metrics.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = 4  # optimizer steps that the state is kept for
LEARNING_RATES = ("1e-6", "1e-5", "1e-4", "1e-3")
KEYS = ("device=cpu", "gradient=detached", f"state.reuse_steps={STEPS}", f"trainer.max_steps={STEPS + 1}")


def metrics_of_run(folder: Path, rollouts: Path, lr: str) -> list[dict]:
    """Metrics of every step of a training run with that learning rate."""
    run_dir = folder / lr
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m"]
    command += ["longstraw_megatron.train", f"rollouts.path={rollouts}", f"run_dir={run_dir}", f"optimizer.lr={lr}"]
    subprocess.run([*command, *KEYS, "wandb.mode=disabled"], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def main() -> None:
    print("| lr | | " + " | ".join(str(age) for age in range(STEPS + 1)) + " |\n|---|---|" + "---|" * (STEPS + 1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rollouts = folder / "rollouts.jsonl"
        make = [sys.executable, str(ROOT / "examples" / "make_manual_rollouts.py"), "--out", str(rollouts)]
        subprocess.run([*make, "--prompt-length", "2048"], check=True, stdout=subprocess.DEVNULL)
        for lr in LEARNING_RATES:
            steps = metrics_of_run(folder, rollouts, lr)
            assert [step["state/reuse_age"] for step in steps] == list(range(STEPS + 1))
            # at age 0 the state is a fresh capture: nothing is measured
            change = [f"{step['state/reuse_logprob_change']:.1e}" for step in steps[1:]]
            drift = [f"{100 * step['state/reuse_loss_drift']:+.2g} %" for step in steps[1:]]
            print(f"| {lr} | logprobs | 0 | " + " | ".join(change) + " |")
            print("| | loss | 0 | " + " | ".join(drift) + " |", flush=True)


if __name__ == "__main__":
    main()
