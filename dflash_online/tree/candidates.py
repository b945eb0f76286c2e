"""The candidates of each slot: the most probable tokens of the drafter, and how probable they are.

    logits [R, D, V] --top_candidates--> Candidates
    logits [R, D, V/T] of each of T ranks --shard_candidates, all-gather--> merge_shards --> Candidates

Under tensor parallelism each rank holds a part of the vocabulary, and what it sends is small: K keys and one
normalizer per slot. All ranks merge the same numbers with the same operations, so all get the same
candidates. Off the CPU nothing is read back by the host. Knows no SGLang and no process group.

Shape letters: R = requests, D = depths (drafts per block), V = vocabulary, K = candidates per depth,
G = V / 64 groups, C = entries that are selected from, T = ranks.

Source: DDTree (arXiv 2604.12989); specification, section D.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_online.errors import ConfigError, ShapeError

GROUP_SIZE = 64
LOW_32_BITS = (1 << 32) - 1
NO_KEY = -(1 << 63)
"""Comes after every key: fills up a shard that holds fewer tokens than candidates."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most probable tokens of each depth, in falling order.

    One depth, two candidates: `token_id_RDK = [[[2, 0]]]`, `log_prob_RDK = [[[-0.2, -1.9]]]`.
    """

    token_id_RDK: Tensor  # [R, D, K] int64, distinct within a depth; equal logits: smaller token first
    log_prob_RDK: Tensor  # [R, D, K] float32, at most 0; normalized over the full vocabulary


def top_candidates(logits_RDV: Tensor, num_candidates: int) -> Candidates:
    """The `min(num_candidates, V)` largest logits of each depth; of equal logits the smaller token first.

    Log-probabilities are `logit - logsumexp(all V logits)` in float32. A depth whose normalizer is not
    finite gives -inf, so that trees stay well-formed.

    Raises:
        ConfigError: `num_candidates` is below 1.
        ShapeError: the logits are not [R, D, V] with V >= 1.
    """
    _check(logits_RDV, num_candidates)
    width = min(num_candidates, logits_RDV.shape[2])
    if logits_RDV.numel() == 0:
        empty_RDK = logits_RDV.new_empty((*logits_RDV.shape[:2], width))
        return Candidates(empty_RDK.to(torch.int64), empty_RDK.float())
    token_id_RDK = _token_ids(_largest(logits_RDV, width))
    logit_RDK = logits_RDV.gather(2, token_id_RDK).float()
    return _normalized(token_id_RDK, logit_RDK, _log_normalizer(logits_RDV, logit_RDK[:, :, :1]))


def shard_candidates(logits_RDV: Tensor, num_candidates: int, first_token: int) -> Tensor:
    """What one rank sends of its part of the vocabulary: tokens `first_token` and following, maybe none.

    Returns:
        [R, D, num_candidates + 1] int64: keys of the largest logits, then the bits of the normalizer.

    Raises:
        ConfigError: `num_candidates` is below 1.
        ShapeError: the logits are not [R, D, V].
    """
    # A token of no weight stands for the rows that padding leaves without tokens; its key is never taken.
    is_empty = logits_RDV.ndim == 3 and logits_RDV.shape[2] == 0
    if is_empty:
        logits_RDV = F.pad(logits_RDV, (0, 1), value=-torch.inf)
    _check(logits_RDV, num_candidates)
    key_RDK = _largest(logits_RDV, min(num_candidates, logits_RDV.shape[2]))
    largest_RD1 = _logits(key_RDK[:, :, :1])
    # A shard of masked tokens adds nothing, where a whole vocabulary of them has no law.
    normalizer_RD1 = _log_normalizer(logits_RDV, largest_RD1)
    normalizer_RD1 = torch.where(largest_RD1.isneginf(), largest_RD1, normalizer_RD1)
    bits_RD1 = normalizer_RD1.view(torch.int32).to(torch.int64)
    key_RDK = torch.full_like(key_RDK, NO_KEY) if is_empty else key_RDK - first_token
    key_RDK = F.pad(key_RDK, (0, num_candidates - key_RDK.shape[2]), value=NO_KEY)
    return torch.cat([key_RDK, bits_RD1], dim=2)


def merge_shards(shard_TRDC: Tensor, vocab_size: int) -> Candidates:
    """The candidates of the whole vocabulary, from what all ranks sent.

    Tokens equal those of `top_candidates`; log-probabilities too, but for the rounding of the normalizer,
    which is summed rank by rank.

    Raises:
        ShapeError: the shards are not [T, R, D, K + 1] with K >= 1.
    """
    if shard_TRDC.ndim != 4 or shard_TRDC.shape[3] < 2:
        raise ShapeError(f"shards {tuple(shard_TRDC.shape)}, not [T, R, D, K + 1] with K >= 1")
    key_RDC = shard_TRDC[..., :-1].permute(1, 2, 0, 3).flatten(2)
    key_RDK = key_RDC.topk(min(shard_TRDC.shape[3] - 1, vocab_size), dim=2).values
    normalizer_TRD = shard_TRDC[..., -1].to(torch.int32).view(torch.float32)
    return _normalized(_token_ids(key_RDK), _logits(key_RDK), normalizer_TRD.logsumexp(dim=0)[:, :, None])


def _check(logits_RDV: Tensor, num_candidates: int) -> None:
    if logits_RDV.ndim != 3 or logits_RDV.shape[2] < 1:
        raise ShapeError(f"logits {tuple(logits_RDV.shape)}, not [R, D, V] with V >= 1")
    if num_candidates < 1:
        raise ConfigError("num_candidates", num_candidates, ">= 1")


def _normalized(token_id_RDK: Tensor, logit_RDK: Tensor, normalizer_RD1: Tensor) -> Candidates:
    log_prob_RDK = (logit_RDK - normalizer_RD1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    return Candidates(token_id_RDK, log_prob_RDK.clamp(max=0.0))


def _largest(logits_RDV: Tensor, width: int) -> Tensor:
    """Keys of the largest logits, [R, D, width], falling.

    Only the `width` groups of neighbouring tokens with the largest maxima can hold them: a token of another
    group comes after the maxima of all of these. Maxima are a cheap vector loop, a selection is not.
    """
    vocab, device = logits_RDV.shape[2], logits_RDV.device
    num_groups = vocab // GROUP_SIZE
    if num_groups <= 2 * width:
        return _largest_keys(logits_RDV, torch.arange(vocab, device=device), width)
    whole = num_groups * GROUP_SIZE
    top_RDG = torch.unflatten(logits_RDV[:, :, :whole], 2, (num_groups, GROUP_SIZE)).amax(dim=3)
    group_RDK = _token_ids(_largest_keys(top_RDG, torch.arange(num_groups, device=device), width))
    member = torch.arange(GROUP_SIZE, device=device)
    id_RDC = (group_RDK[:, :, :, None] * GROUP_SIZE + member).flatten(2)
    if whole < vocab:
        rest = torch.arange(whole, vocab, device=device).expand(*id_RDC.shape[:2], -1)
        id_RDC = torch.cat([id_RDC, rest], dim=2)
    return _largest_keys(logits_RDV.gather(2, id_RDC), id_RDC, width)


def _largest_keys(value_RDC: Tensor, id_RDC: Tensor, width: int) -> Tensor:
    """Keys of the largest values, falling; of equal values the smaller id first.

    `torch.topk` promises no order of ties, so value and id become one integer key without ties.
    """
    # Adding 0.0 makes -0.0 and 0.0 one value.
    bits_RDC = _monotone((value_RDC.float() + 0.0).view(torch.int32))
    return ((bits_RDC.to(torch.int64) << 32) - id_RDC).topk(width, dim=2).values


def _monotone(bits: Tensor) -> Tensor:
    """Bits of floats as integers of the same order, and back: the low bits of negative ones are flipped."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _token_ids(key_RDK: Tensor) -> Tensor:
    return (-key_RDK) & LOW_32_BITS


def _logits(key_RDK: Tensor) -> Tensor:
    return _monotone(((key_RDK + _token_ids(key_RDK)) >> 32).to(torch.int32)).view(torch.float32)


def _log_normalizer(logits_RDV: Tensor, largest_RD1: Tensor) -> Tensor:
    """Log of the sum of exponentials over V, [R, D, 1] float32; one depth at a time bounds the copy."""
    total_RD = torch.stack(
        [
            (logits_RDV[:, depth] - largest_RD1[:, depth]).exp_().sum(dim=1)
            for depth in range(logits_RDV.shape[1])
        ],
        dim=1,
    )
    return largest_RD1 + total_RD.log()[:, :, None]
