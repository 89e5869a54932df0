"""The released models, formula and dry run: `python tests/plan/released.py [stages] [TOKENS] [ROW ..]`.

The tables of README and docs/planner.md. A dry run is of a rank of the stage that takes most by the formula, or one of
every pipeline stage where `stages` is given. Minutes a row; rows are numbers of `ROWS`. Fails above 3 % off.
"""

import sys
import time

from longstraw_megatron.compose import load_config
from longstraw_megatron.plan.dry_run import dry_run
from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.plan.memory import plan_memory
from longstraw_megatron.plan.workload import Workload
from longstraw_megatron.planner import num_gpus_of, resolve_hardware

TOKENS = 2_097_152
WITHIN = 0.03
QWEN = "model=qwen3_6_27b parallel=qwen_8gpu_tp4_pp2"
GLM = "model=glm_5_2 parallel=glm_32gpu_tp8_pp4_ep8"
HOST = "optimizer.optimizer_cpu_offload=true state.stage_inputs=host"
LOW = f"{HOST} state.grad_dtype=bf16 optimizer.grad_reduce_in_fp32=false"
ROWS = (
    f"{QWEN} {LOW}",
    f"{QWEN} {HOST}",
    QWEN,
    f"{QWEN} {LOW} state.location=host",
    f"{QWEN} {LOW} gradient=detached",
    f"{GLM} {LOW}",
    f"{GLM} {LOW} trainable=[decoder.final_layernorm.weight]",
    f"model=glm_5_2 parallel=glm_32gpu_pp4_cp8_ep8 {LOW}",
    f"model=glm_5_2 parallel=glm_32gpu_pp4_cp8_ep8 {LOW} trainable=[decoder.final_layernorm.weight]",
)
WORKLOAD = (
    "hardware=h20_141gb device=cuda precision=bf16 response_length=2048 group_size=2 segment_length=16384 "
    "recompute=full state.page_length=65536"
)


def main(words: list[str]) -> int:
    """Exit code 1 where formula and dry run are more than 3 % apart."""
    numbers = [int(word) for word in words if word != "stages"]
    tokens = next((number for number in numbers if number >= len(ROWS)), TOKENS)
    rows = [ROWS[number] for number in numbers if number < len(ROWS)] or ROWS
    worst = 0.0
    print(f"{tokens} tokens\n{'formula GB':>10} {'dry run':>8} {'off':>7} {'s':>5}  rank  phase    keys", flush=True)
    for row in rows:
        config = resolve_hardware(load_config([*row.split(), *WORKLOAD.split(), f"prompt_length={tokens}"]))
        layout = Layout(config, Workload.of(config), num_gpus_of(config))
        memory = plan_memory(layout)
        for stage in memory.stages if "stages" in words else [memory.worst]:
            began = time.monotonic()
            peak = dry_run(config, layout.workload, rank=stage.first_rank, world_size=layout.num_gpus).peak
            seconds = time.monotonic() - began
            off = stage.tensors / peak.peak - 1
            worst = max(worst, abs(off))
            sizes = f"{stage.tensors / 1e9:10.2f} {peak.peak / 1e9:8.2f} {off:+7.1%}"
            print(f"{sizes} {seconds:5.0f}  {stage.first_rank:>4}  {peak.name:8} {row}", flush=True)
    return int(worst > WITHIN)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
