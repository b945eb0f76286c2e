"""Chunked losses equal the plain ones: loss per slot, cross-entropy, top-1, label and gradient."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dflash_online.distill.slot_loss import SlotTargets, chunked_slot_losses, plain_slot_losses
from dflash_online.errors import ShapeError


def random_slots(num_slots=37, hidden=12, vocab=101, seed=0):
    generator = torch.Generator().manual_seed(seed)
    targets = SlotTargets(
        label_N=torch.randint(vocab, (num_slots,), generator=generator),
        verifier_NH=torch.randn(num_slots, hidden, generator=generator),
    )
    head_VH = torch.randn(vocab, hidden, generator=generator)
    return torch.randn(num_slots, hidden, generator=generator), head_VH, targets


def kinds():
    _, _, both = random_slots()
    return {
        "tokens": dataclasses.replace(both, verifier_NH=None),
        "verifier": dataclasses.replace(both, label_N=None),
        "soft KL": dataclasses.replace(both, label_N=None, kl_share=1.0, kl_temperature=2.0),
        "mixture on tokens": dataclasses.replace(both, kl_share=0.7, kl_temperature=2.0),
        "mixture on verifier": dataclasses.replace(both, label_N=None, kl_share=0.3, kl_temperature=0.7),
    }


def both_ways(hidden, head, targets, **options):
    fast_in, plain_in = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    fast = chunked_slot_losses(fast_in, head, targets, **options)
    plain = plain_slot_losses(plain_in, head, targets)
    weight_N = torch.linspace(0.1, 1, len(hidden))
    for losses in (fast, plain):
        # Divided, as the caller does by the denominator.
        ((losses.loss_N * weight_N).sum() / 3).backward()
    return fast, plain, fast_in.grad, plain_in.grad


@pytest.mark.parametrize("chunk_slots", [1, 7, 1000])
@pytest.mark.parametrize("kind", kinds())
def test_chunked_equals_plain_with_its_gradient(kind, chunk_slots):
    hidden, head, _ = random_slots()
    fast, plain, gradient, expected = both_ways(hidden, head, kinds()[kind], chunk_slots=chunk_slots)
    torch.testing.assert_close(fast.loss_N, plain.loss_N)
    torch.testing.assert_close(fast.cross_entropy_N, plain.cross_entropy_N)
    assert torch.equal(fast.is_correct_N, plain.is_correct_N)
    assert torch.equal(fast.label_N, plain.label_N)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("kind", kinds())
def test_gradient_is_right_by_finite_differences(kind):
    hidden, head, targets = random_slots(num_slots=3, hidden=4, vocab=6)
    chosen = kinds()[kind]
    targets = dataclasses.replace(targets, kl_share=chosen.kl_share, kl_temperature=chosen.kl_temperature)

    def loss(hidden_NH):
        return chunked_slot_losses(hidden_NH, head.double(), targets, chunk_slots=2).loss_N.sum()

    # The loss is reduced in float32 by design, which bounds how exact a difference quotient can be.
    point = hidden.double().requires_grad_()
    assert torch.autograd.gradcheck(loss, (point,), eps=1e-2, atol=1e-2, rtol=1e-2)


def test_soft_kl_is_zero_with_a_zero_gradient_where_drafter_and_verifier_agree():
    hidden, head, targets = random_slots()
    targets = SlotTargets(verifier_NH=hidden, kl_share=1.0, kl_temperature=2.0)
    hidden = hidden.clone().requires_grad_()
    losses = chunked_slot_losses(hidden, head, targets)
    losses.loss_N.sum().backward()
    torch.testing.assert_close(losses.loss_N, torch.zeros(37), rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden.grad, torch.zeros_like(hidden), rtol=0, atol=1e-5)
    assert losses.is_correct_N.all()


def test_extreme_logits_stay_finite_and_equal_plain():
    hidden, head, _ = random_slots()
    for targets in kinds().values():
        fast, plain, gradient, expected = both_ways(200 * hidden, head, targets)
        assert torch.isfinite(fast.loss_N).all()
        torch.testing.assert_close(fast.loss_N, plain.loss_N)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_head_is_close_to_float32_and_reduces_in_float32():
    hidden, head, targets = random_slots(num_slots=200, hidden=64, vocab=500)
    targets = dataclasses.replace(targets, kl_share=0.5)
    fast_in, plain_in = (hidden / 8).requires_grad_(), (hidden / 8).requires_grad_()
    fast = chunked_slot_losses(fast_in, head.bfloat16(), targets)
    plain = plain_slot_losses(plain_in, head, targets)
    assert fast.loss_N.dtype == fast.cross_entropy_N.dtype == torch.float32
    torch.testing.assert_close(fast.loss_N.sum(), plain.loss_N.sum(), rtol=2e-3, atol=0)
    fast.loss_N.sum().backward()
    plain.loss_N.sum().backward()
    cosine = torch.nn.functional.cosine_similarity(fast_in.grad.flatten(), plain_in.grad.flatten(), dim=0)
    assert cosine > 0.9995


def test_autocast_does_not_overrule_the_type_of_the_head():
    hidden, head, targets = random_slots()
    plain = plain_slot_losses(hidden, head, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast = chunked_slot_losses(hidden, head, targets)
    torch.testing.assert_close(fast.loss_N, plain.loss_N)


def test_no_slot_gives_zero_and_a_zero_gradient():
    hidden, head, targets = random_slots(num_slots=0)
    hidden.requires_grad_()
    losses = chunked_slot_losses(hidden, head, targets)
    losses.loss_N.sum().backward()
    assert losses.loss_N.sum().item() == 0
    assert hidden.grad.shape == (0, 12)


def test_without_a_gradient_none_is_computed():
    hidden, head, targets = random_slots()
    losses = chunked_slot_losses(hidden, head, targets)
    assert not losses.loss_N.requires_grad
    torch.testing.assert_close(losses.loss_N, plain_slot_losses(hidden, head, targets).loss_N)


def test_arguments_that_disagree_are_refused():
    hidden, head, targets = random_slots()
    for changed in (
        dataclasses.replace(targets, label_N=targets.label_N[:-1]),
        dataclasses.replace(targets, verifier_NH=targets.verifier_NH[:, :-1]),
    ):
        with pytest.raises(ShapeError, match="hidden, head, labels or verifier"):
            chunked_slot_losses(hidden, head, changed)
    with pytest.raises(ShapeError, match="hidden, head, labels or verifier"):
        chunked_slot_losses(hidden[:-1], head, targets)
    with pytest.raises(ShapeError, match=r"no verifier for a loss with 0.5 soft KL"):
        chunked_slot_losses(hidden, head, SlotTargets(label_N=targets.label_N, kl_share=0.5))
    with pytest.raises(ShapeError, match="no label"):
        chunked_slot_losses(hidden, head, SlotTargets())
