"""Loss and gradients against SpecForge 0.2.0 and speculators 0.9.0: same weights, same record, float32.

The marker `rival` skips by name what is not installed (`make rivals`). Each rival runs once, in a process of
its own, over all cases, on eager attention; every parameter's gradient is compared. What is not equal is a
line of the DFlash specification, C.2 to C.5: which anchors are taken, and what the sum is divided by.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import HIDDEN, VOCAB, sliding_config, tiny_config, tiny_drafter, tiny_head, tiny_record

from dflash_online.distill.objective import block_objective
from dflash_online.distill.pack import all_blocks, valid_anchors
from dflash_online.distill.recipe import Recipe
from dflash_online.drafter.checkpoint import TrainingInfo, export_tensors, save_checkpoint
from dflash_online.drafter.convert import convert_checkpoint
from dflash_online.drafter.speculators import Layout
from tests.rival import Rival

RECORD = tiny_record(26, ((5, 14), (17, 26)), seed=3)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}

_SPECFORGE = """
import json, sys, torch
from safetensors.torch import load_file, save_file
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.modeling.draft.dflash import DFlashDraftModel
given = load_file(sys.argv[1] + "/in")
for folder, outputs, options in json.loads(sys.argv[2]):
    draft = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    head = torch.nn.Linear(given["head"].shape[1], given["head"].shape[0], bias=False)
    head.weight.data = given["head"]
    embed = torch.nn.Embedding.from_pretrained(given["embedding"])
    model = OnlineDFlashModel(
        draft, head, embed, draft.mask_token_id, block_size=draft.block_size, attention_backend="eager",
        num_anchors=512, **options,
    )
    loss, _, metrics = model(given["tokens"][None], given["features"][None], given["mask"][None])
    loss.backward()
    found = {name: p.grad for name, p in draft.named_parameters()}
    save_file(found | {"loss": loss.detach().view(1)}, outputs)
"""

_SPECULATORS = """
import json, sys, torch
from safetensors.torch import load_file, save_file
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
given = load_file(sys.argv[1] + "/in")
for folder, outputs, options in json.loads(sys.argv[2]):
    config = DFlashSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = DFlashDraftModel(config).float()
    missing, unexpected = model.load_state_dict(load_file(folder + "/model.safetensors"), strict=False)
    assert not unexpected, unexpected
    frozen = {"embed_tokens": "embedding", "verifier_norm": "norm"}
    frozen |= {"lm_head": "head", "verifier_lm_head": "head"}
    assert {name.removesuffix(".weight") for name in missing} <= set(frozen), missing
    for name, key in frozen.items():
        getattr(model, name).weight = torch.nn.Parameter(given[key], requires_grad=False)
    _, loss, _ = model(
        given["features"][None], given["tokens"][None], given["mask"][None], given["deepest"][None],
        document_ids=torch.zeros(1, len(given["tokens"]), dtype=torch.long), max_anchors=len(given["tokens"]),
        loss_config=resolve_loss_config(options.pop("loss_fn"), "eager"), **options,
    )
    loss.sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    save_file(found | {"loss": loss.detach().view(1)}, outputs)
"""


def inputs(path):
    """The record, the frozen tensors, and features with a last row that no block sees."""
    head = dataclasses.replace(tiny_head(), final_norm_H=torch.linspace(0.5, 1.5, HIDDEN))
    features = RECORD.features_TF.float()
    features = torch.cat([features, torch.full((1, 2 * HIDDEN), 7.0)])
    given = {
        "tokens": torch.tensor(RECORD.header.token_ids),
        "mask": RECORD.loss_mask_T().long(),
        "features": features,
        "deepest": features[:, HIDDEN:].contiguous(),
        "embedding": head.embedding_VH,
        "head": head.weight_VH,
        "norm": head.final_norm_H,
    }
    save_file(given, path)
    return head


def ours(drafter, head, recipe, anchors, *, per_batch=False):
    batch = all_blocks(RECORD, anchors, drafter.config.block_size)
    batch = dataclasses.replace(batch, features_SF=batch.features_SF.float())
    result = block_objective(drafter, head, batch, recipe)
    loss = result.loss_sum / (1.0 if per_batch else result.denominator)
    loss.backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters()}
    return loss.detach(), gradients


def assert_equal(theirs, loss, gradients):
    theirs = dict(theirs)
    torch.testing.assert_close(loss, theirs.pop("loss")[0], **TOLERANCE)
    assert set(theirs) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs[name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


# Case to config, our recipe, their options. Their D-PACE divides by the number of sequences (C.5), one here.
SPECFORGE_CASES = {
    f"{attention} {name}": (config, recipe, options)
    for attention, config in (("full", tiny_config()), ("sliding", sliding_config(6)))
    for name, recipe, options in (
        ("decay", Recipe(name="tokens", gamma=3.0), {"loss_decay_gamma": 3.0}),
        ("dpace", Recipe(name="dpace", weighting="dpace"), {"loss_type": "dpace", "dpace_alpha": 0.5}),
    )
}
VERIFIER = Recipe(name="x", label_source="verifier", denominator="slots", gamma=3.0)
SPECULATORS_CASES = {
    "ce": (tiny_config(), VERIFIER, {"loss_fn": "ce", "gamma": 3.0}),
    "kl": (tiny_config(), dataclasses.replace(VERIFIER, kl_share=1.0), {"loss_fn": "kl_div", "gamma": 3.0}),
    "dpace": (
        tiny_config(),
        dataclasses.replace(VERIFIER, weighting="dpace"),
        {"loss_fn": "ce", "per_position_loss_weight": "dpace"},
    ),
}


def run_cases(name, script, cases, folder, layout):
    """What the rival finds in each case: loss and gradients."""
    inputs(folder / "in")
    arguments = []
    for case, (config, _, options) in cases.items():
        made = folder / case
        save_checkpoint(
            made, config, export_tensors(tiny_drafter(config), config), training=TrainingInfo(number=1)
        )
        if layout is Layout.SPECULATORS:
            convert_checkpoint(made, folder / f"{case} converted", layout)
            made = folder / f"{case} converted"
        arguments.append([str(made), str(folder / f"{case}.out"), options])
    Rival.named(name).run(script, folder, json.dumps(arguments))
    return {case: load_file(folder / f"{case}.out") for case in cases}


@pytest.fixture(scope="module")
def specforge(tmp_path_factory):
    return run_cases(
        "specforge", _SPECFORGE, SPECFORGE_CASES, tmp_path_factory.mktemp("specforge"), Layout.ZLAB
    )


@pytest.fixture(scope="module")
def speculators(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculators")
    return run_cases("speculators", _SPECULATORS, SPECULATORS_CASES, folder, Layout.SPECULATORS)


@pytest.mark.rival("specforge")
@pytest.mark.parametrize("case", SPECFORGE_CASES)
def test_tokens_loss_and_gradients_are_those_of_specforge(specforge, tmp_path, case):
    config, recipe, _ = SPECFORGE_CASES[case]
    head, anchors = inputs(tmp_path / "in"), valid_anchors(RECORD.loss_mask_T())
    per_batch = recipe.weighting == "dpace"
    assert_equal(specforge[case], *ours(tiny_drafter(config), head, recipe, anchors, per_batch=per_batch))


@pytest.mark.rival("speculators")
@pytest.mark.parametrize("case", SPECULATORS_CASES)
def test_verifier_loss_and_gradients_are_those_of_speculators(speculators, tmp_path, case):
    config, recipe, _ = SPECULATORS_CASES[case]
    # Their anchors: supervised, and not among the last block of the sequence (C.2).
    anchors = RECORD.loss_mask_T()[: -config.block_size].nonzero().flatten()
    assert_equal(speculators[case], *ours(tiny_drafter(config), inputs(tmp_path / "in"), recipe, anchors))


def test_the_record_has_blocks_that_are_cut_and_blocks_that_are_whole():
    batch = all_blocks(RECORD, valid_anchors(RECORD.loss_mask_T()), 4)
    slots = batch.valid_AB.sum(dim=1)
    assert set(slots.tolist()) == {1, 2, 3}
    assert VOCAB > int(batch.label_AB.max())
