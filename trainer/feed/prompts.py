"""Which prompt is captured next, and how a prompt becomes token ids.

    open_prompts --load--> LoadedPrompts --> [ PromptStream ] --PlannedCapture--> intake
    POST /prompts --added_prompts-------------^

Order: held-out prompts first, then what users added, then the source, again and again up to `epochs`.
Each prompt has one name, `<run>/<epoch>/<index>` (`<run>/held-out/<index>`, `<run>/added/<seq>`): a name
that is settled in the store is never planned again. The cursor is the lowest position of the source that
is not settled; it is committed together with the record. Runs on the event loop; loading and rendering block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_online.errors import ConfigError
from dflash_online.prompts.item import PromptItem, parse_row
from dflash_online.prompts.read import open_prompts, split_prompts
from dflash_online.prompts.template import ChatTokenizer, render_item
from dflash_online.target.client import CaptureRequest
from dflash_online.wire.record import RecordSource
from trainer.runs.config import RunConfig
from trainer.store.record_rows import RecordKind
from trainer.store.run_rows import RunRow
from trainer.store.store import Store

_MAX_NAMED_SKIPS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPrompts:
    """The prompts of a run, read once."""

    train: tuple[PromptItem, ...]
    held_out: tuple[PromptItem, ...]
    """At most `held_out_records` of them."""
    num_skipped: int
    skipped: tuple[str, ...]
    """The first broken lines, each with its place and what is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCapture:
    """One prompt on its way."""

    record_id: str
    kind: RecordKind
    item: PromptItem
    position: int | None = None
    """In the source, counted over all epochs."""
    added_seq: int | None = None
    """In the queue of added prompts."""


def load_prompts(config: RunConfig) -> LoadedPrompts:
    """Read and split the prompts of a run. Blocks.

    Raises:
        PromptError: the source cannot be opened.
        ConfigError: no prompt is left to train on.
    """
    source = open_prompts(config.prompts)
    train, held_out = split_prompts(source, config.held_out_share, config.seed)
    if not train:
        raise ConfigError(
            "prompts", config.prompts, f"a source with train prompts ({source.num_skipped} lines skipped)"
        )
    return LoadedPrompts(
        train=tuple(train),
        held_out=tuple(held_out[: config.held_out_records]),
        num_skipped=source.num_skipped,
        skipped=tuple(str(error) for error in source.skipped[:_MAX_NAMED_SKIPS]),
    )


def make_request(plan: PlannedCapture, tokenizer: ChatTokenizer, config: RunConfig) -> CaptureRequest:
    """Render a prompt by the target's template. Blocks for about a millisecond per thousand tokens.

    Raises:
        PromptError: the template refuses it, or nothing of it is supervised.
    """
    ids, spans = render_item(tokenizer, plan.item, **config.chat_template_kwargs)
    if spans:
        return CaptureRequest(
            mode="prefill",
            input_ids=tuple(ids),
            loss_spans=tuple(spans),
            record_id=plan.record_id,
            cursor=plan.position,
            source=RecordSource.CONVERSATION,
        )
    return CaptureRequest(
        input_ids=tuple(ids),
        sampling_params=config.sampling.as_params(),
        record_id=plan.record_id,
        cursor=plan.position,
    )


class PromptStream:
    """The run's prompts in order, with what is settled left out."""

    def __init__(self, store: Store, run: RunRow, prompts: LoadedPrompts) -> None:
        self._store, self._run_id, self._prompts = store, run.run_id, prompts
        self._end = None if run.config.epochs is None else run.config.epochs * len(prompts.train)
        self._next = run.cursor
        self._settled = store.records.settled_positions(run.run_id, run.cursor)
        self._in_flight: set[int] = set()
        self._added_in_flight: set[int] = set()
        self._next_held_out = 0

    @property
    def epoch(self) -> int:
        """Passes over the source that were begun before the next prompt."""
        return self._next // len(self._prompts.train)

    @property
    def is_done(self) -> bool:
        """Nothing is in flight and no prompt is left, added ones included."""
        at_end = self._end is not None and self._next >= self._end
        return at_end and not self._in_flight and not self._store.added_prompts.count(self._run_id)

    def plan_next(self) -> PlannedCapture | None:
        """The next prompt, now in flight; None when there is none for now."""
        return self._plan_held_out() or self._plan_added() or self._plan_source()

    def settle(self, plan: PlannedCapture) -> None:
        """Call inside the transaction that stores the record's row."""
        if plan.added_seq is not None:
            self._added_in_flight.discard(plan.added_seq)
            self._store.added_prompts.settle(plan.added_seq)
        if plan.position is not None:
            self._in_flight.discard(plan.position)
            self._store.runs.set_cursor(self._run_id, min(self._in_flight, default=self._next))

    def _plan_held_out(self) -> PlannedCapture | None:
        while self._next_held_out < len(self._prompts.held_out):
            index = self._next_held_out
            self._next_held_out += 1
            record_id = f"{self._run_id}/held-out/{index}"
            if not self._store.records.has(record_id):
                item = self._prompts.held_out[index]
                return PlannedCapture(record_id=record_id, kind=RecordKind.HELD_OUT, item=item)
        return None

    def _plan_added(self) -> PlannedCapture | None:
        limit = len(self._added_in_flight) + 1
        for seq, row in self._store.added_prompts.waiting(self._run_id, limit=limit):
            if seq not in self._added_in_flight:
                self._added_in_flight.add(seq)
                return PlannedCapture(
                    record_id=f"{self._run_id}/added/{seq}",
                    kind=RecordKind.TRAIN,
                    item=parse_row(row, source="POST /prompts", line=seq),
                    added_seq=seq,
                )
        return None

    def _plan_source(self) -> PlannedCapture | None:
        while self._next in self._settled:
            self._settled.discard(self._next)
            self._next += 1
        if self._end is not None and self._next >= self._end:
            return None
        position, self._next = self._next, self._next + 1
        self._in_flight.add(position)
        epoch, index = divmod(position, len(self._prompts.train))
        return PlannedCapture(
            record_id=f"{self._run_id}/{epoch}/{index}",
            kind=RecordKind.TRAIN,
            item=self._prompts.train[index],
            position=position,
        )


def split_added(rows: list[Any], config: RunConfig) -> tuple[list[dict[str, Any]], int]:
    """Check posted rows and leave out those on the held-out side.

    Returns:
        The rows to queue, and how many belong to the held-out side.

    Raises:
        PromptError: names the first row that cannot be read, counted from 1.
    """
    queue: list[dict[str, Any]] = []
    num_held_out = 0
    for number, row in enumerate(rows, start=1):
        item = parse_row(row, source="POST /prompts", line=number)
        train, held_out = split_prompts([item], config.held_out_share, config.seed)
        queue.extend(row for _ in train)
        num_held_out += len(held_out)
    return queue, num_held_out
