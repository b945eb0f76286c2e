"""From chat turns to token ids, by the target's own chat template.

    PromptItem.messages --render_prompt--> ids that end where the answer begins
    a conversation --render_conversation--> ids and the spans that the assistant wrote

A span covers exactly what the target would have generated: from the end of the generation prompt up to and
with the end-of-turn token. Needs a tokenizer with character offsets (every fast tokenizer). Raises
PromptError when the template cannot say where an answer begins or ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dflash_online.errors import ConfigError, PromptError
from dflash_online.prompts.item import Message, PromptItem

_PROBE = "DFLASH PROBE"


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    all_special_ids: list[int]
    eos_token_id: int | None

    def apply_chat_template(self, conversation: list[dict[str, str]], /, **kwargs: Any) -> Any: ...

    def __call__(self, text: str, /, **kwargs: Any) -> Any: ...


def render_prompt(tokenizer: ChatTokenizer, messages: Sequence[Message], **kwargs: Any) -> list[int]:
    """Token ids of a prompt, the header of the answer included.

    Args:
        kwargs: passed to the template, e.g. `enable_thinking=False`.

    Raises:
        PromptError: the template refuses the turns.
    """
    return _tokenize(tokenizer, _render(tokenizer, messages, is_prompt=True, **kwargs))[0]


def render_conversation(
    tokenizer: ChatTokenizer, messages: Sequence[Message], **kwargs: Any
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a finished conversation and the half-open spans of its assistant tokens, rising.

    Raises:
        PromptError: the template refuses the turns, rewrites them, or marks no end of a turn.
    """
    text = _render(tokenizer, messages, is_prompt=False, **kwargs)
    ids, offsets = _tokenize(tokenizer, text)
    end_id = _end_of_turn_id(tokenizer, **kwargs)
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        first_character = _answer_start(tokenizer, text, messages[:index], **kwargs)
        start = next((i for i, (begin, _) in enumerate(offsets) if begin >= first_character), len(ids))
        end = next((i + 1 for i in range(start, len(ids)) if ids[i] == end_id), None)
        if end is None:
            raise PromptError("chat template", None, f"turn {index}: no end-of-turn token {end_id} behind it")
        spans.append((start, end))
    return ids, spans


def render_item(
    tokenizer: ChatTokenizer, item: PromptItem, **kwargs: Any
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of any prompt, and the spans of its answers when it is a finished conversation, else none.

    Raises:
        PromptError: nothing to answer or to learn from, or the template refuses the turns.
    """
    spans: list[tuple[int, int]] = []
    if item.messages is None:
        ids = list(tokenizer(item.text or "")["input_ids"])
    elif item.conversation:
        ids, spans = render_conversation(tokenizer, item.messages, **kwargs)
        if not spans:
            raise PromptError(item.origin, None, "no assistant token to learn from")
    else:
        ids = render_prompt(tokenizer, item.messages, **kwargs)
    if not ids:
        raise PromptError(item.origin, None, "no token at all")
    return ids, spans


def load_tokenizer(folder: str) -> ChatTokenizer:
    """The tokenizer of a target's folder. Takes seconds.

    Raises:
        ConfigError: the folder holds no tokenizer.
    """
    from transformers import AutoTokenizer  # seconds to import; most commands need none

    try:
        tokenizer: ChatTokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise ConfigError("target_path", folder, f"a folder with a tokenizer ({exc})") from exc
    return tokenizer


def _render(tokenizer: ChatTokenizer, messages: Sequence[Message], *, is_prompt: bool, **kwargs: Any) -> str:
    from jinja2 import TemplateError

    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=is_prompt, **kwargs)
    except (TemplateError, ValueError) as error:
        raise PromptError("chat template", None, str(error)) from error
    assert isinstance(text, str)
    return text


def _tokenize(tokenizer: ChatTokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    # The template has already written every special token, so none is added.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(encoded["input_ids"]), [(int(begin), int(end)) for begin, end in encoded["offset_mapping"]]


def _answer_start(tokenizer: ChatTokenizer, text: str, before: Sequence[Message], **kwargs: Any) -> int:
    """Character at which the answer to `before` starts in the text of the whole conversation."""
    if not before:
        raise PromptError("chat template", None, "a conversation must not start with an assistant turn")
    header_end = len(_render(tokenizer, before, is_prompt=False, **kwargs))
    prompt = _render(tokenizer, before, is_prompt=True, **kwargs)
    # Thinking templates open the last answer otherwise than the earlier ones: only the header may agree.
    shared = _shared_start(text, prompt)
    if shared <= header_end:
        raise PromptError(
            "chat template", None, f"turn {len(before)}: the template rewrites the turns before it"
        )
    return shared


def _shared_start(left: str, right: str) -> int:
    """Number of leading characters that both have."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _end_of_turn_id(tokenizer: ChatTokenizer, **kwargs: Any) -> int:
    """The special token that the template puts behind an answer."""
    probe = (Message("user", "a"), Message("assistant", _PROBE))
    text = _render(tokenizer, probe, is_prompt=False, **kwargs)
    ids, offsets = _tokenize(tokenizer, text)
    after = text.rindex(_PROBE) + len(_PROBE)
    special = {*tokenizer.all_special_ids, tokenizer.eos_token_id}
    for token_id, (begin, _) in zip(ids, offsets, strict=True):
        if begin >= after and token_id in special:
            return token_id
    raise PromptError("chat template", None, "no special token ends an answer, so its end cannot be learnt")
