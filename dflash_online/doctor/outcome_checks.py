"""Server and reference agree, and yet tau is lower than expected: then the drafter is what it is, and why.

    answers to the text, training records, what was expected --> Finding or None
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_online.distill.pack import valid_anchors
from dflash_online.doctor.finding import Finding
from dflash_online.doctor.live_checks import leaked_accuracy
from dflash_online.doctor.served import Reference
from dflash_online.evaluate.tau import EvaluationResult, evaluate_drafter
from dflash_online.wire.record import Record

_CHECK = "tau"
_LEAK_GAIN = 0.15
# A drafter that learned from fewer supervised tokens than this has seen little, whatever its size.
FEW_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class Expectation:
    """What tau should be, and how far below it may lie."""

    tau: float
    source: str
    share: float = 0.9

    def is_met_by(self, tau: float) -> bool:
        """Both over 1, which is what decoding without a drafter commits."""
        return tau - 1 >= self.share * (self.tau - 1)


def check_leak(reference: Reference, records: list[Record]) -> Finding | None:
    """A drafter must not need the anchor's own row: serving never has it."""
    served, leaked = leaked_accuracy(reference, records)
    if leaked - served < _LEAK_GAIN:
        return None
    found = f"top-1 of slot 1 {served:.3f}, with the anchor's own feature {leaked:.3f}"
    return Finding.of("context boundary", "slot 1", found, f"a gain below {_LEAK_GAIN}", 2)


def expected_tau(reference: Reference, given: float | None) -> Expectation | None:
    """What the user says, else what the gate measured when the drafter was published."""
    if given is not None:
        return Expectation(given, "given")
    training = reference.checkpoint.training
    gate = training.gate if training else None
    return Expectation(float(gate["new_tau"]), "the gate at training") if gate else None


def check_outcome(
    reference: Reference, answers: list[Record], records: Sequence[Record], expected: Expectation
) -> Finding | None:
    """Why tau on this text is below the expectation; the first explanation that fits."""
    measured = evaluate_drafter(reference.drafter, reference.frozen, answers, with_slots=False)
    if expected.is_met_by(measured.tau):
        return None
    where, bound = f"{len(answers)} answers", f"{expected.tau:.3f} ({expected.source})"
    if expected.is_met_by(measured.tau_all_anchors):
        found = f"tau {measured.tau:.3f} over rounds, {measured.tau_all_anchors:.3f} over all anchors"
        return Finding.of(_CHECK, where, found, bound, 13)
    on_records = _measure(reference, records)
    if on_records is not None:
        longest = max(len(record.header.token_ids) for record in records)
        short = [_cut(answer, longest) for answer in answers if len(answer.header.token_ids) > longest]
        within = _measure(reference, [record for record in short if record is not None])
        if within is not None and expected.is_met_by(within.tau):
            found = f"tau {measured.tau:.3f}, within the first {longest} tokens {within.tau:.3f}"
            return Finding.of(_CHECK, where, found, bound, 15)
        if expected.is_met_by(on_records.tau):
            found = f"tau {measured.tau:.3f} here, {on_records.tau:.3f} on the training's records"
            return Finding.of(_CHECK, where, found, bound, 9)
    training = reference.checkpoint.training
    seen = training.tokens_seen if training else None
    if seen is not None and seen < FEW_TOKENS:
        return Finding.of(_CHECK, where, f"tau {measured.tau:.3f} after {seen} supervised tokens", bound, 14)
    return Finding.of(_CHECK, where, f"tau {measured.tau:.3f}", bound, 9)


def _measure(reference: Reference, records: Sequence[Record]) -> EvaluationResult | None:
    usable = [r for r in records if r.header.layer_ids == reference.checkpoint.config.target_layer_ids]
    if not usable:
        return None
    return evaluate_drafter(reference.drafter, reference.frozen, usable, with_slots=False)


def _cut(record: Record, num_tokens: int) -> Record | None:
    """The start of a record; None where nothing of the answer is left."""
    header = record.header
    spans = tuple((start, min(end, num_tokens)) for start, end in header.loss_spans if start < num_tokens)
    changed = replace(
        header, token_ids=header.token_ids[:num_tokens], num_rows=num_tokens - 1, loss_spans=spans
    )
    cut = Record(changed, record.features_TF[: num_tokens - 1])
    return cut if spans and len(valid_anchors(cut.loss_mask_T())) else None
