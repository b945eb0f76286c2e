"""`dflash-online doctor` and the real server: healthy, and with another drafter than the folder's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_online.cli import main
from tests.e2e.target_server import TargetServer


def run_doctor(
    capsys: pytest.CaptureFixture[str], server: TargetServer, drafter: Path, target: Path, *more: str
) -> tuple[int, dict[str, object]]:
    url = str(server.client.base_url)
    arguments = ["--url", url, "--drafter", str(drafter), "--target", str(target), *more]
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments, "--limit", "2", "--max-new-tokens", "24", "--json"])
    assert isinstance(ended.value.code, int)
    return ended.value.code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("policy", [{"mode": "chain"}, {"mode": "tree", "num_nodes": 16}])
def test_the_server_does_what_the_reference_does(
    tree_server: TargetServer,
    trained_drafter: Path,
    model_folder: Path,
    policy: dict[str, object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    tree_server.set_policy(**policy)
    code, result = run_doctor(capsys, tree_server, trained_drafter, model_folder, "--expected-tau", "1.0")
    assert result["finding"] is None
    assert code == 0
    passed = [entry["check"] for entry in result["passed"]]  # type: ignore[attr-defined]
    for check in ("features", "context keys", "block logits", "accepted drafts", "tau"):
        assert check in passed


def test_another_drafter_swapped_in_is_named(
    tree_server: TargetServer,
    trained_drafter: Path,
    drafters: list[Path],
    model_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tree_server.swap(drafters[1])
    try:
        code, result = run_doctor(capsys, tree_server, trained_drafter, model_folder)
    finally:
        tree_server.swap(trained_drafter)
    assert code == 1
    finding = result["finding"]
    assert isinstance(finding, dict)
    assert (finding["check"], finding["cause"]["number"]) == ("served version", 12)
