"""Rows of every known shape become prompts; a wrong row says what is wrong with it."""

from __future__ import annotations

import pytest

from dflash_online.errors import PromptError
from dflash_online.prompts.item import Message, PromptItem, parse_row


def parse(row: object) -> PromptItem:
    return parse_row(row, source="data.jsonl", line=3)


def test_a_plain_prompt_is_one_user_turn() -> None:
    item = parse({"prompt": "Say hello."})
    assert item.messages == (Message("user", "Say hello."),)
    assert (item.text, item.conversation, item.origin) == (None, False, "data.jsonl:3")


def test_raw_text_stays_raw() -> None:
    item = parse({"text": "Once upon a time"})
    assert item.messages is None
    assert item.text == "Once upon a time"


def test_messages_that_end_with_an_answer_are_a_finished_conversation() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert parse({"messages": turns}).conversation is False
    finished = parse({"messages": [*turns, {"role": "assistant", "content": "Hello."}]})
    assert finished.conversation is True
    assert finished.messages is not None
    assert finished.messages[-1] == Message("assistant", "Hello.")


def test_speakers_of_sharegpt_get_chat_roles() -> None:
    item = parse({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]})
    assert item.messages == (Message("user", "Hi"), Message("assistant", "Hello."))


def test_a_prompt_with_its_response_is_a_finished_conversation() -> None:
    item = parse({"prompt": "Hi", "response": "Hello."})
    assert item.conversation
    assert item.messages == (Message("user", "Hi"), Message("assistant", "Hello."))


def test_humaneval_rows_are_wrapped_as_in_the_published_tables() -> None:
    item = parse(
        {"task_id": "x/0", "prompt": "\ndef f():\n", "entry_point": "f", "test": "", "canonical_solution": ""}
    )
    assert item.messages is not None
    assert item.messages[0].content == (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\ndef f():\n```"
    )


def test_gsm8k_rows_ask_for_a_boxed_answer_and_leave_the_given_one_out() -> None:
    item = parse({"question": "How many?", "answer": "#### 7"})
    assert item.messages is not None
    assert item.messages[0].content == (
        "How many?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )


def test_mt_bench_rows_keep_their_second_turn_for_later() -> None:
    item = parse({"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]})
    assert item.messages == (Message("user", "Write."),)
    assert item.follow_ups == ("Rewrite.",)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "a row must be an object, got list"),
        (
            {"foo": 1},
            "needs one of messages, conversations, turns, question, prompt, instruction, text; has: foo",
        ),
        ({"prompt": 3}, "prompt must be a string, got int"),
        ({"prompt": "  "}, "prompt must not be empty"),
        ({"turns": ["a", 2]}, "turns must hold strings"),
        ({"messages": []}, "messages must be a list with at least one turn"),
        (
            {"messages": [{"role": "king", "content": "a"}]},
            r"messages\[0\].role must be one of .*, got 'king'",
        ),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content must be a string, got NoneType"),
        ({"messages": [{"role": "system", "content": "a"}]}, "must end with a user, tool or assistant turn"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "must not start with an answer"),
    ],
)
def test_a_wrong_row_is_refused_with_place_and_reason(row: object, reason: str) -> None:
    with pytest.raises(PromptError, match=reason) as caught:
        parse(row)
    assert str(caught.value).startswith("prompts data.jsonl:3: ")


def test_alpaca_rows_are_one_user_turn_and_leave_the_given_output_out() -> None:
    with_input = parse({"instruction": "Add these.", "input": "1 and 2", "output": "3"})
    assert with_input.messages == (Message("user", "Add these.\n\n1 and 2"),)
    assert not with_input.conversation
    for empty in ({"input": ""}, {"input": None}, {}):
        assert parse({"instruction": "Say hello.", **empty}).messages == (Message("user", "Say hello."),)
    with pytest.raises(PromptError, match="input must be a string, got int"):
        parse({"instruction": "Add these.", "input": 3})


def test_a_prompt_of_several_strings_is_turns_without_answers() -> None:
    item = parse({"prompt_id": 1, "category": "math", "prompt": ["first", "second"], "reference": []})
    assert item.messages == (Message("user", "first"),)
    assert item.follow_ups == ("second",)
