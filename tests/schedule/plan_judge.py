"""A second opinion on plans, that shares nothing with the checker but the actions.

Ranks take turns, one action each; a tensor is a string that says what it is, and every rule is judged by what the
stages have in their hands at that moment.
"""

from collections import defaultdict, deque

from longstraw_megatron.schedule import Description, Op, Plan

FORWARD_FLOWS = (Op.PREFILL, Op.BLOCK_PREFILL, Op.FORWARD)


class Illegal(Exception):
    pass


class _Stage:
    """What one virtual stage has done, as lists of units by group."""

    def __init__(self, stage: int, description: Description):
        self.stage, self.description = stage, description
        self.last = description.pp_size * description.vpp_size - 1
        self.did = {op: defaultdict(list) for op in Op if op.is_compute}
        self.inputs, self.outputs = {}, {}
        self.links = [self.chains(group) for group in range(len(description.groups))]
        self.along = {True: defaultdict(int), False: defaultdict(int)}  # links done of the chains there and back

    def demand(self, true: bool) -> None:
        if not true:
            raise Illegal

    def take(self, op: Op, group: int, unit: int) -> None:
        """The input of an action, which must have been received unless the stage is where that flow begins."""
        begins = self.stage == (0 if op in FORWARD_FLOWS else self.last)
        if not begins:
            self.demand(self.inputs.pop((op, group, unit), None) == f"{op.name} {group} {unit}")

    def chains(self, group: int) -> tuple[list, list]:
        """What the group's microbatches do, in order: (block prefills and forwards, backwards and block walks)."""
        shape, there, back = self.description.groups[group], [], []
        unit = 0
        for microbatch in range(shape.num_microbatches):
            blocks = list(range(unit, unit + (shape.blocks[microbatch] if shape.blocks else 0)))
            unit += len(blocks)
            there += [(Op.BLOCK_PREFILL, u, microbatch) for u in blocks] + [(Op.FORWARD, microbatch, microbatch)]
            back += [(Op.BACKWARD, microbatch, microbatch)]
            back += [(Op.BLOCK_BACKWARD, u, microbatch) for u in reversed(blocks)]
        return there, back

    def follow(self, there: bool, op: Op, group: int, unit: int) -> None:
        """The action is the next link of its chain."""
        chain, done = self.links[group][not there], self.along[there][group]
        self.demand(done < len(chain) and chain[done][:2] == (op, unit))
        self.along[there][group] += 1

    def live_branches(self) -> int:
        """Microbatches of which something is done and something left."""
        live = 0
        for group, (there, back) in enumerate(self.links):
            done, walked = self.along[True][group], self.along[False][group]
            if done and walked < len(back):
                live += max(0, there[done - 1][2] - back[walked][2] + 1)
        return live

    def compute(self, op: Op, group: int, unit: int) -> None:
        shape, did = self.description.groups[group], self.did
        walks = self.description.exact and not self.description.forward_only
        trains = not self.description.forward_only
        self.demand(unit not in did[op][group])
        if op is Op.PREFILL:
            self.demand(unit == len(did[op][group]) < shape.num_segments)
        elif op in (Op.FORWARD, Op.BLOCK_PREFILL):
            self.demand(len(did[Op.PREFILL][group]) == shape.num_segments)
            self.follow(True, op, group, unit)
        elif op in (Op.BACKWARD, Op.BLOCK_BACKWARD):
            self.demand(trains and (op is not Op.BACKWARD or unit in did[Op.FORWARD][group]))
            self.follow(False, op, group, unit)
        else:
            self.demand(walks and self.along[False][group] == len(self.links[group][1]))
            self.demand(unit in did[Op.PREFILL][group] and unit == shape.num_segments - 1 - len(did[op][group]))
        self.take(op, group, unit)
        did[op][group].append(unit)
        self.outputs[op, group, unit] = f"{op.name} {group} {unit}"
        ended = op in (Op.BACKWARD, Op.BLOCK_BACKWARD)  # what this very action finished was alive until now
        self.demand(not trains or ended or self.live_branches() <= self.description.max_live_graphs(self.stage))
        ops = [Op.PREFILL, Op.BLOCK_PREFILL, Op.FORWARD, *[Op.BACKWARD, Op.BLOCK_BACKWARD] * trains]
        ops += [Op.PROMPT_BACKWARD] * walks
        live = 0
        for g, other in enumerate(self.description.groups):
            wanted = sum(self.wanted(o, other) for o in ops)
            done = sum(len(did[o][g]) for o in ops)
            # a group that this very action finished was alive until now
            live += 0 < done < wanted or (g == group and done == wanted)
        self.demand(live <= self.description.max_live_prefixes)

    def wanted(self, op: Op, shape) -> int:
        if op in (Op.PREFILL, Op.PROMPT_BACKWARD):
            return shape.num_segments
        return shape.num_microbatches if op in (Op.FORWARD, Op.BACKWARD) else sum(shape.blocks)

    def is_done(self) -> bool:
        """Everything was done, sent and used."""
        walks = self.description.exact and not self.description.forward_only
        for group, shape in enumerate(self.description.groups):
            trains = not self.description.forward_only
            there = {op: self.wanted(op, shape) for op in FORWARD_FLOWS}
            back = {op: trains * self.wanted(op, shape) for op in (Op.BACKWARD, Op.BLOCK_BACKWARD)}
            wanted = there | back | {Op.PROMPT_BACKWARD: walks * self.wanted(Op.PROMPT_BACKWARD, shape)}
            if any(len(self.did[op][group]) != num for op, num in wanted.items()):
                return False
        leftover = [key for key in self.outputs if self.stage != (self.last if key[0] in FORWARD_FLOWS else 0)]
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
