"""The ring's three verbs, the collectives' transposes, byte counts, and lost peers."""

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist

from longstraw_megatron.comm import (
    PeerError,
    Ring,
    Traffic,
    all_gather,
    all_gather_rows,
    all_to_all,
    gather_affine,
    heads_to_seq,
    reduce_scatter,
    seq_to_heads,
)
from longstraw_megatron.testing import RankError, run_ranks


def _circulate(rank, size):
    traffic = Traffic()
    near = Ring(dist.group.WORLD, purpose="near", traffic=traffic)
    far = Ring(dist.group.WORLD, purpose="far", traffic=traffic, tag=1)
    seen, x, total = [], torch.full((3, 2), float(rank)), torch.zeros(5, dtype=torch.bfloat16)
    arriving = total
    for ring_step in range(size):
        seen.append(int(x[0, 0]))
        (received,) = near.send_recv(x.t())  # not contiguous: the ring copies
        near.commit()
        if ring_step:
            far.wait()
            total = arriving
        total = total + rank
        (arriving,) = far.send_recv(total)
        far.commit()
        near.wait()
        x = received.t()
    far.wait()
    return seen, arriving.tolist(), dict(traffic.sent), traffic.total


@pytest.mark.parametrize("size", [2, 3, 4])
def test_two_channels_circulate(size):
    for rank, (seen, total, sent, total_sent) in enumerate(run_ranks(size, _circulate)):
        assert seen == [(rank - ring_step) % size for ring_step in range(size)]
        assert total == [float(sum(range(size)))] * 5  # home again, with every rank's share
        assert sent == {"near": size * 24, "far": size * 10}
        assert total_sent == size * 34


def _misuse(rank, size):
    with pytest.raises(RuntimeError, match="commit without send_recv"):
        Ring(dist.group.WORLD, purpose="x").commit()
    ring = Ring(dist.group.WORLD, purpose="x")
    with pytest.raises(RuntimeError, match="wait without commit"):
        ring.wait()
    ring.send_recv(torch.ones(1))
    with pytest.raises(RuntimeError, match="wait without commit"):
        ring.wait()
    ring.commit()
    with pytest.raises(RuntimeError, match="commit called twice"):
        ring.commit()
    with pytest.raises(RuntimeError, match="send_recv between commit and wait"):
        ring.send_recv(torch.ones(1))
    ring.wait()
    with pytest.raises(RuntimeError, match="wait without commit"):
        ring.wait()
    alone = [dist.new_group([i]) for i in range(size)][rank]
    with pytest.raises(ValueError, match="at least 2 ranks, got 1"):
        Ring(alone, purpose="x")


def test_misuse_raises():
    run_ranks(2, _misuse)


def _collectives(rank, size):
    group, traffic = dist.group.WORLD, Traffic()
    x = torch.arange(6.0).view(3, 2) + 100 * rank
    gathered = all_gather(x.t(), group, purpose="gather", traffic=traffic)
    assert torch.equal(gathered, torch.stack([(torch.arange(6.0).view(3, 2) + 100 * r).t() for r in range(size)]))
    shards = torch.stack([torch.full((2,), 10.0 * rank + r) for r in range(size)])
    reduced = reduce_scatter(shards, group, purpose="reduce", traffic=traffic)
    assert reduced.tolist() == [10.0 * sum(range(size)) + size * rank] * 2
    exchanged = all_to_all(shards, group, purpose="exchange", traffic=traffic)
    assert exchanged.tolist() == [[10.0 * r + rank] * 2 for r in range(size)]
    sent = {"gather": 24, "reduce": 8, "exchange": 8}
    assert dict(traffic.sent) == {name: (size - 1) * num_bytes for name, num_bytes in sent.items() if size > 1}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives(size):
    run_ranks(size, _collectives)


def _everyones(rank, size, shape, salt):
    """The same float64 tensors on all ranks: [one for each rank]."""
    generator = torch.Generator().manual_seed(salt)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(size)]


def _differentiable(rank, size):
    group = dist.group.WORLD
    rows, channels = 3, 6 * size
    shards, weights = (_everyones(rank, size, (rows, channels), salt) for salt in (1, 2))

    x = shards[rank].clone().requires_grad_()
    out = all_gather_rows(x, group)
    assert torch.equal(out, torch.cat(shards))
    weight = _everyones(rank, size, (size * rows, channels), 3)
    (out * weight[rank]).sum().backward()
    want = sum(weight)[rank * rows : (rank + 1) * rows]
    assert (x.grad - want).norm() <= 1e-14 * want.norm()

    sections = (2 * size, 4 * size)
    for split in (None, sections):
        x = shards[rank].clone().requires_grad_()
        out = seq_to_heads(x, group, sections=split)
        whole = torch.cat(shards)
        parts = whole.split(split or channels, dim=1)
        assert torch.equal(out, torch.cat([part.chunk(size, dim=1)[rank] for part in parts], dim=1))
        back = heads_to_seq(out, group, sections=split)
        assert torch.equal(back, shards[rank])
        (back * weights[rank]).sum().backward()
        assert torch.equal(x.grad, weights[rank])
        (grad,) = torch.autograd.grad((seq_to_heads(x, group, sections=split) * out.detach()).sum(), x)
        assert torch.equal(grad, shards[rank])

    maps = list(zip(_everyones(rank, size, (2, 3, 3), 4), _everyones(rank, size, (2, 3, 5), 5), strict=True))
    leaves = [x.clone().requires_grad_() for x in maps[rank]]
    gathered = gather_affine(*leaves, group)
    for i in range(2):
        assert torch.equal(gathered[i], torch.stack([pair[i] for pair in maps]))
    scales = [(1.0 + r) * torch.ones_like(gathered[0][0, 0, 0, 0]) for r in range(size)]
    (gathered[0].sin().sum() * scales[rank] + gathered[1].square().sum() * scales[rank]).backward()
    for leaf, want in zip(leaves, (maps[rank][0].cos(), 2 * maps[rank][1]), strict=True):
        want = want * sum(scales)
        assert (leaf.grad - want).norm() <= 1e-14 * want.norm()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_differentiable_collectives_are_transposes(size):
    run_ranks(size, _differentiable)


def _sections_refused(rank, size):
    with pytest.raises(ValueError, match="multiple of 2"):
        seq_to_heads(torch.zeros(1, 6), dist.group.WORLD, sections=(3, 3))
    with pytest.raises(ValueError, match="must sum"):
        heads_to_seq(torch.zeros(2, 3), dist.group.WORLD, sections=(2, 2))


def test_sections_that_do_not_divide_are_refused():
    run_ranks(2, _sections_refused)


def _lost_peer(rank, size, how, folder):
    group = dist.new_group(range(size), timeout=datetime.timedelta(seconds=2))
    if rank == 1:
        if how == "dies":
            os._exit(7)
        time.sleep(5)
        return
    began = time.monotonic()
    ring = Ring(group, purpose="queries")
    with pytest.raises(PeerError, match=rf"Ring 'queries' failed on rank {rank} of {size}: a peer died or was silent"):
        for _ in range(2 * size):
            ring.send_recv(torch.ones(4))
            ring.commit()
            ring.wait()
    with pytest.raises(PeerError, match="All-gather 'rows' failed"):
        all_gather(torch.ones(2), group, purpose="rows")
    (folder / str(rank)).write_text(f"{time.monotonic() - began}")


def test_silent_peer_ends_in_a_reason(tmp_path):
    run_ranks(3, _lost_peer, "hangs", tmp_path)
    for rank in (0, 2):
        assert 1.5 <= float((tmp_path / str(rank)).read_text()) <= 5


def test_dead_peer_ends_in_a_reason(tmp_path):
    with pytest.raises(RankError, match="exit code 7") as error:
        run_ranks(3, _lost_peer, "dies", tmp_path)
    assert error.value.rank == 1
    for rank in (0, 2):
        assert float((tmp_path / str(rank)).read_text()) <= 3
