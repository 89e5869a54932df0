"""The door of this folder: a path and a format in, a list of prompt groups out."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from longstraw_megatron.batch import PromptGroup
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.rollouts.native import read_native
from longstraw_megatron.rollouts.tokenizer import load_tokenizer

FORMATS: dict[str, Callable[..., Iterator[PromptGroup]]] = {"jsonl": read_native}
SUFFIXES = {".jsonl": "jsonl"}


def read_rollouts(
    path: str | Path | None, *, format: str = "auto", tokenizer: str | None = None, vocab_size: int
) -> list[PromptGroup]:
    """Every group of the file, in its order.

    `format=auto` goes by the suffix. `tokenizer` (`bytes`, or the place of a tokenizer.json) turns text into tokens.
    RefusedError names file, line, group and branch of the first thing that doesn't fit.
    """
    if path is None:
        raise RefusedError("rollouts.path is not set; name a file of prompt groups.")
    path = Path(path)
    if not path.is_file():
        got = "a folder" if path.is_dir() else "no such file"
        raise RefusedError(f"rollouts.path={path} must be a file of prompt groups, got {got}.")
    if format == "auto":
        if path.suffix not in SUFFIXES:
            raise RefusedError(
                f"rollouts.path={path} has the suffix {path.suffix!r}, which tells rollouts.format=auto nothing; "
                f"set rollouts.format to one of {', '.join(FORMATS)}."
            )
        format = SUFFIXES[path.suffix]
    if format not in FORMATS:
        raise RefusedError(f"rollouts.format must be one of auto, {', '.join(FORMATS)}, got {format!r}.")
    encoder = None if tokenizer is None else load_tokenizer(tokenizer)
    try:
        groups = list(FORMATS[format](path, tokenizer=encoder, vocab_size=vocab_size))
    except OSError as error:
        raise RefusedError(f"rollouts.path={path} can't be read: {error.strerror}.") from error
    if not groups:
        raise RefusedError(f"rollouts.path={path} is empty; it must hold at least one prompt group.")
    return groups


def length_warnings(groups: Iterable[PromptGroup], max_position_embeddings: int | None) -> list[str]:
    """A sentence for every group whose longest sequence passes the positions that the model was made for."""
    if max_position_embeddings is None:
        return []
    warnings = []
    for group in groups:
        length = len(group.prompt_tokens) + max(group.response_lengths)
        if length > max_position_embeddings:
            warnings.append(
                f"Group {group.group_id!r} has {len(group.prompt_tokens)} prompt tokens, up to {length} in all, beyond "
                f"the model's max_position_embeddings of {max_position_embeddings}: RoPE is extrapolated."
            )
    return warnings
