"""Counts greedy outputs that drafting changed: budgets and concurrencies against no drafting, token by token.

One server per run. Plain outputs come first (policy off, one request at a time); then every policy at every
concurrency generates the same prompts, of mixed lengths and mixed numbers of tokens. Where an output differs,
the target's own logits at the first difference say by how much it preferred one token to the other: a margin
near zero is a tie that rounding decides, anything else a bug. With `--samples`, the law of two sampled tokens
is compared too, with their exact probabilities (for a target of few tokens).

Targets: `--model DIR` with `--drafter DIR`, or `--tiny`: a random two-layer LLaMA of 64 tokens, made on
the spot with a random drafter, where a tree of 64 nodes covers whole levels.

Run: `python benchmarks/lossless.py --help`. Needs no network. Exit code 1 when a difference has a margin
above `--max-margin`. `--to FILE` keeps one entry per `--case`. Last line: one JSON object.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import torch
import typer
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dflash_online.drafter.checkpoint import TrainingInfo, export_tensors, save_checkpoint
from dflash_online.drafter.init import initialize, new_drafter_config
from dflash_online.evaluate.tau import tau_of
from dflash_online.process.port import free_port
from dflash_online.process.service import Service
from dflash_online.target.model_info import TargetModelInfo

# Mode and draft nodes; None: as many as the drafter's block gives.
POLICIES: tuple[tuple[str, int | None], ...] = (
    ("off", None),
    ("chain", None),
    ("tree", 7),
    ("tree", 16),
    ("tree", 32),
    ("tree", 64),
)
QUESTIONS = (
    "Write a Python function that {}.",
    "Explain in two sentences how one {}.",
    "Give me three examples of a program that {}.",
    "What can go wrong when code {}?",
)
TASKS = (
    "reverses a string",
    "sorts a list of dates",
    "counts words in a file",
    "finds prime numbers",
    "merges two dictionaries",
    "parses a date",
    "removes duplicates",
    "computes a median",
    "flattens nested lists",
    "validates an address",
    "draws a histogram",
    "reads a table",
)
TINY_VOCAB = 64


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and the number of tokens to ask for."""

    input_ids: list[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token that drafting changed."""

    policy: str
    job: int
    position: int
    margin: float
    """Plain token's logit minus the other's, by the target in float32 on the same prefix."""


def policy_name(mode: str, num_nodes: int | None) -> str:
    """As /dflash/acceptance names it."""
    return mode if num_nodes is None else f"{mode}:{num_nodes}"


class Server:
    """The running server over HTTP."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=600.0, trust_env=False)

    def set_policy(self, mode: str, num_nodes: int | None) -> None:
        self._http.put("/dflash/policy", json={"mode": mode, "num_nodes": num_nodes}).raise_for_status()

    def generate(self, input_ids: list[int], sampling: dict[str, Any]) -> list[int]:
        body = {"input_ids": input_ids, "sampling_params": {"ignore_eos": True, **sampling}}
        return list(self._http.post("/generate", json=body).raise_for_status().json()["output_ids"])

    def greedy(self, jobs: Sequence[Job], concurrency: int) -> list[list[int]]:
        def run(job: Job) -> list[int]:
            return self.generate(job.input_ids, {"temperature": 0.0, "max_new_tokens": job.num_tokens})

        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(run, jobs))

    def histograms(self) -> dict[str, list[int]]:
        """Accepted drafts per step, by policy."""
        entries = self._http.get("/dflash/acceptance").raise_for_status().json()["versions"]
        return {entry["policy"]: entry["histogram"] for entry in entries}


def make_tiny(folder: Path) -> tuple[Path, Path]:
    """A random target of two layers and a random drafter for it. Returns their folders."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    target = TargetModelInfo.from_folder(folder / "target")
    drafter = replace(
        new_drafter_config(target, num_layers=1, block_size=8, target_layer_ids=(0,)), dtype="float32"
    )
    tensors = export_tensors(initialize(drafter, seed=1), drafter)
    save_checkpoint(folder / "drafter", drafter, tensors, training=TrainingInfo(number=1))
    return folder / "target", folder / "drafter"


def make_jobs(model: Path | None, num_prompts: int, max_tokens: int) -> list[Job]:
    """Prompts of mixed lengths. model: whose tokenizer to use; None: random tokens of the tiny target."""
    rng = random.Random(0)
    jobs = []
    tokenizer = None if model is None else AutoTokenizer.from_pretrained(model)
    for index in range(num_prompts):
        if tokenizer is None:
            ids = [rng.randrange(3, TINY_VOCAB) for _ in range(rng.randint(1, 120))]
        else:
            question = QUESTIONS[index % len(QUESTIONS)].format(TASKS[index % len(TASKS)])
            filler = " ".join(rng.choice(TASKS) for _ in range(rng.randint(0, 12)))
            text = f"<|im_start|>user\nItem {index}: {filler}. {question}<|im_end|>\n<|im_start|>assistant\n"
            ids = list(tokenizer(text, add_special_tokens=False).input_ids)
        jobs.append(Job(ids, rng.randint(max(1, max_tokens // 6), max_tokens)))
    return jobs


@torch.no_grad()
def next_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """[V] float32: the target's logits after these tokens."""
    logits: torch.Tensor = model(torch.tensor([ids])).logits[0, -1]
    return logits


def find_differences(
    model: Any, policy: str, jobs: Sequence[Job], plain: list[list[int]], found: list[list[int]]
) -> list[Difference]:
    """First difference of each job. A length that differs counts with an infinite margin."""
    differences = []
    for index, (job, wanted, other) in enumerate(zip(jobs, plain, found, strict=True)):
        if wanted == other:
            continue
        pairs = enumerate(zip(wanted, other, strict=False))
        position = next((i for i, (a, b) in pairs if a != b), None)
        if position is None:
            differences.append(Difference(policy, index, min(len(wanted), len(other)), float("inf")))
            continue
        logits_V = next_logits(model, job.input_ids + wanted[:position])
        margin = float((logits_V[wanted[position]] - logits_V[other[position]]).abs())
        differences.append(Difference(policy, index, position, margin))
    return differences


def law_of_two_tokens(server: Server, model: Any, prompt: list[int], num_samples: int) -> dict[str, float]:
    """p-values of two sampled tokens against their exact probabilities, top-p 0.9 of a warm distribution."""
    temperature, top_p = 1.5, 0.9

    def kept(ids: list[int]) -> dict[int, float]:
        probs_V = torch.softmax(next_logits(model, ids) / temperature, dim=-1)
        values, tokens = probs_V.sort(descending=True)
        is_kept = values.cumsum(0) - values <= top_p
        values = values[is_kept] / values[is_kept].sum()
        return dict(zip(tokens[is_kept].tolist(), values.tolist(), strict=True))

    exact = {(a, b): p * q for a, p in kept(prompt).items() for b, q in kept([*prompt, a]).items()}
    sampling = {"temperature": temperature, "top_p": top_p, "max_new_tokens": 2}
    result = {}
    for mode, num_nodes in (("off", None), ("chain", None), ("tree", 16), ("tree", 64)):
        server.set_policy(mode, num_nodes)
        with ThreadPoolExecutor(16) as pool:
            outputs = list(pool.map(lambda _: server.generate(prompt, sampling), range(num_samples)))
        counts = Counter((first, second) for first, second in outputs)
        if not set(counts) <= set(exact):
            result[policy_name(mode, num_nodes)] = 0.0
            continue
        # Outcomes too rare for the test's approximation are pooled.
        common = [o for o in exact if exact[o] * num_samples >= 5]
        seen = [counts[o] for o in common]
        wanted = [exact[o] * num_samples for o in common]
        if (rest := num_samples - sum(wanted)) > 1e-6 * num_samples:
            seen, wanted = [*seen, num_samples - sum(seen)], [*wanted, rest]
        scale = sum(seen) / sum(wanted)
        pvalue = float(chisquare(seen, [w * scale for w in wanted]).pvalue)
        result[policy_name(mode, num_nodes)] = round(pvalue, 4)
        print(
            f"law of two tokens, {policy_name(mode, num_nodes)}: {len(common)} outcomes, p = {pvalue:.3f}",
            flush=True,
        )
    return result


def campaign(
    server: Server, model: Any, jobs: Sequence[Job], concurrencies: Sequence[int]
) -> tuple[dict[str, Any], list[Difference]]:
    """All policies at all concurrencies. Returns counts and every difference."""
    server.set_policy("off", None)
    plain = server.greedy(jobs, 1)
    num_compared = num_tokens = 0
    differences: list[Difference] = []
    for mode, num_nodes in POLICIES:
        for concurrency in concurrencies:
            start = time.perf_counter()
            server.set_policy(mode, num_nodes)
            found = server.greedy(jobs, concurrency)
            name = f"{policy_name(mode, num_nodes)}@{concurrency}"
            new = find_differences(model, name, jobs, plain, found)
            differences += new
            num_compared += len(found)
            num_tokens += sum(map(len, found))
            spent = time.perf_counter() - start
            print(f"{name}: {len(found)} compared, {len(new)} differ, {spent:.0f} s", flush=True)
    counts = {
        "num_generations": num_compared,
        "num_tokens": num_tokens,
        "num_different": len(differences),
        "max_margin": max((d.margin for d in differences), default=0.0),
        "different_by_policy": dict(Counter(d.policy for d in differences)),
        "tau": {name: round(tau_of(h), 3) for name, h in server.histograms().items()},
    }
    return counts, differences


def main(
    case: Annotated[str, typer.Option(help="Name of the entry in the result file.")],
    model: Annotated[Path | None, typer.Option(help="Folder of the target.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="Folder of a trained drafter for it.")] = None,
    tiny: Annotated[bool, typer.Option(help="Make a tiny random target and drafter instead.")] = False,
    dtype: Annotated[str, typer.Option(help="Of the server.")] = "float32",
    overlap: Annotated[bool, typer.Option(help="Overlapped scheduling.")] = False,
    num_prompts: Annotated[int, typer.Option(min=1)] = 24,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 48,
    concurrency: Annotated[str, typer.Option(help="Requests at a time, by commas.")] = "1,4,16",
    samples: Annotated[int, typer.Option(min=0, help="Samples per policy for the law; tiny only.")] = 0,
    max_margin: Annotated[float, typer.Option(help="Largest margin that counts as a tie.")] = 1e-3,
    to: Annotated[Path | None, typer.Option(help="JSON file that keeps one entry per case.")] = None,
) -> None:
    """Compare outputs with and without drafting."""
    with tempfile.TemporaryDirectory() as scratch:
        if tiny:
            target, draft = make_tiny(Path(scratch))
        elif model is not None and drafter is not None:
            target, draft = model, drafter
        else:
            raise typer.BadParameter("--model and --drafter are both required without --tiny")
        jobs = make_jobs(None if tiny else model, num_prompts, max_tokens)
        oracle = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        port = free_port()
        command = [sys.executable, "-m", "server_patches", "--model", str(target), "--drafter", str(draft)]
        command += ["--port", str(port), "--dtype", dtype, "--max-nodes", "64", "--policy", "off"]
        command += ["--overlap" if overlap else "--no-overlap", "--"]
        command += ["--context-length", "1024", "--max-running-requests", "16"]
        command += ["--skip-tokenizer-init"] if tiny else []
        url = f"http://127.0.0.1:{port}"
        with Service("target", command, Path(scratch) / "target.log") as service:
            service.wait_ready(f"{url}/dflash/info", timeout_s=300.0, on_wait=lambda _: None)
            server = Server(url)
            counts, differences = campaign(server, oracle, jobs, [int(c) for c in concurrency.split(",")])
            laws = law_of_two_tokens(server, oracle, jobs[0].input_ids, samples) if samples else {}
            service.require_running()
    entry = {
        "target": "random LLaMA, 2 layers, 64 tokens" if tiny else target.name,
        "dtype": dtype,
        "overlap": overlap,
        "concurrency": concurrency,
        "max_margin_allowed": max_margin,
        **counts,
        "law_p_values": laws,
        "num_samples": samples,
    }
    for difference in differences:
        print(difference)
    if to is not None:
        entries = json.loads(to.read_text()) if to.exists() else {}
        to.write_text(json.dumps({**entries, case: entry}, indent=1, sort_keys=True) + "\n")
    print(json.dumps({"case": case, **entry}))
    if any(difference.margin > max_margin for difference in differences):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
