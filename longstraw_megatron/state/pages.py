"""Rows of one layer's prefix state, appended segment by segment into pages, with their gradient accumulators.

Attention walks the pages and merges; gradients are added page by page where the rows live. A fork (a branch that is
replayed in blocks) shares the pages of its parent and appends pages of its own, so that gradients of shared rows
reach the one accumulator.

Where state rests in host memory, and where accumulators have fewer bits than sums, a page is worked on in a copy: of
its values, fetched while the page before it is computed with, and of its accumulators, put back when the next page is
asked for. The first page of a walk is waited for. Where few rows of a page are selected, the host picks them and no
others are copied; which they are it learns from the device, and waits for that before each such page.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw_megatron.state.accumulate import Rounding, stochastic_bfloat16
from longstraw_megatron.state.residence import OnDevice, Residence

Select = Callable[[int, int], Tensor | None]  # (start, stop) of a page -> distinct rows of it, int64 [m]; None: all
Take = Callable[[], tuple[Tensor, ...]]


@dataclass(eq=False)
class Page:
    """Rows [start, start + used) of a layer: `tensors[i]` is [capacity, ...], `grads[i]` alike once a gradient came.

    `takes_grad`: its rows are walked back from; those of a detached prompt are not, also where a branch reads them.
    """

    start: int
    tensors: tuple[Tensor, ...]
    takes_grad: bool
    used: int = 0
    grads: tuple[Tensor, ...] | None = None

    @property
    def capacity(self) -> int:
        return self.tensors[0].shape[0]

    @property
    def stop(self) -> int:
        return self.start + self.used


@dataclass(eq=False)
class PageView:
    """The first `stop - start` rows of a page where it is computed with, or these `rows` [m] (int64, on the host)."""

    page: Page
    start: int
    stop: int
    tensors: tuple[Tensor, ...]
    rows: Tensor | None = None
    # the copy of accumulators that is worked on: begun to be fetched, there, changed; put back at once when closed
    fetching: Take | None = None
    grads: tuple[Tensor, ...] | None = None
    changed: bool = False
    closed: bool = True


class PagedRows:
    """A growing table of rows, e.g. (k [rows, G, H], v [rows, G, H]) of one attention layer on this rank.

    `capacity` is the number of rows expected in all (pages are then trimmed to it); without it every append makes
    pages of its own. `grad_dtype=None` means float32, or float64 for float64 rows; `rounding` is how sums come to fewer
    bits, `seed` that of its random numbers.
    """

    def __init__(
        self,
        *,
        page_length: int,
        capacity: int | None = None,
        grad_dtype: torch.dtype | None = None,
        takes_grad: bool = True,
        residence: Residence | None = None,
        rounding: Rounding = "nearest",
        seed: int = 0,
    ):
        self.page_length = page_length
        self.takes_grad = takes_grad
        self.capacity = capacity
        self.grad_dtype = grad_dtype
        self.residence = residence or OnDevice()
        self.rounding = rounding
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._pages: list[Page] = []
        self._num_shared = 0
        self._marks: dict[int, int] = {}

    @property
    def num_rows(self) -> int:
        return self._pages[-1].stop if self._pages else 0

    def fork(self) -> "PagedRows":
        """A table that shares this one's pages; what it appends is its own, and takes gradients."""
        child = PagedRows(
            page_length=self.page_length,
            grad_dtype=self.grad_dtype,
            residence=self.residence,
            rounding=self.rounding,
            seed=self.seed,
        )
        child._pages = list(self._pages)
        child._num_shared = len(self._pages)
        # one after the other: with the same random numbers again, sums of branches would err together
        child._generators = self._generators
        return child

    def append(self, *rows: Tensor) -> None:
        """Copy rows [n, ...] behind the last one."""
        done, num_new = 0, rows[0].shape[0]
        while done < num_new:
            page = self._pages[-1] if self._pages else None
            if page is None or page.used == page.capacity or self.capacity is None:
                start = self.num_rows
                left = num_new - done if self.capacity is None else max(self.capacity - start, num_new - done)
                length = min(self.page_length, left)
                tensors = tuple(self.residence.empty(row, (length, *row.shape[1:])) for row in rows)
                page = Page(start, tensors, self.takes_grad)
                self._pages.append(page)
            count = min(page.capacity - page.used, num_new - done)
            for tensor, row in zip(page.tensors, rows, strict=True):
                self.residence.store(tensor[page.used : page.used + count], row[done : done + count].detach())
            page.used += count
            done += count

    def pages(
        self, stop: int, *, values: bool = True, with_grads: bool = False, select: Select | None = None
    ) -> Iterator[PageView]:
        """Views of the rows before `stop`, in order; each is good until the next one is asked for, and whoever wants no
        more than two staged pages at a time lets go of its tensors by then.

        `with_grads` tells that gradients will be added to every view that takes any, `values=False` that nothing is
        read. `select` is asked where rows rest in host memory.
        """
        spans = [(page, min(page.stop, stop)) for page in self._pages if page.start < stop]
        coming = self._begin(*spans[0], values, with_grads, select) if spans else None
        for i in range(len(spans)):
            view, take = coming
            coming = self._begin(*spans[i + 1], values, with_grads, select) if i + 1 < len(spans) else None
            view.tensors = take()
            view.closed = False
            try:
                yield view
            finally:
                view.closed = True
                self._put_back(view)
                if self.residence.stages:
                    view.tensors = ()  # the copy goes before the next but one comes: two are there at a time

    def _begin(
        self, page: Page, stop: int, values: bool, with_grads: bool, select: Select | None
    ) -> tuple[PageView, Take]:
        """A view whose tensors are on their way."""
        view = PageView(page, page.start, stop, ())
        picked = select(page.start, stop) if select is not None and self.residence.stages else None
        view.rows = None if picked is None else picked.cpu()
        if with_grads and page.takes_grad and page.grads is not None and self.residence.stages:
            view.fetching = self._fetch(view, page.grads)
        return view, self._fetch(view, page.tensors if values else ())

    def _fetch(self, view: PageView, tensors: tuple[Tensor, ...]) -> Take:
        """Begin to copy the view's rows of the page's `tensors`."""
        if view.rows is not None:
            return self.residence.gather(*tensors, rows=view.rows)
        return self.residence.fetch(*(tensor[: view.stop - view.start] for tensor in tensors))

    def add_grad(self, view: PageView, *grads: Tensor) -> None:
        """Add gradients [view.stop - view.start, ...] of the view's rows to their accumulators."""
        for accumulator, grad in zip(self._open(view), grads, strict=True):
            accumulator += grad
        self._changed(view)

    def add_grad_at(self, view: PageView, index: Tensor, *grads: Tensor) -> None:
        """Add gradients [m, ...] of the view's rows `index` [m] (repetitions add up)."""
        for accumulator, grad in zip(self._open(view), grads, strict=True):
            accumulator.index_add_(0, index, grad.to(accumulator.dtype))
        self._changed(view)

    def _sum_dtype(self, page: Page) -> torch.dtype:
        return torch.promote_types(page.tensors[0].dtype, torch.float32)

    def _in_place(self, page: Page) -> bool:
        """Whether sums are made in the accumulators themselves."""
        return not self.residence.stages and (self.grad_dtype or self._sum_dtype(page)) == self._sum_dtype(page)

    def _open(self, view: PageView) -> tuple[Tensor, ...]:
        """What gradients of the view's rows are added to."""
        page = view.page
        if self._in_place(page):
            return tuple(grad[: view.stop - view.start] for grad in self._accumulators(page))
        if view.grads is None:
            resting = view.fetching or self._fetch(view, self._accumulators(page))
            view.grads = tuple(grad.to(self._sum_dtype(page)) for grad in resting())
        return view.grads

    def _changed(self, view: PageView) -> None:
        view.changed = view.grads is not None
        if view.closed:
            self._put_back(view)

    def _put_back(self, view: PageView) -> None:
        """Round the sums and let them rest."""
        if view.changed:
            for grad, target in zip(view.grads, view.page.grads, strict=True):
                rounded = self._round(view, grad, target.dtype)
                if view.rows is not None:
                    self.residence.scatter(target, view.rows, rounded)
                else:
                    self.residence.store(target[: view.stop - view.start], rounded)
        view.fetching, view.grads, view.changed = None, None, False

    def _round(self, view: PageView, grad: Tensor, dtype: torch.dtype) -> Tensor:
        if self.rounding == "nearest" or (grad.dtype, dtype) != (torch.float32, torch.bfloat16):
            return grad.to(dtype)
        if grad.device not in self._generators:
            self._generators[grad.device] = torch.Generator(grad.device).manual_seed(self.seed)
        all_rows = {"rows": view.rows, "num_rows": view.stop - view.start}
        return stochastic_bfloat16(grad, self._generators[grad.device], **all_rows)

    def grad(self, start: int, stop: int) -> tuple[Tensor, ...] | None:
        """The gradients accumulated for rows [start, stop), or None where none ever came."""
        parts = []
        for page in self._pages:
            lo, hi = max(page.start, start), min(page.stop, stop)
            if lo < hi and page.grads is not None:
                grads = self.residence.fetch(*(grad[lo - page.start : hi - page.start] for grad in page.grads))()
                parts.append((lo, hi, grads))
        if not parts:
            return None
        if len(parts) == 1 and parts[0][:2] == (start, stop):
            return parts[0][2]
        whole = tuple(grad.new_zeros(stop - start, *grad.shape[1:]) for grad in parts[0][2])
        for lo, hi, grads in parts:
            for target, grad in zip(whole, grads, strict=True):
                target[lo - start : hi - start] = grad
        return whole

    def mark(self, boundary: int) -> None:
        """Remember how many rows there are before the segment from `boundary`, where that is not its shards' number."""
        self._marks[boundary] = self.num_rows

    def truncate_at(self, boundary: int, num_rows: int) -> None:
        """Forget the rows of segments from `boundary` on; it begins at `num_rows`, unless it was marked."""
        self.truncate(self._marks.get(boundary, num_rows))
        self._marks = {earlier: rows for earlier, rows in self._marks.items() if earlier < boundary}

    def truncate(self, num_rows: int) -> None:
        """Forget the rows from `num_rows` on, and free the pages that hold no other."""
        while self._pages and self._pages[-1].start >= num_rows:
            self._pages.pop()
        if self._pages and self._pages[-1].stop > num_rows:
            page = self._pages[-1]
            page.used = num_rows - page.start
            if page.grads is not None:
                self.residence.synchronize()
            for grad in page.grads or ():
                grad[page.used :].zero_()  # rows appended here later start without a gradient

    def value_bytes(self) -> int:
        """Bytes of this table's own pages."""
        return sum(tensor.nbytes for page in self._pages[self._num_shared :] for tensor in page.tensors)

    def grad_bytes(self) -> int:
        return sum(grad.nbytes for page in self._pages[self._num_shared :] for grad in page.grads or ())

    def make_grads(self) -> None:
        """Make the accumulators of all pages that take gradients, which otherwise come with the first one of each."""
        for page in self._pages:
            if page.takes_grad:
                self._accumulators(page)

    def _accumulators(self, page: Page) -> tuple[Tensor, ...]:
        if page.grads is None:
            dtype = self.grad_dtype or self._sum_dtype(page)
            page.grads = tuple(self.residence.empty(t, tuple(t.shape), dtype).zero_() for t in page.tensors)
        return page.grads
