"""The known reasons why served tau is low although training looks right, with what to do about each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason."""

    number: int
    name: str
    confirm: str
    repair: str


_ALL = (
    Cause(
        1,
        "hooked layer off by one",
        "id i in layer_ids of GET /dflash/info is the output of decoder layer i; speculators counts from 1",
        "convert the drafter (dflash-online drafter convert), or serve with the ids it was trained on",
    ),
    Cause(
        2,
        "the anchor's own feature leaks into training",
        "the drafter drafts far better when the context holds the anchor's row, which serving never has",
        "mask the context strictly below the anchor, then train anew",
    ),
    Cause(
        3,
        "final norm missing in front of the head",
        "the served block output equals the local one before the final norm",
        "apply the drafter's norm before the target's head; check the tensor norm.weight",
    ),
    Cause(
        4,
        "sliding layers run as full, or the reverse",
        "the served block output equals a local one with other layer types",
        "set layer_types, sliding_window and use_sliding_window in the drafter's config.json",
    ),
    Cause(
        5,
        "rotary settings differ",
        "context keys have the local length at every position, but another direction",
        "compare rope_theta, scaling and head_dim of the drafter's config.json with what the server read",
    ),
    Cause(
        6,
        "drafter's embedding or head overwritten",
        "context keys agree, block output or accepted drafts do not",
        "embedding and head must be the target's: restart the server from the target's own folder",
    ),
    Cause(
        7,
        "drafter weights landed on the target",
        "the features differ beyond recognition",
        "restart the server; update a drafter through /dflash/drafter/stage only",
    ),
    Cause(
        8,
        "chat template or thinking mode differs between training and serving",
        "the server's rendering of a message ends otherwise than the prompts of the training records",
        "serve with the run's chat_template_kwargs, or train on prompts rendered as served",
    ),
    Cause(
        9,
        "language or domain shift",
        "tau is as expected on the training's held-out records and low on this text",
        "train on prompts like these (POST /prompts)",
    ),
    Cause(
        10,
        "target quantized or fine-tuned after capture",
        "the checksum of the target's weights is not that of training, or its features differ a little",
        "train on captures of the target that serves now; a warm start is enough",
    ),
    Cause(
        11,
        "low-precision overflow",
        "features, keys or block output are not finite, or lie at the bound of float16",
        "serve in bfloat16 or float32",
    ),
    Cause(
        12,
        "stale drafter context or stale weights after a swap",
        "another version is served than the folder's, or context keys are those of other weights",
        "swap again (stage, commit), or restart the server with this drafter",
    ),
    Cause(
        13,
        "teacher-forced accuracy mistaken for acceptance",
        "tau over all anchors is what was expected, tau over rounds is not",
        "compare tau with tau: dflash-online eval, reading chain",
    ),
    Cause(
        14,
        "too little data",
        "tokens_seen in the drafter's training.json",
        "train longer, on more prompts; start from an official drafter where there is one",
    ),
    Cause(
        15,
        "served context longer than trained",
        "tau falls at positions beyond the longest training record",
        "train on documents as long as those served",
    ),
    Cause(
        16,
        "tensor names that the server skips",
        "the folder's tensors are not exactly those of the config",
        "convert the drafter (dflash-online drafter convert), or rename the tensors",
    ),
)
CAUSES: dict[int, Cause] = {cause.number: cause for cause in _ALL}
