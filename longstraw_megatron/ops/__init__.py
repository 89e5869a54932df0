"""One signature per operation; kernel or reference chosen by argument, never at import."""
