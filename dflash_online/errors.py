"""Every error that DFlash Online raises on purpose.

    DflashOnlineError
    +-- ConfigError               a field of a config, request or command line is out of bounds
    +-- ShapeError                tensors that belong together disagree in shape
    +-- WireError                 a record cannot be read
    |   +-- WireVersionError        written by another format version
    |   +-- TruncatedRecordError    the stream ended early
    |   +-- ChecksumError           bytes changed on the way
    |   +-- CorruptRecordError      frames or header make no sense
    +-- CheckpointError           a drafter folder cannot be used
    |   +-- IncompleteCheckpointError   its completion marker or a file is missing
    |   +-- TensorMismatchError         tensors missing, unexpected, misshapen or not finite
    |   +-- UnsupportedCheckpointError  recognised, but of a kind that is not DFlash
    +-- TargetError               the target server did not do what was asked
    |   +-- TargetUnavailableError  no answer, or an answer of 5xx: worth trying again
    |   +-- TargetBusyError         capture is shed right now: try again after a while
    |   +-- TargetRefusedError      the request itself is wrong: trying again will not help
    |   +-- TargetIdentityError     another model, or other weights, than before
    +-- PromptError               a prompt source or one of its lines cannot be used
    +-- PluginError               the SGLang plugin cannot work here
    +-- TrainerServiceError       the trainer service gave no answer, or refused
    +-- ModelFetchError           a model cannot be fetched or unpacked
    +-- ProcessError              a service did not start, or ended early
        +-- PortInUseError          another process listens on its port

Each error keeps its data as attributes and derives the message from them. All are picklable:
`super().__init__` receives every argument of the constructor, in order. To add one, pick the
broadest class whose handler would do the right thing, and extend the picture above.
"""

from __future__ import annotations

from collections.abc import Sequence


class DflashOnlineError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(DflashOnlineError):
    """A value is out of bounds. Edge answer: HTTP 422."""

    def __init__(self, field: str, value: object, bound: str) -> None:
        super().__init__(field, value, bound)
        self.field, self.value, self.bound = field, value, bound

    def __str__(self) -> str:
        return f"{self.field} must be {self.bound}, got {self.value!r}"


class ShapeError(DflashOnlineError):
    """Tensors that belong together disagree in shape."""


class WireError(DflashOnlineError):
    """A record cannot be read. The record is dropped and counted; the stream goes on."""


class WireVersionError(WireError):
    """The record was written by a format version that this reader does not know."""

    def __init__(self, found: object, supported: int) -> None:
        super().__init__(found, supported)
        self.found, self.supported = found, supported

    def __str__(self) -> str:
        return f"wire format_version must be {self.supported}, got {self.found!r}"


class TruncatedRecordError(WireError):
    """The stream ended before the trailer frame."""

    def __init__(self, received_rows: int, expected_rows: int | None) -> None:
        super().__init__(received_rows, expected_rows)
        self.received_rows, self.expected_rows = received_rows, expected_rows

    def __str__(self) -> str:
        expected = "unknown, no header yet" if self.expected_rows is None else self.expected_rows
        return f"record ended early: {self.received_rows} feature rows of {expected}"


class ChecksumError(WireError):
    """The feature bytes do not match the trailer's checksum."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected, found)
        self.expected, self.found = expected, found

    def __str__(self) -> str:
        return f"record checksum must be {self.expected}, got {self.found}"


class CorruptRecordError(WireError):
    """A frame or header field makes no sense."""

    def __init__(self, field: str, value: object, bound: str) -> None:
        super().__init__(field, value, bound)
        self.field, self.value, self.bound = field, value, bound

    def __str__(self) -> str:
        return f"record field {self.field} must be {self.bound}, got {self.value!r}"


class CheckpointError(DflashOnlineError):
    """A drafter folder cannot be used. Edge answer: HTTP 422."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"drafter checkpoint {self.path}: {self.reason}"


class IncompleteCheckpointError(CheckpointError):
    """The folder lacks a file or its completion marker: it does not exist for us."""


class UnsupportedCheckpointError(CheckpointError):
    """A drafter of another family (DFlash2, Domino, DSpark, ...), recognised and refused by name."""


class TensorMismatchError(CheckpointError):
    """Tensors are missing, unexpected, misshapen, of another dtype, or not finite."""

    def __init__(
        self,
        path: str,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        wrong: Sequence[str] = (),
    ) -> None:
        parts = [
            f"{label}: {', '.join(names)}"
            for label, names in (("missing", missing), ("unexpected", unexpected), ("wrong", wrong))
            if names
        ]
        super().__init__(path, "; ".join(parts))
        self.args = (path, tuple(missing), tuple(unexpected), tuple(wrong))
        self.missing, self.unexpected, self.wrong = tuple(missing), tuple(unexpected), tuple(wrong)


class TargetError(DflashOnlineError):
    """The target server did not do what was asked."""


class TargetUnavailableError(TargetError):
    """No answer in time, a broken connection, or an answer of 5xx. Worth trying again."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(url, reason)
        self.url, self.reason = url, reason

    def __str__(self) -> str:
        return f"target {self.url} is unavailable: {self.reason}"


class TargetBusyError(TargetError):
    """Capture is shed right now, so that serving goes first."""

    def __init__(self, url: str, retry_after_s: float) -> None:
        super().__init__(url, retry_after_s)
        self.url, self.retry_after_s = url, retry_after_s

    def __str__(self) -> str:
        return f"target {self.url} sheds capture; retry after {self.retry_after_s:g} s"


class TargetRefusedError(TargetError):
    """The request itself is wrong (4xx)."""

    def __init__(self, url: str, status: int, detail: str) -> None:
        super().__init__(url, status, detail)
        self.url, self.status, self.detail = url, status, detail

    def __str__(self) -> str:
        return f"target {self.url} refused with HTTP {self.status}: {self.detail}"


class TargetIdentityError(TargetError):
    """The target is not the one that the run started with: publishing stops, and this is an alarm."""

    def __init__(self, field: str, expected: str, found: str) -> None:
        super().__init__(field, expected, found)
        self.field, self.expected, self.found = field, expected, found

    def __str__(self) -> str:
        return f"target {self.field} changed: the run started with {self.expected}, now it is {self.found}"


class PromptError(DflashOnlineError):
    """A prompt source, or one line of it, cannot be used."""

    def __init__(self, source: str, line: int | None, reason: str) -> None:
        super().__init__(source, line, reason)
        self.source, self.line, self.reason = source, line, reason

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}:{self.line}"
        return f"prompts {place}: {self.reason}"


class PluginError(DflashOnlineError):
    """The SGLang plugin cannot work here: wrong version, not loaded, or not in every process."""


class TrainerServiceError(DflashOnlineError):
    """The trainer service gave no answer (`status` None), or refused."""

    def __init__(self, url: str, status: int | None, detail: str) -> None:
        super().__init__(url, status, detail)
        self.url, self.status, self.detail = url, status, detail

    def __str__(self) -> str:
        if self.status is None:
            return f"trainer {self.url} does not answer: {self.detail}"
        return f"trainer {self.url} refused with HTTP {self.status}: {self.detail}"


class ModelFetchError(DflashOnlineError):
    """A model cannot be fetched or unpacked; nothing is left half done."""

    def __init__(self, model: str, step: str, reason: str) -> None:
        super().__init__(model, step, reason)
        self.model, self.step, self.reason = model, step, reason

    def __str__(self) -> str:
        return f"model {self.model}: {self.step} failed: {self.reason}"


class ProcessError(DflashOnlineError):
    """A service did not start, did not get ready in time, or ended early."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class PortInUseError(ProcessError):
    """Another process already listens on the port that a service was told to use."""

    def __init__(self, name: str, host: str, port: int) -> None:
        super().__init__(
            name, f"port {port} on {host} is in use; end what listens there, or give another port"
        )
        self.args = (name, host, port)
        self.host, self.port = host, port
