"""One text through the server and through the same weights here, from the target's layers to accepted drafts.

Each check returns a Finding, or None where both agree. A difference is told apart by what it would look
like: the features of a neighbouring layer, keys of the right length and another direction, an output before
the norm. Errors are relative: the norm of the difference over the norm of what is right.

Shape letters: C = context rows, F = feature width, H = hidden size, B = slots of a block.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dflash_online.distill.pack import all_blocks, valid_anchors
from dflash_online.doctor.finding import Finding
from dflash_online.doctor.served import Block, Reference
from dflash_online.evaluate.harness import Harness
from dflash_online.wire.record import Record

# bfloat16 rounds by 2^-9; features travel in it. A server that computes in it is farther off after many
# layers.
FEATURE_BOUND = {"float32": 0.01, "bfloat16": 0.08, "float16": 0.03}
DRAFTER_BOUND = {"float32": 0.01, "bfloat16": 0.08, "float16": 0.03}
_FAR = 0.5
_FLOAT16_MAX = 65504.0


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|; infinite where something is not finite."""
    if not found.isfinite().all():
        return float("inf")
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-12))


def check_features(reference: Reference, record: Record, dtype: str) -> Finding | None:
    """Layer by layer, in the order of depth."""
    check, ids = "features", reference.checkpoint.config.target_layer_ids
    bound, hidden = FEATURE_BOUND.get(dtype, 0.08), reference.checkpoint.config.hidden_size
    token_ids = record.header.token_ids[:-1]
    wanted_CF = reference.target.features(token_ids)
    for index, layer_id in sorted(enumerate(ids), key=lambda pair: pair[1]):
        columns = slice(index * hidden, (index + 1) * hidden)
        found_CH, where = record.features_TF[:, columns], f"layer {layer_id}"
        if not found_CH.isfinite().all() or found_CH.float().abs().max() >= _FLOAT16_MAX:
            return Finding.of(check, where, f"largest value {found_CH.abs().max():g}", "finite, in range", 11)
        error = relative_error(found_CH, wanted_CF[:, columns])
        if error <= bound:
            continue
        for other in (layer_id - 1, layer_id + 1):
            if 0 <= other < reference.target.num_layers:
                near = relative_error(found_CH, reference.target.features(token_ids, (other,)))
                if near <= bound:
                    return Finding.of(check, where, f"the output of layer {other}", f"that of {layer_id}", 1)
        cause = 7 if error > _FAR else 10
        return Finding.of(check, where, f"relative error {error:.3g}", f"{bound:g}", cause)
    return None


def check_context_keys(served: dict[str, Tensor], local: Block, dtype: str) -> Finding | None:
    """Keys of every draft layer, as its attention reads them."""
    check, bound = "context keys", DRAFTER_BOUND.get(dtype, 0.08)
    found_LCKE, wanted_LCKE = served["context_key_LCKE"], local.context_key_LCKE
    if found_LCKE.shape != wanted_LCKE.shape:
        return Finding.of(check, "shape", tuple(found_LCKE.shape), tuple(wanted_LCKE.shape), 12)
    for layer, (found_CKE, wanted_CKE) in enumerate(zip(found_LCKE, wanted_LCKE, strict=True)):
        error = relative_error(found_CKE, wanted_CKE)
        if error <= bound:
            continue
        where = f"draft layer {layer}"
        if not found_CKE.isfinite().all():
            return Finding.of(check, where, "values that are not finite", "finite", 11)
        # A rotation turns a key and keeps its length.
        length_error = relative_error(found_CKE.norm(dim=-1), wanted_CKE.norm(dim=-1))
        cause = 5 if length_error <= bound else 12
        found = f"relative error {error:.3g}, of the keys' lengths {length_error:.3g}"
        return Finding.of(check, where, found, f"{bound:g}", cause)
    return None


def check_block(
    reference: Reference, features_CF: Tensor, served: dict[str, Tensor], local: Block, dtype: str
) -> Finding | None:
    """Logits of the block, slot by slot, by the target's head from the served output."""
    check, bound = "block logits", DRAFTER_BOUND.get(dtype, 0.08)
    found_BH = served["hidden_BH"]
    found_BV, wanted_BV = reference.frozen.logits(found_BH), reference.frozen.logits(local.hidden_BH)
    errors = [relative_error(found, wanted) for found, wanted in zip(found_BV, wanted_BV, strict=True)]
    slot = next((index for index, error in enumerate(errors) if error > bound), None)
    if slot is None:
        return None
    where, found = f"slot {slot}", f"relative error {errors[slot]:.3g}"
    if not found_BH.isfinite().all():
        return Finding.of(check, where, "values that are not finite", "finite", 11)
    if relative_error(found_BH, local.unnormed_BH) <= bound:
        return Finding.of(check, where, found + ", equal to the output before the norm", f"{bound:g}", 3)
    for name, drafter in reference.with_other_layer_types(len(features_CF)):
        other = reference.block(features_CF, served["block_id_B"], drafter)
        if relative_error(found_BH, other.hidden_BH) <= bound:
            return Finding.of(check, where, f"{found}, equal to {name}", f"{bound:g}", 4)
    return Finding.of(check, where, found, f"{bound:g}", 6)


def check_accepted(reference: Reference, records: list[Record], policy: str) -> Finding | None:
    """Rounds of each answer by accepted drafts: as the server counted, and as its own weights would.

    Args:
        policy: `chain` or `tree:16`; the tree is that of the best nodes, compared by what it accepts.
    """
    kind, _, num_nodes = policy.partition(":")
    harness = Harness(reference.drafter, reference.frozen, num_nodes=[int(num_nodes)] if num_nodes else [])
    reading = f"ddtree_nodes_{num_nodes}" if kind == "tree" else "chain"
    for record in records:
        if not harness.add(record):
            continue
        wanted = list(harness.report.histograms[reading][-1])
        found = [*record.header.acceptance, *[0] * (len(wanted) - len(record.header.acceptance))]
        if _moved(found, wanted) > _tolerated_rounds(sum(wanted)):
            return Finding.of(f"accepted drafts ({policy})", record.header.record_id, found, wanted, 6)
    return None


def _moved(found: list[int], wanted: list[int]) -> int:
    return sum(abs(a - b) for a, b in zip(found, wanted, strict=True)) // 2


def _tolerated_rounds(num_rounds: int) -> int:
    """A near-tie that falls the other way moves a round or two; a wrong head moves most."""
    return max(2, num_rounds // 5)


@torch.no_grad()
def leaked_accuracy(reference: Reference, records: list[Record]) -> tuple[float, float]:
    """Top-1 accuracy of slot 1 over all anchors: as served, and with the anchor's own row in the context."""
    drafter, frozen, right, total = reference.drafter, reference.frozen, [0, 0], 0
    for record in records:
        anchor_A = valid_anchors(record.loss_mask_T())
        # The last row of features belongs to the token before the last.
        anchor_A = anchor_A[anchor_A < len(record.features_TF)]
        if not len(anchor_A):
            continue
        batch = all_blocks(record, anchor_A, drafter.config.block_size)
        mask = batch.mask(drafter.config.sliding_window)
        id_AB = torch.full_like(batch.label_AB, drafter.config.mask_token_id)
        id_AB[:, 0] = batch.anchor_token_A
        for index, seen in enumerate((mask, replace(mask, anchor_position_A=mask.anchor_position_A + 1))):
            hidden_ABH = drafter.forward_blocks(
                frozen.embed(id_AB),
                drafter.context(batch.features_SF),
                block_positions_AB=batch.block_position_AB,
                ctx_positions_S=batch.context_position_S,
                mask=seen,
            )
            draft_A = frozen.logits(hidden_ABH[:, 1]).argmax(-1)
            right[index] += int((draft_A == batch.label_AB[:, 1])[batch.valid_AB[:, 1]].sum())
        total += int(batch.valid_AB[:, 1].sum())
    return right[0] / max(total, 1), right[1] / max(total, 1)
