"""Rollouts as the trainer sees them: a prompt and its G responses, with what the objective needs per token.

A `Branch` is one response. The first response token is predicted from the last prompt token, so the prompt's prefix
is the prompt without that token, a branch's inputs are [last prompt token] + response[:-1], and its targets are the
response itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

from longstraw_megatron.errors import RefusedError

PER_TOKEN_FLOATS = ("old_logprobs", "ref_logprobs", "rollout_logprobs")


def _array(name: str, value, ndim: int, kinds: str, wanted: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:
        raise RefusedError(
            f"{name} has rows of different length, wanted {ndim}-dimensional {wanted}; check the rollouts file."
        ) from None
    if array.size and (array.dtype.kind not in kinds or array.ndim != ndim):
        raise RefusedError(
            f"{name} has dtype {array.dtype} and shape {list(array.shape)}, wanted {ndim}-dimensional {wanted}; "
            "check the rollouts file."
        )
    return array


def _integers(name: str, value, ndim: int = 1) -> np.ndarray:
    return _array(name, value, ndim, "iub", "integers").astype(np.int64)


def _floats(name: str, value) -> np.ndarray:
    return _array(name, value, 1, "iuf", "numbers").astype(np.float64)


@dataclass(frozen=True, eq=False)
class Branch:
    """One response of a prompt. Sequences are turned into arrays; R = len(tokens), which may be 0.

    Raises RefusedError where a list is not as long as `tokens`, or a value is out of its range.
    """

    tokens: np.ndarray  # [R] int64, the response
    reward: float
    advantage: float | None = None  # of the whole branch; None: from the rewards of its group
    loss_mask: np.ndarray | None = None  # [R] int64, 1 where the token is in the loss; None: everywhere
    old_logprobs: np.ndarray | None = None  # [R] float64, of the weights that the ratio is against
    ref_logprobs: np.ndarray | None = None  # [R] float64, of the reference policy
    rollout_logprobs: np.ndarray | None = None  # [R] float64, as the inference engine reported them
    routed_experts: np.ndarray | None = None  # [R, MoE layers, top-k] int64, of input t (the last prompt token is 0)
    status: str | None = None  # how the generation ended, e.g. completed, truncated

    def __post_init__(self):
        arrays = {"tokens": _integers("tokens", self.tokens)}
        length = len(arrays["tokens"])
        if self.loss_mask is not None:
            arrays["loss_mask"] = _integers("loss_mask", self.loss_mask)
        if self.routed_experts is not None:
            arrays["routed_experts"] = _integers("routed_experts", self.routed_experts, ndim=3)
        for name in PER_TOKEN_FLOATS:
            if getattr(self, name) is not None:
                arrays[name] = _floats(name, getattr(self, name))
        for name, array in arrays.items():
            if len(array) != length:
                raise RefusedError(
                    f"{name} has {len(array)} entries in a branch of {length} tokens, wanted one entry per token; "
                    "check the rollouts file."
                )
            object.__setattr__(self, name, array)
        self._check_values()

    def _check_values(self) -> None:
        if self.loss_mask is not None and not np.isin(self.loss_mask, (0, 1)).all():
            raise RefusedError(
                f"loss_mask has the values {sorted(set(self.loss_mask.tolist()))[:4]}, wanted only 0 and 1; "
                "put weights into the advantage instead."
            )
        for name in ("tokens", "routed_experts"):
            array = getattr(self, name)
            if array is not None and array.size and array.min() < 0:
                raise RefusedError(f"{name} has the entry {array.min()}, wanted 0 or more; check the rollouts file.")
        if self.routed_experts is not None and self.routed_experts.size:
            ordered = np.sort(self.routed_experts, axis=-1)
            if (ordered[..., 1:] == ordered[..., :-1]).any():
                raise RefusedError(
                    "routed_experts has one expert twice in a layer's top-k, wanted different ones, since a token goes "
                    "to each of them once; check the rollouts file."
                )
        for name in PER_TOKEN_FLOATS:
            array = getattr(self, name)
            bad = [] if array is None else np.flatnonzero(~np.isfinite(array) & (self.mask == 1))
            if len(bad):
                raise RefusedError(
                    f"{name} is {array[bad[0]]} at token {bad[0]}, wanted finite numbers wherever the token is in the "
                    "loss; mask the token or check the rollouts file."
                )
        for name in ("reward", "advantage"):
            value = getattr(self, name)
            if value is None and name == "advantage":
                continue
            if not isinstance(value, Real) or not math.isfinite(value):
                raise RefusedError(f"{name} is {value!r}, wanted a finite number; check the rollouts file.")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def mask(self) -> np.ndarray:
        """[R] int64, 1 where the token is in the loss."""
        return np.ones(len(self.tokens), np.int64) if self.loss_mask is None else self.loss_mask

    @property
    def num_loss_tokens(self) -> int:
        """R_i: the tokens that are in the loss."""
        return int(self.mask.sum())


@dataclass(frozen=True, eq=False)
class PromptGroup:
    """A prompt of P >= 1 tokens and its G >= 1 responses."""

    group_id: str
    prompt_tokens: np.ndarray  # [P] int64
    branches: tuple[Branch, ...]

    def __post_init__(self):
        prompt_tokens = _integers("prompt_tokens", self.prompt_tokens)
        if not len(prompt_tokens) or prompt_tokens.min() < 0:
            raise RefusedError(
                f"Group {self.group_id} has prompt tokens {prompt_tokens[:4].tolist()}, wanted one or more ids from 0 "
                "up, since the first response token is predicted from the last prompt token; give it a start token."
            )
        if not len(self.branches):
            raise RefusedError(f"Group {self.group_id} has no branches, wanted one or more; drop the group.")
        object.__setattr__(self, "prompt_tokens", prompt_tokens)
        object.__setattr__(self, "branches", tuple(self.branches))

    @property
    def group_size(self) -> int:
        return len(self.branches)

    @property
    def prefix_tokens(self) -> np.ndarray:
        """The tokens that prefill covers, [P-1]: all but the last."""
        return self.prompt_tokens[:-1]

    @property
    def response_lengths(self) -> tuple[int, ...]:
        return tuple(len(branch) for branch in self.branches)

    @property
    def loss_tokens(self) -> tuple[int, ...]:
        """R_i of every branch."""
        return tuple(branch.num_loss_tokens for branch in self.branches)

    def input_tokens(self, branch: int) -> np.ndarray:
        """What the branch's segment is fed, [R]: the last prompt token, then the response without its last token."""
        tokens = self.branches[branch].tokens
        return np.concatenate((self.prompt_tokens[-1:], tokens))[: len(tokens)]

    def target_tokens(self, branch: int) -> np.ndarray:
        """What it predicts, [R]: the response."""
        return self.branches[branch].tokens

    def cost(self, *, exact: bool = True, recompute: bool = False) -> int:
        """Work in token-forwards, a backward being two: what data-parallel ranks are balanced by.

        The prefix costs one forward, and in exact mode one more with its backward; a response token costs a forward
        and a backward; recompute adds a forward to every backward. Attention's growth with length is left out.
        """
        with_backward = 4 if recompute else 3
        prefix = len(self.prefix_tokens) * (1 + with_backward if exact else 1)
        return prefix + sum(self.response_lengths) * with_backward


def assign_groups(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Give whole groups to data-parallel ranks: the costliest first, each to the rank with the least so far.

    Ties go to the lower group index, and to the rank with fewer groups, then the lower rank. Each rank's list is in
    descending cost, so that ranks which must stay in step run groups of like cost together. Ranks may get none.
    """
    if num_ranks < 1:
        raise ValueError(f"assign_groups needs num_ranks >= 1, got {num_ranks}.")
    assigned: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(num_ranks), key=lambda r: (load[r], len(assigned[r]), r))
        assigned[rank].append(index)
        load[rank] += costs[index]
    return assigned


def split_microbatches(
    group: PromptGroup, branches_per_microbatch: int, response_block: int | None = None
) -> list[list[int]]:
    """Indices of the branches that are replayed together, in order; the last microbatch may be smaller.

    A branch of more than `response_block` tokens goes in blocks, and alone: its microbatch comes in its turn.
    """
    if branches_per_microbatch < 1:
        raise RefusedError(
            f"branches_per_microbatch is {branches_per_microbatch}, wanted 1 or more; 1 holds the smallest graph."
        )
    microbatches: list[list[int]] = []
    open_one: list[int] = []
    for index, length in enumerate(group.response_lengths):
        if response_block is not None and length > response_block:
            microbatches.append([index])
            continue
        if not open_one or len(open_one) == branches_per_microbatch:
            open_one = []
            microbatches.append(open_one)
        open_one.append(index)
    return microbatches
