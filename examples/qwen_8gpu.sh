#!/usr/bin/env bash
# GRPO of Qwen3.6-27B on one node of 8 GPUs. The layout is tested with small models on CPUs; it has not run on GPUs.
#
#   MODEL=/data/Qwen3.6-27B ROLLOUTS=/data/groups.jsonl examples/qwen_8gpu.sh [KEY=VALUE ...]
#
# Words behind the script's name are more keys and win over those here.
set -euo pipefail

: "${MODEL:?MODEL is the checkpoint folder: config.json and safetensors}"
: "${ROLLOUTS:?ROLLOUTS is the file of prompt groups, JSON lines}"
RUN=${RUN:-runs/qwen_8gpu}

keys=(
    model.hf_path="$MODEL"          # weights, and the model's shape
    rollouts.path="$ROLLOUTS"       # the whole file is one optimizer step, unless groups_per_step says otherwise
    parallel=qwen_8gpu_tp4_pp2      # qwen_8gpu_tp4_cp2 cuts the prompt, not the layers
    gradient=exact                  # detached leaves out what flows through the prompt, and its cost
    segment_length=16384            # prompt tokens per forward: activations grow with it, boundary states shrink
    branches_per_microbatch=1       # responses that are replayed together; memory grows with it
    recompute=full                  # layers run once more in backward instead of keeping their activations
    state.grad_dtype=bf16           # gradients of the prompt's keys and values: half of fp32's memory
    precision=bf16
    optimizer.lr=1e-6
    trainer.max_steps=1
    trainer.save_dir="$RUN/checkpoints"
    trainer.resume=auto             # go on from the newest checkpoint there, if there is any
    dist.timeout_s=7200             # longer than the longest segment or branch takes: a silent rank ends the job
    run_dir="$RUN"                  # metrics.jsonl and W&B's offline files
)
exec torchrun --standalone --nproc-per-node 8 -m longstraw_megatron.train "${keys[@]}" "$@"
