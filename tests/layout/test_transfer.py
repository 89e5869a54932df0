"""The choice of a transfer form is a function of bytes; the bytes are worked out by hand."""

from dataclasses import replace

import pytest

from longstraw_megatron.layout.transfer import TransferShape, buffer_bytes, choose_transfer, transfer_bytes

MIB = 2**20

# 24 query heads, 4 key heads of 256 in bf16, on 8 ranks, segments of 32768 tokens.
QWEN = TransferShape(
    cp_size=8,
    rows=4096,
    prefix_rows=0,
    num_heads=24,
    num_key_heads=4,
    head_dim=256,
    itemsize=2,
    sum_itemsize=4,
    prefix_grad=True,
)
TINY = TransferShape(
    cp_size=3,
    rows=2,
    prefix_rows=5,
    num_heads=4,
    num_key_heads=2,
    head_dim=8,
    itemsize=2,
    sum_itemsize=4,
    prefix_grad=True,
)


@pytest.mark.parametrize(
    "transfer, forward, backward",
    [
        # q: 2 * 4 * 8 = 64 items, 128 B; partial: 64 * 4 + 8 * 4 = 288 B; three of q's size and lse: 416 B; dq: 256 B
        ("ring", 2 * 128 + 3 * 288, 2 * 416 + 3 * 256),
        ("gather_queries", 2 * 128 + 2 * 288, 2 * 416 + 2 * 256),
        # k and v: 2 * 7 * 2 * 8 = 224 items, 448 B; their gradients 896 B
        ("gather_keys", 2 * 448, 2 * (448 + 896)),
    ],
)
def test_bytes_by_hand(transfer, forward, backward):
    assert transfer_bytes(transfer, TINY, backward=False) == forward
    assert transfer_bytes(transfer, TINY, backward=True) == backward


def test_detached_prefix_sends_no_gradient_home():
    detached = replace(TINY, prefix_grad=False)  # gradients of the 2 own rows only: 64 items, 256 B
    assert transfer_bytes("gather_keys", detached, backward=True) == 2 * (448 + 256)
    for transfer in ("ring", "gather_queries"):
        assert transfer_bytes(transfer, detached, backward=True) == transfer_bytes(transfer, TINY, backward=True)


@pytest.mark.parametrize("backward, static, running", [(False, 128, 288), (True, 416, 256)])
def test_buffers_by_hand(backward, static, running):
    assert buffer_bytes("ring", TINY, backward=backward) == 2 * (static + running)  # what leaves and what arrives
    assert buffer_bytes("gather_queries", TINY, backward=backward) == 3 * (static + 2 * running)
    assert buffer_bytes("gather_keys", TINY, backward=backward) == 3 * (448 + (896 if backward else 0))


def test_keys_while_they_are_few_then_queries():
    """Early segments gather keys; a long prefix stays where it is."""
    chosen = [choose_transfer(replace(QWEN, prefix_rows=4096 * i), backward=False) for i in range(20)]
    switch = chosen.index("ring")
    assert chosen == ["gather_keys"] * switch + ["ring"] * (20 - switch)
    assert switch == 2  # gathered keys fit in the buffers of 256 MiB behind one segment, not behind two
    unlimited = [
        choose_transfer(replace(QWEN, prefix_rows=4096 * i), backward=False, buffer_limit=2**60) for i in range(20)
    ]
    # A key row is 4096 B; a query row with its partial 24 * (256 * 2 + 256 * 4 + 4) = 36,960 B: keys up to 9.02 shards.
    assert unlimited == ["gather_keys"] * 9 + ["gather_queries"] * 11


def test_long_prefix_never_moves():
    prompt = replace(QWEN, prefix_rows=2 * MIB // 8)
    for backward in (False, True):
        assert choose_transfer(prompt, backward=backward) == "ring"
        assert choose_transfer(replace(prompt, rows=64), backward=backward) == "gather_queries"  # a branch's replay
        assert choose_transfer(prompt, backward=backward, buffer_limit=0) == "ring"


def test_choice_sends_the_fewest_bytes_that_fit():
    for rows in (1, 64, 1024, 8192):
        for prefix_rows in (0, 64, 4096, 262144):
            for backward in (False, True):
                shape = replace(QWEN, rows=rows, prefix_rows=prefix_rows)
                chosen = choose_transfer(shape, backward=backward)
                sent = transfer_bytes(chosen, shape, backward=backward)
                assert chosen == "ring" or buffer_bytes(chosen, shape, backward=backward) <= 256 * MIB
                for other in ("ring", "gather_queries", "gather_keys"):
                    fits = other == "ring" or buffer_bytes(other, shape, backward=backward) <= 256 * MIB
                    assert not fits or sent <= transfer_bytes(other, shape, backward=backward)
