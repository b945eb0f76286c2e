"""PyPI's `dflash` 0.1.0 loads our checkpoint unchanged and gives our logits.

The marker `rival` skips it, by name, where that package is not installed.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import sliding_config, tiny_config, tiny_drafter, tiny_head

from dflash_online.drafter.checkpoint import TrainingInfo, export_tensors, load_checkpoint, save_checkpoint
from dflash_online.drafter.model import DFlashDrafter

pytestmark = pytest.mark.rival("dflash")

_RIVAL = """
import sys
import torch
from safetensors.torch import load_file, save_file
from dflash.model import DFlashDraftModel
folder, inputs, outputs = sys.argv[1:]
given = load_file(inputs)
model = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
head = torch.nn.Linear(given["head"].shape[1], given["head"].shape[0], bias=False)
head.weight.data = given["head"]
with torch.no_grad():
    hidden = model(
        position_ids=torch.arange(given["features"].shape[0] + given["embeds"].shape[0])[None],
        noise_embedding=given["embeds"][None],
        target_hidden=given["features"][None],
    )
    logits = model.compute_logits(hidden, head)[0]
meta = torch.tensor([model.block_size, model.mask_token_id])
save_file({"logits": logits.contiguous(), "meta": meta}, outputs)
"""


@pytest.mark.parametrize("config", [tiny_config(dtype="bfloat16"), tiny_config(), sliding_config(5)])
@pytest.mark.parametrize("num_context", [1, 17])
def test_the_rival_loads_our_folder_and_gives_our_logits(rival, tmp_path, config, num_context):
    tensors = export_tensors(tiny_drafter(config), config)
    save_checkpoint(tmp_path / "v", config, tensors, training=TrainingInfo(number=1))
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_context, config.feature_width, generator=generator)
    head = tiny_head()
    embeds = head.embed(torch.tensor([3] + [config.mask_token_id] * (config.block_size - 1)))
    save_file({"features": features, "embeds": embeds, "head": head.weight_VH}, tmp_path / "in.safetensors")
    rival.run(_RIVAL, tmp_path / "v", tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    theirs = load_file(tmp_path / "out.safetensors")
    drafter = DFlashDrafter.from_tensors(config, load_checkpoint(tmp_path / "v").tensors)
    cache = drafter.new_cache()
    drafter.extend_context(cache, features, torch.arange(num_context))
    ours = head.logits(drafter.draft_block(embeds, num_context, cache))
    torch.testing.assert_close(ours, theirs["logits"], rtol=1e-5, atol=1e-5)
    assert theirs["meta"].tolist() == [config.block_size, config.mask_token_id]
