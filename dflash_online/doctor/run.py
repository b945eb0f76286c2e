"""`doctor`: checks in a fixed order, ended by the first difference.

    server, drafter's folder, target's folder, prompts [, training records] --diagnose--> Diagnosis

What comes first is what everything behind it depends on: names, layers, versions, the target's features, the
drafter's context, its block, what was accepted; then whether the drafter is simply not better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_online.doctor import folder_checks, live_checks, outcome_checks
from dflash_online.doctor.finding import Diagnosis, Finding
from dflash_online.doctor.folder_checks import Unknown
from dflash_online.doctor.served import Reference, Served
from dflash_online.wire.record import Record

Say = Callable[[str], None]
Step = tuple[str, str, Callable[[], Finding | None]]
"""Name, what is compared, the check."""


def diagnose(
    server: Served,
    drafter: Path,
    target: Path,
    prompts: Sequence[Sequence[int]],
    *,
    tokenizer: Any,
    records: Sequence[Record] = (),
    expected_tau: float | None = None,
    max_new_tokens: int = 64,
    say: Say = lambda _text: None,
) -> Diagnosis:
    """Compare the server with the same weights here.

    Args:
        prompts: token ids; each is answered greedily by both.
        records: of the run's training or held-out set, for the checks that need them.
        say: told the name of each check before it runs.

    Raises:
        CheckpointError, ConfigError, TargetUnavailableError: it cannot run.
    """
    diagnosis = Diagnosis()
    say("tensor names")
    if (finding := folder_checks.check_tensor_names(drafter)) is not None:
        diagnosis.finding = finding
        return diagnosis
    diagnosis.passed.append(("tensor names", str(drafter)))
    reference = Reference.load(drafter, target)
    options = _Options(tokenizer, records, expected_tau, max_new_tokens)
    for name, compared, check in _steps(server, reference, prompts, options):
        say(name)
        try:
            finding = check()
        except Unknown as why:
            diagnosis.skipped.append((name, str(why)))
            continue
        if finding is not None:
            diagnosis.finding = finding
            return diagnosis
        diagnosis.passed.append((name, compared))
    return diagnosis


class _Options:
    def __init__(
        self, tokenizer: Any, records: Sequence[Record], expected_tau: float | None, max_new_tokens: int
    ) -> None:
        self.tokenizer, self.records = tokenizer, records
        self.expected_tau, self.max_new_tokens = expected_tau, max_new_tokens


def _steps(
    server: Served, reference: Reference, prompts: Sequence[Sequence[int]], options: _Options
) -> Iterator[Step]:
    """Each step is made when the ones before it have passed: later ones need their results."""
    info, dtype = server.info(), ""
    dtype = str(info["model"]["dtype"]).removeprefix("torch.")
    policy = info["policy"]
    yield "hooked layers", "layer_ids", lambda: folder_checks.check_layer_ids(reference, info)
    yield "served version", "drafter", lambda: folder_checks.check_version(reference, info)
    yield "target weights", "checksum", lambda: folder_checks.check_target_checksum(reference, info)
    yield (
        "chat template",
        "end of a rendered prompt",
        lambda: folder_checks.check_chat_template(server, options.records, options.tokenizer),
    )
    answers = [server.answer(ids, options.max_new_tokens) for ids in prompts]
    first = answers[0]
    yield "features", "all hooked layers", lambda: live_checks.check_features(reference, first, dtype)
    if policy["mode"] == "off":
        yield (
            "context keys",
            "",
            _raising("the server's policy is off: nothing is drafted (PUT /dflash/policy)"),
        )
        return
    served = server.probe(list(prompts[0]))
    features_CF = reference.target.features(list(prompts[0])).float()
    local = reference.block(features_CF, served["block_id_B"])
    yield (
        "context keys",
        f"{reference.checkpoint.config.num_layers} draft layers",
        lambda: live_checks.check_context_keys(served, local, dtype),
    )
    yield (
        "block logits",
        f"{reference.checkpoint.config.block_size} slots",
        lambda: live_checks.check_block(reference, features_CF, served, local, dtype),
    )
    label = f"tree:{policy['num_nodes']}" if policy["mode"] == "tree" else policy["mode"]
    if policy["mode"] in ("chain", "tree"):
        rounds = f"{sum(sum(answer.header.acceptance) for answer in answers)} rounds, {label}"
        yield (
            "accepted drafts",
            rounds,
            lambda: live_checks.check_accepted(reference, answers, label),
        )
    yield "context boundary", "slot 1", lambda: outcome_checks.check_leak(reference, answers)
    expected = outcome_checks.expected_tau(reference, options.expected_tau)
    if expected is None:
        yield "tau", "", _raising("no tau to compare with (--expected-tau, or a folder that passed a gate)")
        return
    yield (
        "tau",
        f"against {expected.tau:.3f} ({expected.source})",
        lambda: outcome_checks.check_outcome(reference, answers, options.records, expected),
    )


def _raising(why: str) -> Callable[[], Finding | None]:
    def check() -> Finding | None:
        raise Unknown(why)

    return check
