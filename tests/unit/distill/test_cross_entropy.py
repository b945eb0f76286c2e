"""Chunked cross-entropy equals the plain one: loss, per-slot loss, top-1 and gradient."""

from __future__ import annotations

import pytest
import torch

from dflash_online.distill.cross_entropy import chunked_cross_entropy, plain_cross_entropy
from dflash_online.errors import ShapeError


def random_slots(num_slots=37, hidden=12, vocab=101, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_slots, hidden, generator=generator),
        torch.randn(vocab, hidden, generator=generator),
        torch.randint(vocab, (num_slots,), generator=generator),
        torch.rand(num_slots, generator=generator),
    )


@pytest.mark.parametrize("chunk_slots", [1, 7, 37, 1000])
def test_chunked_equals_plain_with_its_gradient(chunk_slots):
    hidden, head, labels, weights = random_slots()
    fast_in, plain_in = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    fast = chunked_cross_entropy(fast_in, head, labels, weights, chunk_slots=chunk_slots)
    plain = plain_cross_entropy(plain_in, head, labels, weights)
    torch.testing.assert_close(fast.loss_sum, plain.loss_sum)
    torch.testing.assert_close(fast.loss_N, plain.loss_N)
    assert torch.equal(fast.is_correct_N, plain.is_correct_N)
    # Backward of a scaled loss: the caller divides by the summed weight.
    (fast.loss_sum / 3).backward()
    (plain.loss_sum / 3).backward()
    torch.testing.assert_close(fast_in.grad, plain_in.grad)


def test_gradient_is_right_by_finite_differences():
    hidden, head, labels, weights = random_slots(num_slots=3, hidden=4, vocab=6)

    def loss(hidden_NH):
        return chunked_cross_entropy(
            hidden_NH, head.double(), labels, weights.double(), chunk_slots=2
        ).loss_sum

    # The loss is reduced in float32 by design, which bounds how exact a difference quotient can be.
    point = hidden.double().requires_grad_()
    assert torch.autograd.gradcheck(loss, (point,), eps=1e-2, atol=1e-2, rtol=1e-2)


def test_extreme_logits_stay_finite_and_equal_plain():
    hidden, head, labels, weights = random_slots()
    fast_in, plain_in = (200 * hidden).requires_grad_(), (200 * hidden).requires_grad_()
    fast = chunked_cross_entropy(fast_in, head, labels, weights)
    plain = plain_cross_entropy(plain_in, head, labels, weights)
    torch.testing.assert_close(fast.loss_N, plain.loss_N)
    fast.loss_sum.backward()
    plain.loss_sum.backward()
    torch.testing.assert_close(fast_in.grad, plain_in.grad)


def test_bfloat16_head_is_close_to_float32_and_reduces_in_float32():
    hidden, head, labels, weights = random_slots(num_slots=200, hidden=64, vocab=500)
    fast_in, plain_in = (hidden / 8).requires_grad_(), (hidden / 8).requires_grad_()
    fast = chunked_cross_entropy(fast_in, head.bfloat16(), labels, weights)
    plain = plain_cross_entropy(plain_in, head, labels, weights)
    assert fast.loss_sum.dtype == fast.loss_N.dtype == torch.float32
    torch.testing.assert_close(fast.loss_sum, plain.loss_sum, rtol=2e-3, atol=0)
    fast.loss_sum.backward()
    plain.loss_sum.backward()
    cosine = torch.nn.functional.cosine_similarity(fast_in.grad.flatten(), plain_in.grad.flatten(), dim=0)
    assert cosine > 0.9995


def test_autocast_does_not_overrule_the_type_of_the_head():
    hidden, head, labels, weights = random_slots()
    plain = plain_cross_entropy(hidden, head, labels, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast = chunked_cross_entropy(hidden, head, labels, weights)
    torch.testing.assert_close(fast.loss_N, plain.loss_N)


def test_no_slot_gives_zero_and_a_zero_gradient():
    hidden, head, labels, weights = random_slots(num_slots=0)
    hidden.requires_grad_()
    losses = chunked_cross_entropy(hidden, head, labels, weights)
    losses.loss_sum.backward()
    assert losses.loss_sum.item() == 0
    assert hidden.grad.shape == (0, 12)


def test_without_a_gradient_none_is_computed():
    hidden, head, labels, weights = random_slots()
    losses = chunked_cross_entropy(hidden, head, labels, weights)
    assert not losses.loss_sum.requires_grad
    torch.testing.assert_close(losses.loss_sum, plain_cross_entropy(hidden, head, labels, weights).loss_sum)


@pytest.mark.parametrize("shorten", [0, 2, 3])
def test_arguments_that_disagree_are_refused(shorten):
    arguments = list(random_slots())
    arguments[shorten] = arguments[shorten][:-1]
    with pytest.raises(ShapeError, match="hidden, head, labels, weights"):
        chunked_cross_entropy(*arguments)
