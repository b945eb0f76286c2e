"""One prompt, and how it is read from one row of any known shape.

    row of JSONL, parquet or POST /prompts --parse_row--> PromptItem --template--> token ids

The shapes that are understood, first match wins:

    messages | conversations   chat turns; with an assistant turn at the end it is a finished conversation
    turns                      user turns without answers (MT-Bench)
    question (+ answer)        a word problem (GSM8K); the answer is left out, the target writes its own
    prompt + entry_point       a function to complete (HumanEval)
    prompt (+ response)        one user turn, chat turns, or a list as `turns`; with a response a finished
                               conversation
    instruction (+ input)      one user turn (Alpaca); the output is left out, the target writes its own
    text                       raw text, sent to the target without a chat template

Knows neither files nor tokens. Raises PromptError naming the origin and what is wrong with the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflash_online.errors import PromptError

ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_OF_SPEAKER = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant")

# Wording of the published DFlash tables, so that figures can be compared.
_FUNCTION_WRAP = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
)
_PROBLEM_WRAP = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptItem:
    """One prompt. Exactly one of `messages` and `text` is set."""

    messages: tuple[Message, ...] | None
    """Chat turns, for the target's chat template."""
    text: str | None
    """Raw text, sent as it is."""
    conversation: bool
    """The last turn is an answer: captured by prefill only, nothing is generated."""
    origin: str
    """`source:line`, for messages to the user."""
    follow_ups: tuple[str, ...] = ()
    """Further user turns, each to be sent after the answer to the one before."""

    def __post_init__(self) -> None:
        assert (self.messages is None) != (self.text is None), "exactly one of messages and text"

    @property
    def content_key(self) -> str:
        """What the prompt says, whatever file it came from: equal prompts have equal keys."""
        turns = [(m.role, m.content) for m in self.messages or ()]
        return repr((self.text, turns, self.follow_ups))


def user_prompt(content: str, origin: str, follow_ups: Sequence[str] = ()) -> PromptItem:
    """A prompt of one user turn."""
    turns, later = (Message("user", content),), tuple(follow_ups)
    return PromptItem(messages=turns, text=None, conversation=False, origin=origin, follow_ups=later)


def parse_row(row: object, *, source: str, line: int | None) -> PromptItem:
    """Read a row of any shape in this module's header.

    Raises:
        PromptError: the row is no mapping, has no known field, or a field of the wrong type.
    """
    if not isinstance(row, Mapping):
        raise PromptError(source, line, f"a row must be an object, got {type(row).__name__}")
    place = _Place(source, line)
    for field in ("messages", "conversations"):
        if row.get(field) is not None:
            return _chat(row[field], field, place)
    if row.get("turns") is not None:
        return _turns(row["turns"], place)
    if row.get("question") is not None:
        return user_prompt(_PROBLEM_WRAP.format(place.text(row, "question")), place.origin)
    if row.get("prompt") is not None:
        return _prompt(row, place)
    if row.get("instruction") is not None:
        return _instruction(row, place)
    if row.get("text") is not None:
        text = place.text(row, "text")
        return PromptItem(messages=None, text=text, conversation=False, origin=place.origin)
    names = ", ".join(sorted(map(str, row))[:8]) or "none"
    raise place.error(
        f"needs one of messages, conversations, turns, question, prompt, instruction, text; has: {names}"
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the row stands; makes errors that name it."""

    source: str
    line: int | None

    @property
    def origin(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"

    def error(self, reason: str) -> PromptError:
        return PromptError(self.source, self.line, reason)

    def text(self, row: Mapping[str, object], field: str) -> str:
        value = row.get(field)
        if not isinstance(value, str):
            raise self.error(f"{field} must be a string, got {type(value).__name__}")
        if not value.strip():
            raise self.error(f"{field} must not be empty")
        return value


def _instruction(row: Mapping[str, object], place: _Place) -> PromptItem:
    parts = [place.text(row, "instruction")]
    if row.get("input") not in (None, ""):  # most rows of Alpaca have an empty one
        parts.append(place.text(row, "input"))
    return user_prompt("\n\n".join(parts), place.origin)


def _prompt(row: Mapping[str, object], place: _Place) -> PromptItem:
    if isinstance(row["prompt"], (list, tuple)):
        if row["prompt"] and all(isinstance(turn, str) for turn in row["prompt"]):
            return _turns(row["prompt"], place)
        return _chat(row["prompt"], "prompt", place)
    prompt = place.text(row, "prompt")
    if row.get("entry_point") is not None:
        return user_prompt(_FUNCTION_WRAP.format(prompt.strip("\n")), place.origin)
    for answer_field in ("response", "completion"):
        if row.get(answer_field) is not None:
            turns = (Message("user", prompt), Message("assistant", place.text(row, answer_field)))
            return PromptItem(messages=turns, text=None, conversation=True, origin=place.origin)
    return user_prompt(prompt, place.origin)


def _turns(value: object, place: _Place) -> PromptItem:
    if not isinstance(value, (list, tuple)) or not value:
        raise place.error("turns must be a list with at least one entry")
    if not all(isinstance(turn, str) and turn.strip() for turn in value):
        raise place.error("turns must hold strings that are not empty")
    return user_prompt(value[0], place.origin, value[1:])


def _chat(value: object, field: str, place: _Place) -> PromptItem:
    if not isinstance(value, (list, tuple)) or not value:
        raise place.error(f"{field} must be a list with at least one turn")
    messages = tuple(_message(turn, f"{field}[{i}]", place) for i, turn in enumerate(value))
    if messages[-1].role == "assistant":
        if len(messages) < 2:
            raise place.error(f"{field} must not start with an answer")
        return PromptItem(messages=messages, text=None, conversation=True, origin=place.origin)
    if messages[-1].role not in ("user", "tool"):
        raise place.error(f"{field} must end with a user, tool or assistant turn, got {messages[-1].role!r}")
    return PromptItem(messages=messages, text=None, conversation=False, origin=place.origin)


def _message(turn: object, name: str, place: _Place) -> Message:
    if not isinstance(turn, Mapping):
        raise place.error(f"{name} must be an object, got {type(turn).__name__}")
    speaker = turn.get("role", turn.get("from"))
    role = _ROLE_OF_SPEAKER.get(str(speaker), str(speaker))
    if role not in ROLES:
        raise place.error(f"{name}.role must be one of {', '.join(ROLES)}, got {speaker!r}")
    content = turn.get("content", turn.get("value"))
    if not isinstance(content, str):
        raise place.error(f"{name}.content must be a string, got {type(content).__name__}")
    return Message(role, content)
