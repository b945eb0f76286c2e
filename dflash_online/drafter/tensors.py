"""The tensors that a drafter of a given config has, and the check that a set of tensors is exactly that.

SGLang skips names that it does not know and leaves the previous weight in place, so that a misnamed tensor
shows as bad drafts only. Hence every checkpoint is checked here before it is written, loaded or published.
Raises TensorMismatchError. Source: DFlash specification, section A.1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dflash_online.drafter.config import DrafterConfig
from dflash_online.errors import TensorMismatchError

# Names that published files use for the same tensors.
_ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor of such a drafter."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.fc_width),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    per_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        per_layer |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
            "self_attn.o_proj.bias": (hidden,),
        }
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in per_layer.items()}
    return shapes


def validate_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor], *, path: str = "tensors") -> None:
    """Check names, shapes, types and finiteness.

    Args:
        path: named in the error.

    Raises:
        TensorMismatchError: with every missing, unexpected and wrong tensor, and what is wrong.
    """
    shapes, dtype = expected_shapes(config), tensor_dtype(config)
    wrong = []
    for name in sorted(shapes.keys() & tensors.keys()):
        tensor = tensors[name]
        if tuple(tensor.shape) != shapes[name]:
            wrong.append(f"{name} has shape {list(tensor.shape)}, not {list(shapes[name])}")
        elif tensor.dtype != dtype:
            wrong.append(f"{name} is {tensor.dtype}, not {dtype}")
        elif not bool((finite := torch.isfinite(tensor)).all()):
            place = (~finite).nonzero()[0].tolist()
            wrong.append(f"{name} is not finite: {float(tensor[tuple(place)])} at {place}")
    missing, unexpected = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or unexpected or wrong:
        raise TensorMismatchError(path, missing, unexpected, wrong)


def tensor_dtype(config: DrafterConfig) -> torch.dtype:
    """Type of the saved weights.

    Raises:
        TensorMismatchError: the config names no floating type.
    """
    dtype = getattr(torch, config.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TensorMismatchError("config.json", wrong=[f"dtype {config.dtype!r} is no floating type"])
    return dtype


def export_tensors(model: nn.Module, config: DrafterConfig) -> dict[str, Tensor]:
    """A copy of the weights as they are saved: on the CPU, in the config's type, contiguous."""
    dtype = tensor_dtype(config)
    return {
        name: tensor.detach().to("cpu", dtype, copy=True).contiguous()
        for name, tensor in model.state_dict().items()
    }


def canonical_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published spellings turned into ours: a leading `model.` and the encoder aliases.

    Raises:
        ValueError: two tensors have one name in two spellings.
    """
    renamed: dict[str, Tensor] = {}
    for spelling, tensor in tensors.items():
        bare = spelling.removeprefix("model.")
        name = _ALIASES.get(bare, bare)
        if name in renamed:
            raise ValueError(f"{name} is there twice, once spelled {spelling}")
        renamed[name] = tensor
    return renamed
