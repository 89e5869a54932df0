"""What a prompt leaves on a pipeline stage, and where: rows, boundaries, experts, gradients of the first two."""

from collections import Counter
from dataclasses import dataclass, field

from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.plan.parameters import Stage
from longstraw_megatron.state.prefix import GATHERED_PAGE_LENGTH

STAGED_PAGES = 2  # of a table: the one that is computed with, and the next


@dataclass
class KeptState:
    """Bytes by item: on the device, and in host memory (`state.location=host`).

    `staged` has what is copied for the moment of a layer by its kind of attention, from the host or to sum in float32.
    """

    device: Counter[Item] = field(default_factory=Counter)
    host: Counter[Item] = field(default_factory=Counter)
    staged: dict[str, Counter[Item]] = field(default_factory=dict)


def grad_itemsize(layout: Layout) -> int:
    """Bytes of an element of the accumulators of rows."""
    names = {"auto": layout.shape.float_itemsize, "fp32": 4, "bf16": 2}
    return names[layout.config.state.grad_dtype]


def boundary_bytes(layout: Layout) -> int:
    """One boundary of one delta-rule layer."""
    shape, hf, cp = layout.shape, layout.hf, layout.config.parallel.cp
    heads = shape.over_tp(hf["linear_num_value_heads"])
    state = -(-heads * hf["linear_key_head_dim"] * hf["linear_value_head_dim"] // cp) * shape.float_itemsize
    # where the state is relayed every rank keeps the whole tail
    channels = shape.delta_channels if shape.relays else shape.delta_channels // cp
    return state + (hf["linear_conv_kernel_dim"] - 1) * channels * shape.itemsize


class _Tables:
    """Adds up a stage's tables."""

    def __init__(self, layout: Layout):
        self.layout, self.kept = layout, KeptState()
        self.on_host = layout.config.state.location == "host"
        self.grad_size = grad_itemsize(layout)

    def _stage(self, attention: str, staged: Counter[Item]) -> None:
        """One table of a layer at a time."""
        self.kept.staged[attention] = self.kept.staged.get(attention, Counter()) | staged

    def rows(self, attention: str, elements: int, page_length: int, *, with_grads: bool, owners: int = 1) -> None:
        """A table with so many elements in a row, of the prompt and of a branch that goes in blocks.

        `owners` ranks with the same rows share them out.
        """
        layout, shape = self.layout, self.layout.shape
        rows, path_rows = -(-layout.prefix_rows // owners), -(-layout.path_rows // owners)
        grad_rows = (rows * layout.exact + path_rows) * with_grads
        values, grads = (rows + path_rows) * elements * shape.itemsize, grad_rows * elements * self.grad_size
        target = self.kept.host if self.on_host else self.kept.device
        target[Item.STATE] += values
        target[Item.STATE_GRADIENTS] += grads
        page = min(page_length, rows + path_rows)
        pages = min(STAGED_PAGES * page, rows + path_rows)
        staged = Counter()
        if self.on_host:
            staged[Item.STATE] = pages * elements * shape.itemsize
            staged[Item.STATE_GRADIENTS] = pages * elements * self.grad_size * (grads > 0)
        if grads and self.grad_size < shape.float_itemsize:
            staged[Item.STATE_GRADIENTS] += page * elements * shape.float_itemsize  # sums of a page are made in float32
        self._stage(attention, staged)

    def boundaries(self) -> None:
        """Those of one layer: all where it is walked back, with the gradients of two at a time."""
        layout, size = self.layout, boundary_bytes(self.layout)
        prompt = len(layout.segments)
        number = (prompt if layout.exact else min(prompt, 1)) + layout.path_blocks
        walked = prompt * layout.exact + layout.path_blocks
        if self.on_host:
            self.kept.host[Item.BOUNDARIES] += number * size
            # a copy lives as long as the graph that began with it
            self.kept.device[Item.BOUNDARIES] += size if layout.config.recompute != "full" else 0
            self._stage("delta", Counter({Item.BOUNDARIES: size}))
        else:
            self.kept.device[Item.BOUNDARIES] += number * size
        self.kept.device[Item.BOUNDARY_GRADIENTS] += min(walked, 2) * size

    def experts(self) -> None:
        """Those that every row was sent to, padding too."""
        hf, layout = self.layout.hf, self.layout
        rows = layout.segment_rows * len(layout.segments) // layout.split
        rows += layout.path_rows // layout.split
        self.kept.device[Item.STATE] += rows * hf["num_experts_per_tok"] * (1 if hf["n_routed_experts"] <= 256 else 2)


def kept_state(layout: Layout, stage: Stage) -> KeptState:
    """What one prompt, and a branch in blocks behind it, leave on a stage."""
    shape, hf, tables = layout.shape, layout.hf, _Tables(layout)
    page_length = layout.config.state.page_length
    for layer in stage.layers:
        attention, mlp = layout.kinds[layer]
        if attention == "softmax":
            tables.rows(attention, 2 * shape.key_value_heads * hf["head_dim"], page_length, with_grads=True)
        elif attention == "delta":
            tables.boundaries()
        else:
            owners = layout.config.parallel.tp
            latent_page = page_length if tables.on_host else GATHERED_PAGE_LENGTH
            tables.rows(attention, shape.latent, latent_page, with_grads=True, owners=owners)
            if attention == "full":
                tables.rows(attention, hf["index_head_dim"], page_length, with_grads=False, owners=owners)
        if mlp == "sparse":
            tables.experts()
    return tables.kept
