"""A second opinion on plans, that shares nothing with the checker but the actions.

Ranks take turns, one action each; a tensor is a string that says what it is, and every rule is judged by what the
stages have in their hands at that moment.
"""

from collections import defaultdict, deque

from longstraw_megatron.schedule import Description, Op, Plan


class Illegal(Exception):
    pass


class _Stage:
    """What one virtual stage has done, as lists of units by group."""

    def __init__(self, stage: int, description: Description):
        self.stage, self.description = stage, description
        self.last = description.pp_size * description.vpp_size - 1
        self.did = {op: defaultdict(list) for op in Op if op.is_compute}
        self.inputs, self.outputs = {}, {}

    def demand(self, true: bool) -> None:
        if not true:
            raise Illegal

    def take(self, op: Op, group: int, unit: int) -> None:
        """The input of an action, which must have been received unless the stage is where that flow begins."""
        begins = self.stage == (0 if op in (Op.PREFILL, Op.FORWARD) else self.last)
        if not begins:
            self.demand(self.inputs.pop((op, group, unit), None) == f"{op.name} {group} {unit}")

    def compute(self, op: Op, group: int, unit: int) -> None:
        shape, did = self.description.groups[group], self.did
        walks = self.description.exact and not self.description.forward_only
        trains = not self.description.forward_only
        self.demand(unit not in did[op][group])
        if op is Op.PREFILL:
            self.demand(unit == len(did[op][group]) < shape.num_segments)
        elif op is Op.FORWARD:
            self.demand(len(did[Op.PREFILL][group]) == shape.num_segments)
            self.demand(unit == len(did[op][group]) < shape.num_microbatches)
        elif op is Op.BACKWARD:
            self.demand(trains and unit == len(did[op][group]) and unit in did[Op.FORWARD][group])
        else:
            self.demand(walks and len(did[Op.BACKWARD][group]) == shape.num_microbatches)
            self.demand(unit in did[Op.PREFILL][group] and unit == shape.num_segments - 1 - len(did[op][group]))
        self.take(op, group, unit)
        did[op][group].append(unit)
        self.outputs[op, group, unit] = f"{op.name} {group} {unit}"
        graphs = sum(len(did[Op.FORWARD][g]) - len(did[Op.BACKWARD][g]) for g in range(len(self.description.groups)))
        self.demand(not trains or graphs <= self.description.max_live_graphs(self.stage))
        ops = [Op.PREFILL, Op.FORWARD, *[Op.BACKWARD] * trains, *[Op.PROMPT_BACKWARD] * walks]
        live = 0
        for g, other in enumerate(self.description.groups):
            wanted = sum(
                other.num_segments if o in (Op.PREFILL, Op.PROMPT_BACKWARD) else other.num_microbatches for o in ops
            )
            done = sum(len(did[o][g]) for o in ops)
            # a group that this very action finished was alive until now
            live += 0 < done < wanted or (g == group and done == wanted)
        self.demand(live <= self.description.max_live_prefixes)

    def is_done(self) -> bool:
        """Everything was done, sent and used."""
        walks = self.description.exact and not self.description.forward_only
        for group, shape in enumerate(self.description.groups):
            wanted = {
                Op.PREFILL: shape.num_segments,
                Op.FORWARD: shape.num_microbatches,
                Op.BACKWARD: 0 if self.description.forward_only else shape.num_microbatches,
                Op.PROMPT_BACKWARD: shape.num_segments if walks else 0,
            }
            if any(len(self.did[op][group]) != num for op, num in wanted.items()):
                return False
        leftover = [
            key for key in self.outputs if self.stage != (self.last if key[0] in (Op.PREFILL, Op.FORWARD) else 0)
        ]
        return not leftover and not self.inputs


def is_legal(plan: Plan, description: Description) -> bool:
    """Whether all ranks get to their ends, legally, with receives that block and sends that do not."""
    pp_size = description.pp_size
    stages = [_Stage(stage, description) for stage in range(pp_size * description.vpp_size)]
    channels = defaultdict(deque)
    cursors = [0] * pp_size
    moved = True
    try:
        while moved:
            moved = False
            for pp_rank in range(pp_size):
                if cursors[pp_rank] == len(plan[pp_rank]):
                    continue
                action = plan[pp_rank][cursors[pp_rank]]
                stage = stages[action.stage]
                key = (action.of or action.op, action.group, action.unit)
                stage.demand(action.stage % pp_size == pp_rank)
                if action.op.is_compute:
                    stage.compute(*key)
                elif action.op in (Op.SEND_FORWARD, Op.SEND_BACKWARD):
                    target = action.stage + (1 if action.op is Op.SEND_FORWARD else -1)
                    stage.demand(key in stage.outputs)
                    channels[pp_rank, target % pp_size].append((target, stage.outputs.pop(key)))
                else:
                    source = action.stage - (1 if action.op is Op.RECV_FORWARD else -1)
                    channel = channels[source % pp_size, pp_rank]
                    if not channel:
                        continue
                    stage.demand(key not in stage.inputs)
                    stage.demand(channel.popleft() == (action.stage, f"{key[0].name} {key[1]} {key[2]}"))
                    stage.inputs[key] = f"{key[0].name} {key[1]} {key[2]}"
                cursors[pp_rank] += 1
                moved = True
    except Illegal:
        return False
    ended = all(cursor == len(actions) for cursor, actions in zip(cursors, plan, strict=True))
    return ended and not any(channels.values()) and all(stage.is_done() for stage in stages)
