"""Readable reference mathematics: tensors in, tensors out, no communication."""
