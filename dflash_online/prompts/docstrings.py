"""Built-in prompts: "Write a Python function ..." from the docstrings of Python's standard library.

    stdlib source files --ast--> public functions with a docstring --> one prompt each

Reads source text only: nothing is imported, so no module's side effect runs. The same Python gives the
same prompts in the same order; about 830 on Python 3.11. Modules that this Python lacks are left out.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Chosen for plain functions whose first docstring sentence says what they do. A package means its __init__.
_MODULES = (
    "ast asyncio.locks asyncio.queues base64 bisect bz2 calendar cmd code codeop collections configparser"
    " contextlib csv dataclasses datetime difflib dis email.header email.utils filecmp fileinput fnmatch"
    " fractions functools genericpath getpass gettext glob graphlib gzip heapq hmac html html.parser"
    " http.cookies importlib.util inspect ipaddress json json.decoder json.encoder linecache locale lzma"
    " mimetypes netrc ntpath numbers operator optparse os pathlib pickle pickletools pkgutil platform"
    " plistlib poplib posixpath pprint profile pstats queue quopri random rlcompleter runpy sched secrets"
    " shelve shlex shutil socket socketserver stat statistics subprocess sysconfig tempfile textwrap"
    " threading timeit tokenize trace traceback tracemalloc types typing unittest.case urllib.parse"
    " urllib.request uuid warnings weakref webbrowser xml.sax.saxutils zipapp"
).split()

# First words that are a verb, so that the sentence becomes a request; other sentences make no prompt.
_VERBS = frozenset(
    (
        "accept acquire add adjust alter append apply arrange assert associate attach authenticate bind block"
        " calculate call cancel cast change check choose clean clear close collapse combine compare compile"
        " compress compute connect construct convert copy create debug decide declare decode decompress"
        " decrement delegate delete dequeue deserialize detect determine disable disassemble discard dispatch"
        " display divide draw dump emit encode enter escape estimate evaluate execute expand extend extract"
        " feed fetch fill find finish flush force format free generate get group guess handle identify"
        " implement import increment indent indicate initialize initiate insert install interpret invoke"
        " isolate issue iterate join load locate log make map mark merge modify move normalize omit open"
        " optimize override parse pass perform pop prepare print process produce provide push put query quote"
        " raise read register release remove rename render replace represent request reset resize resolve"
        " restore retrieve return rotate run scan schedule search seek send serialize set shuffle skip sort"
        " split start stop store submit subscribe sum summarize take terminate test tokenize transfer"
        " transform translate try turn unescape unregister update use validate verify wait wake walk work"
        " wrap"
        " write yield"
    ).split()
)
_MIN_WORDS, _MAX_CHARACTERS = 4, 220


def docstring_prompts() -> list[str]:
    """Every prompt, no two equal, in an order without meaning: any first part holds all kinds of modules."""
    root = Path(sysconfig.get_path("stdlib"))
    prompts: dict[str, None] = {}
    for module in _MODULES:
        source = _source_of(root, module)
        if source is not None:
            prompts.update(dict.fromkeys(prompts_from_source(source)))
    return sorted(prompts, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())


def prompts_from_source(source: str) -> Iterator[str]:
    """The prompts of one module's source, in its order."""
    for function in _public_functions(ast.parse(source)):
        sentence = _first_sentence(ast.get_docstring(function) or "")
        clause = _as_relative_clause(sentence) if sentence is not None else None
        if clause is not None:
            yield f"Write a Python function `{function.name}({_arguments(function)})` that {clause}"


def _source_of(root: Path, module: str) -> str | None:
    base = root.joinpath(*module.split("."))
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return None


def _public_functions(module: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                    yield member


def _first_sentence(docstring: str) -> str | None:
    """The first sentence on one line with its full stop, or None when it says too little or too much."""
    paragraph = " ".join(docstring.strip().split("\n\n", 1)[0].split())
    sentence = re.split(r"(?<=[a-z0-9)\]'\"`])\. +(?=[A-Z(])", paragraph, maxsplit=1)[0].rstrip(" .:;")
    starts_well = re.match(r"[A-Z][a-z]+ ", sentence) is not None
    is_plain = sentence.isascii() and "->" not in sentence and ">>>" not in sentence
    says_enough = len(sentence.split()) >= _MIN_WORDS and len(sentence) <= _MAX_CHARACTERS
    return sentence + "." if starts_well and is_plain and says_enough else None


def _arguments(function: ast.FunctionDef) -> str:
    """The argument list as written, without `self`, `cls`, annotations and defaults of private names."""
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    for variadic in (arguments.vararg, arguments.kwarg):
        if variadic is not None:
            variadic.annotation = None
    for names in (arguments.posonlyargs, arguments.args):
        if names and names[0].arg in ("self", "cls"):
            del names[0]
            break
    return ast.unparse(arguments)


def _as_relative_clause(sentence: str) -> str | None:
    """`Return the sum.` or `Returns the sum.` -> `returns the sum.`; None without a known verb in front."""
    first, rest = sentence.split(" ", 1)
    word = first.lower()
    for verb in (word, word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("ies") + "y"):
        if verb in _VERBS:
            return f"{_third_person(verb)} {rest}"
    return None


def _third_person(verb: str) -> str:
    if verb.endswith("y") and verb[-2] not in "aeou":
        return f"{verb[:-1]}ies"
    return f"{verb}es" if verb.endswith(("s", "sh", "ch", "x", "z", "o")) else f"{verb}s"
