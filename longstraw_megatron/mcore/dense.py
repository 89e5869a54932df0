"""The dense baseline: every branch as one full sequence, prompt and response, with autograd through all of it.

It runs on the very modules and kernels that segments do: a group is rewritten into one whose prompt is a single token,
so that the prefix is empty and a branch is the whole sequence. Only response tokens have targets, so no logits are
made for the prompt. The gradient is that of ordinary training, which `gradient=exact` equals.
"""

from dataclasses import dataclass, replace

import numpy as np

from longstraw_megatron.batch import PER_TOKEN_FLOATS, Branch, PromptGroup
from longstraw_megatron.mcore.group_work import NO_TARGET


@dataclass(frozen=True, eq=False)
class DenseGroup(PromptGroup):
    """A group whose branches repeat the prompt: their first `context_length` tokens belong to it."""

    context_length: int

    def target_tokens(self, branch: int) -> np.ndarray:
        """What the branch predicts, [context_length + R]: nothing inside the prompt."""
        targets = super().target_tokens(branch).copy()
        targets[: self.context_length] = NO_TARGET
        return targets


def _dense_branch(branch: Branch, context: np.ndarray) -> Branch:
    """`branch` behind `context`, whose tokens are in no loss."""
    if branch.routed_experts is not None:
        raise ValueError("routed_experts cover the response only, wanted none: a dense pass routes the prompt itself.")
    padded = {
        name: np.concatenate((np.zeros(len(context)), getattr(branch, name)))
        for name in PER_TOKEN_FLOATS
        if getattr(branch, name) is not None
    }
    mask = np.concatenate((np.zeros(len(context), np.int64), branch.mask))
    return replace(branch, tokens=np.concatenate((context, branch.tokens)), loss_mask=mask, **padded)


def dense_group(group: PromptGroup) -> DenseGroup:
    """The same objective without a prefix: the prompt's first token, then everything else in every branch."""
    context = group.prompt_tokens[1:]
    branches = tuple(_dense_branch(branch, context) for branch in group.branches)
    return DenseGroup(group.group_id, group.prompt_tokens[:1], branches, len(context))
