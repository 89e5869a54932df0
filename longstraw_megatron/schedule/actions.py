"""What a pipeline stage can do, as data.

A plan is one list of actions per pipeline rank. Compute actions name the prompt group, the unit in it (a prompt
segment or a microbatch of branches) and the virtual stage; communication actions move the tensor that the compute
action `of` produced or needs between neighbouring virtual stages.
"""

from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    """The verbs of a plan; names of the transfers are Megatron's."""

    PREFILL = "P"  # prompt segment, no graph, state appended, input kept for the walk
    FORWARD = "F"  # microbatch of branches, graph kept until its BACKWARD
    BACKWARD = "B"
    PROMPT_BACKWARD = "W"  # prompt segment: recompute with a graph, backward, state gradients injected
    RECV_FORWARD = "rf"
    SEND_FORWARD = "sf"
    RECV_BACKWARD = "rb"
    SEND_BACKWARD = "sb"

    @property
    def is_compute(self) -> bool:
        return self in (Op.PREFILL, Op.FORWARD, Op.BACKWARD, Op.PROMPT_BACKWARD)


@dataclass(frozen=True)
class Action:
    """One step of one pipeline rank."""

    op: Op
    group: int  # index of the prompt group in this step's list
    unit: int  # prompt segment (PREFILL, PROMPT_BACKWARD) or microbatch (FORWARD, BACKWARD)
    stage: int  # virtual stage that acts, 0 .. pp_size * vpp_size - 1
    of: Op | None = None  # transfers only: the compute action, on `stage`, that makes or needs the tensor

    def __str__(self) -> str:
        name = self.op.value if self.of is None else f"{self.op.value}:{self.of.value}"
        return f"{name}{self.group}.{self.unit}@{self.stage}"
