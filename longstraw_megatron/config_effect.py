"""Keys that a run sets and that change nothing in it, or cost it more than they seem to: said, not refused."""

from collections.abc import Sequence

from longstraw_megatron.batch import PromptGroup, assign_groups, split_microbatches
from longstraw_megatron.config import Config

# Terms of a sum in bf16 by which its own error has passed that of a gradient in bf16: docs/precision.md, measured.
MAX_BF16_TERMS = 64


def gradient_terms(config: Config, groups: Sequence[PromptGroup], dp_size: int) -> int:
    """Backwards of a step over `groups`, each of which adds to every `main_grad`, on the rank that has most of them."""
    exact, block = config.gradient == "exact", config.response_block

    def terms(group: PromptGroup) -> int:
        segments = -(-len(group.prefix_tokens) // config.segment_length) if exact else 0
        microbatches = split_microbatches(group, config.branches_per_microbatch, block)
        longest = [max(len(group.branches[i]) for i in microbatch) for microbatch in microbatches]
        return segments + sum(1 if block is None else max(1, -(-length // block)) for length in longest)

    costs = [group.cost(exact=exact, recompute=config.recompute == "full") for group in groups]
    return max(sum(terms(groups[i]) for i in of_rank) for of_rank in assign_groups(costs, dp_size))


def rounding_advice(config: Config, steps: Sequence[Sequence[PromptGroup]], dp_size: int) -> list[str]:
    """A sentence where bf16 main gradients would lose more than a gradient in bf16 is off by; `steps` has their groups.

    `precision` is resolved.
    """
    if config.optimizer.grad_reduce_in_fp32 or config.precision != "bf16":
        return []
    terms = max(gradient_terms(config, groups, dp_size) for groups in steps)
    if terms <= MAX_BF16_TERMS:
        return []
    return [
        f"optimizer.grad_reduce_in_fp32=false rounds sums of {terms} gradients a step to bf16, which above "
        f"{MAX_BF16_TERMS} costs more than bf16's own error (docs/precision.md); a longer segment_length, more "
        "branches_per_microbatch or fewer groups_per_step make them fewer, optimizer.grad_reduce_in_fp32=true exact."
    ]


def keys_without_effect(config: Config, longest_response: int) -> list[str]:
    """A sentence for each key away from its default that this run can't use; `device` and `precision` are resolved.

    `longest_response` is in tokens.
    """
    state, block, found = config.state, config.response_block, []
    in_blocks = block is not None and block < longest_response

    def note(key: str, value: object, reason: str) -> None:
        found.append(f"{key}={value} has no effect: {reason}.")

    if not config.optimizer.grad_reduce_in_fp32 and config.precision != "bf16":
        note("optimizer.grad_reduce_in_fp32", "false", f"precision={config.precision} takes equal ones")
    if state.stage_inputs == "host" and config.parallel.pp == 1:
        note("state.stage_inputs", "host", "with parallel.pp=1 no stage gets its inputs from another")
    if block is not None and not in_blocks:
        note("response_block", block, f"no response has more than {longest_response} tokens")
    if state.reuse_check_every != 1 and not state.reuse_steps:
        every = "null" if state.reuse_check_every is None else state.reuse_check_every
        note("state.reuse_check_every", every, "with state.reuse_steps=0 no state is kept")
    if config.gradient == "detached" and not in_blocks:
        # a prompt that is not walked back and whole responses have no sums of state gradients
        if state.grad_dtype != "auto":
            note("state.grad_dtype", state.grad_dtype, "gradient=detached with whole responses has none")
        if state.grad_rounding != "nearest":
            note("state.grad_rounding", state.grad_rounding, "nothing is rounded")
    if config.reference.hf_path is not None and "ref_logprobs" not in config.objective.needs:
        note("reference.hf_path", config.reference.hf_path, f"objective.{config.objective.name} takes no reference")
    return found
