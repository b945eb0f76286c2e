"""What the endpoints of one app share."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from trainer.observe.instruments import Instruments
from trainer.observe.prometheus import StoreCollector
from trainer.runs.controller import RunController
from trainer.store.store import Store


@dataclass(slots=True)
class Service:
    """The parts of a running service."""

    store: Store
    controller: RunController
    instruments: Instruments
    collector: StoreCollector
    is_ready: bool = False
    """True once an unfinished run was brought back to life, or there was none."""


def service_of(request: Request) -> Service:
    """The service behind a request."""
    service: Service = request.app.state.service
    return service
