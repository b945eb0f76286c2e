"""Each known cause of a low served tau is planted alone, and `doctor` names exactly that one.

The server is the faulty one of faulty_server.py; folders, weights, records and drafts are real. The matrix of
planted and named causes is in docs/doctor.md.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_server import FaultyServer
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dflash_online.distill.objective import block_objective
from dflash_online.distill.pack import pack_records
from dflash_online.distill.recipe import ZLAB
from dflash_online.doctor.finding import Diagnosis
from dflash_online.doctor.outcome_checks import _cut, check_leak
from dflash_online.doctor.run import diagnose
from dflash_online.doctor.served import Reference
from dflash_online.drafter.checkpoint import TrainingInfo, export_tensors, save_checkpoint
from dflash_online.drafter.config import DrafterConfig
from dflash_online.drafter.init import initialize
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.evaluate.tau import evaluate_drafter
from dflash_online.target.frozen import FrozenHead
from dflash_online.target.inprocess import InProcessTarget
from dflash_online.wire.record import Record

LAYER_IDS, ANSWER_LENGTH, CHECKSUM = (1, 3, 4), 40, "c0ffee"
QUESTIONS = [
    f"Question {i}: how many {thing}?" for i, thing in enumerate(["apples", "boats", "cats", "dogs"])
]
OTHER_QUESTIONS = ["Was it not raining in Lyon on the day after?", "Name a river, a lake, and a sea."]


@dataclass
class Case:
    """Folders on disk, and what a run would have kept."""

    drafter: Path
    target: Path
    tokenizer: Any
    records: list[Record]
    reference: Reference

    def prompts(self, questions: list[str]) -> list[list[int]]:
        server = FaultyServer.healthy(self.reference, self.tokenizer)
        return [server.render(question) for question in questions]

    def diagnose(self, server: FaultyServer, **options: Any) -> Diagnosis:
        options = {
            "records": self.records,
            "max_new_tokens": ANSWER_LENGTH,
            "drafter": self.drafter,
        } | options
        questions = options.pop("questions", QUESTIONS[:2])
        return diagnose(
            server, target=self.target, prompts=self.prompts(questions), tokenizer=self.tokenizer, **options
        )


def config_of(**changes: Any) -> DrafterConfig:
    config = DrafterConfig(
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=264,
        num_target_layers=6,
        target_layer_ids=LAYER_IDS,
        mask_token_id=262,
        block_size=6,
        rope_theta=1e4,
        max_position_embeddings=512,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=24,
        dtype="float32",
    )
    return replace(config, **changes)


def trained(head: FrozenHead, records: list[Record], *, steps: int = 150) -> DFlashDrafter:
    """A drafter that knows the answers by heart."""
    drafter = initialize(config_of(), seed=0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = pack_records(records, block_size=6, num_anchors=160, generator=generator)
        result = block_objective(drafter, head, batch, ZLAB)
        optimizer.zero_grad()
        torch.autograd.backward(result.loss_sum / result.denominator)
        optimizer.step()
    return drafter.eval()


def saved(drafter: DFlashDrafter, folder: Path, *, tau: float | None, tokens_seen: int = 10**7) -> Path:
    training = TrainingInfo(
        number=4,
        target={"path": "x", "revision": "", "weight_checksum": CHECKSUM},
        gate=None if tau is None else {"new_tau": tau},
        tokens_seen=tokens_seen,
    )
    save_checkpoint(folder, drafter.config, export_tensors(drafter, drafter.config), training=training)
    return folder


@pytest.fixture(scope="module")
def case(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A healthy set-up: a target whose text is no repetition, and a drafter with tau well above 1."""
    folder = tmp_path_factory.mktemp("doctor")
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=264,
        max_position_embeddings=512,
        initializer_range=0.25,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # as in a large target, the layers behind the hooked ones change little
        model.model.layers[5].mlp.down_proj.weight.mul_(0.1)
        model.model.layers[5].self_attn.o_proj.weight.mul_(0.1)
    model.save_pretrained(folder / "target")
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    tokenizer.save_pretrained(folder / "target")
    target = InProcessTarget.from_folder(folder / "target", LAYER_IDS)
    head = FrozenHead.from_folder(folder / "target")
    turns = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [tokenizer.apply_chat_template(t, add_generation_prompt=True, tokenize=False) for t in turns]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    records = [
        target.capture(ids, record_id=f"r{i}", max_new_tokens=ANSWER_LENGTH) for i, ids in enumerate(prompts)
    ]
    drafter = trained(head, records)
    tau = evaluate_drafter(drafter, head, records).tau
    assert tau > 2.5
    saved(drafter, folder / "drafter", tau=tau)
    reference = Reference.load(folder / "drafter", folder / "target")
    return Case(folder / "drafter", folder / "target", tokenizer, records, reference)


@pytest.fixture
def server(case: Case) -> FaultyServer:
    return FaultyServer.healthy(case.reference, case.tokenizer)


def named(diagnosis: Diagnosis) -> tuple[str, int]:
    assert diagnosis.finding is not None
    return diagnosis.finding.check, diagnosis.finding.cause.number


def test_a_healthy_server_passes_every_check(case: Case, server: FaultyServer) -> None:
    diagnosis = case.diagnose(server)
    assert diagnosis.finding is None
    assert [name for name, _ in diagnosis.passed] == [
        "tensor names",
        "hooked layers",
        "served version",
        "target weights",
        "chat template",
        "features",
        "context keys",
        "block logits",
        "accepted drafts",
        "context boundary",
        "tau",
    ]
    assert diagnosis.skipped == []
    assert json.loads(json.dumps(diagnosis.to_json()))["is_healthy"] is True


def other_layer_ids(server: FaultyServer) -> None:
    server.layer_ids = (1, 3, 5)


def shifted_layers(server: FaultyServer) -> None:
    server.hook((0, 2, 3))


def wrong_rotation(server: FaultyServer) -> None:
    drafter = server.reference.drafter
    drafter.config = replace(drafter.config, rope_theta=1e6)


def all_full(server: FaultyServer) -> None:
    drafter = server.reference.drafter
    drafter.config = replace(drafter.config, layer_types=("full_attention",) * 2)


def no_norm(server: FaultyServer) -> None:
    server.has_norm = False


def other_embedding(server: FaultyServer) -> None:
    frozen = server.reference.frozen
    server.reference = replace(
        server.reference, frozen=replace(frozen, embedding_VH=frozen.weight_VH.flip(0))
    )


def other_head(server: FaultyServer) -> None:
    frozen = server.reference.frozen
    server.reference = replace(
        server.reference, frozen=replace(frozen, weight_VH=frozen.weight_VH.roll(7, 0))
    )


def drafter_on_target(server: FaultyServer) -> None:
    layers = server.reference.target._layers
    for own, layer in zip(server.reference.drafter.layers, layers, strict=False):
        layer.mlp.load_state_dict(own.mlp.state_dict())
        layer.self_attn.o_proj.load_state_dict(own.self_attn.o_proj.state_dict())


def another_template(server: FaultyServer) -> None:
    server.tokenizer = copy.deepcopy(server.tokenizer)
    server.tokenizer.chat_template += "{% if add_generation_prompt %}<think></think>\n{% endif %}"


def another_checksum(server: FaultyServer) -> None:
    server.checksum = "decaf"


def quantized(server: FaultyServer) -> None:
    """Six bits, without a word: the checksum is still the old one."""
    for parameter in server.reference.target._model.parameters():
        step = parameter.detach().abs().max() / 31
        parameter.copy_((parameter / step).round() * step)


def overflow(server: FaultyServer) -> None:
    server.on_features = lambda features_TF: (features_TF.float() * 1e5).half().bfloat16()


def another_version(server: FaultyServer) -> None:
    server.version = "3-0123456789ab"


def stale_keys(server: FaultyServer) -> None:
    """The context projection of other weights, under the new version's name."""
    other = initialize(config_of(), seed=9)
    server.reference.drafter.fc.load_state_dict(other.fc.state_dict())


@pytest.mark.parametrize(
    ("plant", "check", "cause"),
    [
        (other_layer_ids, "hooked layers", 1),
        (shifted_layers, "features", 1),
        (no_norm, "block logits", 3),
        (all_full, "block logits", 4),
        (wrong_rotation, "context keys", 5),
        (other_embedding, "block logits", 6),
        (other_head, "accepted drafts (chain)", 6),
        (drafter_on_target, "features", 7),
        (another_template, "chat template", 8),
        (another_checksum, "target weights", 10),
        (quantized, "features", 10),
        (overflow, "features", 11),
        (another_version, "served version", 12),
        (stale_keys, "context keys", 12),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
@torch.no_grad()
def test_a_fault_of_the_server_is_named(
    case: Case, server: FaultyServer, plant: Callable[[FaultyServer], None], check: str, cause: int
) -> None:
    plant(server)
    assert named(case.diagnose(server)) == (check, cause)


def test_tensors_under_other_names_are_named(case: Case, server: FaultyServer, tmp_path: Path) -> None:
    folder = tmp_path / "renamed"
    folder.mkdir()
    tensors = load_file(case.drafter / "model.safetensors")
    tensors["decoder.norm.weight"] = tensors.pop("norm.weight")
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((case.drafter / "config.json").read_bytes())
    diagnosis = case.diagnose(server, drafter=folder)
    assert named(diagnosis) == ("tensor names", 16)
    assert diagnosis.finding is not None
    assert "norm.weight" in diagnosis.finding.found


class ReadsItsLastRow(DFlashDrafter):
    """What training with a leak tends to: slot 1 is what the last visible row of the context predicts."""

    def context(self, features_CF: torch.Tensor) -> torch.Tensor:
        return features_CF

    def forward_blocks(self, embeds_ABH: torch.Tensor, ctx_SH: torch.Tensor, **where: Any) -> torch.Tensor:
        last_A = where["mask"].anchor_position_A - 1
        deepest_AH = ctx_SH[last_A, self.config.deepest_layer_columns]
        return deepest_AH[:, None].expand(embeds_ABH.shape).float()


def test_a_drafter_that_needs_the_anchors_feature_is_named(case: Case) -> None:
    """Learning such a drafter takes more text than a test has: this one is written down."""
    drafter = ReadsItsLastRow(config_of())
    finding = check_leak(replace(case.reference, drafter=drafter), case.records)
    assert finding is not None
    assert (finding.check, finding.cause.number) == ("context boundary", 2)
    assert check_leak(case.reference, case.records) is None


def test_text_unlike_the_training_is_named_as_a_shift(case: Case, server: FaultyServer) -> None:
    assert named(case.diagnose(server, questions=OTHER_QUESTIONS)) == ("tau", 9)


def test_answers_beyond_the_trained_length_are_named(case: Case, server: FaultyServer) -> None:
    assert named(case.diagnose(server, max_new_tokens=4 * ANSWER_LENGTH)) == ("tau", 15)


def test_an_accuracy_taken_for_acceptance_is_named(case: Case, tmp_path: Path) -> None:
    # It knows the first halves of the answers: many good anchors, and most rounds in the other halves.
    halves = [_cut(record, record.header.prompt_length + ANSWER_LENGTH // 2) for record in case.records]
    drafter = trained(case.reference.frozen, [half for half in halves if half is not None])
    measured = evaluate_drafter(drafter, case.reference.frozen, case.records)
    folder = saved(drafter, tmp_path / "half", tau=None)
    server = FaultyServer.healthy(Reference.load(folder, case.target), case.tokenizer)
    assert measured.tau < measured.tau_all_anchors
    options = {"drafter": folder, "expected_tau": measured.tau_all_anchors}
    assert named(case.diagnose(server, **options)) == ("tau", 13)


def test_a_drafter_that_has_seen_little_is_named(case: Case, tmp_path: Path) -> None:
    folder = saved(
        trained(case.reference.frozen, case.records, steps=3), tmp_path / "young", tau=None, tokens_seen=900
    )
    server = FaultyServer.healthy(Reference.load(folder, case.target), case.tokenizer)
    diagnosis = case.diagnose(server, drafter=folder, expected_tau=3.0)
    assert named(diagnosis) == ("tau", 14)


def test_a_check_that_cannot_be_made_says_why_and_the_others_go_on(case: Case, tmp_path: Path) -> None:
    folder = saved(case.reference.drafter, tmp_path / "plain", tau=None)
    server = FaultyServer.healthy(Reference.load(folder, case.target), case.tokenizer)
    diagnosis = case.diagnose(server, drafter=folder, records=[])
    assert diagnosis.finding is None
    assert [name for name, _ in diagnosis.skipped] == ["chat template", "tau"]
    assert len(diagnosis.passed) == 9
