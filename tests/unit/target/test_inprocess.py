"""A target in this process: features are those of the hooked layers, answers are greedy, bad layers are
named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_online.errors import ConfigError
from dflash_online.target.inprocess import InProcessTarget
from dflash_online.wire.record import RecordSource

EOS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=37,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    path = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@torch.no_grad()
def test_features_are_outputs_of_the_hooked_layers_and_the_answer_is_greedy(folder: Path) -> None:
    target = InProcessTarget.from_folder(folder, (3, 1))
    record = target.capture([7, 8, 9], record_id="a", max_new_tokens=12)
    ids, header = record.header.token_ids, record.header
    model = LlamaForCausalLM.from_pretrained(folder)
    output = model(torch.tensor([ids[:-1]]), output_hidden_states=True)
    assert ids[3:] == tuple(output.logits[0, 2:].argmax(-1).tolist())
    # Entry 0 is the embedding, so that layer i's output is entry i + 1.
    wanted = torch.cat([output.hidden_states[4][0], output.hidden_states[2][0]], dim=1).bfloat16()
    torch.testing.assert_close(record.features_TF, wanted)
    assert (header.layer_ids, header.num_rows, header.row_width) == ((3, 1), len(ids) - 1, 48)
    assert header.loss_spans == ((3, len(ids)),)
    assert header.finish_reason == ("stop" if ids[-1] == EOS else "length")


def test_a_conversation_is_taken_as_it_is(folder: Path) -> None:
    target = InProcessTarget.from_folder(folder, (1,))
    record = target.capture([7, 8, 9, 10], record_id="b", max_new_tokens=9, loss_spans=[(2, 4)])
    assert record.header.token_ids == (7, 8, 9, 10)
    assert record.header.source is RecordSource.CONVERSATION
    assert (record.header.prompt_length, record.header.loss_spans) == (2, ((2, 4),))
    assert len(record.features_TF) == 3


def test_the_weights_stay_and_no_hook_stays(folder: Path) -> None:
    target = InProcessTarget.from_folder(folder, (1, 3))
    target.features([1, 2, 3])
    assert not any(layer._forward_hooks for layer in target._layers)
    assert not any(parameter.requires_grad for parameter in target._model.parameters())


@pytest.mark.parametrize("layer_ids", [(4,), (-1,), (1, 9)])
def test_a_layer_that_cannot_be_hooked_is_named(folder: Path, layer_ids: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"layer_ids must be in 0..3 \(the target has 5 layers\)"):
        InProcessTarget.from_folder(folder, layer_ids)


def test_a_folder_that_is_no_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="target must be a folder that transformers can load"):
        InProcessTarget.from_folder(tmp_path, (1,))
