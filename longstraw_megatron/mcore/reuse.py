"""A detached prompt's state kept over optimizer steps, and how far it is from a fresh one by then.

State that older weights made is stale. The detached gradient may take it all the same; what that costs is measured on
a sample, a branch that the step moves behind the shortest prompt that has one: its logprobs and its loss with a fresh
capture of that prompt, which is then dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longstraw_megatron.batch import PromptGroup
from longstraw_megatron.mcore.group_work import GroupWork
from longstraw_megatron.state import PrefixState


@dataclass
class _Captured:
    groups: Sequence[PromptGroup]
    states: list[list[PrefixState]]  # of each of this rank's groups, by chunk
    age: int = 0  # optimizer steps since


class PrefixReuse:
    """The prefix states of whole global batches, each for `steps` optimizer steps behind its own.

    Every rank decides from the global batch alone, so that ranks in lockstep prefill together or not at all.
    """

    def __init__(self, steps: int):
        self.steps = steps
        self._captured: list[_Captured] = []

    def begin_step(self) -> None:
        """An optimizer step later: what is too old is dropped."""
        for captured in self._captured:
            captured.age += 1
        self._captured = [captured for captured in self._captured if captured.age <= self.steps]

    def _find(self, groups: Sequence[PromptGroup]) -> _Captured | None:
        for captured in self._captured:
            if len(captured.groups) == len(groups) and all(
                a is b for a, b in zip(captured.groups, groups, strict=True)
            ):
                return captured
        return None

    def states_of(self, groups: Sequence[PromptGroup]) -> list[list[PrefixState]] | None:
        """The states of this rank's groups of a global batch, if they are kept."""
        captured = self._find(groups)
        return None if captured is None else captured.states

    def age_of(self, groups: Sequence[PromptGroup]) -> int:
        """Optimizer steps since the states of a global batch were captured; 0 where they are not kept."""
        captured = self._find(groups)
        return 0 if captured is None else captured.age

    def keep(self, groups: Sequence[PromptGroup], works: Sequence[GroupWork]) -> None:
        if self.steps and self._find(groups) is None:
            self._captured.append(_Captured(groups, [work.states for work in works]))


def drift_sample(groups: Sequence[PromptGroup], advantages: Sequence[Sequence[float]]) -> tuple[int, int] | None:
    """(group, branch) that drift is measured on: of the shortest prompt, and of its branches the shortest.

    Branches with a token in the loss and an advantage go first, since only their loss says something; then those
    with such a token. A prompt of one token leaves no state that could drift; None where there are no others.
    `advantages` [groups][branches].
    """

    def order(place: tuple[int, int]) -> tuple:
        group, branch = groups[place[0]], groups[place[0]].branches[place[1]]
        is_masked = branch.num_loss_tokens == 0
        return is_masked, float(advantages[place[0]][place[1]]) == 0, len(group.prompt_tokens), place[0], len(branch)

    places = ((g, b) for g, group in enumerate(groups) if len(group.prefix_tokens) for b in range(group.group_size))
    return min(places, key=order, default=None)


def logprob_change(stale: np.ndarray, fresh: np.ndarray, mask: np.ndarray) -> float:
    """Mean absolute difference, in nats, over the tokens in the loss; 0 where there are none."""
    return float(np.abs(fresh - stale)[mask == 1].mean()) if mask.any() else 0.0


def loss_drift(stale: float, fresh: float) -> float | None:
    """(stale - fresh) / |fresh| of a branch's share of the loss, a fraction; None where the fresh one is 0."""
    return (stale - fresh) / abs(fresh) if fresh else None
