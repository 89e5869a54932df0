"""Rows of one layer's prefix state, appended segment by segment into pages, with their gradient accumulators.

Attention walks the pages and merges; gradients are added page by page where the rows live. A fork (a branch that is
replayed in blocks) shares the pages of its parent and appends pages of its own, so that gradients of shared rows
reach the one accumulator.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


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


@dataclass(frozen=True, eq=False)
class PageView:
    """The first `stop - start` rows of a page, on the device that computes."""

    page: Page
    start: int
    stop: int
    tensors: tuple[Tensor, ...]


class PagedRows:
    """A growing table of rows, e.g. (k [rows, G, H], v [rows, G, H]) of one attention layer on this rank.

    `capacity` is the number of rows expected in all (pages are then trimmed to it); without it every append makes
    pages of its own. `grad_dtype=None` means float32, or float64 for float64 rows.
    """

    def __init__(
        self,
        *,
        page_length: int,
        capacity: int | None = None,
        grad_dtype: torch.dtype | None = None,
        takes_grad: bool = True,
    ):
        self.page_length = page_length
        self.takes_grad = takes_grad
        self.capacity = capacity
        self.grad_dtype = grad_dtype
        self._pages: list[Page] = []
        self._num_shared = 0

    @property
    def num_rows(self) -> int:
        return self._pages[-1].stop if self._pages else 0

    def fork(self) -> "PagedRows":
        """A table that shares this one's pages; what it appends is its own, and takes gradients."""
        child = PagedRows(page_length=self.page_length, grad_dtype=self.grad_dtype)
        child._pages = list(self._pages)
        child._num_shared = len(self._pages)
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
                page = Page(start, tuple(row.new_empty(length, *row.shape[1:]) for row in rows), self.takes_grad)
                self._pages.append(page)
            count = min(page.capacity - page.used, num_new - done)
            for tensor, row in zip(page.tensors, rows, strict=True):
                tensor[page.used : page.used + count] = row[done : done + count].detach()
            page.used += count
            done += count

    def pages(self, stop: int) -> Iterator[PageView]:
        """Views of the rows before `stop`, in order."""
        for page in self._pages:
            if page.start >= stop:
                return
            end = min(page.stop, stop)
            yield PageView(page, page.start, end, tuple(tensor[: end - page.start] for tensor in page.tensors))

    def add_grad(self, view: PageView, *grads: Tensor) -> None:
        """Add gradients [view.stop - view.start, ...] of the view's rows to their accumulators."""
        for accumulator, grad in zip(self._accumulators(view.page), grads, strict=True):
            accumulator[: view.stop - view.start] += grad

    def add_grad_at(self, view: PageView, index: Tensor, *grads: Tensor) -> None:
        """Add gradients [m, ...] of the view's rows `index` [m] (repetitions add up)."""
        for accumulator, grad in zip(self._accumulators(view.page), grads, strict=True):
            accumulator.index_add_(0, index, grad.to(accumulator.dtype))

    def grad(self, start: int, stop: int) -> tuple[Tensor, ...] | None:
        """The gradients accumulated for rows [start, stop), or None where none ever came."""
        parts = []
        for page in self._pages:
            lo, hi = max(page.start, start), min(page.stop, stop)
            if lo < hi and page.grads is not None:
                parts.append((lo, hi, tuple(grad[lo - page.start : hi - page.start] for grad in page.grads)))
        if not parts:
            return None
        if len(parts) == 1 and parts[0][:2] == (start, stop):
            return parts[0][2]
        whole = tuple(grad.new_zeros(stop - start, *grad.shape[1:]) for grad in parts[0][2])
        for lo, hi, grads in parts:
            for target, grad in zip(whole, grads, strict=True):
                target[lo - start : hi - start] = grad
        return whole

    def truncate(self, num_rows: int) -> None:
        """Forget the rows from `num_rows` on, and free the pages that hold no other."""
        while self._pages and self._pages[-1].start >= num_rows:
            self._pages.pop()
        if self._pages and self._pages[-1].stop > num_rows:
            page = self._pages[-1]
            page.used = num_rows - page.start
            for grad in page.grads or ():
                grad[page.used :].zero_()  # rows appended here later start without a gradient

    def value_bytes(self) -> int:
        """Bytes of this table's own pages."""
        return sum(tensor.nbytes for page in self._pages[self._num_shared :] for tensor in page.tensors)

    def grad_bytes(self) -> int:
        return sum(grad.nbytes for page in self._pages[self._num_shared :] for grad in page.grads or ())

    def make_grads(self) -> None:
        """Make the accumulators of all pages, which otherwise come with the first gradient of each."""
        for page in self._pages:
            self._accumulators(page)

    def _accumulators(self, page: Page) -> tuple[Tensor, ...]:
        if page.grads is None:
            dtype = self.grad_dtype
            page.grads = tuple(
                torch.zeros_like(t, dtype=dtype or (t.dtype if t.dtype == torch.float64 else torch.float32))
                for t in page.tensors
            )
        return page.grads
