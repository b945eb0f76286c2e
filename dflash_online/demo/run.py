"""The whole loop on one machine: what `dflash-online demo` does, step by step.

    model -> drafter 1 -> target, trainer -> bench -> train and publish -> bench -> end all -> table, JSON

Every service is held by a context manager, so that whatever ends the demo (an error, Ctrl-C, SIGTERM) also
ends the services; the result is reported only when they are gone. Raises DflashOnlineError and Interrupted.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from dflash_online.bench.measure import BenchConfig, run_bench
from dflash_online.bench.report import BenchReport
from dflash_online.demo.config import MODEL_NAME, DemoConfig, bench_prompts, fill_run_config, read_example
from dflash_online.demo.interruption import Interruption
from dflash_online.demo.memory import PeakMemory
from dflash_online.demo.report import DemoResult
from dflash_online.demo.screen import DemoScreen
from dflash_online.demo.services import Running, start_target, start_trainer
from dflash_online.demo.training import train_for
from dflash_online.demo.workdir import own_workdir
from dflash_online.prompts.item import PromptItem
from dflash_online.target.client import TargetClient
from dflash_online.target.fetch import fetch_model

_REQUEST_TIMEOUT_S = 300.0
_MAX_DRAFTING_BATCH, _PROBE_INTERVAL = 4, 16


def run_demo(config: DemoConfig, console: Console) -> DemoResult:
    """Run everything and leave nothing behind but the models folder and the workdir."""
    example = read_example(config.run_config)
    prompts = bench_prompts(example, max(config.num_prompts, config.num_latency_prompts))
    with own_workdir(config.workdir) as workdir, Interruption() as interruption:
        with DemoScreen(console) as screen, PeakMemory() as memory:
            demo = _Demo(config, example, prompts, workdir, interruption, screen, memory)
            return demo.run()


class _Demo:
    """The steps, in order."""

    def __init__(
        self,
        config: DemoConfig,
        example: dict[str, Any],
        prompts: list[PromptItem],
        workdir: Path,
        interruption: Interruption,
        screen: DemoScreen,
        memory: PeakMemory,
    ) -> None:
        self._config, self._example, self._prompts = config, example, prompts
        self._workdir, self._interruption = workdir, interruption
        self._screen, self._memory = screen, memory
        self._steps_s: dict[str, float] = {}
        self._started = time.monotonic()

    def run(self) -> DemoResult:
        with self._timed("model", f"the model {MODEL_NAME}"):
            model = self._config.models_dir / MODEL_NAME
            fetch_model(MODEL_NAME, model, self._screen.waiting)
        with self._timed("drafter", "a new drafter, version 1"):
            drafter = self._make_drafter(model)
        with self._services(model, drafter) as (target, trainer):
            measured = self._measure(model, target, trainer)
        result = DemoResult(
            **measured,
            peak_rss_mb=self._memory.peaks_mb(),
            minutes=self._config.minutes,
            wall_s=time.monotonic() - self._started,
            steps_s=self._steps_s,
            num_leftover_processes=sum(len(one.service.left_over()) for one in (target, trainer)),
            are_ports_free=all(one.is_port_free() for one in (target, trainer)),
        )
        (self._workdir / "result.json").write_text(json.dumps(result.to_json(), indent=2) + "\n")
        return result

    def _measure(self, model: Path, target: Running, trainer: Running) -> dict[str, Any]:
        config, prompts = self._config, self._prompts[: self._config.num_prompts]
        with self._timed("bench_first", f"measuring version 1 on {len(prompts)} prompts never trained on"):
            first = self._bench(target, prompts, ("off", "chain"), config.concurrency)
        with self._timed("train", f"training for {config.minutes:g} minutes, publishing on the way"):
            status = train_for(
                trainer,
                target,
                fill_run_config(self._example, target_url=target.url, target_path=model),
                train_s=60 * config.minutes,
                stop_timeout_s=config.stop_timeout_s,
                ask_info=lambda: ask_info(target.url),
                show=self._screen.show,
            )
        info = ask_info(target.url)
        with self._timed("bench_last", f"measuring version {info['drafter']['version']} on the same prompts"):
            last = self._bench(target, prompts, ("chain", "tree"), config.concurrency)
            few = self._prompts[: config.num_latency_prompts]
            speed = self._bench(target, few, ("off", "chain", "tree"), 1)
        return {"first": first, "last": last, "speed": speed, "info": ask_info(target.url), "status": status}

    def _make_drafter(self, model: Path) -> Path:
        from dflash_online.drafter.checkpoint import TrainingInfo, save_checkpoint
        from dflash_online.drafter.init import initialize, new_drafter_config
        from dflash_online.drafter.tensors import export_tensors
        from dflash_online.target.model_info import TargetModelInfo

        wanted = self._example["drafter"]
        config = new_drafter_config(
            TargetModelInfo.from_folder(model),
            num_layers=wanted["num_layers"],
            block_size=wanted["block_size"],
        )
        drafter = initialize(config, seed=self._example["seed"])
        folder = self._workdir / "drafter-v1"
        save_checkpoint(folder, config, export_tensors(drafter, config), training=TrainingInfo(number=1))
        return folder

    @contextmanager
    def _services(self, model: Path, drafter: Path) -> Iterator[tuple[Running, Running]]:
        """Both services, ready; ended when the block is left, and then they are gone."""
        logs = self._workdir / "logs"
        with ExitStack() as stack:
            # Last in, first out: entered last, so that all endings below run while signals wait.
            with self._timed("start", "starting target and trainer"):
                with self._interruption.hold():
                    target = start_target(model, drafter, logs / "target.log")
                    stack.callback(self._end, target)
                    trainer = start_trainer(self._workdir / "runs", logs / "trainer.log")
                    stack.callback(self._end, trainer)
                for running, path in ((trainer, "/readyz"), (target, "/health")):
                    self._memory.add(running.service)
                    self._wait_ready(running, path)
            set_policy(target.url)
            yield target, trainer
            self._screen.step("ending both services")

    def _end(self, running: Running) -> None:
        with self._interruption.hold():
            running.service.stop()

    def _wait_ready(self, running: Running, path: str) -> None:
        name = running.service.name
        running.service.wait_ready(
            running.url + path,
            self._config.ready_timeout_s,
            lambda waited_s: self._screen.waiting(f"{name} loads, {waited_s:.0f} s"),
        )

    def _bench(
        self, target: Running, prompts: list[PromptItem], policies: tuple[str, ...], concurrency: int
    ) -> BenchReport:
        config = BenchConfig(
            url=target.url,
            concurrencies=(concurrency,),
            policies=policies,
            max_tokens=self._config.max_tokens,
            num_warmup=1,
            request_timeout_s=_REQUEST_TIMEOUT_S,
            max_pass_s=_REQUEST_TIMEOUT_S,
        )

        def show(name: str, num_done: int, num_all: int) -> None:
            self._screen.waiting(f"{name}: {num_done} of {num_all}")

        return asyncio.run(run_bench(config, prompts, show))

    @contextmanager
    def _timed(self, name: str, text: str) -> Iterator[None]:
        self._screen.step(text)
        start = time.monotonic()
        yield
        self._steps_s[name] = time.monotonic() - start


def set_policy(url: str) -> None:
    """Draft where it pays on a CPU, in small batches. Captures run in large ones: a probe step now and then
    keeps the live acceptance of each version measured while they do."""

    async def put() -> None:
        client = TargetClient(url)
        try:
            await client.set_policy(
                "chain", max_batch_size=_MAX_DRAFTING_BATCH, probe_interval=_PROBE_INTERVAL
            )
        finally:
            await client.aclose()

    asyncio.run(put())


def ask_info(url: str) -> dict[str, Any]:
    """GET /dflash/info, once."""

    async def ask() -> dict[str, Any]:
        client = TargetClient(url)
        try:
            return await client.info()
        finally:
            await client.aclose()

    return asyncio.run(ask())
