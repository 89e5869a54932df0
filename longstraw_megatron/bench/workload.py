"""What is run: synthetic prompt groups, and what each method would cost if only token-forwards counted."""

import numpy as np

from longstraw_megatron.batch import Branch, PromptGroup
from longstraw_megatron.config import Config

DENSE_METHODS = ("dense", "dense_recompute")


def make_groups(config: Config, num_groups: int) -> list[PromptGroup]:
    """Groups of `prompt_length`, `response_length` and `group_size`, random tokens, advantages from -1 to 1.3."""
    generator = np.random.default_rng(config.seed)
    advantages = np.linspace(-1.0, 1.3, config.group_size) if config.group_size > 1 else [1.0]

    def tokens(length: int) -> np.ndarray:
        return generator.integers(0, config.model.hf_config["vocab_size"], length)

    return [
        PromptGroup(
            f"g{g}",
            tokens(config.prompt_length),
            tuple(Branch(tokens(config.response_length), reward=0.0, advantage=float(a)) for a in advantages),
        )
        for g in range(num_groups)
    ]


def token_forwards(config: Config, method: str) -> int:
    """Work of one group in token-forwards, a backward being two; `PromptGroup.cost` of what the method runs."""
    sequence = config.prompt_length - 1 + config.response_length
    if method in DENSE_METHODS:
        return config.group_size * sequence * (4 if method == "dense_recompute" else 3)
    (group,) = make_groups(config, 1)
    return group.cost(exact=method == "exact", recompute=config.recompute == "full")
