"""What an action of the schedule runs through a stage, in tokens and rows."""

from dataclasses import dataclass

from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.schedule import Action, Op

WALKS = (Op.PROMPT_BACKWARD, Op.BLOCK_BACKWARD)
PREFILLS = (Op.PREFILL, Op.BLOCK_PREFILL)


@dataclass(frozen=True)
class Pass:
    """One segment through a stage: tokens over all context-parallel ranks, rows of one of them, prefix before it."""

    op: Op
    rows: int  # padding included
    prompt: int  # tokens of the prompt before it
    path: int  # of the branch's own blocks before it
    sequences: tuple[int, ...]  # tokens of each
    forwards: int  # how often it runs forward
    backward: bool

    @property
    def tokens(self) -> int:
        return sum(self.sequences)

    @property
    def prefix(self) -> int:
        return self.prompt + self.path

    @property
    def pairs(self) -> float:
        """Attended (query, key) pairs."""
        return self.tokens * self.prefix + sum(length * (length + 1) / 2 for length in self.sequences)

    @property
    def selects(self) -> bool:
        """Whether it selects tokens: the selection stays on a pass, so a BACKWARD finds that of its FORWARD."""
        return self.op is not Op.BACKWARD


def pass_of(layout: Layout, action: Action) -> Pass:
    """The pass of a compute action."""
    recompute = layout.config.recompute == "full"
    op, prompt, path = action.op, layout.workload.prefix_length, 0
    if op in (Op.FORWARD, Op.BACKWARD):
        lengths = layout.microbatches[action.unit]
        path = sum(layout.earlier_blocks[action.unit])
    elif op in (Op.BLOCK_PREFILL, Op.BLOCK_BACKWARD):
        microbatch, block = layout.group_shape.block_of(action.unit)
        blocks = layout.earlier_blocks[microbatch]
        lengths, path = [blocks[block]], sum(blocks[:block])
    else:
        lengths, prompt = [layout.segments[action.unit]], sum(layout.segments[: action.unit])
    return Pass(
        op=op,
        rows=layout.cut(lengths).rows,
        prompt=prompt,
        path=path,
        sequences=tuple(lengths),
        forwards=1 + recompute if op in WALKS else int(recompute) if op is Op.BACKWARD else 1,
        backward=op in WALKS or op is Op.BACKWARD,
    )
