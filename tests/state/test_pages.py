"""Paged rows: what is appended is what is read, and gradients reach the rows they belong to."""

import pytest
import torch

from longstraw_megatron.ops.staging import HostStaging
from longstraw_megatron.state import OnDevice, PagedRows
from longstraw_megatron.testing.memory import peak_memory

RESIDENCE = [OnDevice()]  # of the tables that a test makes


@pytest.fixture(autouse=True, params=["device", "host"])
def residence(request):
    """Every test runs with rows on the device and in host memory."""
    RESIDENCE[0] = OnDevice() if request.param == "device" else HostStaging(torch.device("cpu"))
    yield
    RESIDENCE[0] = OnDevice()


def rows_of(start, stop):
    """Two tensors of rows that know their index."""
    index = torch.arange(start, stop, dtype=torch.float32)
    return index[:, None].repeat(1, 3), (100 + index)[:, None, None].repeat(1, 2, 2)


def filled(*lengths, page_length=4, **options):
    rows, start = PagedRows(page_length=page_length, residence=RESIDENCE[0], **options), 0
    for length in lengths:
        rows.append(*rows_of(start, start + length))
        start += length
    return rows


def spans(rows, stop=None):
    return [(view.start, view.stop) for view in rows.pages(rows.num_rows if stop is None else stop)]


def read(rows, stop):
    pages = [view.tensors for view in rows.pages(stop)]
    return [torch.cat([tensors[i] for tensors in pages]) for i in range(2)] if pages else []


@pytest.mark.parametrize("capacity", [None, 3, 11, 64])
@pytest.mark.parametrize("lengths", [(11,), (1, 2, 3, 5), (4, 4, 3), (0, 11), (10, 0, 1)])
def test_appended_rows_are_read(lengths, capacity):
    rows = filled(*lengths, capacity=capacity)
    assert rows.num_rows == 11
    for stop in range(1, 12):
        for got, want in zip(read(rows, stop), rows_of(0, stop), strict=True):
            assert torch.equal(got, want)
        assert spans(rows, stop)[-1][1] == stop
    assert spans(rows, 0) == []


def test_pages_fill_up_where_the_length_is_known():
    assert spans(filled(1, 2, 3, 5, capacity=11)) == [(0, 4), (4, 8), (8, 11)]
    assert spans(filled(1, 2, 3, 5)) == [(0, 1), (1, 3), (3, 6), (6, 10), (10, 11)]  # else a page for each append


def test_the_last_page_is_trimmed_to_the_capacity():
    row_bytes = 4 * (3 + 4)
    assert filled(5, capacity=6, page_length=4).value_bytes() == 6 * row_bytes  # pages of 4 and 2 rows
    assert filled(5, page_length=4).value_bytes() == 5 * row_bytes
    assert filled(2, capacity=6, page_length=4).value_bytes() == 4 * row_bytes
    over = filled(6, 3, capacity=6, page_length=4)  # more than expected still fits
    assert spans(over) == [(0, 4), (4, 6), (6, 9)]
    assert torch.equal(read(over, 9)[0], rows_of(0, 9)[0])


def test_rows_are_copied_and_detached():
    source, other = rows_of(0, 2)
    source.requires_grad_()
    rows = PagedRows(page_length=4, residence=RESIDENCE[0])
    rows.append(source, other)
    other.fill_(-1)
    (tensors,) = [view.tensors for view in rows.pages(2)]
    assert not tensors[0].requires_grad
    assert torch.equal(tensors[1], rows_of(0, 2)[1])


def add_ones(rows, stop, scale=1.0):
    for view in rows.pages(stop):
        rows.add_grad(view, *(scale * torch.ones_like(tensor) for tensor in view.tensors))


@pytest.mark.parametrize("lengths, capacity", [((3, 5, 3), 11), ((3, 5, 3), None)])
def test_gradients_add_up_over_page_borders(lengths, capacity):
    rows = filled(*lengths, capacity=capacity)
    assert rows.grad(0, 11) is None and rows.grad_bytes() == 0
    add_ones(rows, 11)
    add_ones(rows, 6, scale=2.0)
    want = torch.tensor([3.0] * 6 + [1.0] * 5)
    for start in range(11):
        for stop in range(start + 1, 12):
            for grad, tensor in zip(rows.grad(start, stop), rows_of(start, stop), strict=True):
                assert torch.equal(grad, want[start:stop].view(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor))
    assert rows.grad(5, 5) is None


def test_rows_without_a_gradient_have_zeros_beside_those_with_one():
    rows = filled(8, capacity=8)
    add_ones(rows, 3)
    assert rows.grad(4, 8) is None
    assert rows.grad(2, 6)[0][:, 0].tolist() == [1, 0, 0, 0]


def test_gradients_by_index_repeat():
    rows = filled(6, capacity=6)
    first, second = rows.pages(6)
    index = torch.tensor([1, 1, 0])
    rows.add_grad_at(second, index, torch.ones(3, 3), torch.full((3, 2, 2), 2.0))
    assert rows.grad(0, 6)[0][:, 0].tolist() == [0, 0, 0, 0, 1, 2]
    assert rows.grad(0, 6)[1][:, 0, 0].tolist() == [0, 0, 0, 0, 2, 4]
    assert first.page.grads is None


@pytest.mark.parametrize(
    "dtype, grad_dtype, want",
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float32, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtype_of_accumulators(dtype, grad_dtype, want):
    rows = PagedRows(page_length=4, grad_dtype=grad_dtype, residence=RESIDENCE[0])
    rows.append(torch.ones(2, 3, dtype=dtype))
    (view,) = rows.pages(2)
    for _ in range(300):  # in bfloat16 a sum of ones stops at 256
        rows.add_grad(view, torch.ones(2, 3, dtype=dtype))
    (grad,) = rows.grad(0, 2)
    assert grad.dtype == want
    assert grad[0, 0] == (256 if want == torch.bfloat16 else 300)


def test_fork_shares_rows_and_their_accumulators():
    rows = filled(6, capacity=8)
    child = rows.fork()
    child.append(*rows_of(6, 9))
    assert (rows.num_rows, child.num_rows) == (6, 9)
    assert torch.equal(read(child, 9)[0], rows_of(0, 9)[0])
    assert torch.equal(read(rows, 6)[0], rows_of(0, 6)[0])
    add_ones(child, 9)
    add_ones(rows, 5)
    assert rows.grad(0, 6)[0][:, 0].tolist() == [2, 2, 2, 2, 2, 1]
    assert child.grad(0, 9)[0][:, 0].tolist() == [2, 2, 2, 2, 2, 1, 1, 1, 1]
    second = rows.fork()
    second.append(*rows_of(6, 8))
    assert second.grad(6, 8) is None  # another branch's own rows
    child.truncate(6)
    assert (child.num_rows, rows.num_rows) == (6, 6)
    assert rows.grad(0, 6)[0][:, 0].tolist() == [2, 2, 2, 2, 2, 1]


def test_truncate_frees_pages_and_forgets_gradients():
    rows = filled(11, capacity=11)
    add_ones(rows, 11)
    full = rows.value_bytes()
    rows.truncate(6)
    assert rows.num_rows == 6 and spans(rows) == [(0, 4), (4, 6)]
    assert rows.value_bytes() == full * 8 // 11  # the page that is used in part stays whole
    rows.append(*rows_of(6, 11))
    assert torch.equal(read(rows, 11)[0], rows_of(0, 11)[0])
    assert rows.grad(4, 11)[0][:, 0].tolist() == [1, 1, 0, 0, 0, 0, 0]  # new rows have no gradient yet
    rows.truncate(0)
    assert rows.num_rows == 0 and rows.value_bytes() == 0 and rows.grad_bytes() == 0


def test_gradients_added_while_pages_are_walked_are_those_added_one_by_one():
    """What is staged goes back when the next page is asked for, the last one and a walk that is broken off included."""
    walked, single = filled(11, capacity=11), filled(11, capacity=11)
    for _ in range(2):
        for view in walked.pages(10, with_grads=True):
            walked.add_grad(view, *view.tensors)
            walked.add_grad_at(view, torch.tensor([0, 1, 0]), torch.ones(3, 3), torch.ones(3, 2, 2))
        for view, tensors in [(view, view.tensors) for view in single.pages(10)]:
            single.add_grad(view, *tensors)
            single.add_grad_at(view, torch.tensor([0, 1, 0]), torch.ones(3, 3), torch.ones(3, 2, 2))
    for view in walked.pages(3, values=False, with_grads=True):
        walked.add_grad(view, torch.ones(3, 3), torch.ones(3, 2, 2))
        break
    single.add_grad(next(iter(single.pages(3))), torch.ones(3, 3), torch.ones(3, 2, 2))
    for got, want in zip(walked.grad(0, 11), single.grad(0, 11), strict=True):
        assert torch.equal(got, want)


def test_the_next_page_is_fetched_before_this_one_is_given():
    class Log(HostStaging):
        def fetch(self, *tensors):
            events.append("fetch")
            return super().fetch(*tensors)

    events = []
    rows = PagedRows(page_length=4, capacity=11, residence=Log(torch.device("cpu")))
    rows.append(*rows_of(0, 11))
    for _ in rows.pages(11):
        events.append("use")
    assert events == ["fetch", "fetch", "use", "fetch", "use", "use"]


def test_two_pages_are_staged_at_a_time():
    """This one and the next, each with its values and its sums."""
    rows = PagedRows(page_length=64, capacity=8 * 64, residence=HostStaging(torch.device("cpu")))
    rows.append(torch.ones(8 * 64, 16))
    rows.make_grads()
    grad = torch.ones(64, 16)
    with peak_memory() as recorder:
        for view in rows.pages(8 * 64, with_grads=True):
            rows.add_grad(view, grad)
    assert 0 < recorder.peak <= 2 * (64 * 16 * 4) * 2
    assert torch.equal(rows.grad(0, 8 * 64)[0], torch.ones(8 * 64, 16))


def test_selected_rows_alone_are_fetched_and_get_their_gradients():
    rows = filled(9, capacity=9, page_length=6)
    picked = {0: torch.tensor([1, 4]), 6: None}
    for view in rows.pages(9, with_grads=True, select=lambda start, stop: picked[start]):
        if view.rows is not None:
            assert torch.equal(view.tensors[0], rows_of(0, 9)[0][[1, 4]])
            rows.add_grad_at(view, torch.tensor([1, 1, 0]), torch.ones(3, 3), torch.ones(3, 2, 2))
        elif view.start == 0:  # on the device nothing is picked
            rows.add_grad_at(view, torch.tensor([4, 4, 1]), torch.ones(3, 3), torch.ones(3, 2, 2))
        else:
            assert torch.equal(view.tensors[1], rows_of(6, 9)[1])
    assert rows.grad(0, 9)[0][:, 0].tolist() == [0, 1, 0, 0, 2, 0, 0, 0, 0]


def test_selected_rows_are_on_their_way_before_the_page_in_front_of_them_is_given():
    """Values and sums of a picked page, as those of a whole one."""

    class Log(HostStaging):
        def gather(self, *tensors, rows):
            events.append("gather")
            take = super().gather(*tensors, rows=rows)
            return lambda: events.append("take") or take()

    events = []
    rows = PagedRows(page_length=4, capacity=8, residence=Log(torch.device("cpu")))
    rows.append(*rows_of(0, 8))
    rows.make_grads()
    for view in rows.pages(8, with_grads=True, select=lambda start, stop: torch.tensor([1, 3])):
        events.append("use")
        rows.add_grad(view, *view.tensors)
    # of both pages sums and values, then of each its values, and in its use its sums
    assert events == ["gather"] * 4 + ["take", "use", "take"] * 2
    assert rows.grad(0, 8)[0][:, 0].tolist() == [0, 1, 0, 3, 0, 5, 0, 7]


def test_random_numbers_of_a_row_do_not_depend_on_which_others_are_selected():
    """Sums on the host, of which only the selected rows come, are those on the device bit for bit."""
    sums = []
    for residence in (OnDevice(), HostStaging(torch.device("cpu"))):
        rows = PagedRows(
            page_length=64, capacity=96, grad_dtype=torch.bfloat16, rounding="stochastic", residence=residence
        )
        rows.append(torch.ones(96, 8))
        for step in range(4):
            picked = torch.arange(step, 30, 3)
            grad = torch.linspace(0, 1, 8).expand(len(picked), 8) + picked[:, None]
            for view in rows.pages(96, with_grads=True, select=lambda start, stop, picked=picked: picked):
                index = torch.arange(len(picked)) if view.rows is not None else picked
                rows.add_grad_at(view, index, grad)
        sums.append(rows.grad(0, 96)[0])
    assert sums[0].any() and torch.equal(*sums)


def test_stochastic_rounding_keeps_what_rounding_to_the_nearest_loses():
    sums = {}
    for rounding in ("nearest", "stochastic"):
        rows = PagedRows(page_length=64, grad_dtype=torch.bfloat16, rounding=rounding, residence=RESIDENCE[0])
        rows.append(torch.ones(64, 32))
        for _ in range(600):
            for view in rows.pages(64, with_grads=True):
                rows.add_grad(view, torch.full((64, 32), 1.0))
        (sums[rounding],) = rows.grad(0, 64)
    assert (sums["nearest"] == 256).all()
    assert sums["stochastic"].dtype == torch.bfloat16
    mean = sums["stochastic"].float().mean().item()
    # each of 344 additions beyond 256 has a variance of at most 2 * 2 / 4, and there are 2048 sums: 5 deviations
    assert abs(mean - 600) < 5 * (344 / 2048) ** 0.5


def test_branches_in_blocks_round_by_different_random_numbers():
    rows = PagedRows(page_length=64, grad_dtype=torch.bfloat16, rounding="stochastic", residence=RESIDENCE[0])
    rows.append(torch.ones(64, 32))
    for _ in range(600):
        fork = rows.fork()
        for view in fork.pages(64, with_grads=True):
            fork.add_grad(view, torch.full((64, 32), 1.0))
    (sums,) = rows.grad(0, 64)
    # 256 additions beyond 256 have a variance of 1, the last 88 one of 3; with the same numbers in every fork a sum
    # gets all of them or none
    assert (sums.float() - 600).square().mean().item() < 1.3 * (256 + 3 * 88)


def test_stochastic_rounding_is_unbiased_repeatable_and_keeps_what_is_exact():
    from longstraw_megatron.state.accumulate import stochastic_bfloat16

    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, float("inf"), float("-inf"), float("nan"), 2.0**-133])
    for seed in range(20):
        rounded = stochastic_bfloat16(exact, torch.Generator().manual_seed(seed))
        assert torch.equal(rounded.float().nan_to_num(7), exact.nan_to_num(7))
    x = torch.full((20000,), -(1 + 2.0**-9))  # a quarter of the way from -1 to -(1 + 2^-7)
    first, again = (stochastic_bfloat16(x, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, again)
    assert set(first.tolist()) == {-1.0, -(1 + 2.0**-7)}
    assert abs((first != -1).float().mean().item() - 0.25) < 5 * (0.25 * 0.75 / 20000) ** 0.5
