"""What is planned: prompts, responses and how many GPUs, apart from the model and its layout."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longstraw_megatron.batch import Branch, PromptGroup
from longstraw_megatron.config import Config


@dataclass(frozen=True)
class Workload:
    """One prompt group of an optimizer step, by its lengths in tokens."""

    prompt_length: int
    response_lengths: tuple[int, ...]

    @classmethod
    def of(cls, config: Config) -> "Workload":
        """The workload that the keys describe."""
        return cls(config.prompt_length, (config.response_length,) * config.group_size)

    @classmethod
    def of_groups(cls, groups: Sequence[PromptGroup]) -> "list[Workload]":
        """Those of given rollouts."""
        return [cls(len(group.prompt_tokens), group.response_lengths) for group in groups]

    @property
    def prefix_length(self) -> int:
        """What prefill covers: the prompt without its last token."""
        return self.prompt_length - 1

    def group(self) -> PromptGroup:
        """A group of these lengths, of tokens 0."""
        branches = tuple(Branch(_zeros(length), reward=0.0) for length in self.response_lengths)
        return PromptGroup("workload", _zeros(self.prompt_length), branches)


def _zeros(length: int) -> np.ndarray:
    """Tokens 0 that take no memory, whatever the length."""
    return np.broadcast_to(np.int64(0), length)
