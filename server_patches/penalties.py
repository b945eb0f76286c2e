"""Penalties in our worker: SGLang's own are kept for plain decoding and never reach a verify step.

    batch.reqs --parameters, output so far--> PenaltyTerms --> verify logits, or a prefill's sampling info

Why: upstream counts output tokens in the decode preparation that DFLASH does not pass, so a penalized request
would be decoded without penalties, and with `min_new_tokens` would never end. Here the counts are taken from
the request's own output at every step; with overlapped scheduling the scheduler has not yet seen the newest
tokens, which are then remembered from the step before. Reading them waits for the device, only in steps with
a penalized request. Part of the worker, on every TP rank.

Shape letters: R = requests, N = nodes, P = path, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from dflash_online.tree.draft_tree import DraftTrees, visibility
from dflash_online.tree.penalty import Penalty, PenaltyTerms, penalty_terms


def penalty_of(request: Any) -> Penalty:
    """The request's penalties; a neutral value when it asks for none."""
    params = request.sampling_params
    if not params.min_new_tokens:
        ending: set[int] = set()
    else:
        tokenizer = request.tokenizer
        ending = {
            *(params.stop_token_ids or ()),
            *(request.eos_token_ids or ()),
            *(getattr(tokenizer, "additional_stop_token_ids", None) or ()),
        }
        if getattr(tokenizer, "eos_token_id", None) is not None:
            ending.add(tokenizer.eos_token_id)
    return Penalty(
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        repetition=params.repetition_penalty,
        min_new_tokens=params.min_new_tokens,
        ending_token_ids=tuple(sorted(ending)),
    )


class Penalties:
    """The penalties of one worker's batches. Holds the newest tokens of penalized requests of one step."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, list[int]]] = {}
        """Request id -> output tokens before its last step, and the tokens of that step."""

    def adjust_prefill(self, batch: Any) -> None:
        """Put exact terms into the sampling info of a prefill, chunk or mixed batch, which lasts one step."""
        info = batch.sampling_info
        if info is None:
            return
        # A mixed batch also holds requests that are decoding; only their newest tokens may be missing.
        decoding = {request.rid for request in batch.decoding_reqs or ()}
        rows: dict[int, PenaltyTerms] = {}
        for index, request in enumerate(batch.reqs):
            if request.rid not in decoding:
                # Retracted, maybe with a step in flight whose tokens were then dropped.
                self._newest.pop(request.rid, None)
            penalty = penalty_of(request)
            if not penalty.is_neutral:
                output = self._output(request)
                rows[index] = _root_terms(penalty, output, info.vocab_size, info.temperatures.device)
        info.acc_additive_penalties = info.acc_scaling_penalties = None
        if rows:
            shape = (len(batch.reqs), info.vocab_size)
            info.acc_additive_penalties = torch.zeros(shape, device=info.temperatures.device)
            info.acc_scaling_penalties = torch.ones(shape, device=info.temperatures.device)
            for index, terms in rows.items():
                info.acc_additive_penalties[index] = terms.additive_NV[0]
                info.acc_scaling_penalties[index] = terms.scaling_NV[0]

    def adjust_nodes(self, batch: Any, logits_NV: torch.Tensor, trees: DraftTrees) -> None:
        """Penalize verify logits in place. logits_NV: [R*N, V], any float type."""
        penalties = {i: p for i, r in enumerate(batch.reqs) if not (p := penalty_of(r)).is_neutral}
        if not penalties:
            return
        logits_RNV = logits_NV.view(len(batch.reqs), trees.num_nodes, -1)
        is_on_path_RNN = visibility(trees)
        # The root is the last token of the output, already counted there.
        is_on_path_RNN[:, :, 0] = False
        for index, penalty in penalties.items():
            terms = penalty_terms(
                penalty,
                torch.tensor(self._output(batch.reqs[index]), dtype=torch.int64, device=logits_NV.device),
                trees.token_id_RN[index],
                is_on_path_RNN[index],
                logits_NV.shape[-1],
            )
            logits_RNV[index] = terms.apply(logits_RNV[index])

    def remember(self, batch: Any, produced_RP: torch.Tensor, num_produced_R: torch.Tensor | None) -> None:
        """Keep the tokens of this step for the next one.

        Args:
            produced_RP: [R, P] tokens, padded; num_produced_R: [R] how many are real, None: one each.
        """
        penalized = [i for i, r in enumerate(batch.reqs) if not penalty_of(r).is_neutral]
        if not penalized:
            self._newest = {}
            return
        produced = produced_RP.tolist()
        counts = [1] * len(produced) if num_produced_R is None else num_produced_R.tolist()
        self._newest = {
            batch.reqs[i].rid: (len(self._output(batch.reqs[i])), produced[i][: counts[i]]) for i in penalized
        }

    def _output(self, request: Any) -> list[int]:
        """Output tokens of a decoding request, those that the scheduler has not yet seen included."""
        output = list(request.output_ids)
        start, tokens = self._newest.get(request.rid, (-1, []))
        return output + tokens if start == len(output) else output


def _root_terms(penalty: Penalty, output: list[int], vocab_size: int, device: torch.device) -> PenaltyTerms:
    """Terms of a single node without drafts before it."""
    return penalty_terms(
        penalty,
        torch.tensor(output, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.zeros(1, 1, dtype=torch.bool, device=device),
        vocab_size,
    )
