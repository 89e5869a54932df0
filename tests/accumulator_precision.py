"""Measures what the dtype of gradient accumulators costs: `python tests/accumulator_precision.py`, on a CPU.

A tiny Qwen hybrid whose weights are numbers of bfloat16. The truth is Hugging Face's dense gradient in float64, the
yardstick Hugging Face's dense gradient in bfloat16. Prints the tables of docs/precision.md: `sums` (a page's, alone),
`state` (state gradients; the model computes in float32, so that nothing else is off), `main_grad` (the model computes
in bfloat16, so that increments are those of a run). Without an argument all of them.
"""

import dataclasses
import math
import sys

import torch
from harness import Layout, build_learner, fill_from_hf, gradient_errors, make_groups, prompt_groups
from oracle import dense_grpo, make_model, qwen_config

from longstraw_megatron.state import PagedRows
from longstraw_megatron.state.accumulate import stochastic_bfloat16
from longstraw_megatron.testing import run_ranks

RESPONSES = [24, 16]
STATE_PROMPT, STATE_SEGMENTS = 513, (2, 16, 128)
PAGE_LENGTH = 128  # rows whose gradients a pass sums in float32
# (prompts, tokens of each, segments of each)
MAIN_GRAD_CASES = ((1, 2049, 2), (1, 2049, 16), (1, 2049, 64), (1, 2049, 128), (8, 257, 16), (1, 2049, 1024))
SUMS = (2, 16, 128, 1024)
NEAREST = {"grad_dtype": torch.bfloat16}
STOCHASTIC = NEAREST | {"grad_rounding": "stochastic"}


def relative_error(grads: dict, truth: dict) -> float:
    """Relative L2 error of the whole gradient."""
    error = sum(float((grads[k].double() - g).square().sum()) for k, g in truth.items() if g is not None)
    return math.sqrt(error / sum(float(g.square().sum()) for g in truth.values() if g is not None))


def _rank(rank, world_size, layout, hf, weights, truth, groups, precision, stochastic) -> tuple[float, torch.Tensor]:
    """Relative L2 error of the whole gradient; the gradient [all parameters] float64.

    `stochastic`: a float32 `main_grad` that is rounded to bfloat16 at random behind every backward. It adds bfloat16
    increments to numbers of bfloat16, so this is the sum that a bfloat16 one would round.
    """
    learner, context = build_learner(layout, hf, detached=False, precision=precision)
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    parameters = [p for chunk in learner.chunks for p in chunk.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(1)

    def round_main_grads(action):
        for parameter in parameters if action.op.flow == -1 else ():
            parameter.main_grad.copy_(stochastic_bfloat16(parameter.main_grad, generator))

    if stochastic:
        learner.engine.progress = round_main_grads
    learner.compute_gradients(prompt_groups(groups))
    errors, _ = gradient_errors(learner, hf, truth)
    error, norm = (sum(pair[i] for pair in errors.values()) for i in (0, 1))
    return math.sqrt(error / norm), torch.cat([p.main_grad.flatten().double() for p in parameters])


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


class Case:
    """Prompts of a length with the truth of their gradient, and runs of the product on them."""

    def __init__(self, model, num_prompts: int, prompt_length: int):
        self.groups = make_groups(*[(prompt_length, RESPONSES)] * num_prompts)
        self.prefix_length = prompt_length - 1
        self.truth = dense_grpo(model.double(), self.groups).grads
        self.dense_bfloat16 = relative_error(dense_grpo(model.bfloat16(), self.groups).grads, self.truth)
        self.weights = dict(model.float().state_dict())
        self.hf = model.config.to_dict() | {"architectures": [type(model).__name__]}

    def run(self, num_segments: int, *, precision="fp32", stochastic=False, **options) -> tuple[float, torch.Tensor]:
        """As `_rank`, with `options` of the layout."""
        layout = Layout(segment_length=self.prefix_length // num_segments, page_length=PAGE_LENGTH)
        layout = dataclasses.replace(layout, **options)
        args = (layout, self.hf, self.weights, self.truth, self.groups, precision, stochastic)
        (result,) = run_ranks(1, _rank, *args, timeout=3600)
        return result


def state_errors(model) -> None:
    """By the dtype of state gradients, with a float32 `main_grad`."""
    case = Case(model, 1, STATE_PROMPT)
    print(f"dense bfloat16: {case.dense_bfloat16:.1e}\n| state gradients | segments {STATE_SEGMENTS} |", flush=True)
    for name, options in {"float32": {}, "bfloat16": NEAREST, "bfloat16, stochastic": STOCHASTIC}.items():
        cells = [f"{case.run(num_segments, **options)[0]:.1e}" for num_segments in STATE_SEGMENTS]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main_grad_errors(model) -> None:
    """By the dtype of `main_grad`, its share being the distance to the same increments summed in float32."""
    print("| prompts x segments | terms | dense bfloat16 | main_grad float32 | bfloat16 | its share | stochastic |")
    print("|---|---|---|---|---|---|---|", flush=True)
    cases: dict[tuple[int, int], Case] = {}
    for num_prompts, length, num_segments in MAIN_GRAD_CASES:
        if (num_prompts, length) not in cases:
            cases[num_prompts, length] = Case(model, num_prompts, length)
        case = cases[num_prompts, length]
        common = {"precision": "bf16", "branches_per_microbatch": len(RESPONSES), "page_length": case.prefix_length}
        whole, exact = case.run(num_segments, **common)
        low, nearest = case.run(num_segments, grad_reduce_in_fp32=False, **common)
        _, drawn = case.run(num_segments, stochastic=True, **common)
        shares = [float((grad - exact).norm() / exact.norm()) for grad in (nearest, drawn)]
        cells = (f"{value:.1e}" for value in (case.dense_bfloat16, whole, low, *shares))
        terms = num_prompts * (num_segments + 1)  # both responses are in one microbatch
        print(f"| {num_prompts} x {num_segments} | {terms} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or ["sums", "state", "main_grad"]
    if "sums" in wanted:
        for mean in (0.0, 1.0):
            sum_errors(mean)
    model = make_model(qwen_config(num_hidden_layers=4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    if "state" in wanted:
        state_errors(model)
    if "main_grad" in wanted:
        main_grad_errors(model)


if __name__ == "__main__":
    main()
