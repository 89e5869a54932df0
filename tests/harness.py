"""Our gradients in any layout, rank by rank, against the oracle's."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from oracle import DenseResult

from longstraw_megatron.batch import Branch, PromptGroup
from longstraw_megatron.compose import load_config
from longstraw_megatron.config import ParallelConfig
from longstraw_megatron.functional.objective_config import ObjectiveConfig
from longstraw_megatron.mcore.architectures import text_config
from longstraw_megatron.mcore.group_work import CutOptions
from longstraw_megatron.mcore.learner import Learner, LearnerOptions
from longstraw_megatron.mcore.model import BuildOptions, build_model, wrap_ddp
from longstraw_megatron.mcore.optimizer import build_optimizer
from longstraw_megatron.mcore.parallel import init_parallel
from longstraw_megatron.mcore.session import make_link
from longstraw_megatron.mcore.trainable import freeze_others
from longstraw_megatron.mcore.weights import megatron_state_from_hf, named_weights
from longstraw_megatron.mcore.weights.gradients import complete_gradients
from longstraw_megatron.mcore.weights.names import tp_of
from longstraw_megatron.mcore.weights.table import entries_of
from longstraw_megatron.schedule import Action
from longstraw_megatron.state import OnDevice, StateOptions
from longstraw_megatron.testing import run_ranks

OVERALL, PER_TENSOR, PER_TENSOR_ABS, LOGPROB = 1e-5, 1e-4, 1e-6, 1e-5  # DESIGN section 8
SCALAR = 1e-5  # loss and gradient norm: one layout equals every other, since each equals the truth
LOSS_ABS = 1e-6  # rounding of float32 logprobs, for losses whose terms cancel


def names_of(cases, *, wide=()) -> list:
    """Names of cases for parametrize; those in `wide` are for `make test-wide` only."""
    return [pytest.param(name, marks=pytest.mark.wide) if name in wide else name for name in cases]


@dataclass(frozen=True)
class Layout:
    """A parallel layout and the knobs of a run that must not change the gradient."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    sp: bool | None = None  # None: with tp > 1
    segment_length: int = 64
    branches_per_microbatch: int = 1
    response_block: int | None = None
    reuse_steps: int = 0
    reuse_check_every: int | None = None
    recompute: str = "none"
    style: str = "zigzag"
    page_length: int = 48
    grad_dtype: torch.dtype | None = None
    grad_rounding: str = "nearest"
    residence: object = field(default_factory=OnDevice)  # where prefix state rests
    max_live_prefixes: int = 1
    changes: dict = field(default_factory=dict)  # of the built TransformerConfig, e.g. the MoE dispatcher
    stages: tuple[int, ...] | None = None
    frozen: tuple[str, ...] = ()  # substrings of parameter names that do not train
    trainable: tuple[str, ...] = ()  # patterns of those that do; empty: all
    stage_inputs: str = "device"
    grad_reduce_in_fp32: bool = True

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def parallel(self) -> ParallelConfig:
        sp = self.tp > 1 if self.sp is None else self.sp
        return ParallelConfig(
            tp=self.tp, cp=self.cp, pp=self.pp, vpp=self.vpp, ep=self.ep, etp=self.etp, sp=sp, stages=self.stages
        )


@dataclass
class RankResult:
    errors: dict[str, tuple[float, float]]  # Megatron's unsharded name -> (squared error, squared norm of the truth)
    logprobs: dict[tuple[int, int], np.ndarray]
    stats: dict[str, float]
    missing: list[str]  # has a gradient where the truth has none, or the other way round
    # the model's tensors that are to have a gradient -> squared norm of the truth; and what the optimizer clips by
    wanted: dict[str, float] = field(default_factory=dict)
    grad_norm: float | None = None


def prompt_groups(groups: list[dict]) -> list[PromptGroup]:
    """The oracle's groups as the product reads them."""
    return [
        PromptGroup(
            f"g{g}",
            np.asarray(group["prompt"]),
            tuple(
                Branch(
                    np.asarray(response),
                    reward=0.0,
                    advantage=float(advantage),
                    loss_mask=np.asarray(group["masks"][b]) if "masks" in group else None,
                    routed_experts=np.asarray(group["experts"][b]) if "experts" in group else None,
                    old_logprobs=np.asarray(group["old_logprobs"][b]) if "old_logprobs" in group else None,
                )
                for b, (response, advantage) in enumerate(zip(group["responses"], group["advantages"], strict=True))
            ),
        )
        for g, group in enumerate(groups)
    ]


def make_groups(*shapes: tuple[int, list[int]], vocab: int = 128, seed: int = 0) -> list[dict]:
    """Random groups of (prompt length, response lengths), with spread advantages."""
    generator = torch.Generator().manual_seed(seed + sum(p + sum(r) for p, r in shapes))

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(1, vocab, (length,), generator=generator)

    return [
        {
            "prompt": tokens(prompt),
            "responses": [tokens(length) for length in responses],
            "advantages": torch.linspace(-1.0, 1.3, len(responses)).tolist() if len(responses) > 1 else [1.0],
        }
        for prompt, responses in shapes
    ]


def after_updates(groups: list[dict], truth: DenseResult, *, seed: int = 0) -> list[dict]:
    """The groups as a later step sees them: their old logprobs are up to 0.1, less than the clip, off the present ones.

    At ratio 1 the loss is the mean advantage whatever the model says; here it is not.
    """
    generator = torch.Generator().manual_seed(seed)

    def moved(logprobs: torch.Tensor) -> list[float]:
        return (logprobs + 0.2 * torch.rand(len(logprobs), generator=generator) - 0.1).tolist()

    return [
        group | {"old_logprobs": [moved(truth.logprobs[g, b]) for b in range(len(group["responses"]))]}
        for g, group in enumerate(groups)
    ]


def recorded_actions(learner: Learner) -> list[Action]:
    """A list that has the actions of the learner's last step, or pass, from now on."""
    executed: list[Action] = []
    run = learner.engine.run

    def spy(actions, works, **kwargs):
        executed[:] = actions
        return run(actions, works, **kwargs)

    learner.engine.run = spy
    return executed


def build_learner(
    layout: Layout,
    hf: dict,
    *,
    detached: bool,
    precision: str = "fp32",
    objective=None,
    use_distributed_optimizer: bool = False,
):
    """(learner, context) of this rank; weights are unset."""
    context = init_parallel(layout.parallel, device=torch.device("cpu"), seed=1, timeout_s=60)
    chunks = build_model(hf, BuildOptions(precision, layout.recompute), context, **layout.changes)
    options = LearnerOptions(
        cut=CutOptions(
            segment_length=layout.segment_length,
            branches_per_microbatch=layout.branches_per_microbatch,
            response_block=layout.response_block,
            style=layout.style,
            row_multiple=context.row_multiple,
        ),
        state=StateOptions(
            exact=not detached,
            page_length=layout.page_length,
            grad_dtype=layout.grad_dtype,
            grad_rounding=layout.grad_rounding,
            residence=layout.residence,
        ),
        objective=objective or ObjectiveConfig(),
        logprob_block=16,
        max_live_prefixes=layout.max_live_prefixes,
        stage_inputs=layout.stage_inputs,
        reuse_steps=layout.reuse_steps,
        reuse_check_every=layout.reuse_check_every,
    )
    if layout.trainable:
        freeze_others(chunks, layout.trainable, hf, context.groups)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if any(part in name for part in layout.frozen):
                parameter.requires_grad_(False)
    chunks = wrap_ddp(
        chunks,
        context,
        use_distributed_optimizer=use_distributed_optimizer,
        grad_reduce_in_fp32=layout.grad_reduce_in_fp32,
    )
    return Learner(chunks, context, options, link=make_link(context)), context


def fill_from_hf(chunks, hf: dict, tensors: dict, groups) -> None:
    """Set this rank's parameters from named Hugging Face tensors."""
    full = megatron_state_from_hf(tensors, hf)
    for weight in named_weights(chunks, entries_of(text_config(hf)), groups):
        weight.tensor.data.copy_(_shard(weight, full[weight.entry.megatron], groups))


def _shard(weight, full: torch.Tensor, groups) -> torch.Tensor:
    """This rank's part of an unsharded Megatron tensor: sections of rows cut one by one, or columns."""
    entry, (rank, size) = weight.entry, tp_of(weight.entry, groups)
    if entry.axis == "columns":
        return full.chunk(size, dim=1)[rank]
    if entry.axis is None or size == 1:
        return full
    lengths = [sum(span.stop - span.start for span in section) for section in entry.sections]
    return torch.cat([section.chunk(size)[rank] for section in full.split(lengths)])


def gradient_errors(learner: Learner, hf: dict, truth: dict, *, frozen: bool = False):
    """RankResult's `errors` and `missing` of the gradient that the learner has now; `truth` has Hugging Face names."""
    want_all = megatron_state_from_hf(truth, hf, gradient=True)
    errors, missing = {}, []
    for weight in named_weights(learner.chunks, entries_of(text_config(hf)), learner.context.groups):
        want = want_all.get(weight.entry.megatron)
        if not isinstance(weight.tensor, torch.nn.Parameter):
            continue
        if not weight.tensor.requires_grad:
            if want is not None and not frozen:
                missing.append(weight.entry.megatron)
            continue
        if want is None:
            missing.append(weight.entry.megatron)
            continue
        got = weight.tensor.main_grad.double()
        want = _shard(weight, want, learner.context.groups).double().view_as(got)
        errors[weight.entry.megatron] = (float((got - want).square().sum()), float(want.square().sum()))
    return errors, missing


def _norms_of_truth(learner: Learner, hf: dict, truth: dict) -> dict[str, float]:
    """RankResult's `wanted`: of a tied embedding and head one, and none that is frozen on this rank."""
    entries = entries_of(text_config(hf))
    frozen = {
        weight.entry.megatron
        for weight in named_weights(learner.chunks, entries, learner.context.groups)
        if not weight.tensor.requires_grad
    }
    return {
        name: float(want.double().square().sum())
        for name, want in megatron_state_from_hf(truth, hf, gradient=True).items()
        if not entries[name].duplicate and name not in frozen
    }


def _run_rank(rank, world_size, layout, hf, weights, truths, groups, precision) -> list[RankResult]:
    """A step for each of `truths`: (gradients, whether the prompt is detached)."""
    distributed = layout.cp * layout.dp > 1  # as a run has it
    learner, context = build_learner(
        layout, hf, detached=truths[0][1], precision=precision, use_distributed_optimizer=distributed
    )
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    optimizer = build_optimizer(
        load_config([]).optimizer,
        learner.chunks,
        context,
        precision=precision,
        use_distributed_optimizer=distributed,
    )
    results = []
    for truth, detached in truths:
        learner.options = replace(learner.options, state=replace(learner.options.state, exact=not detached))
        stats, logprobs = learner.compute_gradients(prompt_groups(groups))
        optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        complete_gradients(learner.chunks)
        errors, missing = gradient_errors(learner, hf, truth, frozen=bool(layout.frozen or layout.trainable))
        wanted = _norms_of_truth(learner, hf, truth)
        results.append(RankResult(errors, logprobs, stats, missing, wanted, grad_norm))
    return results


def _run_grads(rank, world_size, layout, hf, weights, groups, detached) -> dict[str, torch.Tensor]:
    learner, context = build_learner(layout, hf, detached=detached)
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    learner.compute_gradients(prompt_groups(groups))
    return {
        f"{i}.{name}": parameter.main_grad.clone()
        for i, chunk in enumerate(learner.chunks)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }


def gradients_of(
    layout: Layout, hf_model, groups: list[dict], *, detached: bool = False
) -> list[dict[str, torch.Tensor]]:
    """`main_grad` of every parameter on every rank, for runs that are to be compared with each other."""
    hf = hf_model.config.to_dict() | {"architectures": [type(hf_model).__name__]}
    return run_ranks(
        layout.world_size, _run_grads, layout, hf, dict(hf_model.state_dict()), groups, detached, timeout=400
    )


def run_layout(
    layout: Layout, hf_model, truth: DenseResult, groups: list[dict], *, detached: bool = False, precision: str = "fp32"
) -> list[RankResult]:
    """Gradients of `groups` on every rank of a layout, compared with the truth in the rank itself."""
    return _run_steps(layout, hf_model, [(truth, detached)], groups, precision)[0]


def run_exact_and_detached(
    layout: Layout, hf_model, exact: DenseResult, detached: DenseResult, groups: list[dict]
) -> tuple[list[RankResult], list[RankResult]]:
    """`run_layout` with the exact gradient and then with the detached one, by the same ranks."""
    return tuple(_run_steps(layout, hf_model, [(exact, False), (detached, True)], groups, "fp32"))


def _run_steps(layout: Layout, hf_model, truths, groups: list[dict], precision: str) -> list[list[RankResult]]:
    """[step][rank]."""
    hf = hf_model.config.to_dict() | {"architectures": [type(hf_model).__name__]}
    steps = [(truth.grads, detached) for truth, detached in truths]
    weights = dict(hf_model.state_dict())
    by_rank = run_ranks(layout.world_size, _run_rank, layout, hf, weights, steps, groups, precision, timeout=400)
    return [list(of_step) for of_step in zip(*by_rank, strict=True)]


def assert_equals_oracle(results: list[RankResult], truth: DenseResult) -> None:
    """DESIGN section 8's bounds for every tensor on every rank; logprobs, loss and gradient norm; nothing left out."""
    seen = set().union(*(result.errors for result in results))
    wanted = set.intersection(*(set(result.wanted) for result in results))
    assert wanted <= seen, f"on no rank: {sorted(wanted - seen)[:4]}"
    norm_trained = math.sqrt(sum(results[0].wanted[name] for name in wanted))
    norm_all = math.sqrt(sum(float(g.double().square().sum()) for g in truth.grads.values() if g is not None))
    for rank, result in enumerate(results):
        assert not result.missing, f"rank {rank}: gradients missing or too many: {result.missing[:4]}"
        total = math.sqrt(sum(error for error, _ in result.errors.values()))
        # a tensor without gradient is held to the absolute bound
        table = sorted(
            ((math.sqrt(error) / (math.sqrt(norm) or norm_all), name) for name, (error, norm) in result.errors.items()),
            reverse=True,
        )
        worst = ", ".join(f"{name} {relative:.1e}" for relative, name in table[:3])
        rank_norm = math.sqrt(sum(norm for _, norm in result.errors.values()))
        print(f"rank {rank}: overall {total / rank_norm:.1e}; {worst}")  # pytest -rP shows it
        assert total <= OVERALL * rank_norm, f"rank {rank}: overall {total / rank_norm:.1e}; {worst}"
        for name, (error, norm) in result.errors.items():
            bound = PER_TENSOR * math.sqrt(norm) + PER_TENSOR_ABS * norm_all
            assert math.sqrt(error) <= bound, (
                f"rank {rank}: {name} off by {math.sqrt(error):.1e} > {bound:.1e}; {worst}"
            )
        assert result.logprobs.keys() == truth.logprobs.keys()
        for key, logprobs in result.logprobs.items():
            assert np.abs(logprobs - truth.logprobs[key].numpy()).max(initial=0) <= LOGPROB, f"rank {rank}: {key}"
        assert result.stats["loss"] == pytest.approx(truth.loss, rel=SCALAR, abs=LOSS_ABS), f"rank {rank}"
        assert result.grad_norm is None or result.grad_norm == pytest.approx(norm_trained, rel=SCALAR), f"rank {rank}"
