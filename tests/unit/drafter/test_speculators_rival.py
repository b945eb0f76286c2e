"""speculators 0.9.0 loads what we convert and computes what we compute, and we read what it saves itself.

Its model only has a training pass: blocks at the anchors that a loss mask marks, over one text. Its window of
a sliding layer counts from the anchor, ours and z-lab's from each slot, so that the two agree while no row is
out of the window; the test stays there.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import (
    VOCAB,
    sliding_config,
    tiny_config,
    tiny_drafter,
    tiny_head,
    write_target_folder,
)

from dflash_online.drafter.checkpoint import TrainingInfo, export_tensors, load_checkpoint, save_checkpoint
from dflash_online.drafter.convert import convert_checkpoint
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.drafter.speculators import Layout
from tests.rival import Rival

NUM_ROWS, ANCHORS = 20, (0, 3, 4, 11)
CASES = {
    "full": tiny_config(dtype="bfloat16"),
    "sliding": sliding_config(64),
    "biased": tiny_config(attention_bias=True, num_layers=3, layer_types=()),
}

_RIVAL = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig

for folder in map(Path, sys.argv[1:]):
    config = SpeculatorModelConfig.from_pretrained(folder / "theirs")
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder / "theirs", config=config, dtype=torch.float32).eval()
    given = load_file(folder / "in.safetensors")
    model.embed_tokens.weight.data = given["embedding"]
    model.lm_head.weight.data = model.verifier_lm_head.weight.data = given["head"]
    num_rows, anchors = len(given["token_ids"]), given["anchors"]
    loss_mask = torch.zeros(1, num_rows)
    loss_mask[0, anchors] = 1
    with torch.no_grad():
        hidden, logits, *_ = model._backbone_forward(
            hidden_states=given["features"][None],
            input_ids=given["token_ids"][None],
            loss_mask=loss_mask,
            verifier_last_hidden_states=torch.zeros(1, num_rows, config.transformer_layer_config.hidden_size),
            document_ids=torch.zeros(1, num_rows, dtype=torch.long),
            max_anchors=len(anchors),
        )
    meta = torch.tensor([model.block_size, model.mask_token_id, *model.target_layer_ids])
    save_file({"logits": logits[0].contiguous(), "meta": meta}, folder / "out.safetensors")
    model.to(torch.bfloat16).save_pretrained(folder / "saved")
"""

pytestmark = pytest.mark.rival("speculators")


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, Path]:
    """A folder per case: ours in `ours`, converted in `theirs`, saved by the rival in `saved`."""
    folders = {}
    head, generator = tiny_head(), torch.Generator().manual_seed(0)
    for name, config in CASES.items():
        folder = folders[name] = tmp_path_factory.mktemp(name)
        tensors = export_tensors(tiny_drafter(config), config)
        save_checkpoint(folder / "ours", config, tensors, training=TrainingInfo(number=1))
        convert_checkpoint(folder / "ours", folder / "theirs", Layout.SPECULATORS)
        given = {
            "features": torch.randn(NUM_ROWS, config.feature_width, generator=generator),
            "token_ids": torch.randint(VOCAB - 1, (NUM_ROWS,), generator=generator),
            "anchors": torch.tensor(ANCHORS),
            "embedding": head.embedding_VH,
            "head": head.weight_VH,
        }
        save_file(given, folder / "in.safetensors")
    Rival.named("speculators").run(_RIVAL, *folders.values())
    return folders


@pytest.mark.parametrize("name", CASES)
def test_the_rival_loads_our_export_and_gives_our_logits(cases, name):
    config, folder, head = CASES[name], cases[name], tiny_head()
    given, theirs = load_file(folder / "in.safetensors"), load_file(folder / "out.safetensors")
    drafter = DFlashDrafter.from_tensors(config, load_checkpoint(folder / "ours").tensors)
    ours = []
    for anchor in ANCHORS:
        cache = drafter.new_cache()
        drafter.extend_context(cache, given["features"][:anchor], torch.arange(anchor))
        masks = [config.mask_token_id] * config.num_drafts
        embeds = head.embed(torch.tensor([int(given["token_ids"][anchor]), *masks]))
        ours.append(head.logits(drafter.draft_block(embeds, anchor, cache)))
    torch.testing.assert_close(torch.cat(ours), theirs["logits"], rtol=1e-5, atol=1e-5)
    shifted = [layer_id + 1 for layer_id in config.target_layer_ids]
    assert theirs["meta"].tolist() == [config.block_size, config.mask_token_id, *shifted]


@pytest.mark.parametrize("name", CASES)
def test_we_read_what_the_rival_saves_and_it_is_the_same_drafter(cases, name, tmp_path):
    saved = cases[name] / "saved"
    fields = json.loads((saved / "config.json").read_text())
    fields.pop("num_target_layers")  # ours: a folder that began there lacks it
    (saved / "config.json").write_text(json.dumps(fields))
    target = write_target_folder(tmp_path / "target", {"x": torch.ones(1)})
    convert_checkpoint(saved, tmp_path / "back", Layout.ZLAB, target=target)
    back, ours = load_checkpoint(tmp_path / "back"), load_checkpoint(cases[name] / "ours")
    assert back.config == dataclasses.replace(CASES[name], dtype="bfloat16")
    assert back.tensors.keys() == ours.tensors.keys()
    for tensor_name, tensor in back.tensors.items():
        assert torch.equal(tensor, ours.tensors[tensor_name].bfloat16()), tensor_name
