"""A lost peer, said in a sentence.

gloo raises when a connection closes or the group's timeout passes; with NCCL the watchdog ends the process, and what
is raised before that is worded here as well.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import OutOfMemoryError
from torch.distributed import ProcessGroup


class PeerError(RuntimeError):
    """A transfer did not end: a peer died, or was silent for longer than the group's timeout."""


@contextmanager
def transfer_named(name: str, process_group: ProcessGroup) -> Iterator[None]:
    """Turn the backend's error into one that names the transfer and this rank."""
    try:
        yield
    except (PeerError, OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise PeerError(
            f"{name} failed on rank {process_group.rank()} of {process_group.size()}: a peer died or was silent past "
            f"the timeout; look at the other ranks' output first. Backend: {error}"
        ) from error
