"""Wire format v1: round trip in chunks of any size, and every way a stream can be broken."""

from __future__ import annotations

import dataclasses
import io
import itertools

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_record

from dflash_online.errors import (
    ChecksumError,
    CorruptRecordError,
    TruncatedRecordError,
    WireError,
    WireVersionError,
)
from dflash_online.wire.codec import RecordDecoder, decode_record, encode_record, pack_header, unpack_header
from dflash_online.wire.record import Record, RecordSource

RECORD = tiny_record(20, ((4, 9), (12, 20)), seed=3)
FULL_HEADER = dataclasses.replace(
    RECORD.header,
    source=RecordSource.TRAFFIC,
    cursor=None,
    drafter_version="7-ab12cd34ef56",
    sampling={"temperature": 0.7, "max_new_tokens": 96, "ignore_eos": False, "stop": "x"},
    acceptance=(5, 3, 0, 1),
)


def encoded(record: Record = RECORD, **options) -> bytes:
    return b"".join(encode_record(record, **options))


def assert_same(one: Record, other: Record) -> None:
    assert one.header == other.header
    assert torch.equal(one.features_TF.view(torch.int16), other.features_TF.view(torch.int16))


@pytest.mark.parametrize("frame_bytes", [2, 100, 4 << 20])
def test_round_trip_keeps_every_field_and_every_bit(frame_bytes):
    features = RECORD.features_TF.clone()
    features[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    record = Record(FULL_HEADER, features)
    assert_same(decode_record(encoded(record, frame_bytes=frame_bytes)), record)


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 2500), max_size=12))
def test_chunks_of_any_size_give_the_same_record(cuts):
    data, decoder = encoded(frame_bytes=333), RecordDecoder()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, stop in itertools.pairwise(edges):
        decoder.feed(data[start:stop])
    assert_same(decoder.finish(), RECORD)


def test_one_byte_at_a_time():
    decoder = RecordDecoder()
    for byte in encoded():
        decoder.feed(bytes([byte]))
    assert_same(decoder.finish(), RECORD)


def test_any_msgpack_library_can_walk_the_stream():
    kinds = [item.code for item in msgpack.Unpacker(io.BytesIO(encoded(frame_bytes=1000)))]
    assert kinds == [1, 2, 2, 3]


def test_feature_frames_are_views_of_the_tensor_not_copies():
    parts = [part for part in encode_record(RECORD) if isinstance(part, memoryview)]
    assert sum(len(part) for part in parts) == RECORD.header.num_bytes
    assert all(part.obj is not None for part in parts)


def test_header_is_known_before_the_features_have_arrived():
    data, decoder = encoded(), RecordDecoder()
    assert decoder.header is None
    decoder.feed(data[: len(data) - RECORD.header.num_bytes])
    assert decoder.header == RECORD.header


@pytest.mark.parametrize("kept", [0, 3, 200, 1500, -1])
def test_a_short_stream_says_how_much_arrived(kept):
    data, decoder = encoded(), RecordDecoder()
    decoder.feed(data[:kept])
    with pytest.raises(TruncatedRecordError) as caught:
        decoder.finish()
    assert caught.value.expected_rows in (None, 19)
    assert caught.value.received_rows <= 19


def test_every_flipped_byte_is_noticed():
    data = encoded()
    for index in range(0, len(data), 7):
        broken = bytearray(data)
        broken[index] ^= 0x55
        try:
            record = decode_record(bytes(broken))
        except WireError:
            continue
        # The header has no checksum of its own: a flip inside a token id or a name is another valid header.
        assert record.header != RECORD.header
        assert torch.equal(record.features_TF, RECORD.features_TF)


def test_a_flipped_feature_byte_is_a_checksum_error():
    data = bytearray(encoded())
    data[len(data) // 2 + 300] ^= 1
    with pytest.raises(ChecksumError):
        decode_record(bytes(data))


def test_an_unknown_format_version_is_named():
    fields = msgpack.unpackb(pack_header(RECORD.header)) | {"format_version": 2}
    with pytest.raises(WireVersionError, match="format_version must be 1, got 2"):
        unpack_header(msgpack.packb(fields))


@pytest.mark.parametrize(
    "change",
    [
        {"colour": "red"},
        {"source": "nowhere"},
        {"token_ids": b"123"},
        {"target": {"path": "x"}},
        {"loss_spans": [[1]]},
        {"loss_spans": 7},
        {"layer_ids": None},
    ],
)
def test_a_malformed_header_field_is_refused(change):
    fields = msgpack.unpackb(pack_header(RECORD.header)) | change
    with pytest.raises(CorruptRecordError, match="header"):
        unpack_header(msgpack.packb(fields))


@pytest.mark.parametrize("name", ["record_id", "token_ids", "num_rows", "prompt_length"])
def test_a_missing_header_field_is_refused(name):
    fields = msgpack.unpackb(pack_header(RECORD.header))
    del fields[name]
    with pytest.raises(CorruptRecordError, match="header"):
        unpack_header(msgpack.packb(fields))


@pytest.mark.parametrize("payload", [b"\xc1", b"\x93\x01\x02\x03", b"\x81\xa1a"])
def test_a_header_that_is_no_map_is_refused(payload):
    with pytest.raises(CorruptRecordError):
        unpack_header(payload)


def test_bytes_after_the_trailer_are_refused():
    with pytest.raises(CorruptRecordError, match="empty after the trailer"):
        decode_record(encoded() + b"\x00")


def test_text_in_place_of_a_record_is_refused_at_once():
    with pytest.raises(CorruptRecordError, match="frame marker"):
        RecordDecoder().feed(b'{"error": "busy"}')


def test_features_before_a_header_are_refused():
    data = encoded()
    start = len(data) - RECORD.header.num_bytes
    frame = data.index(b"\xc9", 6)
    assert frame < start
    with pytest.raises(CorruptRecordError, match="header"):
        decode_record(data[frame:])


def test_memory_is_bounded_before_it_is_taken():
    with pytest.raises(CorruptRecordError, match="feature bytes must be at most 100"):
        decode_record(encoded(), max_feature_bytes=100)
    with pytest.raises(CorruptRecordError, match="frame length"):
        RecordDecoder().feed(b"\xc9\xff\xff\xff\xff\x01")


def test_features_that_disagree_with_the_header_are_not_sent():
    for features in (RECORD.features_TF[:-1], RECORD.features_TF.float()):
        with pytest.raises(CorruptRecordError, match="features"):
            encoded(Record(RECORD.header, features))
