"""What three known training bugs cost, on one small real target, the same records and the same seed.

    Python's help texts --train--> Llama over letters --generate--> records --each recipe--> drafter --> tau

Each bug is a switch in the recipe; its pair differs in that switch alone. A drafter is measured on held-out
records: label agreement, top-1 accuracy per slot (teacher-forced), chain tau. The test suite asserts
direction and size; this script runs several seeds, prints a table, and draws the plot of docs/three-bugs.md.
Last line: one JSON object. Bugs: recipes of a real project; DFlash specification C.7, items 1 to 3.

The target is trained here, in about a minute. Its deepest hooked layer is one before the last, and labels
made from it agree with the target's tokens in about six of ten cases.

    python benchmarks/three_bugs.py --seeds 3 --plot docs/three-bugs.png --out RESULT.json

Shape letters: T = tokens, R = records, F = feature width.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import statistics
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_online.distill.noise import FeatureNoise
from dflash_online.distill.objective import block_objective
from dflash_online.distill.pack import pack_records
from dflash_online.distill.recipe import Recipe
from dflash_online.distill.statistics import SlotStatistics
from dflash_online.drafter.config import DrafterConfig
from dflash_online.drafter.init import initialize
from dflash_online.evaluate.tau import evaluate_drafter
from dflash_online.target.frozen import FrozenHead
from dflash_online.wire.record import Record, RecordHeader, RecordSource, TargetIdentity

LETTERS = "\n" + string.ascii_lowercase + string.digits + " .,:;()[]{}<>=+-*/_'\"`#@%&!?|\\~^$"
MASK = len(LETTERS)
NUM_LAYERS, HIDDEN, LAYER_IDS = 6, 64, (0, 2, 4)
CORPUS_LENGTH = 24_000
PROMPT_LENGTH, ANSWER_LENGTH = 32, 96
BLOCK_SIZE = 8
# The deviation of the noise, as a share of that of the deepest features.
NOISE_SHARE = 1.0
NUM_TARGET_STEPS, NUM_RECORDS, NUM_DRAFTER_STEPS = 400, 320, 300


@dataclass(frozen=True)
class World:
    """A trained target and what it said."""

    head: FrozenHead
    train: list[Record]
    held_out: list[Record]
    noise: FeatureNoise
    target_loss: float  # nats per character, last steps


@dataclass(frozen=True)
class Arm:
    """One drafter, trained and measured."""

    label_agreement: float  # of the training labels, with those of clean features
    accuracy: tuple[float, ...]  # slots 1 .. B-1, held out
    tau: float


def recipe_pairs(noise: FeatureNoise) -> dict[str, tuple[Recipe, Recipe]]:
    """Name of the bug to the recipe without and with it."""
    tokens = Recipe(name="tokens", gamma=4.0)
    verifier = replace(tokens, name="verifier", label_source="verifier")
    noisy = replace(verifier, name="verifier, noise", noise=noise)
    soft = replace(verifier, name="soft KL", kl_share=1.0, kl_temperature=2.0, gamma=10.0)
    return {
        "noise reaches the labels": (noisy, replace(noisy, noise_reaches_labels=True)),
        "fc without the deepest layer": (tokens, replace(tokens, fc_layers="all_but_last")),
        "soft KL with gamma 10": (verifier, soft),
    }


def corpus() -> Tensor:
    """[T] int64: the help texts that Python ships, as letters of our alphabet."""
    text = "".join(pydoc_data.topics.topics.values()).lower()[:CORPUS_LENGTH]
    place = {letter: index for index, letter in enumerate(LETTERS)}
    return torch.tensor([place[letter] for letter in text if letter in place])


def trained_target(text_T: Tensor, *, num_steps: int) -> tuple[LlamaForCausalLM, float]:
    """A character-level Llama and its loss."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(LETTERS) + 1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    target = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(target.parameters(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=num_steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(num_steps):
        start_R = torch.randint(len(text_T) - 128, (16,), generator=generator)
        batch_RT = text_T[start_R[:, None] + torch.arange(128)]
        loss = target(input_ids=batch_RT, labels=batch_RT).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return target.eval().requires_grad_(False), statistics.fmean(losses[-20:])


def make_world(*, num_steps: int = NUM_TARGET_STEPS, num_records: int = NUM_RECORDS) -> World:
    """Train the target and let it speak, greedily."""
    text_T = corpus()
    target, loss = trained_target(text_T, num_steps=num_steps)
    generator = torch.Generator().manual_seed(1)
    start_R = torch.randint(len(text_T) - PROMPT_LENGTH, (num_records,), generator=generator)
    prompt_RT = text_T[start_R[:, None] + torch.arange(PROMPT_LENGTH)]
    token_RT = target.generate(
        prompt_RT, max_new_tokens=ANSWER_LENGTH, do_sample=False, pad_token_id=MASK, eos_token_id=None
    )
    states = target(input_ids=token_RT[:, :-1], output_hidden_states=True).hidden_states
    features_RTF = torch.cat([states[layer + 1] for layer in LAYER_IDS], dim=-1)
    records = [_record(str(i), token_RT[i], features_RTF[i]) for i in range(num_records)]
    norm = target.model.norm
    head = FrozenHead(
        target.model.embed_tokens.weight.detach(),
        target.lm_head.weight.detach(),
        norm.weight.detach(),
        norm.variance_epsilon,
    )
    deepest_std = features_RTF[..., -HIDDEN:].std().item()
    num_train = num_records * 4 // 5
    noise = FeatureNoise((NOISE_SHARE * deepest_std,))
    return World(head, records[:num_train], records[num_train:], noise, loss)


def _record(record_id: str, token_T: Tensor, features_TF: Tensor) -> Record:
    header = RecordHeader(
        record_id=record_id,
        source=RecordSource.PROMPT,
        cursor=0,
        target=TargetIdentity(path="letters", revision="", weight_checksum="00"),
        drafter_version="none",
        layer_ids=LAYER_IDS,
        dtype="bfloat16",
        num_rows=len(features_TF),
        row_width=features_TF.shape[1],
        token_ids=tuple(token_T.tolist()),
        prompt_length=PROMPT_LENGTH,
        loss_spans=((PROMPT_LENGTH, len(token_T)),),
        finish_reason="length",
    )
    return Record(header, features_TF.bfloat16())


def train_and_measure(
    world: World, recipe: Recipe, *, seed: int = 0, num_steps: int = NUM_DRAFTER_STEPS
) -> Arm:
    """One drafter by one recipe; records, anchors and fresh weights depend on the seed alone."""
    config = DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=len(LETTERS) + 1,
        num_target_layers=NUM_LAYERS,
        target_layer_ids=LAYER_IDS,
        mask_token_id=MASK,
        block_size=BLOCK_SIZE,
        rope_theta=1e4,
        fc_layers=recipe.fc_layers,
    )
    drafter = initialize(config, seed=seed)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=num_steps, pct_start=0.1)
    pick = torch.Generator().manual_seed(seed)
    agreed = total = 0
    for step in range(num_steps):
        order = torch.randperm(len(world.train), generator=pick)[:8].tolist()
        batch = pack_records(
            [world.train[i] for i in order], block_size=BLOCK_SIZE, num_anchors=128, generator=pick
        )
        noise = torch.Generator().manual_seed(seed * 1_000_003 + step)
        result = block_objective(drafter, world.head, batch, recipe, step=step, generator=noise)
        optimizer.zero_grad()
        (result.loss_sum / result.denominator).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        agreed, total = agreed + _num_agreed(result.stats), total + _num_slots(result.stats)
    with torch.no_grad():
        measured = evaluate_drafter(drafter.eval(), world.head, world.held_out)
    assert measured.stats is not None
    return Arm(agreed / total, tuple(measured.stats.accuracy()), measured.tau)


def _num_agreed(stats: SlotStatistics) -> int:
    return int(stats.num_agreed_B.sum())


def _num_slots(stats: SlotStatistics) -> int:
    return int(stats.num_total_B.sum())


def compare(world: World, seeds: Sequence[int], *, num_steps: int) -> dict[str, list[tuple[Arm, Arm]]]:
    """Each bug's pair of arms, without and with it, for every seed."""
    found: dict[str, list[tuple[Arm, Arm]]] = {}
    for bug, (without, planted) in recipe_pairs(world.noise).items():
        found[bug] = []
        for seed in seeds:
            arms = [
                train_and_measure(world, recipe, seed=seed, num_steps=num_steps)
                for recipe in (without, planted)
            ]
            found[bug].append((arms[0], arms[1]))
            print(f"{bug}, seed {seed}: tau {arms[0].tau:.3f} -> {arms[1].tau:.3f}", flush=True)
    return found


def summary(pairs: Sequence[tuple[Arm, Arm]]) -> dict[str, Any]:
    """Means over seeds of one bug, without and with it."""

    def mean(values: Sequence[float]) -> float:
        return round(statistics.fmean(values), 4)

    arms = {"without": [pair[0] for pair in pairs], "with": [pair[1] for pair in pairs]}
    result: dict[str, Any] = {
        name: {
            "tau": mean([arm.tau for arm in some]),
            "tau_by_seed": [round(arm.tau, 4) for arm in some],
            "label_agreement": mean([arm.label_agreement for arm in some]),
            "accuracy": [mean(slot) for slot in zip(*(arm.accuracy for arm in some), strict=True)],
        }
        for name, some in arms.items()
    }
    result["tau_change"] = round(result["with"]["tau"] / result["without"]["tau"] - 1, 4)
    return result


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Accuracy by slot, without and with each bug."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, (bug, result) in zip(
        figure.subplots(1, len(results), sharey=True), results.items(), strict=True
    ):
        for name, style in (("without", "o-"), ("with", "s--")):
            accuracy = result[name]["accuracy"]
            label = f"{name}: tau {result[name]['tau']:.2f}"
            axes.plot(range(1, len(accuracy) + 1), accuracy, style, label=label)
        axes.set_title(bug)
        axes.set_xlabel("slot")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("top-1 accuracy, held out")
    figure.savefig(path, dpi=110)


def main(
    seeds: Annotated[int, typer.Option(help="Drafters per arm.")] = 3,
    steps: Annotated[int, typer.Option(help="Training steps of a drafter.")] = NUM_DRAFTER_STEPS,
    plot: Annotated[Path | None, typer.Option(help="PNG file to draw.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the last line.")] = None,
) -> None:
    """Measure what each bug costs."""
    torch.set_num_threads(1)
    world = make_world()
    print(f"target: {world.target_loss:.3f} nats per letter, noise {world.noise.levels[0]:.3f}", flush=True)
    found = compare(world, range(seeds), num_steps=steps)
    results = {bug: summary(pairs) for bug, pairs in found.items()}
    if plot is not None:
        draw(results, plot)
    line = json.dumps(
        {"benchmark": "three_bugs", "torch": torch.__version__, "seeds": seeds, "steps": steps, **results}
    )
    if out is not None:
        out.write_text(line + "\n", encoding="ascii")
    print(line)


if __name__ == "__main__":
    typer.run(main)
