"""Measures what the dtype of gradient accumulators costs: `python tests/accumulator_precision.py`, minutes on a CPU.

A tiny Qwen hybrid whose weights are numbers of bfloat16 computes in float32; its gradient accumulators are float32, or
bfloat16 with either rounding. The truth is Hugging Face's dense gradient in float64, the yardstick Hugging Face's dense
gradient in bfloat16. Prints the table of docs/precision.md.
"""

import dataclasses
import math

import torch
from harness import Layout, make_groups, run_layout
from oracle import DenseResult, dense_grpo, make_model, qwen_config

PROMPT, RESPONSES = 513, [24, 16]
SEGMENTS = (2, 16, 128)
KINDS = {
    "float32": {},
    "bfloat16": {"grad_dtype": torch.bfloat16},
    "bfloat16, stochastic rounding": {"grad_dtype": torch.bfloat16, "grad_rounding": "stochastic"},
}


def relative_error(grads: dict, truth: dict) -> float:
    """Relative L2 error of the whole gradient."""
    error = sum(float((grads[k].double() - g).square().sum()) for k, g in truth.items() if g is not None)
    return math.sqrt(error / sum(float(g.square().sum()) for g in truth.values() if g is not None))


def main() -> None:
    torch.set_num_threads(1)
    model = make_model(qwen_config(num_hidden_layers=4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    groups = make_groups((PROMPT, RESPONSES))
    truth = dense_grpo(model.double(), groups)
    half = dense_grpo(model.bfloat16(), groups)
    print(f"dense bfloat16 | {relative_error(half.grads, truth.grads):.1e}", flush=True)
    model = model.float()
    print("| accumulators | " + " | ".join(f"{n} segments" for n in SEGMENTS) + " |", flush=True)
    for name, options in KINDS.items():
        cells = []
        for num_segments in SEGMENTS:
            layout = Layout(segment_length=(PROMPT - 1) // num_segments, page_length=128)
            layout = dataclasses.replace(layout, **options)
            result = run_layout(layout, model, DenseResult(grads=truth.grads), groups)[0]
            error = sum(e for e, _ in result.errors.values())
            cells.append(f"{math.sqrt(error / sum(n for _, n in result.errors.values())):.1e}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
