"""Penalties on what a request has said already, exact at every node of a draft tree.

    output so far + path to the node --counts--> PenaltyTerms --added, then divided--> logits of the node

Plain decoding penalizes each token by all output before it. At a tree node "before it" is the output so far
and the drafts from the root to the node, so each node has counts of its own. Used by the worker that
verifies; knows nothing of SGLang.

Shape letters: N = nodes, V = vocabulary, T = tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalty:
    """A request's penalties, in the meaning of the OpenAI API; the defaults do nothing."""

    frequency: float = 0.0
    """Subtracted from a token's logit for each time it was said."""
    presence: float = 0.0
    """Subtracted once it was said at all."""
    repetition: float = 1.0
    """Divides a positive logit, multiplies a negative one, once it was said at all."""
    min_new_tokens: int = 0
    """Output tokens before which the ending tokens are excluded."""
    ending_token_ids: tuple[int, ...] = ()
    """Tokens that would end the request; only looked at for `min_new_tokens`."""

    @property
    def is_neutral(self) -> bool:
        return not (self.frequency or self.presence or self.min_new_tokens) and self.repetition == 1.0


@dataclass(frozen=True, slots=True)
class PenaltyTerms:
    """What a penalty does to logits: first an addition, then a scaling."""

    additive_NV: torch.Tensor  # [N, V] float32, -inf where excluded
    scaling_NV: torch.Tensor  # [N, V] float32, >= 0

    def apply(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """The penalized logits, in the dtype of `logits_NV`."""
        moved_NV = logits_NV.float() + self.additive_NV
        return torch.where(moved_NV < 0, moved_NV * self.scaling_NV, moved_NV / self.scaling_NV).to(
            logits_NV.dtype
        )


def penalty_terms(
    penalty: Penalty,
    output_id_T: torch.Tensor,
    path_id_N: torch.Tensor,
    is_on_path_NN: torch.Tensor,
    vocab_size: int,
) -> PenaltyTerms:
    """Terms at every node of one request's tree.

    Args:
        output_id_T: [T] int64, output committed so far, the root's token included, the prompt not.
        path_id_N: [N] int64, token of each node.
        is_on_path_NN: [N, N] bool, row n marks the drafts from the root to n, n included, the root not.
            A single row of one False is the root alone.
    """
    counts_NV = torch.bincount(output_id_T, minlength=vocab_size).float().repeat(len(path_id_N), 1)
    counts_NV.scatter_add_(1, path_id_N.expand(len(path_id_N), -1), is_on_path_NN.float())
    is_said_NV = counts_NV > 0
    additive_NV = -(penalty.frequency * counts_NV + penalty.presence * is_said_NV)
    ending = [token for token in penalty.ending_token_ids if 0 <= token < vocab_size]
    if penalty.min_new_tokens and ending:
        num_output_N = len(output_id_T) + is_on_path_NN.sum(dim=1)
        is_early_N1 = (num_output_N < penalty.min_new_tokens)[:, None]
        additive_NV[:, ending] = additive_NV[:, ending].masked_fill(is_early_N1, float("-inf"))
    scaling_NV = torch.ones_like(counts_NV).masked_fill_(is_said_NV, penalty.repetition)
    return PenaltyTerms(additive_NV, scaling_NV)
