"""Every error is picklable, keeps its data, and stands in the picture at the top of its module."""

from __future__ import annotations

import inspect
import pickle

import pytest

from dflash_online import errors
from dflash_online.errors import DflashOnlineError, TensorMismatchError

ALL = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, DflashOnlineError) and cls.__module__ == errors.__name__
]
_SAMPLES = {"int": 7, "float": 2.5, "object": "x", "Sequence[str]": ("a", "b")}


def sample(cls: type[DflashOnlineError]) -> DflashOnlineError:
    """An instance with every argument of its constructor given."""
    if cls.__init__ is Exception.__init__:
        return cls("reason")
    parameters = list(inspect.signature(cls).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return cls("reason")
    return cls(*[_SAMPLES.get(str(p.annotation).split(" | ")[0], "text") for p in parameters])


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_an_error_survives_pickling_with_message_and_data(cls):
    error = sample(cls)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error) != ""
    assert vars(copy) == vars(error)
    assert copy.args == error.args


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_an_error_is_in_the_picture_and_says_what_it_is(cls):
    assert cls.__name__ in (errors.__doc__ or "")
    assert cls.__doc__


def test_messages_name_field_value_and_bound():
    assert str(errors.ConfigError("block_size", 1, ">= 2")) == "block_size must be >= 2, got 1"
    error = TensorMismatchError("folder", missing=["a"], wrong=["b is not finite"])
    assert str(error) == "drafter checkpoint folder: missing: a; wrong: b is not finite"
    assert (error.missing, error.unexpected, error.wrong) == (("a",), (), ("b is not finite",))
