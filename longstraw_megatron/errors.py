"""The exceptions that a user is meant to read."""


class RefusedError(ValueError):
    """Bad input, refused before any weight is made.

    The message is one sentence: what, got, wanted, what to do. The doors (`train.py`, `cli.py`) print it on one
    rank's stderr and leave with exit code 2.
    """


class DryRunError(RuntimeError):
    """A dry run that ended without a result.

    The message is one sentence; `longstraw plan` prints it on stderr and leaves with exit code 1. What the process of
    the dry run said is in the file that it names.
    """


class NonFiniteError(ArithmeticError):
    """NaN or Inf in logprobs, a loss or a gradient: the step ends before the optimizer.

    `quantity` says what is not finite. Whoever knows which branch it was fills in the names with `at`.
    """

    def __init__(self, quantity: str, *, group_id: str | None = None, branches: tuple[int, ...] = ()):
        self.quantity, self.group_id, self.branches = quantity, group_id, branches
        where = "" if group_id is None else f" in group {group_id}"
        if len(branches) == 1:
            where += f", branch {branches[0]}"
        elif branches:
            where += f", one of the branches {', '.join(map(str, branches))} of a microbatch"
        super().__init__(f"NaN or Inf in {quantity}{where}; the step was stopped before the optimizer.")

    def at(self, group_id: str, *branches: int) -> "NonFiniteError":
        """The same error with the group and the branch (its index in the group) named, or those it may be."""
        return NonFiniteError(self.quantity, group_id=group_id, branches=branches)
