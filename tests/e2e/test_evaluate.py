"""tau by the evaluation harness is tau by the server: the same steps and tokens on the same greedy text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_online.drafter.checkpoint import load_checkpoint
from dflash_online.drafter.config import DrafterConfig
from dflash_online.evaluate.harness import Harness
from dflash_online.target.frozen import FrozenHead
from tests.e2e.conftest import load_drafter
from tests.e2e.target_server import PROMPTS, TargetServer, chat_text

TEXTS = [chat_text(prompt) for prompt in PROMPTS]
# Answers end at odd places, most of them in the middle of a step.
LIMITS = (32, 23, 18, 11, 6, 2)


def requests(server: TargetServer) -> list[tuple[str, dict[str, Any]]]:
    """Texts and sampling settings: ended by the length limit, a stop token or a stop string."""
    ended: list[tuple[str, dict[str, Any]]] = [
        (text, {"max_new_tokens": limit}) for text, limit in zip(TEXTS[: len(LIMITS)], LIMITS, strict=True)
    ]
    for text in TEXTS[len(LIMITS) :]:
        plain = server.generate(text, max_new_tokens=32)
        ended.append((text, {"max_new_tokens": 32, "stop_token_ids": [plain["output_ids"][7]]}))
        ended.append((text, {"max_new_tokens": 32, "stop": [plain["text"][20:24]]}))
    return [(text, {"temperature": 0.0, **sampling}) for text, sampling in ended]


@pytest.mark.parametrize(
    ("policy", "reading"),
    [({"mode": "chain"}, "chain"), ({"mode": "tree", "num_nodes": 16}, "ddtree_nodes_16")],
)
def test_harness_and_server_count_the_same_steps_and_tokens(
    tree_server: TargetServer,
    drafter_config: DrafterConfig,
    frozen: FrozenHead,
    trained_drafter: Path,
    policy: dict[str, Any],
    reading: str,
) -> None:
    tree_server.set_policy(**policy)
    to_send, before = requests(tree_server), pooled_by_server(tree_server, policy)
    records = [tree_server.capture(text=text, sampling_params=sampling) for text, sampling in to_send]
    after = pooled_by_server(tree_server, policy)
    drafter = load_drafter(drafter_config, load_checkpoint(trained_drafter).tensors)
    harness = Harness(drafter, frozen, num_nodes=[16])
    for record in records:
        assert harness.add(record)
        offline = list(harness.report.histograms[reading][-1])
        online = padded(record.header.acceptance)
        assert online == offline, record.header.token_ids[record.header.prompt_length :]
        committed = sum((a + 1) * count for a, count in enumerate(online))
        # The first token of an answer comes from prefill; of the last step the bonus may lie behind the end.
        num_later = len(record.header.token_ids) - record.header.prompt_length - 1
        assert committed in (num_later, num_later + 1)
    pooled = [sum(column) for column in zip(*harness.report.histograms[reading], strict=True)]
    assert [new - old for new, old in zip(after, before, strict=True)] == pooled
    # Drafts were accepted, so that there was something to count and to cut.
    assert harness.report.tau(reading) > 1.3


def pooled_by_server(server: TargetServer, policy: dict[str, Any]) -> list[int]:
    """What GET /dflash/acceptance counted of the live drafter under the policy."""
    name = f"tree:{policy['num_nodes']}" if policy["mode"] == "tree" else "chain"
    return padded(server.histograms_by_policy(server.drafter()["version"]).get(name, []))


def padded(histogram: Sequence[int]) -> list[int]:
    return [*histogram, *[0] * (8 - len(histogram))]
