"""Progress bars of a step: prompt segments, branches, prompt backward. Each advances as a plan's actions are done."""

import sys
from typing import TextIO

from tqdm import tqdm

from longstraw_megatron.schedule.actions import Action, Op

LABELS = {Op.PREFILL: "prompt segments", Op.FORWARD: "branches", Op.PROMPT_BACKWARD: "prompt backward"}


class Progress:
    """Bars on standard error, for rank 0 only. An engine calls it with every action that it has done.

    Where `file` is not a terminal, a line every ten seconds. Backwards of branches count as done with their forward's
    bar: one bar a phase, and only for phases that a step has.
    """

    def __init__(self, *, enabled: bool = True, file: TextIO | None = None):
        self._file = file or sys.stderr
        self._is_terminal = self._file.isatty()
        self.enabled = enabled
        self._label = ""
        self._totals: dict[Op, int] = {}
        self._bars: dict[Op, tqdm] = {}

    def begin(self, label: str, totals: dict[Op, int]) -> None:
        """Start a step (or a pass of scoring) that will do `totals` actions of each kind; ends the one before."""
        self.end()
        self._label, self._totals = label, totals

    def __call__(self, action: Action) -> None:
        # Rank 0 holds stage 0; its other virtual stages do the same units again.
        if not self.enabled or action.op not in LABELS or action.stage != 0:
            return
        if action.op not in self._bars:
            self._bars[action.op] = tqdm(
                total=self._totals.get(action.op),
                desc=f"{self._label} {LABELS[action.op]}".strip(),
                file=self._file,
                mininterval=0.1 if self._is_terminal else 10.0,
                leave=True,
                position=list(LABELS).index(action.op) if self._is_terminal else 0,  # in a file no cursor moves
                dynamic_ncols=self._is_terminal,
            )
        self._bars[action.op].update(1)

    def end(self) -> None:
        for bar in self._bars.values():
            bar.close()
        self._bars = {}
