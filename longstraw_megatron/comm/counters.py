"""What a rank hands to the network, counted where it is sent."""

import logging
from collections import Counter

from torch import Tensor


class Traffic:
    """Bytes that this rank sent, by purpose. Communication objects add to it; formulas are tested against it.

    A collective counts what a rank must send at least: its shard to each peer (all-gather), or each peer's shard of
    its own contribution (reduce-scatter, all-to-all).
    """

    def __init__(self):
        self.sent: Counter[str] = Counter()
        self._said: set[str] = set()

    @property
    def total(self) -> int:
        return self.sent.total()

    def add(self, purpose: str, *tensors: Tensor, copies: int = 1) -> None:
        self.sent[purpose] += copies * sum(tensor.nbytes for tensor in tensors)

    def say_once(self, logger: logging.Logger, *, key: str, message: str) -> None:
        """Log the first message of each key."""
        if key not in self._said:
            self._said.add(key)
            logger.info(message)
