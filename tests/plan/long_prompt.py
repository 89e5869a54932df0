"""Is a long prompt its state, the state's gradients and one segment? `python tests/plan/long_prompt.py [TOKENS]`.

The tiny Qwen hybrid, exact, on one CPU rank; 131,072 tokens take minutes. What one segment takes is measured by itself,
on a prompt of two segments (the second has a prefix and a page to read): its peak without its state and gradients.
"""

import sys

import torch

from longstraw_megatron.bench.worker import shortened
from longstraw_megatron.bench.workload import make_groups
from longstraw_megatron.compose import load_config
from longstraw_megatron.config import resolve_auto
from longstraw_megatron.mcore.parallel import init_parallel
from longstraw_megatron.mcore.session import build_trainer
from longstraw_megatron.testing import run_ranks
from longstraw_megatron.testing.memory import PeakMemory

TOKENS, SEGMENT = 131_072, 2_048
WITHIN = 0.10
KEYS = (
    "model=tiny_qwen_hybrid",
    "recompute=full",
    f"segment_length={SEGMENT}",
    f"state.page_length={SEGMENT}",
    "response_length=64",
    "group_size=2",
)


def measure(rank: int, world_size: int, prompt_length: int) -> tuple[int, int]:
    """(most bytes of state and its gradients, peak of one step's gradient), both over the loaded model."""
    config = resolve_auto(load_config([*KEYS, f"prompt_length={prompt_length}"]), cuda_available=False)
    context = init_parallel(config.parallel, device=torch.device("cpu"), seed=1, timeout_s=3600)
    groups = make_groups(config, context.groups.dp.size())
    learner = build_trainer(config, groups, context).learner
    learner.compute_gradients(shortened(groups, 100))
    most = 0

    def progress(action: object) -> None:
        nonlocal most
        most = max(most, sum(learner.engine.state_bytes().values()))

    learner.engine.progress = progress
    with PeakMemory() as memory:
        learner.compute_gradients(groups)
    return most, memory.peak


def main(tokens: int = TOKENS) -> int:
    """Exit code 1 where the peak is more than 10 % off."""
    ((short_state, short_peak),) = run_ranks(1, measure, 2 * SEGMENT + 1, timeout=3600)
    segment = short_peak - short_state
    ((state, peak),) = run_ranks(1, measure, tokens, timeout=7200)
    off = peak / (state + segment) - 1
    print(f"{tokens} tokens: state and gradients {state / 1e6:.2f} MB, one segment {segment / 1e6:.2f} MB")
    print(f"peak over the loaded model {peak / 1e6:.2f} MB, {off:+.1%} of their sum")
    return int(abs(off) > WITHIN)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
