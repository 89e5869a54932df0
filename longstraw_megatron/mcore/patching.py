"""Replacing attributes of other packages for a while: a list of patches as data, undone in reverse order."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """`owner.name` is replaced by `replacement`; `reason` says why and where upstream (file:line) it matters."""

    owner: object
    name: str
    replacement: object
    reason: str

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}: {self.reason}"


@contextlib.contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[None]:
    """Apply patches inside the block; afterwards every attribute is what it was, the absent ones absent."""
    with contextlib.ExitStack() as undo:
        for patch in patches:
            old = vars(patch.owner).get(patch.name, _MISSING)
            setattr(patch.owner, patch.name, patch.replacement)
            if old is _MISSING:
                undo.callback(delattr, patch.owner, patch.name)
            else:
                undo.callback(setattr, patch.owner, patch.name, old)
        yield
