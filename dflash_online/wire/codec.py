"""Bytes of a record: one header frame, feature frames of a few MiB, one trailer frame.

    encode_record(record) -> chunks of bytes          RecordDecoder.feed(chunk) ... .finish() -> Record

A record is a plain msgpack stream of ext objects, so that any msgpack library can walk it:

    ext32(1, packed header map)   ext32(2, raw little-endian bf16 rows) ...   ext32(3, packed trailer map)

The decoder reads the six-byte ext32 prefix itself and copies payload bytes from the network's chunks
straight into the preallocated tensor: a feature byte is copied once. Bounded: a header above
`MAX_HEADER_BYTES`, or features above the caller's `max_feature_bytes`, are refused before memory is
allocated. Fails with the classes of `WireError`; knows neither HTTP nor files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import msgpack
import numpy as np
import torch
import xxhash

from dflash_online.errors import (
    ChecksumError,
    CorruptRecordError,
    TruncatedRecordError,
    WireVersionError,
)
from dflash_online.wire.record import FORMAT_VERSION, Record, RecordHeader, RecordSource, TargetIdentity

HEADER_FRAME, FEATURE_FRAME, TRAILER_FRAME = 1, 2, 3
FRAME_BYTES = 4 << 20
MAX_HEADER_BYTES = 64 << 20
_EXT32 = 0xC9
_PREFIX = struct.Struct(">BIb")  # msgpack ext32: marker, payload length, ext type


def _frame_prefix(kind: int, num_bytes: int) -> bytes:
    return _PREFIX.pack(_EXT32, num_bytes, kind)


def _bytes_view(features_TF: torch.Tensor) -> memoryview:
    """Writable byte view of a contiguous CPU bf16 tensor; no copy."""
    return features_TF.view(torch.int16).numpy().data.cast("B")


def pack_header(header: RecordHeader) -> bytes:
    """The header as a packed msgpack map; token ids as raw little-endian int32."""
    fields = asdict(header)
    fields["format_version"] = FORMAT_VERSION
    fields["token_ids"] = np.asarray(header.token_ids, dtype="<i4").tobytes()
    return bytes(msgpack.packb(fields))


def unpack_header(payload: bytes) -> RecordHeader:
    """Read a header frame.

    Raises:
        WireVersionError: unknown format version.
        CorruptRecordError: not a map, a field missing, unknown, of the wrong type or out of bounds.
    """
    fields = _unpack_map(payload, "header")
    version = fields.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise WireVersionError(version, FORMAT_VERSION)
    try:
        raw_ids = fields.pop("token_ids")
        return RecordHeader(
            source=RecordSource(fields.pop("source")),
            target=TargetIdentity(**fields.pop("target")),
            token_ids=tuple(np.frombuffer(raw_ids, dtype="<i4").tolist()),
            layer_ids=tuple(int(i) for i in fields.pop("layer_ids")),
            loss_spans=tuple((int(start), int(end)) for start, end in fields.pop("loss_spans")),
            acceptance=tuple(int(n) for n in fields.pop("acceptance", ())),
            **fields,
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptRecordError("header", str(exc), "a complete header of format version 1") from exc


def _unpack_map(payload: bytes, name: str) -> dict[str, Any]:
    try:
        value = msgpack.unpackb(payload)
    except (ValueError, msgpack.UnpackException) as exc:
        raise CorruptRecordError(name, f"{len(payload)} bytes", "a msgpack map") from exc
    if not isinstance(value, dict):
        raise CorruptRecordError(name, type(value).__name__, "a msgpack map")
    return value


def encode_record(record: Record, *, frame_bytes: int = FRAME_BYTES) -> Iterator[bytes | memoryview]:
    """Yield the record's bytes in order. Feature frames are views of the tensor, not copies.

    Args:
        record: features [T-1, F] bfloat16, contiguous, on the CPU.
        frame_bytes: payload bytes of a feature frame.

    Raises:
        CorruptRecordError: the features disagree with the header.
    """
    features_TF, header = record.features_TF, record.header
    if tuple(features_TF.shape) != (header.num_rows, header.row_width) or features_TF.dtype != torch.bfloat16:
        raise CorruptRecordError(
            "features",
            (tuple(features_TF.shape), features_TF.dtype),
            f"bfloat16 [{header.num_rows}, {header.row_width}]",
        )
    packed = pack_header(header)
    yield _frame_prefix(HEADER_FRAME, len(packed)) + packed
    view = _bytes_view(features_TF)
    digest = xxhash.xxh3_64()
    for start in range(0, len(view), frame_bytes):
        part = view[start : start + frame_bytes]
        digest.update(part)
        yield _frame_prefix(FEATURE_FRAME, len(part))
        yield part
    trailer = msgpack.packb({"num_rows": header.num_rows, "checksum": digest.hexdigest()})
    yield _frame_prefix(TRAILER_FRAME, len(trailer)) + trailer


class RecordDecoder:
    """Reads one record from chunks of any size.

    Usage: `for chunk in stream: decoder.feed(chunk)`, then `record = decoder.finish()`. Single use; not
    thread-safe.
    """

    def __init__(self, *, max_feature_bytes: int = 8 << 30) -> None:
        self._max_feature_bytes = max_feature_bytes
        self._pending = bytearray()  # bytes of a prefix, header or trailer not yet complete
        self._frame_kind = 0
        self._frame_left = 0
        self._received = 0
        self._header: RecordHeader | None = None
        self._features_TF: torch.Tensor | None = None
        self._view = memoryview(b"")
        self._digest = xxhash.xxh3_64()
        self._record: Record | None = None

    @property
    def header(self) -> RecordHeader | None:
        """The header, as soon as its frame has arrived."""
        return self._header

    def feed(self, chunk: bytes | memoryview) -> None:
        """Take the next bytes of the stream.

        Raises:
            WireError: the stream is no record of this version; the decoder is then useless.
        """
        data = memoryview(chunk)
        while len(data):
            if self._record is not None:
                raise CorruptRecordError("stream", f"{len(data)} bytes", "empty after the trailer")
            if not self._frame_left:
                data = self._take_prefix(data)
            elif self._frame_kind == FEATURE_FRAME:
                data = self._take_features(data)
            else:
                data = self._take_map(data)

    def finish(self) -> Record:
        """The complete record.

        Raises:
            TruncatedRecordError: the trailer has not arrived.
        """
        if self._record is None:
            row_bytes = 2 * self._header.row_width if self._header else 1
            raise TruncatedRecordError(
                self._received // row_bytes if self._header else 0,
                self._header.num_rows if self._header else None,
            )
        return self._record

    def _take_prefix(self, data: memoryview) -> memoryview:
        wanted = _PREFIX.size - len(self._pending)
        self._pending += data[:wanted]
        if len(self._pending) == _PREFIX.size:
            marker, self._frame_left, self._frame_kind = _PREFIX.unpack(self._pending)
            self._pending.clear()
            self._check_frame(marker)
        return data[wanted:]

    def _check_frame(self, marker: int) -> None:
        if marker != _EXT32:
            raise CorruptRecordError("frame marker", hex(marker), f"{_EXT32:#x} (msgpack ext32)")
        if self._frame_left < 1:
            raise CorruptRecordError("frame length", self._frame_left, "at least 1")
        if self._frame_kind == FEATURE_FRAME:
            if self._header is None:
                raise CorruptRecordError("frame kind", self._frame_kind, f"{HEADER_FRAME} (header) first")
            if self._received + self._frame_left > len(self._view):
                raise CorruptRecordError(
                    "feature bytes",
                    self._received + self._frame_left,
                    f"at most {len(self._view)} as in the header",
                )
            return
        expected = TRAILER_FRAME if self._header else HEADER_FRAME
        if self._frame_kind != expected:
            raise CorruptRecordError("frame kind", self._frame_kind, f"{expected} or {FEATURE_FRAME} here")
        if self._frame_left > MAX_HEADER_BYTES:
            raise CorruptRecordError("frame length", self._frame_left, f"at most {MAX_HEADER_BYTES} bytes")

    def _take_features(self, data: memoryview) -> memoryview:
        part = data[: self._frame_left]
        self._view[self._received : self._received + len(part)] = part
        self._digest.update(part)
        self._received += len(part)
        self._frame_left -= len(part)
        return data[len(part) :]

    def _take_map(self, data: memoryview) -> memoryview:
        part = data[: self._frame_left]
        self._pending += part
        self._frame_left -= len(part)
        if not self._frame_left:
            payload = bytes(self._pending)
            self._pending.clear()
            if self._frame_kind == HEADER_FRAME:
                self._take_header(payload)
            else:
                self._take_trailer(payload)
        return data[len(part) :]

    def _take_header(self, payload: bytes) -> None:
        header = unpack_header(payload)
        if header.num_bytes > self._max_feature_bytes:
            raise CorruptRecordError("feature bytes", header.num_bytes, f"at most {self._max_feature_bytes}")
        self._header = header
        self._features_TF = torch.empty(header.num_rows, header.row_width, dtype=torch.bfloat16)
        self._view = _bytes_view(self._features_TF)

    def _take_trailer(self, payload: bytes) -> None:
        assert self._header is not None
        assert self._features_TF is not None
        trailer = _unpack_map(payload, "trailer")
        if self._received != len(self._view):
            raise CorruptRecordError("feature bytes", self._received, f"{len(self._view)} as in the header")
        if trailer.get("num_rows") != self._header.num_rows:
            raise CorruptRecordError("trailer num_rows", trailer.get("num_rows"), f"{self._header.num_rows}")
        found = self._digest.hexdigest()
        if trailer.get("checksum") != found:
            raise ChecksumError(str(trailer.get("checksum")), found)
        self._record = Record(self._header, self._features_TF)


def decode_record(data: bytes | memoryview, *, max_feature_bytes: int = 8 << 30) -> Record:
    """Read one record from memory. Raises `WireError`."""
    decoder = RecordDecoder(max_feature_bytes=max_feature_bytes)
    decoder.feed(data)
    return decoder.finish()
