"""POST /prompts: more prompts for the run that is alive.

    users --> [ route ] --> added_prompts (bounded) --> feed

Full: 503 with the bound. Prompts on the held-out side of the split are counted and left out.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from trainer.api.service import service_of

_MAX_PER_CALL = 1024

router = APIRouter()


class PromptsBody(BaseModel):
    """Body of POST /prompts: rows of any shape that a prompts file may hold."""

    model_config = ConfigDict(extra="forbid")
    prompts: list[dict[str, Any]] = Field(min_length=1, max_length=_MAX_PER_CALL)


@router.post("/prompts", status_code=202)
async def add_prompts(request: Request, body: PromptsBody) -> dict[str, int]:
    """Queue prompts; they are captured before the rest of the source."""
    return service_of(request).controller.add_prompts(body.prompts)
