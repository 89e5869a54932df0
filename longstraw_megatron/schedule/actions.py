"""What a pipeline stage can do, as data.

A plan is one list of actions per pipeline rank. Compute actions name the prompt group, the unit in it (a prompt
segment, a microbatch of branches or a block of one) and the virtual stage; communication actions move the tensor that
the compute action `of` produced or needs between neighbouring virtual stages.

A long response is a path of blocks behind the prompt. All but its last are BLOCK_PREFILLed before the FORWARD of its
microbatch, which is the pass of the last block, and BLOCK_BACKWARDed after its BACKWARD, in reverse.
"""

from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    """The verbs of a plan; names of the transfers are Megatron's."""

    PREFILL = "P"  # prompt segment, no graph, state appended, input kept for the walk
    BLOCK_PREFILL = "p"  # block of a long response: scored without a graph, state appended, input kept
    FORWARD = "F"  # microbatch of branches (the last block of a long one), graph kept until its BACKWARD
    BACKWARD = "B"
    BLOCK_BACKWARD = "w"  # block of a long response, walked as PROMPT_BACKWARD walks a segment
    PROMPT_BACKWARD = "W"  # prompt segment: recompute with a graph, backward, state gradients injected
    RECV_FORWARD = "rf"
    SEND_FORWARD = "sf"
    RECV_BACKWARD = "rb"
    SEND_BACKWARD = "sb"

    @property
    def is_compute(self) -> bool:
        return self in COMPUTE_OPS

    @property
    def is_send(self) -> bool:
        return self in (Op.SEND_FORWARD, Op.SEND_BACKWARD)

    @property
    def is_receive(self) -> bool:
        return self in (Op.RECV_FORWARD, Op.RECV_BACKWARD)

    @property
    def flow(self) -> int:
        """Where a compute action's output goes: +1 to the next virtual stage, -1 to the previous one."""
        return 1 if self in (Op.PREFILL, Op.BLOCK_PREFILL, Op.FORWARD) else -1


COMPUTE_OPS = (Op.PREFILL, Op.BLOCK_PREFILL, Op.FORWARD, Op.BACKWARD, Op.BLOCK_BACKWARD, Op.PROMPT_BACKWARD)


@dataclass(frozen=True)
class Action:
    """One step of one pipeline rank."""

    op: Op
    group: int  # index of the prompt group in this step's list
    unit: int  # prompt segment, microbatch (FORWARD, BACKWARD), or block counted over the group's microbatches
    stage: int  # virtual stage that acts, 0 .. pp_size * vpp_size - 1
    of: Op | None = None  # transfers only: the compute action, on `stage`, that makes or needs the tensor

    @property
    def peer_stage(self) -> int:
        """Transfers only: the virtual stage at the other end; its pipeline rank is `peer_stage % pp_size`."""
        return self.stage + (1 if self.op in (Op.SEND_FORWARD, Op.RECV_BACKWARD) else -1)

    def __str__(self) -> str:
        name = self.op.value if self.of is None else f"{self.op.value}:{self.of.value}"
        return f"{name}{self.group}.{self.unit}@{self.stage}"


Plan = list[list[Action]]  # plan[pp_rank] is what that rank does, in order


def incoming(compute: Action, num_stages: int) -> Action | None:
    """The receive that `compute` needs, or None where its input is made on its own stage."""
    source = compute.stage - compute.op.flow
    if not 0 <= source < num_stages:
        return None
    op = Op.RECV_FORWARD if compute.op.flow == 1 else Op.RECV_BACKWARD
    return Action(op, compute.group, compute.unit, compute.stage, compute.op)


def outgoing(compute: Action, num_stages: int) -> Action | None:
    """The send that follows `compute`, or None where nobody needs its output."""
    if not 0 <= compute.stage + compute.op.flow < num_stages:
        return None
    op = Op.SEND_FORWARD if compute.op.flow == 1 else Op.SEND_BACKWARD
    return Action(op, compute.group, compute.unit, compute.stage, compute.op)
