"""A target in this process, for evaluation on one machine without a server.

    token ids --transformers, greedy--> answer --one more forward pass, hooks--> features --> Record

Slow and simple: one sequence at a time, no drafter. The features are those of the hooked decoder layers'
outputs over the whole sequence, as `POST /dflash/capture` returns them. Raises ConfigError.

Shape letters: T = tokens, H = hidden size, F = K*H = feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_online.errors import ConfigError
from dflash_online.wire.record import Record, RecordHeader, RecordSource, TargetIdentity


class InProcessTarget:
    """A Hugging Face causal language model with hooks on some decoder layers."""

    def __init__(self, model: Any, layer_ids: Sequence[int], *, path: str) -> None:
        self._model, self._layer_ids, self._path = model.eval().requires_grad_(False), tuple(layer_ids), path
        self._layers: nn.ModuleList = model.get_decoder().layers
        last = len(self._layers) - 1
        if not all(0 <= i < last for i in self._layer_ids):
            bound = f"in 0..{last - 1} (the target has {last + 1} layers)"
            raise ConfigError("layer_ids", self._layer_ids, bound)

    @classmethod
    def from_folder(
        cls,
        path: Path,
        layer_ids: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> InProcessTarget:
        """Load the whole target.

        Raises:
            ConfigError: transformers cannot load the folder, or a layer does not exist.
        """
        from transformers import AutoModelForCausalLM  # seconds to import; no other part of `eval` needs it

        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        except (OSError, ValueError, KeyError) as exc:
            raise ConfigError("target", str(path), f"a folder that transformers can load ({exc})") from exc
        return cls(model.to(device), layer_ids, path=str(path))

    @torch.no_grad()
    def capture(
        self,
        token_ids: Sequence[int],
        *,
        record_id: str,
        max_new_tokens: int,
        loss_spans: Sequence[tuple[int, int]] = (),
    ) -> Record:
        """Answer a prompt greedily, or take a finished conversation as it is, and compute its features.

        Args:
            max_new_tokens: bound of the answer; not used with `loss_spans`.
            loss_spans: supervised spans of a finished conversation; empty for a prompt.
        """
        source, reason, spans, ids = RecordSource.CONVERSATION, "prefill", tuple(loss_spans), list(token_ids)
        prompt_length = spans[0][0] if spans else len(ids)
        if not spans:
            device = self._model.device
            answered = self._model.generate(
                torch.tensor([ids], device=device),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
            ids = answered[0].tolist()
            source, spans = RecordSource.PROMPT, ((prompt_length, len(ids)),)
            reason = "length" if len(ids) - prompt_length == max_new_tokens else "stop"
        features_TF = self.features(ids[:-1])
        header = RecordHeader(
            record_id=record_id,
            source=source,
            cursor=None,
            target=TargetIdentity(path=self._path, revision="", weight_checksum=""),
            drafter_version="none",
            layer_ids=self._layer_ids,
            dtype="bfloat16",
            num_rows=len(features_TF),
            row_width=features_TF.shape[1],
            token_ids=tuple(ids),
            prompt_length=prompt_length,
            loss_spans=spans,
            finish_reason=reason,
        )
        return Record(header, features_TF)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the target."""
        return len(self._layers)

    @torch.no_grad()
    def features(self, token_ids: Sequence[int], layer_ids: Sequence[int] | None = None) -> Tensor:
        """[T, F] bfloat16 on the CPU: outputs of the hooked layers, end to end in the order of their ids.

        Args:
            layer_ids: of other layers, instead of the hooked ones.
        """
        ids = self._layer_ids if layer_ids is None else tuple(layer_ids)
        outputs: dict[int, Tensor] = {}

        def keep(layer_id: int) -> Any:
            def hook(_module: nn.Module, _inputs: object, output: Any) -> None:
                hidden_1TH = output[0] if isinstance(output, tuple) else output
                outputs[layer_id] = hidden_1TH[0].bfloat16().cpu()

            return hook

        hooks = [self._layers[i].register_forward_hook(keep(i)) for i in ids]
        try:
            ids_1T = torch.tensor([list(token_ids)], device=self._model.device)
            self._model.get_decoder()(input_ids=ids_1T, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([outputs[i] for i in ids], dim=1)
