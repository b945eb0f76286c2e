"""PyPI's `dflash` 0.1.0 loads our folders, those of the published configs too, and computes what we compute.

Several rounds of one text: its context grows by unequal numbers of committed rows, through an incremental
cache and from scratch. All cases go through one process, because starting it takes longer than they do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from published import PUBLISHED, reduced
from safetensors.torch import load_file, save_file
from tiny_models import sliding_config, tiny_config, tiny_drafter
from torch import Tensor

from dflash_online.drafter.checkpoint import TrainingInfo, export_tensors, load_checkpoint, save_checkpoint
from dflash_online.drafter.config import DrafterConfig
from dflash_online.drafter.hf_config import config_from_json
from dflash_online.drafter.model import DFlashDrafter
from tests.rival import Rival

# Positions at which the rounds start. In the long text the window of Qwen3.6 begins to hide rows: 2048.
SHORT, LONG = (1, 4, 17), (2040, 2044, 2060)
CASES: dict[str, tuple[DrafterConfig, tuple[int, ...]]] = {
    "tiny": (tiny_config(dtype="bfloat16"), SHORT),
    "tiny with a window of 5": (sliding_config(5), SHORT),
}
for name, fields in PUBLISHED.items():
    CASES[name] = config_from_json(reduced(fields)), LONG if fields.get("use_sliding_window") else SHORT

_RIVAL = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from dflash.model import DFlashDraftModel, _crop_to, _make_cache

for folder in map(Path, sys.argv[1:]):
    given = load_file(folder / "in.safetensors")
    features, embeds, starts = given["features"][None], given["embeds"], given["starts"].tolist()
    model = DFlashDraftModel.from_pretrained(folder / "v", dtype=torch.float32).eval()
    outputs, cache, before = {"scratch": [], "cached": []}, _make_cache(model.config), 0
    for start, embed in zip(starts, embeds[:, None], strict=True):
        end = start + embed.shape[1]
        with torch.no_grad():
            scratch = model(
                position_ids=torch.arange(end)[None],
                noise_embedding=embed,
                target_hidden=features[:, :start],
            )
            cached = model(
                position_ids=torch.arange(before, end)[None],
                noise_embedding=embed,
                target_hidden=features[:, before:start],
                past_key_values=cache,
                use_cache=True,
            )
        _crop_to(cache, start)
        before = start
        outputs["scratch"].append(scratch[0])
        outputs["cached"].append(cached[0])
    stacked = {name: torch.stack(rows) for name, rows in outputs.items()}
    meta = torch.tensor([model.block_size, model.mask_token_id, *model.target_layer_ids])
    save_file(stacked | {"meta": meta}, folder / "out.safetensors")
"""

pytestmark = pytest.mark.rival("dflash")


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, Path]:
    """A folder per case: the drafter in `v`, what goes in, what came out of the rival."""
    folders = {}
    for seed, (name, (config, starts)) in enumerate(CASES.items()):
        folder = folders[name] = tmp_path_factory.mktemp("case")
        drafter = tiny_drafter(config, seed=seed)
        with torch.no_grad():
            for bias in (p for n, p in drafter.named_parameters() if n.endswith(".bias")):
                bias.normal_(generator=torch.Generator().manual_seed(seed))
        tensors = export_tensors(drafter, config)
        save_checkpoint(folder / "v", config, tensors, training=TrainingInfo(number=1))
        generator = torch.Generator().manual_seed(seed)
        given = {
            "features": torch.randn(starts[-1], config.feature_width, generator=generator),
            "embeds": torch.randn(len(starts), config.block_size, config.hidden_size, generator=generator),
            "starts": torch.tensor(starts),
        }
        save_file(given, folder / "in.safetensors")
    Rival.named("dflash").run(_RIVAL, *folders.values())
    return folders


def our_hidden_states(folder: Path) -> dict[str, Tensor]:
    """[rounds, B, H] by an incremental cache, and from scratch."""
    checkpoint, given = load_checkpoint(folder / "v"), load_file(folder / "in.safetensors")
    drafter = DFlashDrafter.from_tensors(checkpoint.config, checkpoint.tensors)
    cache, outputs = drafter.new_cache(), {"scratch": [], "cached": []}
    before = 0
    for start, embeds in zip(given["starts"].tolist(), given["embeds"], strict=True):
        drafter.extend_context(cache, given["features"][before:start], torch.arange(before, start))
        outputs["cached"].append(drafter.draft_block(embeds, start, cache))
        fresh = drafter.new_cache()
        drafter.extend_context(fresh, given["features"][:start], torch.arange(start))
        outputs["scratch"].append(drafter.draft_block(embeds, start, fresh))
        before = start
    return {name: torch.stack(rows) for name, rows in outputs.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_rival_loads_our_folder_and_computes_what_we_compute(cases, name):
    config, _ = CASES[name]
    theirs, ours = load_file(cases[name] / "out.safetensors"), our_hidden_states(cases[name])
    for way in ("scratch", "cached"):
        torch.testing.assert_close(ours[way], theirs[way], rtol=1e-5, atol=1e-5)
    assert theirs["meta"].tolist() == [config.block_size, config.mask_token_id, *config.target_layer_ids]


def test_the_cases_cover_what_the_published_configs_differ_in():
    configs = [config for config, _ in CASES.values()]
    assert {config.yarn is not None for config in configs} == {True, False}
    assert {config.attention_bias for config in configs} == {True, False}
    assert {config.num_layers == len(config.target_layer_ids) for config in configs} == {True, False}
    window = {name: config.sliding_window for name, (config, _) in CASES.items() if config.sliding_window}
    assert window == {"tiny with a window of 5": 5, "Qwen3.6-27B": 2048}
