"""A tree of plain values turned into nested frozen dataclasses, refusing what doesn't fit.

Annotations understood: nested dataclass, bool, int, float, str, Literal of strings, tuple, dict, and unions of these
with None. No value is converted, except an int where a float or a text is wanted.
"""

import dataclasses
import difflib
import math
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from longstraw_megatron.errors import RefusedError


def leaf_keys(cls: type, prefix: str = "") -> list[str]:
    """Every dotted key that has a value of its own, in order."""
    keys = []
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            keys += leaf_keys(field.type, f"{prefix}{field.name}.")
        else:
            keys.append(prefix + field.name)
    return keys


def refuse_unknown(key: str, known: list[str], *, what: str = "key") -> RefusedError:
    """The error for a name that isn't in `known`; the nearest ones are listed."""
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    tail = key.rsplit(".", 1)[-1]
    near += [name for name in known if name.rsplit(".", 1)[-1] == tail and name not in near]
    if len(known) <= 12:
        hint = f"choose from: {', '.join(known)}"
    else:
        hint = f"nearest: {', '.join(near)}" if near else "hydra_configs/ has them all"
    return RefusedError(f"Unknown {what} {key!r}; {hint}.")


def _refuse_value(key: str, value: Any, wanted: str) -> RefusedError:
    return RefusedError(f"{key} must be {wanted}, got {value!r}.")


def _parse(kind: Any, value: Any, key: str, root: type) -> Any:
    """`value` as the annotation `kind` wants it, or RefusedError."""
    origin = get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return parse_dataclass(kind, value, prefix=key, root=root)
    if origin is Literal:
        # YAML reads a bare none, on or off as other types; only strings are choices here.
        if value not in get_args(kind) or not isinstance(value, str):
            raise _refuse_value(key, value, f"one of {', '.join(get_args(kind))}")
        return value
    if origin in (Union, UnionType):
        return _parse_union(get_args(kind), value, key, root)
    if origin is tuple:
        kinds = get_args(kind)
        if not isinstance(value, list | tuple) or (kinds[-1] is not Ellipsis and len(value) != len(kinds)):
            raise _refuse_value(key, value, "a list" if kinds[-1] is Ellipsis else f"a list of {len(kinds)}")
        return tuple(_parse(kinds[0], entry, f"{key}[{i}]", root) for i, entry in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise _refuse_value(key, value, "a mapping")
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise _refuse_value(key, value, "true or false")
        return value
    if kind is int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _refuse_value(key, value, "a whole number")
        return value
    if kind is float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise _refuse_value(key, value, "a finite number")
        return float(value)
    # A name such as 2026 arrives as an int, which reads back as it was typed; a float (1e5) may not.
    if kind is not str or not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise _refuse_value(key, value, f"a text (where it looks like something else, quote it: {key}='\"1e5\"')")
    return str(value)


def _parse_union(kinds: tuple, value: Any, key: str, root: type) -> Any:
    if value is None and NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    for kind in kinds:
        try:
            return _parse(kind, value, key, root)
        except RefusedError as error:
            refusal = error
    if len(kinds) == 1:
        raise refusal
    raise _refuse_value(key, value, " or ".join(_wanted(kind) for kind in kinds))


def _wanted(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    return "a list" if get_origin(kind) is tuple else "a whole number"


def parse_dataclass(cls: type, tree: Any, *, prefix: str = "", root: type | None = None) -> Any:
    """An instance of the dataclass `cls`, nested ones included, of a tree of plain values that has every key.

    `prefix` is the dotted place of `tree` in the tree of `root`, for the messages.
    """
    root, dot = root or cls, f"{prefix}." if prefix else ""
    names = [field.name for field in dataclasses.fields(cls)]
    if not isinstance(tree, dict):
        raise _refuse_value(prefix, tree, f"a group of keys ({', '.join(names)})")
    for name in tree:
        if name not in names:
            raise refuse_unknown(f"{dot}{name}", leaf_keys(root))
    for name in names:
        if name not in tree:
            raise RefusedError(f"{dot}{name} has no value; give it one.")
    return cls(**{f.name: _parse(f.type, tree[f.name], f"{dot}{f.name}", root) for f in dataclasses.fields(cls)})
