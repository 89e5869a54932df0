import math

import pytest
import torch

from longstraw_megatron.functional.logprobs import logprobs
from longstraw_megatron.testing import relative_error


def _case(num_tokens=5, dim=3, vocab=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_tokens, dim, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, dim, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, weight, torch.randint(vocab, (num_tokens,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_token_by_token(temperature):
    hidden, weight, targets = _case()
    got = logprobs(hidden, weight, targets, temperature=temperature)
    for t, target in enumerate(targets.tolist()):
        scores = [
            sum(h * w for h, w in zip(hidden[t].tolist(), row, strict=True)) / temperature for row in weight.tolist()
        ]
        want = scores[target] - math.log(sum(math.exp(score) for score in scores))
        assert float(got[t]) == pytest.approx(want, rel=1e-13)


def test_against_log_softmax_in_float32():
    hidden, weight, targets = _case(dtype=torch.bfloat16)
    got = logprobs(hidden, weight, targets)
    want = (hidden.double() @ weight.double().T).log_softmax(1).gather(1, targets[:, None])[:, 0]
    assert got.dtype == torch.float32
    assert relative_error(got, want) < 1e-6


def test_padding_is_zero():
    hidden, weight, targets = _case()
    hidden.requires_grad_()
    targets[2] = -1
    got = logprobs(hidden, weight, targets)
    got.sum().backward()
    assert got[2] == 0 and not hidden.grad[2].any() and hidden.grad[1].any()
