"""Which tokens a penalized request has said, as the worker counts them while the scheduler lags behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dflash_online.tree.draft_tree import chain_trees, root_trees
from server_patches.penalties import Penalties, penalty_of

VOCAB = 6


@dataclass
class Tokenizer:
    eos_token_id: int = 5
    additional_stop_token_ids: set[int] | None = None


@dataclass
class Params:
    """The part of SGLang's sampling parameters that is read."""

    frequency_penalty: float = 1.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: set[int] | None = None


@dataclass
class Request:
    rid: str
    output_ids: list[int]
    sampling_params: Params = field(default_factory=Params)
    eos_token_ids: set[int] | None = None
    tokenizer: Tokenizer = field(default_factory=Tokenizer)


@dataclass
class Info:
    temperatures: torch.Tensor
    vocab_size: int = VOCAB
    acc_additive_penalties: torch.Tensor | None = None
    acc_scaling_penalties: torch.Tensor | None = None


@dataclass
class Batch:
    reqs: list[Request]
    sampling_info: Any = None
    decoding_reqs: list[Request] | None = None


def counts(penalties: Penalties, batch: Batch) -> list[list[float]]:
    """How often each request is held to have said each token: a frequency penalty of 1 shows it."""
    logits_NV = torch.zeros(len(batch.reqs), VOCAB)
    penalties.adjust_nodes(batch, logits_NV, root_trees(torch.zeros(len(batch.reqs), dtype=torch.int64)))
    return (-logits_NV).tolist()


def test_tokens_that_the_scheduler_has_not_seen_are_counted_once() -> None:
    penalties, request = Penalties(), Request("a", [1])
    batch = Batch([request, Request("plain", [1], Params(frequency_penalty=0.0))])
    produced_RP, num_produced_R = torch.tensor([[2, 3, 0], [4, 0, 0]]), torch.tensor([2, 1])
    penalties.remember(batch, produced_RP, num_produced_R)
    # The scheduler lags a step behind, then has caught up.
    assert counts(penalties, batch)[0] == [0, 1, 1, 1, 0, 0]
    request.output_ids = [1, 2, 3]
    assert counts(penalties, batch)[0] == [0, 1, 1, 1, 0, 0]
    assert counts(penalties, batch)[1] == [0] * VOCAB


def test_a_lag_goes_on_over_many_steps() -> None:
    penalties, request = Penalties(), Request("a", [1])
    said, unseen = [1], list[int]()
    for produced in ([2], [3, 3], [4], [0, 0, 0]):
        # The scheduler starts a step before it has seen the tokens of the one before.
        penalties.remember(Batch([request]), torch.tensor([produced]), torch.tensor([len(produced)]))
        request.output_ids = request.output_ids + unseen
        said, unseen = said + produced, produced
        assert counts(penalties, Batch([request]))[0] == [said.count(token) for token in range(VOCAB)]


def test_a_retracted_request_counts_only_what_it_still_has() -> None:
    """Its step in flight is dropped with it, so the remembered tokens were never said."""
    penalties, request = Penalties(), Request("a", [1])
    penalties.remember(Batch([request]), torch.tensor([[2]]), torch.tensor([1]))
    batch = Batch([request], Info(torch.ones(1, 1)))
    penalties.adjust_prefill(batch)
    assert batch.sampling_info.acc_additive_penalties.tolist() == [[0, -1, 0, 0, 0, 0]]


def test_a_mixed_batch_counts_the_newest_token_of_requests_that_decode() -> None:
    penalties, running, fresh = Penalties(), Request("a", [1]), Request("b", [])
    penalties.remember(Batch([running]), torch.tensor([[2]]), torch.tensor([1]))
    batch = Batch([fresh, running], Info(torch.ones(2, 1)), decoding_reqs=[running])
    penalties.adjust_prefill(batch)
    assert batch.sampling_info.acc_additive_penalties.tolist() == [[0] * VOCAB, [0, -1, -1, 0, 0, 0]]


def test_upstreams_stale_terms_are_taken_out_of_a_prefill() -> None:
    info = Info(torch.ones(1, 1), VOCAB, torch.ones(1, VOCAB), torch.ones(1, VOCAB))
    Penalties().adjust_prefill(Batch([Request("a", [], Params(frequency_penalty=0.0))], info))
    assert info.acc_additive_penalties is None
    assert info.acc_scaling_penalties is None


def test_drafts_on_the_path_count_at_their_own_node_and_below() -> None:
    batch = Batch([Request("a", [1])])
    logits_NV = torch.zeros(3, VOCAB)
    trees = chain_trees(torch.tensor([1]), torch.tensor([[1, 4]]))
    Penalties().adjust_nodes(batch, logits_NV, trees)
    assert (-logits_NV).tolist() == [[0, 1, 0, 0, 0, 0], [0, 2, 0, 0, 0, 0], [0, 2, 0, 0, 1, 0]]


def test_every_token_that_could_end_a_request_waits_for_the_minimum() -> None:
    params = Params(min_new_tokens=2, stop_token_ids={3})
    request = Request("a", [], params, eos_token_ids={4}, tokenizer=Tokenizer(5, {2}))
    assert penalty_of(request).ending_token_ids == (2, 3, 4, 5)
