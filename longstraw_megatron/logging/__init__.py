"""What a run tells: metrics in a file and in W&B, progress bars, tables."""

from longstraw_megatron.logging.metrics import MetricsWriter
from longstraw_megatron.logging.progress import Progress
from longstraw_megatron.logging.table import format_bytes, format_table

__all__ = ["MetricsWriter", "Progress", "format_bytes", "format_table"]
