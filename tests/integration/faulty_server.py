"""A server for `doctor`, in this process, with one fault at a time.

A fake behind the production seam (`doctor.served.Served`): starting the real SGLang once per cause would
take a minute each. Real: a small random Llama of transformers answers greedily, our drafter drafts, rounds
are counted by the walk. What a fault changes is the server's own copy; `doctor` compares with the folders
on disk. The real server meets `doctor` in tests/e2e/test_doctor.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dflash_online.doctor.served import Reference
from dflash_online.evaluate.tau import chain_walk
from dflash_online.target.inprocess import InProcessTarget
from dflash_online.wire.record import Record


@dataclass
class FaultyServer:
    """Healthy until a test changes one of its parts."""

    reference: Reference
    """The server's own copy of everything."""
    tokenizer: Any
    checksum: str
    version: str
    layer_ids: tuple[int, ...]
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    on_features: Callable[[Tensor], Tensor] = lambda features_TF: features_TF
    on_keys: Callable[[Tensor], Tensor] = lambda keys_LCKE: keys_LCKE
    has_norm: bool = True

    @classmethod
    def healthy(cls, reference: Reference, tokenizer: Any) -> FaultyServer:
        """A server that does what the reference does."""
        training = reference.checkpoint.training
        assert training is not None
        assert training.target is not None
        return cls(
            replace(
                reference,
                drafter=copy.deepcopy(reference.drafter),
                frozen=copy.deepcopy(reference.frozen),
                target=copy.deepcopy(reference.target),
            ),
            tokenizer,
            checksum=training.target["weight_checksum"],
            version=str(reference.checkpoint.version),
            layer_ids=reference.checkpoint.config.target_layer_ids,
        )

    def hook(self, layer_ids: tuple[int, ...]) -> None:
        """Compute the features of other layers, without saying so."""
        model = self.reference.target._model
        self.reference = replace(self.reference, target=InProcessTarget(model, layer_ids, path="other"))

    def info(self) -> dict[str, Any]:
        return {
            "target": {"weight_checksum": self.checksum},
            "model": {"dtype": "float32"},
            "layer_ids": list(self.layer_ids),
            "drafter": {"version": self.version},
            "policy": {"mode": "chain", "num_nodes": self.reference.checkpoint.config.num_drafts},
        }

    def answer(self, token_ids: Sequence[int], max_new_tokens: int) -> Record:
        record = self.reference.target.capture(token_ids, record_id="doctor", max_new_tokens=max_new_tokens)
        rounds = chain_walk(self.reference.drafter, self.reference.frozen, record)
        header = replace(record.header, layer_ids=self.layer_ids, acceptance=rounds)
        return Record(header, self.on_features(record.features_TF))

    def render(self, text: str) -> list[int]:
        turns = [{"role": "user", "content": text}]
        rendered = self.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False, **self.template_kwargs
        )
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def probe(self, token_ids: Sequence[int]) -> dict[str, Tensor]:
        config, reference = self.reference.checkpoint.config, self.reference
        anchor = self.answer(token_ids, 2).header.token_ids[len(token_ids)]
        block_id_B = torch.tensor([anchor] + [config.mask_token_id] * config.num_drafts)
        features_CF = self.on_features(reference.target.features(list(token_ids))).float()
        block = reference.block(features_CF, block_id_B)
        return {
            "block_id_B": block_id_B,
            "hidden_BH": block.hidden_BH if self.has_norm else block.unnormed_BH,
            "context_key_LCKE": self.on_keys(block.context_key_LCKE),
        }
