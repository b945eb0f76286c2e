"""Warm start with another number of layers: added ones change nothing, dropped ones are the last."""

from __future__ import annotations

import torch
from tiny_models import sliding_config, tiny_drafter, tiny_head

from dflash_online.drafter.checkpoint import TrainingInfo, export_tensors, save_checkpoint
from dflash_online.drafter.init import warm_start


def test_added_layers_leave_hidden_states_and_dropped_layers_are_the_last(tmp_path):
    config = sliding_config(5)
    drafter = tiny_drafter(config)
    save_checkpoint(tmp_path / "v", config, export_tensors(drafter, config), training=TrainingInfo(number=1))
    embeds, features = tiny_head().embed(torch.tensor([3, 36, 36, 36])), torch.randn(7, config.feature_width)
    hidden = []
    for model in (drafter, warm_start(tmp_path / "v", num_layers=4)):
        cache = model.new_cache()
        model.extend_context(cache, features, torch.arange(7))
        hidden.append(model.draft_block(embeds, 7, cache))
    assert torch.equal(*hidden)
    fewer = warm_start(tmp_path / "v", num_layers=1)
    assert fewer.config.layer_types == config.layer_types[:1]
    assert all(torch.equal(t, drafter.state_dict()[n]) for n, t in fewer.state_dict().items())
