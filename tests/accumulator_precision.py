"""Measures what the dtype of gradient accumulators costs: `python tests/accumulator_precision.py`, minutes on a CPU.

A tiny Qwen hybrid whose weights are numbers of bfloat16 computes in float32; its accumulators of state gradients and of
parameter gradients (`main_grad`) are float32, or bfloat16 with either rounding. The truth is Hugging Face's dense
gradient in float64, the yardstick Hugging Face's dense gradient in bfloat16. Prints the table of docs/precision.md.
"""

import dataclasses
import math

import harness
import torch
from harness import Layout, make_groups
from oracle import dense_grpo, make_model, qwen_config

from longstraw_megatron.state import PagedRows
from longstraw_megatron.state.accumulate import stochastic_bfloat16
from longstraw_megatron.testing import run_ranks

PROMPT, RESPONSES = 513, [24, 16]
SEGMENTS = (2, 16, 128)
SUMS = (2, 16, 128, 1024)
NEAREST = {"grad_dtype": torch.bfloat16}
STOCHASTIC = NEAREST | {"grad_rounding": "stochastic"}
# (state gradients, main_grad) -> options of the state, rounding of main_grad
KINDS = {
    ("float32", "float32"): ({}, None),
    ("bfloat16", "float32"): (NEAREST, None),
    ("bfloat16, stochastic", "float32"): (STOCHASTIC, None),
    ("float32", "bfloat16"): ({}, "nearest"),
    ("float32", "bfloat16, stochastic"): ({}, "stochastic"),
}


def relative_error(grads: dict, truth: dict) -> float:
    """Relative L2 error of the whole gradient."""
    error = sum(float((grads[k].double() - g).square().sum()) for k, g in truth.items() if g is not None)
    return math.sqrt(error / sum(float(g.square().sum()) for g in truth.values() if g is not None))


def _rank(rank, world_size, layout, hf, weights, truth, groups, main_rounding):
    """harness._run_rank, with `main_grad` rounded to bfloat16 after every backward that added to it."""
    build, generator = harness.build_learner, torch.Generator().manual_seed(1)

    def build_learner(*args, **kwargs):
        learner, context = build(*args, **kwargs)

        def round_main_grads(action):
            for chunk in learner.chunks:
                for parameter in chunk.parameters():
                    if parameter.requires_grad and action.op.flow == -1:
                        grad = parameter.main_grad
                        nearest = main_rounding == "nearest"
                        grad.copy_(grad.bfloat16() if nearest else stochastic_bfloat16(grad, generator))

        if main_rounding is not None:
            learner.engine.progress = round_main_grads
        return learner, context

    harness.build_learner = build_learner
    return harness._run_rank(rank, world_size, layout, hf, weights, truth, groups, False, "fp32")


def sum_errors(mean: float) -> None:
    """Relative L2 error of sums of increments N(mean, 1) in the accumulators of a page, by the number of increments."""
    print(f"| sums of N({mean:g}, 1) | " + " | ".join(str(n) for n in SUMS) + " |")
    print("|---|" + "---|" * len(SUMS))
    for name, options in {"bfloat16": NEAREST, "bfloat16, stochastic": STOCHASTIC}.items():
        rounding = options.get("grad_rounding", "nearest")
        rows = PagedRows(page_length=64, grad_dtype=torch.bfloat16, rounding=rounding)
        rows.append(torch.zeros(64, 256))
        truth, generator, cells = torch.zeros(64, 256, dtype=torch.float64), torch.Generator().manual_seed(0), []
        for done in range(1, SUMS[-1] + 1):
            increment = mean + torch.randn(64, 256, generator=generator)
            truth += increment
            for view in rows.pages(64, with_grads=True):
                rows.add_grad(view, increment)
            if done in SUMS:
                (grad,) = rows.grad(0, 64)
                cells.append(f"{float((grad.double() - truth).norm() / truth.norm()):.1e}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    for mean in (0.0, 1.0):
        sum_errors(mean)
    model = make_model(qwen_config(num_hidden_layers=4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    groups = make_groups((PROMPT, RESPONSES))
    truth = dense_grpo(model.double(), groups)
    half = dense_grpo(model.bfloat16(), groups)
    print(f"dense bfloat16: {relative_error(half.grads, truth.grads):.1e}", flush=True)
    model = model.float()
    hf = model.config.to_dict() | {"architectures": [type(model).__name__]}
    print("| state gradients | main_grad | " + " | ".join(f"{n} segments" for n in SEGMENTS) + " |", flush=True)
    print("|---|---|" + "---|" * len(SEGMENTS), flush=True)
    for (state, main_grad), (options, main_rounding) in KINDS.items():
        cells = []
        for num_segments in SEGMENTS:
            layout = Layout(segment_length=(PROMPT - 1) // num_segments, page_length=128)
            layout = dataclasses.replace(layout, **options)
            args = (layout, hf, dict(model.state_dict()), truth.grads, groups, main_rounding)
            (result,) = run_ranks(1, _rank, *args, timeout=1200)
            error, norm = (sum(pair[i] for pair in result.errors.values()) for i in (0, 1))
            cells.append(f"{math.sqrt(error / norm):.1e}")
        print(f"| {state} | {main_grad} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
