"""The native format: JSONL, one prompt group a line, read line by line.

    {"group_id": "g0", "prompt_tokens": [P ids], "branches": [{"tokens": [R ids], "reward": 1.0, ...}, ...]}

Optional in a branch: `advantage`, `status`, and lists as long as `tokens`: `loss_mask`, `old_logprobs`,
`ref_logprobs`, `rollout_logprobs`, `routed_experts` ([R][MoE layer][top-k]). Text (`prompt`, `text`) may stand in
place of tokens where a tokenizer is given. Whatever does not fit is refused with file, line, group and branch.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from longstraw_megatron.batch import Branch, PromptGroup
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.rollouts.tokenizer import Tokenizer

GROUP_KEYS = ("group_id", "prompt_tokens", "prompt", "branches")
MAX_EXPERTS = 2**31
FLOAT32_MAX = float(np.finfo(np.float32).max)
LOGPROB_KEYS = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
BRANCH_KEYS = ("tokens", "text", "reward", "advantage", "loss_mask", *LOGPROB_KEYS, "routed_experts", "status")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; json itself would let the last of two equal keys win in silence."""
    tree = dict(pairs)
    if len(tree) != len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {twice!r} twice in one object")
    return tree


def _check_keys(tree: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(tree, dict):
        raise RefusedError(f"{where} must be a JSON object, got {type(tree).__name__}.")
    for key in tree:
        if key not in known:
            raise RefusedError(f"{where} has the unknown field {key!r}; known are {', '.join(known)}.")


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    """Finite in float32, in which the objective is computed."""
    return type(value) in (int, float) and abs(value) <= FLOAT32_MAX


def _read_tokens(
    tree: dict, key: str, text_key: str, tokenizer: Tokenizer | None, vocab_size: int, where: str
) -> list[int]:
    """The ids under `key`, or those of the text under `text_key`: at least one, each below `vocab_size`."""
    if (key in tree) == (text_key in tree):
        got = "both" if key in tree else "neither"
        raise RefusedError(f"{where} must have either {key!r} or {text_key!r}, got {got}.")
    tokens = tree.get(key)
    if text_key in tree:
        if tokenizer is None:
            raise RefusedError(f"{where} has text ({text_key!r}) but no tokenizer is given; set rollouts.tokenizer.")
        if not isinstance(tree[text_key], str):
            raise RefusedError(f"{where}: {text_key!r} must be a text, got {type(tree[text_key]).__name__}.")
        try:
            tokens = tokenizer.encode(tree[text_key])
        except UnicodeEncodeError as error:
            raise RefusedError(f"{where}: {text_key!r} can't be encoded as UTF-8, got {error.reason}.") from error
    if not isinstance(tokens, list) or not all(map(_is_int, tokens)):
        raise RefusedError(f"{where}: {key!r} must be a list of whole numbers.")
    if not tokens:
        raise RefusedError(f"{where} is empty; at least one token is needed.")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        wrong = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
        raise RefusedError(f"{where}: token {wrong} has id {tokens[wrong]}, outside the vocabulary of {vocab_size}.")
    return tokens


def _read_number(tree: dict, key: str, where: str) -> float:
    if not _is_number(tree[key]):
        raise RefusedError(f"{where}: {key!r} must be a finite float32 number, got {tree[key]!r}.")
    return float(tree[key])


def _read_list(tree: dict, key: str, length: int, where: str) -> list | None:
    """A per-token list of a branch with `length` tokens; None where it is absent."""
    if key not in tree:
        return None
    values = tree[key]
    if not isinstance(values, list) or len(values) != length:
        got = f"{len(values)} entries" if isinstance(values, list) else type(values).__name__
        raise RefusedError(f"{where}: {key!r} must be a list as long as the response ({length} tokens), got {got}.")
    if key == "loss_mask":
        wanted, fits = "0 or 1", [type(value) in (int, bool) and value in (0, 1) for value in values]
    elif key == "routed_experts":
        wanted = "lists [MoE layer][top-k] of expert numbers, no expert twice in one, all of one shape"
        fits = _experts_fit(values)
    else:
        wanted, fits = "finite float32 numbers", [_is_number(value) for value in values]
    if not all(fits):
        wrong = fits.index(False)
        raise RefusedError(f"{where}: {key!r} must hold {wanted}, got {values[wrong]!r} at token {wrong}.")
    return values


def _experts_fit(values: list) -> list[bool]:
    def shape(entry: Any) -> tuple[int, int] | None:
        if not isinstance(entry, list) or not entry or not all(isinstance(layer, list) for layer in entry):
            return None
        experts = [expert for layer in entry for expert in layer]
        regular = len({len(layer) for layer in entry}) == 1 and experts
        if not regular or not all(_is_int(e) and 0 <= e < MAX_EXPERTS for e in experts):
            return None
        is_twice = any(len(set(layer)) < len(layer) for layer in entry)
        return None if is_twice else (len(entry), len(entry[0]))

    shapes = [shape(entry) for entry in values]
    return [entry is not None and entry == shapes[0] for entry in shapes]


def _read_branch(tree: Any, tokenizer: Tokenizer | None, vocab_size: int, where: str) -> Branch:
    _check_keys(tree, BRANCH_KEYS, where)
    tokens = _read_tokens(tree, "tokens", "text", tokenizer, vocab_size, f"{where}, response")
    if "reward" not in tree:
        raise RefusedError(f"{where} has no 'reward'; give it a number.")
    if not isinstance(tree.get("status", ""), str):
        raise RefusedError(f"{where}: 'status' must be a text, got {tree['status']!r}.")
    lists = {key: _read_list(tree, key, len(tokens), where) for key in ("loss_mask", *LOGPROB_KEYS, "routed_experts")}
    return Branch(
        tokens=tokens,
        reward=_read_number(tree, "reward", where),
        advantage=_read_number(tree, "advantage", where) if "advantage" in tree else None,
        status=tree.get("status"),
        **lists,
    )


def _read_group(tree: Any, tokenizer: Tokenizer | None, vocab_size: int, where: str) -> PromptGroup:
    _check_keys(tree, GROUP_KEYS, where)
    group_id = tree.get("group_id")
    if not isinstance(group_id, str) or not group_id:
        raise RefusedError(f"{where} must have a text as 'group_id', got {group_id!r}.")
    where = f"{where}, group {group_id!r}"
    prompt_tokens = _read_tokens(tree, "prompt_tokens", "prompt", tokenizer, vocab_size, f"{where}, prompt")
    branches = tree.get("branches")
    if not isinstance(branches, list) or not branches:
        raise RefusedError(f"{where} has no branches; a group needs at least one response.")
    parsed = [_read_branch(b, tokenizer, vocab_size, f"{where}, branch {i}") for i, b in enumerate(branches)]
    given = [i for i, branch in enumerate(parsed) if branch.advantage is not None]
    if 0 < len(given) < len(parsed):
        absent = next(i for i in range(len(parsed)) if i not in given)
        raise RefusedError(
            f"{where} mixes branches with an 'advantage' ({given[0]}) and without ({absent}); give it to all or none."
        )
    if not any(branch.num_loss_tokens for branch in parsed):
        raise RefusedError(
            f"{where} has no token with a loss_mask of 1 in any branch; there is nothing to learn from it."
        )
    return PromptGroup(group_id=group_id, prompt_tokens=prompt_tokens, branches=tuple(parsed))


def read_native(path: Path, *, tokenizer: Tokenizer | None, vocab_size: int) -> Iterator[PromptGroup]:
    """The groups of a native file, one at a time; RefusedError at the first that doesn't fit."""
    lines: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                tree = json.loads(line.decode("utf-8"), object_pairs_hook=_unique_keys)
            except (ValueError, RecursionError) as error:
                raise RefusedError(f"{where} must be one JSON object, got: {error}.") from error
            group = _read_group(tree, tokenizer, vocab_size, where)
            if (first := lines.setdefault(group.group_id, number)) != number:
                raise RefusedError(f"{where} has the group_id {group.group_id!r} again; line {first} has it already.")
            yield group
