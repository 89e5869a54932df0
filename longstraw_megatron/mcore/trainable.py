"""Which parameters train: name patterns over the unsharded model, the same choice on every rank.

Only what would train can be frozen here: the indexer stays frozen, and so does what a pipeline froze (a LoRA base).
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.architectures import text_config
from longstraw_megatron.mcore.weights.names import named_weights
from longstraw_megatron.mcore.weights.table import ROUTER_BIAS, entries_of, is_tied

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def is_indexer(name: str) -> bool:
    return ".core_attention.indexer." in name


def trainable_names(patterns: Sequence[str], hf_config: dict) -> set[str]:
    """Megatron's names of the unsharded parameters that match any of `patterns` (as the shell matches files).

    A tied output layer goes with the embedding.

    Raises:
        RefusedError: a pattern that matches no parameter, or none but the indexer's, which never trains.
    """
    hf = text_config(hf_config)
    names = [name for name in entries_of(hf) if not name.endswith(ROUTER_BIAS)]
    chosen: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not any(not is_indexer(name) for name in matched):
            what = "the frozen indexer's parameters only" if matched else "no parameter"
            raise RefusedError(
                f"trainable: the pattern {pattern!r} matches {what}, wanted some such as {names[1]}; names are "
                "Megatron's, layers counted from 0."
            )
        chosen |= matched
    if not chosen:
        raise RefusedError("trainable got an empty list, wanted patterns of names or all; name what is to train.")
    tied = {EMBEDDING, HEAD}
    return chosen | tied if is_tied(hf) and chosen & tied else chosen


def freeze_others(
    chunks: Sequence[nn.Module], patterns: Sequence[str], hf_config: dict, groups: ProcessGroupCollection
) -> None:
    """Take every parameter that matches none of `patterns` out of training."""
    chosen = trainable_names(patterns, hf_config)
    for weight in named_weights(chunks, entries_of(text_config(hf_config)), groups):
        if isinstance(weight.tensor, nn.Parameter) and weight.entry.megatron not in chosen:
            weight.tensor.requires_grad_(False)
