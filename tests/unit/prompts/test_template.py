"""Spans hold exactly what the target would have generated."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_online.errors import PromptError
from dflash_online.prompts.item import Message
from dflash_online.prompts.template import render_conversation, render_prompt

_PLAIN = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] + '<e>' + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)
# Like the thinking templates: the last answer opens with an empty thought, earlier ones do not.
_THINKING = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' }}"
    "{% if loop.last and m['role'] == 'assistant' %}{{ '()' }}{% endif %}"
    "{{ m['content'] + '<e>' + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:()' }}{% endif %}"
)
_NO_END = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '|' }}{% endfor %}"
_STRICT = "{{ raise_exception('roles must alternate') }}"

_TURNS = (
    Message("user", "ab"),
    Message("assistant", "cd"),
    Message("user", "e"),
    Message("assistant", "fgh"),
)


def byte_tokenizer(template: str) -> Any:
    """One token per character, so that spans can be read as text; two special tokens."""
    alphabet = {character: i for i, character in enumerate(map(chr, range(32, 127)))}
    vocabulary = {**alphabet, "<s>": 200, "<e>": 201}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<e>", chat_template=template
    )


def spoken(tokenizer: Any, ids: list[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def test_a_prompt_ends_with_the_header_of_the_answer() -> None:
    tokenizer = byte_tokenizer(_PLAIN)
    assert spoken(tokenizer, render_prompt(tokenizer, _TURNS[:1])) == "<s>user:ab<e>|<s>assistant:"


def test_spans_are_the_answers_with_their_end_of_turn() -> None:
    tokenizer = byte_tokenizer(_PLAIN)
    ids, spans = render_conversation(tokenizer, _TURNS)
    assert spoken(tokenizer, ids) == "<s>user:ab<e>|<s>assistant:cd<e>|<s>user:e<e>|<s>assistant:fgh<e>|"
    assert [spoken(tokenizer, ids[start:end]) for start, end in spans] == ["cd<e>", "fgh<e>"]


def test_a_span_follows_the_prompt_that_asked_for_it() -> None:
    tokenizer = byte_tokenizer(_PLAIN)
    ids, spans = render_conversation(tokenizer, _TURNS)
    assert ids[: spans[1][0]] == render_prompt(tokenizer, _TURNS[:3])


def test_a_template_that_opens_the_last_answer_otherwise_is_understood() -> None:
    tokenizer = byte_tokenizer(_THINKING)
    ids, spans = render_conversation(tokenizer, _TURNS)
    assert [spoken(tokenizer, ids[start:end]) for start, end in spans] == ["cd<e>", "fgh<e>"]


def test_template_arguments_reach_the_template() -> None:
    tokenizer = byte_tokenizer("{{ 'x' if enable_thinking else 'y' }}{{ messages[0]['content'] }}")
    assert spoken(tokenizer, render_prompt(tokenizer, _TURNS[:1], enable_thinking=False)) == "yab"


@pytest.mark.parametrize(
    ("template", "turns", "reason"),
    [
        (_NO_END, _TURNS, "no special token ends an answer"),
        (_STRICT, _TURNS, "roles must alternate"),
        (_PLAIN, _TURNS[1:2], "must not start with an assistant turn"),
    ],
)
def test_what_a_template_cannot_say_is_an_error(
    template: str, turns: tuple[Message, ...], reason: str
) -> None:
    with pytest.raises(PromptError, match=reason):
        render_conversation(byte_tokenizer(template), turns)
