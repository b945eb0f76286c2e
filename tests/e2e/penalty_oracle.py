"""What penalized requests must say: the target's logits, penalized by the definition of each penalty.

SGLang's own decoding is no oracle here: it counts output tokens in a preparation that speculation skips.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.target_server import PROMPTS, TargetServer, chat_text

NUM_TOKENS = 40
TEXTS = [chat_text(prompt) for prompt in PROMPTS[:4]]
SETTINGS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.6, "presence_penalty": 0.4},
    {"repetition_penalty": 1.25},
    {"min_new_tokens": 20, "max_new_tokens": 30},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "min_new_tokens": 12, "logit_bias": {"28": 3.0}},
]


def penalized(logits_V: torch.Tensor, said: list[int], ending: set[int], settings: dict[str, Any]) -> Any:
    """One position's logits, by the definition of each penalty."""
    logits_V = logits_V.clone()
    for token in set(said):
        logits_V[token] -= settings.get("frequency_penalty", 0.0) * said.count(token)
        logits_V[token] -= settings.get("presence_penalty", 0.0)
        scale = settings.get("repetition_penalty", 1.0)
        logits_V[token] = logits_V[token] * scale if logits_V[token] < 0 else logits_V[token] / scale
    if len(said) < settings.get("min_new_tokens", 0):
        logits_V[list(ending)] = float("-inf")
    for token, bias in settings.get("logit_bias", {}).items():
        logits_V[int(token)] += bias
    return logits_V


def assert_penalties_are_exact(server: TargetServer, model_folder: Path) -> None:
    """Four requests at a time, each with other penalties; every output token is the penalized argmax."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    ending = {tokenizer.eos_token_id}
    changed = 0
    plain = server.generate_all(TEXTS, 4, max_new_tokens=NUM_TOKENS)
    answers = server.generate_each(
        [(text, {"max_new_tokens": NUM_TOKENS, **s}) for text, s in zip(TEXTS, SETTINGS, strict=True)]
    )
    for text, settings, output, without in zip(TEXTS, SETTINGS, answers, plain, strict=True):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        with torch.no_grad():
            logits_TV = model(torch.tensor([ids + output])).logits[0, len(ids) - 1 : -1]
        for place, token in enumerate(output):
            wanted_V = penalized(logits_TV[place], output[:place], ending, settings)
            # Equal but for rounding: the server adds in another order.
            assert float(wanted_V[token]) >= float(wanted_V.max()) - 1e-3, (settings, place)
        assert len(output) >= settings.get("min_new_tokens", 1)
        changed += output != without
    assert changed >= 3
