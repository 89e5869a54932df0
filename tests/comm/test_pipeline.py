"""Tensors between stages: contents, order, bytes, bounded sends, lost peers; and plans run by real processes."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from longstraw_megatron.comm import PeerError
from longstraw_megatron.comm.pipeline import StageLink, make_channels, ring_channels
from longstraw_megatron.schedule import Costs, Description, GroupShape, check_plan, make_plan
from longstraw_megatron.testing import RankError, run_ranks

SHAPES = [((5, 1, 3), torch.float32), ((0, 4), torch.float32), ((1,), torch.bfloat16), ((700, 33), torch.float64)]
NBYTES = [60, 0, 2, 184800]
ROUNDS = 7


def _content(sender, index, forward):
    shape, dtype = SHAPES[index % 4]
    values = torch.arange(torch.Size(shape).numel()) + 1000 * sender + 100 * index + forward
    return values.to(dtype).view(shape)


def _exchange(rank, size, early):
    link = StageLink(dist.group.WORLD)
    for index in range(ROUNDS):
        shape, dtype = SHAPES[index % 4]
        link.send(_content(rank, index, True).requires_grad_(), forward=True)
        strided = _content(rank, index, False).transpose(0, -1).contiguous().transpose(0, -1)
        link.send(strided, forward=False)
        if early:
            link.expect(shape, dtype, forward=True)
            link.expect(shape, dtype, forward=False)
        # with two ranks both flows share a channel, and are received in the order in which they were sent
        arrived = link.receive(shape, dtype, forward=True)
        returned = link.receive(shape, dtype, forward=False)
        assert arrived.dtype == dtype and not arrived.requires_grad
        assert torch.equal(arrived, _content((rank - 1) % size, index, True))
        assert torch.equal(returned, _content((rank + 1) % size, index, False))
    link.wait()
    return dict(link.traffic.sent)


@pytest.mark.parametrize("early", [False, True], ids=["blocking", "early"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_both_directions_with_varying_shapes(size, early):
    nbytes = sum(NBYTES[index % 4] for index in range(ROUNDS))
    assert run_ranks(size, _exchange, early) == [{"pipeline_forward": nbytes, "pipeline_backward": nbytes}] * size


def _alone(rank, size):
    link = StageLink(dist.group.WORLD)
    link.send(torch.ones(3), forward=True)
    link.send(torch.zeros(2), forward=True)
    assert link.receive((3,), torch.float32, forward=True).tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="never received: .* 1 from this rank"):
        link.wait()
    assert link.receive((2,), torch.float32, forward=True).tolist() == [0, 0]
    link.wait()
    assert link.traffic.total == 0


def test_one_rank_hands_over_to_itself():
    run_ranks(1, _alone)


def _side_by_side(rank, size):
    pipelines = [[0, 1, 3], [2, 4, 5]]
    pp_groups = [dist.new_group(pipeline) for pipeline in pipelines]
    channels = make_channels(pipelines)
    own = next(i for i, pipeline in enumerate(pipelines) if rank in pipeline)
    pp_rank = pipelines[own].index(rank)
    assert sorted(channels) == [pair for pair in ring_channels(3) if pp_rank in pair]
    for pair, group in channels.items():
        assert dist.get_process_group_ranks(group) == sorted(pipelines[own][end] for end in pair)
    assert len(set(channels.values())) == 4
    link = StageLink(pp_groups[own], channels=channels)
    link.send(torch.tensor([rank]), forward=True)
    link.send(torch.tensor([-rank]), forward=False)
    got = [int(link.receive((1,), torch.int64, forward=forward)) for forward in (True, False)]
    link.wait()
    return got


def test_pipelines_side_by_side_with_a_group_per_channel():
    assert run_ranks(6, _side_by_side) == [[3, -1], [0, -3], [5, -4], [1, 0], [2, -5], [4, -2]]


def test_channels_of_a_ring():
    assert ring_channels(1) == []
    assert ring_channels(2) == [(0, 1), (1, 0)]
    assert ring_channels(3) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert ring_channels(4) == [(0, 1), (0, 3), (1, 0), (1, 2), (2, 1), (2, 3), (3, 0), (3, 2)]


def _bounded(rank, size, max_pending):
    link = StageLink(dist.group.WORLD, max_pending_sends=max_pending)
    dist.barrier()
    begin, ends = time.monotonic(), []
    for index in range(3):
        if rank == 0:
            link.send(torch.full((1 << 18,), float(index)), forward=True)
            ends.append(time.monotonic() - begin)
        else:
            time.sleep(0.3)
            assert link.receive((1 << 18,), torch.float32, forward=True)[-1] == index
    link.wait()
    return ends


def test_a_send_waits_when_too_many_are_pending():
    first, second, third = run_ranks(2, _bounded, 1)[0]
    assert first < 0.3 <= second + 0.05 < third - 0.2  # one may be pending; then for the peer's first, and second
    assert run_ranks(2, _bounded, None)[0][-1] < 0.3


def _mismatch(rank, size):
    link = StageLink(dist.group.WORLD)
    link.send(torch.ones(4), forward=True)
    link.expect((4,), torch.float32, forward=True)
    with pytest.raises(RuntimeError, match=r"was posted as \(True, \(4,\), torch.float32\), taken as \(True, \(5,\)"):
        link.receive((5,), torch.float32, forward=True)


def test_taking_another_tensor_than_expected_raises():
    run_ranks(2, _mismatch)


def _untaken(rank, size):
    link = StageLink(dist.group.WORLD)
    link.send(torch.ones(4), forward=True)
    link.expect((4,), torch.float32, forward=True)
    with pytest.raises(RuntimeError, match=rf"never received: {{{1 - rank}: 1}} by peer"):
        link.wait()


def test_a_posted_receive_that_nobody_takes_raises():
    run_ranks(2, _untaken)


def _lost_peer(rank, size, how, folder):
    link = StageLink(dist.group.WORLD, timeout=0.5 if how == "hangs" else None)
    dist.barrier()
    if rank == 1:
        if how == "dies":
            os._exit(7)
        time.sleep(1.5)
        return
    begin = time.monotonic()
    if rank == 0:  # rank 2 of this pipeline hears nothing either, of rank 1
        with pytest.raises(PeerError, match=r"^Receiving from pipeline rank 1 \(global rank 1\) failed on rank 0 of 3"):
            link.receive((4,), torch.float32, forward=False)
    else:
        with pytest.raises(PeerError, match=r"^Receiving from pipeline rank 1 \(global rank 1\) failed on rank 2 of 3"):
            link.receive((4,), torch.float32, forward=True)
    (folder / str(rank)).write_text(str(time.monotonic() - begin))


def test_silent_peer_is_named(tmp_path):
    run_ranks(3, _lost_peer, "hangs", tmp_path)
    assert all(0.4 < float((tmp_path / rank).read_text()) < 1.5 for rank in "02")


def test_dead_peer_is_named(tmp_path):
    with pytest.raises(RankError, match="exit code 7"):
        run_ranks(3, _lost_peer, "dies", tmp_path)
    assert all(float((tmp_path / rank).read_text()) < 1 for rank in "02")


def _shape(op, group, unit, stage):
    """Varying, and the same on all stages."""
    return 1 + (unit * 7 + group * 3 + len(op.name)) % 11, 2


def _message(op, group, unit, stage):
    return torch.full(_shape(op, group, unit, stage), group * 100.0 + unit + 0.01 * stage)


def _execute(rank, size, plan, costs, unit_s, max_pending):
    """Run one rank's list; compute actions sleep. The (start, end) of each."""
    link = StageLink(dist.group.WORLD, max_pending_sends=max_pending)
    arrived, spans = {}, []
    dist.barrier()
    for action in plan[rank]:
        key = (action.of or action.op, action.group, action.unit, action.stage)
        forward = key[0].flow == 1
        if action.op.is_receive:
            arrived[key] = link.receive(_shape(*key), torch.float32, forward=forward)
            assert torch.equal(arrived[key], _message(*key[:3], action.peer_stage))
        elif action.op.is_send:
            link.send(_message(*key), forward=forward)
        else:
            arrived.pop(key, None)
            begin = time.monotonic()
            time.sleep(costs(action) * unit_s)
            spans.append((begin, time.monotonic()))
    link.wait()
    assert not arrived
    return spans


def _bubble(spans_by_rank):
    spans = [span for rank in spans_by_rank for span in rank]
    makespan = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return 1 - sum(end - begin for begin, end in spans) / (len(spans_by_rank) * makespan)


@pytest.mark.parametrize(
    ("description", "unit_s"),
    [
        (Description(groups=(GroupShape(2, 3),), pp_size=2), 0.06),
        (Description(groups=(GroupShape(2, 3),), pp_size=4), 0.05),
        (Description(groups=(GroupShape(2, 2), GroupShape(1, 2)), pp_size=4, max_live_prefixes=2), 0.04),
        (Description(groups=(GroupShape(1, 2),), pp_size=2, vpp_size=2), 0.05),
    ],
    ids=["pp2", "pp4", "pp4_two_live", "pp2_vpp2"],
)
def test_a_plan_runs_as_predicted(description, unit_s):
    plan, costs = make_plan(description), Costs()
    pending = check_plan(plan, description, costs).min_pending_sends
    spans = run_ranks(description.pp_size, _execute, plan, costs, unit_s, pending)
    # what the sleeps really took, so that load on the machine is in the prediction too
    took = {
        action: end - begin
        for actions, of_rank in zip(plan, spans, strict=True)
        for action, (begin, end) in zip((a for a in actions if a.op.is_compute), of_rank, strict=True)
    }
    report = check_plan(plan, description, took.__getitem__)
    assert _bubble(spans) == pytest.approx(report.bubble_fraction, rel=0.15)
