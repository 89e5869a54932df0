"""What ranks take, and what the planner says of them: `PLANNED`, run one by one; `python tests/plan/measured.py`.

Many minutes: runs of both small models, prompts of 4,096 to 65,536 tokens; arguments are indices of those to run. The
test that goes with every change is test_plan_memory.py.

Measured twice: live storages of tensors (`PeakMemory`), and in a second step, without that recorder, the resident size
of the process over what it was before the step. The second has what kernels allocate inside and Python's own objects,
and it has what malloc keeps; blocks from 64 KiB on are therefore given back at once.
"""

import ctypes
import gc
import sys

import torch

from longstraw_megatron.bench.worker import shortened
from longstraw_megatron.bench.workload import make_groups
from longstraw_megatron.compose import load_config
from longstraw_megatron.config import resolve_auto
from longstraw_megatron.mcore.monitor import peak_bytes, reset_peak
from longstraw_megatron.mcore.parallel import init_parallel
from longstraw_megatron.mcore.session import build_trainer
from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.plan.memory import StageMemory, plan_memory
from longstraw_megatron.plan.workload import Workload
from longstraw_megatron.planner import num_gpus_of
from longstraw_megatron.testing import run_ranks
from longstraw_megatron.testing.memory import PeakMemory

M_MMAP_THRESHOLD = -3  # malloc.h
LOADED = (Item.WEIGHTS, Item.GRADIENTS, Item.OPTIMIZER)
QWEN, GLM = "model=tiny_qwen_hybrid", "model=tiny_glm_dsa"
PLANNED = (
    f"{QWEN} prompt_length=4096",
    f"{QWEN} prompt_length=4096 parallel.cp=2 recompute=full",
    f"{QWEN} prompt_length=4096 parallel.pp=2 group_size=3",
    f"{QWEN} prompt_length=8192 parallel.tp=2",
    f"{QWEN} prompt_length=8192 parallel.pp=2 gradient=detached response_length=256",
    f"{QWEN} prompt_length=8192 state.location=host recompute=full",
    f"{QWEN} prompt_length=16384 parallel.cp=2 segment_length=2048 recompute=full",
    f"{QWEN} prompt_length=16384 gradient=detached segment_length=2048 response_length=512 response_block=128",
    f"{GLM} prompt_length=4096",
    f"{GLM} prompt_length=4096 parallel.tp=2 recompute=full",
    f"{GLM} prompt_length=4096 parallel.cp=2 parallel.ep=2",
    f"{GLM} prompt_length=4096 parallel.pp=2 gradient=detached group_size=3",
    f"{GLM} prompt_length=4096 state.location=host",
    f"{GLM} prompt_length=8192 parallel.cp=2 parallel.ep=2 recompute=full",
    f"{QWEN} prompt_length=65536 parallel.cp=2 segment_length=4096 gradient=detached state.location=host",
    f"{QWEN} prompt_length=65536 segment_length=4096 recompute=full",
)
WORKLOAD = "segment_length=1024 response_length=64 group_size=2"


def words_of(run: str) -> list[str]:
    given = {word.split("=")[0] for word in run.split()}
    return [*run.split(), *(word for word in WORKLOAD.split() if word.split("=")[0] not in given)]


def layout_of(words: list[str], num_gpus: int | None = None) -> Layout:
    config = resolve_auto(load_config(words), cuda_available=False)
    return Layout(config, Workload.of(config), num_gpus or num_gpus_of(config))


def measure(rank: int, world_size: int, words: list[str]) -> dict[str, int]:
    """Bytes of one rank: parameters and buffers, gradients, and the peaks of one step's gradient over them."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    config = resolve_auto(load_config(words), cuda_available=False)
    context = init_parallel(config.parallel, device=torch.device("cpu"), seed=1, timeout_s=1200)
    groups = make_groups(config, context.groups.dp.size())
    trainer = build_trainer(config, groups, context)
    parameters = [p for chunk in trainer.learner.chunks for p in chunk.parameters()]
    buffers = [b for chunk in trainer.learner.chunks for b in chunk.module.buffers()]
    trainer.learner.compute_gradients(shortened(groups, 100))
    with PeakMemory() as memory:
        trainer.learner.compute_gradients(groups)
    gc.collect()
    libc.malloc_trim(0)
    reset_peak(context.device)
    before = peak_bytes(context.device)
    trainer.learner.monitor.take()
    trainer.learner.compute_gradients(groups)
    phases = trainer.learner.monitor.take().values()  # each begins a peak of its own
    return {
        "weights": sum(tensor.nbytes for tensor in (*parameters, *buffers)),
        "gradients": sum(p.main_grad.nbytes for p in parameters if p.requires_grad),
        "peak": memory.peak,
        "resident": max(phase.peak_bytes for phase in phases) - before,
    }


def passing(stage: StageMemory) -> int:
    """Planned bytes over the loaded model."""
    return sum(size for item, size in stage.items.items() if item not in LOADED)


def run_and_plan(words: list[str], *, timeout: float) -> list[tuple[StageMemory, list[dict[str, int]]]]:
    """Each pipeline stage's plan, and what its ranks measured."""
    layout = layout_of(words)
    results = run_ranks(layout.num_gpus, measure, words, timeout=timeout)
    return [
        (stage, results[stage.first_rank : stage.first_rank + stage.num_ranks]) for stage in plan_memory(layout).stages
    ]


def main(runs: tuple[str, ...] = PLANNED) -> int:
    """Exit code 1 where a plan is more than 10 % off."""
    worst = 0.0
    print(f"{'planned MB':>10} {'tensors':>8} {'off':>7} {'resident':>8} {'off':>7}  rank  run", flush=True)
    for run in runs:
        stages = run_and_plan(words_of(run), timeout=3600)
        # of the stages the one that takes most, as the planner's worst rank
        stage, ranks = max(stages, key=lambda pair: max(rank["peak"] for rank in pair[1]))
        planned, peak = max(passing(pair[0]) for pair in stages), max(rank["peak"] for rank in ranks)
        resident = max(rank["resident"] for rank in ranks)
        off = planned / peak - 1
        worst = max(worst, abs(off))
        print(
            f"{planned / 1e6:10.2f} {peak / 1e6:8.2f} {off:+7.1%} {resident / 1e6:8.2f} {planned / resident - 1:+7.1%}"
            f"  {stage.first_rank:>4}  {run}",
            flush=True,
        )
    return int(worst > 0.1)


if __name__ == "__main__":
    sys.exit(main(tuple(PLANNED[int(index)] for index in sys.argv[1:]) or PLANNED))
