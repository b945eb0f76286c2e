"""Starts SGLang with the plugin, and refuses to go on when the plugin is not active in every process.

    python -m server_patches --model DIR --drafter DIR [--host --port --dtype ...] [-- SGLANG FLAGS]
        checks -> folders, environment, flags -> python -m sglang.launch_server -> watch until ready -> serve

Runs as the keeper of the server's process tree: whatever ends either of them, nothing is left, the shared
memory of the capture slots included. Exit codes: 0 ended on request, 2 a check failed before anything was
started, 3 the server came up without the plugin, else the server's own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from rich.console import Console

from dflash_online.drafter.checkpoint import (
    TrainingInfo,
    check_against_target,
    check_servable,
    export_tensors,
    load_checkpoint,
    save_checkpoint,
)
from dflash_online.drafter.config import DrafterConfig
from dflash_online.drafter.init import initialize, new_drafter_config
from dflash_online.errors import ConfigError, DflashOnlineError, PluginError
from dflash_online.process.keeper import keep
from dflash_online.process.port import require_free_port
from dflash_online.target.model_info import TargetModelInfo
from dflash_online.tree.policy import PolicyMode
from server_patches.capture.slots import CAPTURE_DIR_ENV
from server_patches.compat import (
    ALGORITHM_NAME,
    MAX_NODES_ENV,
    PATCHED_NAMES,
    PLUGIN_NAME,
    POLICY_ENV,
    VERIFY_WIDTHS_ENV,
    require_supported_version,
)
from server_patches.plugin import ANNOUNCE_DIR_ENV, has_accelerator
from server_patches.ready_watch import ReadyWatch
from server_patches.verify_window import check_widths

SHARED_MEMORY = Path("/dev/shm")
_CPU_STAND_IN = Path(__file__).parent / "cpu" / "stand_in"
_EXIT_REFUSED, _EXIT_INACTIVE = 2, 3
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """What `python -m server_patches` was asked for."""

    model: Path
    drafter: Path | None = None
    """None: a fresh one is made, and nothing is drafted until a trainer publishes and the policy says so."""
    host: str = "127.0.0.1"
    port: int = 30000
    dtype: str = "auto"
    """Of the target and the drafter in the server: auto, float32, bfloat16, ..."""
    capture_slots: int = 32
    """Captures that may be in flight; one more is shed."""
    capture_tokens: int = 4096
    """Tokens, response included, that a slot holds."""
    ready_timeout_s: float = 900.0
    policy: str | None = None
    """Policy at the start: off, chain, tree or auto; None: chain with a drafter, off with a fresh one."""
    max_nodes: int | None = None
    """Largest tree that a policy may ask for, root not counted. Every running request reserves two such
    windows of cache. None: 32 on a CPU, no trees on a GPU (not proved there)."""
    verify_widths: tuple[int, ...] | None = None
    """Widths of a verify pass, root included, that a narrower tree is widened to. On a GPU each is a set of
    CUDA graphs, captured at the start; None: 1, the block size and the largest tree there, none on a CPU."""
    cpu_threads: int | None = None
    """Compute threads of the server on a machine without a GPU; None: one per core. Two processes that
    both compute with all cores are many times slower than two that share the cores out: then set it."""
    is_overlapped: bool | None = None
    """Whether the scheduler prepares a step while the one before it runs; None: with a GPU. On a CPU both
    are work of the same cores."""
    flags: tuple[str, ...] = ()
    """Passed to SGLang as they are."""

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ConfigError("port", self.port, "in 1..65535")
        if not 1 <= self.capture_slots <= 4096:
            raise ConfigError("capture_slots", self.capture_slots, "in 1..4096")
        if self.capture_tokens < 16:
            raise ConfigError("capture_tokens", self.capture_tokens, ">= 16")
        if self.cpu_threads is not None and self.cpu_threads < 1:
            raise ConfigError("cpu_threads", self.cpu_threads, ">= 1")
        if self.policy is not None and self.policy not in tuple(PolicyMode):
            raise ConfigError("policy", self.policy, f"one of {[mode.value for mode in PolicyMode]}")
        if self.max_nodes is not None and not 0 <= self.max_nodes <= 256:
            raise ConfigError("max_nodes", self.max_nodes, "in 0..256")
        for width in self.verify_widths or ():
            if not 1 <= width <= 257:
                raise ConfigError("verify_widths", width, "in 1..257")
        if self.ready_timeout_s <= 0:
            raise ConfigError("ready_timeout_s", self.ready_timeout_s, "> 0 seconds")
        owned = (
            "--speculative-",
            "--model-path",
            "--model",
            "--host",
            "--port",
            "--dtype",
            "--device",
            "--disable-overlap-schedule",
        )
        for flag in self.flags:
            if flag.startswith(owned[0]) or flag.split("=")[0] in owned[1:]:
                raise ConfigError("SGLang flag", flag, "absent: `target serve` sets it itself")

    def largest_tree(self, *, on_gpu: bool) -> int:
        """Draft nodes of the largest tree that memory is reserved for."""
        return (0 if on_gpu else 32) if self.max_nodes is None else self.max_nodes

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}"


def check_before_start(config: LaunchConfig, environment: dict[str, str], *, on_gpu: bool) -> int:
    """All that can be refused without starting anything. Returns the bytes of one capture slot.

    Raises:
        PluginError: wrong SGLang, or the environment's plugin list leaves ours out.
        CheckpointError, ConfigError: the drafter does not fit the target; a verify width fits neither; the
            port is taken.
    """
    require_supported_version()
    listed = environment.get("SGLANG_PLUGINS", "").strip()
    if listed and PLUGIN_NAME not in [name.strip() for name in listed.split(",")]:
        raise PluginError(f"SGLANG_PLUGINS must contain {PLUGIN_NAME}, got {listed!r}")
    target = TargetModelInfo.from_folder(config.model)
    drafter = new_drafter_config(target) if config.drafter is None else _servable_config(config.drafter)
    check_against_target(drafter, target)
    check_widths(config.verify_widths or (), max(drafter.block_size, 1 + config.largest_tree(on_gpu=on_gpu)))
    require_free_port("target", config.host, config.port)
    return config.capture_tokens * drafter.feature_width * 2


def _servable_config(folder: Path) -> DrafterConfig:
    checkpoint = load_checkpoint(folder)
    check_servable(checkpoint)
    return checkpoint.config


def make_fresh_drafter(model: Path, folder: Path) -> Path:
    """Untrained weights, version 0, in the shape that `drafter init` makes by default."""
    config = new_drafter_config(TargetModelInfo.from_folder(model))
    tensors = export_tensors(initialize(config, seed=0), config)
    save_checkpoint(folder, config, tensors, training=TrainingInfo(number=0))
    return folder


def make_environment(config: LaunchConfig, folder: Path, slot_bytes: int, *, on_gpu: bool) -> dict[str, str]:
    """Environment of the server's processes: plugin list, folders, and on CPU the stand-in kernels."""
    environment = dict(os.environ)
    environment.setdefault("SGLANG_PLUGINS", PLUGIN_NAME)
    environment |= {
        ANNOUNCE_DIR_ENV: str(folder / "announce"),
        CAPTURE_DIR_ENV: str(folder / "slots"),
        "DFLASH_CAPTURE_SLOTS": str(config.capture_slots),
        "DFLASH_CAPTURE_SLOT_BYTES": str(slot_bytes),
        POLICY_ENV: config.policy or ("off" if config.drafter is None else "chain"),
        MAX_NODES_ENV: str(config.largest_tree(on_gpu=on_gpu)),
    }
    if config.verify_widths is not None:
        environment[VERIFY_WIDTHS_ENV] = ",".join(map(str, config.verify_widths))
    if not on_gpu:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        if config.cpu_threads is not None:
            environment["OMP_NUM_THREADS"] = str(config.cpu_threads)
        if not _has_real_kernels():
            paths = [str(_CPU_STAND_IN), *filter(None, [environment.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _has_real_kernels() -> bool:
    """Whether an installed `sgl_kernel` exists, which the stand-in must never shadow."""
    import importlib.metadata

    for name in ("sgl-kernel", "sglang-kernel"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False


def make_command(config: LaunchConfig, *, on_gpu: bool) -> list[str]:
    """SGLang's command line."""
    command = [sys.executable, "-W", "ignore::UserWarning", "-m", "sglang.launch_server"]
    command += ["--model-path", str(config.model), "--host", config.host, "--port", str(config.port)]
    command += ["--dtype", config.dtype, "--enable-metrics"]
    command += [
        "--speculative-algorithm",
        ALGORITHM_NAME,
        "--speculative-draft-model-path",
        str(config.drafter),
    ]
    if not on_gpu:
        command += ["--device", "cpu", "--sleep-on-idle"]
        defaults = {"--mem-fraction-static": "0.3", "--max-total-tokens": "32768"}
        for flag, value in defaults.items():
            if not any(given.split("=")[0] == flag for given in config.flags):
                command += [flag, value]
    is_overlapped = on_gpu if config.is_overlapped is None else config.is_overlapped
    if not is_overlapped:
        command.append("--disable-overlap-schedule")
    return command + list(config.flags)


def launch(config: LaunchConfig) -> int:
    """Start the server and stay until it ends. Returns the exit code."""
    on_gpu = has_accelerator()
    slot_bytes = check_before_start(config, dict(os.environ), on_gpu=on_gpu)
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    remove_stale_folders(base)
    folder = base / f"dflash-{os.getpid()}"
    try:
        for name in ("announce", "slots"):
            (folder / name).mkdir(parents=True)
        if config.drafter is None:
            # What is untrained only costs; `auto` finds that out and notices when it changes.
            policy = "auto" if config.policy == "auto" else "off"
            console.print(f"no --drafter: serving with a fresh one, policy {policy}")
            drafter = make_fresh_drafter(config.model, folder / "drafter")
            config = replace(config, drafter=drafter, policy=policy)
        os.environ.update(make_environment(config, folder, slot_bytes, on_gpu=on_gpu))
        watch = ReadyWatch(config.url, folder / "announce", SHARED_MEMORY, timeout_s=config.ready_timeout_s)
        watch.start()
        code = keep(make_command(config, on_gpu=on_gpu))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for path in watch.upstream_files:
        path.unlink(missing_ok=True)
    if watch.failure is not None:
        console.print(f"[red]error:[/red] {watch.failure}")
        return _EXIT_INACTIVE
    return code


def remove_stale_folders(base: Path) -> None:
    """Remove what a launcher that was killed left in shared memory."""
    for folder in base.glob("dflash-*"):
        number = folder.name.removeprefix("dflash-")
        if number.isdigit() and not psutil.pid_exists(int(number)):
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    """Command line of `python -m server_patches`."""
    parser = argparse.ArgumentParser(
        prog="python -m server_patches",
        description="Serve a target model with SGLang and the DFlash Online plugin.",
        epilog="example: python -m server_patches --model models/m --drafter models/d -- --tp-size 2",
    )
    parser.add_argument("--model", type=Path, help="folder of the target model")
    parser.add_argument(
        "--drafter", type=Path, help="folder of the drafter checkpoint (default: a fresh one)"
    )
    parser.add_argument("--policy", choices=[mode.value for mode in PolicyMode], help="policy at the start")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, ...")
    parser.add_argument("--capture-slots", type=int, default=32, help="captures in flight at most")
    parser.add_argument("--capture-tokens", type=int, default=4096, help="tokens that one slot holds")
    parser.add_argument("--max-nodes", type=int, help="largest draft tree (default: 32 on a CPU, 0 on a GPU)")
    parser.add_argument(
        "--verify-widths",
        type=_widths,
        metavar="W,W,...",
        help="widths of a verify pass, root included, each a set of CUDA graphs"
        " (default: 1, the block size and the largest tree on a GPU, as wide as each tree on a CPU)",
    )
    parser.add_argument("--cpu-threads", type=int, help="compute threads without a GPU (default: all cores)")
    parser.add_argument(
        "--overlap",
        dest="is_overlapped",
        action=argparse.BooleanOptionalAction,
        help="prepare a step while the one before it runs (default: with a GPU)",
    )
    parser.add_argument("--ready-timeout-s", type=float, default=900.0)
    parser.add_argument(
        "--list-patches", action="store_true", help="print every upstream name touched, and why"
    )
    parser.add_argument("flags", nargs="*", metavar="-- SGLANG FLAGS")
    own, flags = _split(arguments)
    options = parser.parse_args(own)
    if options.list_patches:
        for patch in PATCHED_NAMES:
            Console().print(f"[bold]{patch.name}[/bold] ({patch.how}): {patch.reason}", highlight=False)
        return 0
    if options.model is None:
        parser.error("--model is required")
    fields = {k: v for k, v in vars(options).items() if k not in ("list_patches", "flags")}
    try:
        return launch(LaunchConfig(**fields, flags=tuple(flags)))
    except DflashOnlineError as exc:
        console.print(f"[red]error:[/red] {exc}")
        return _EXIT_REFUSED


def _widths(text: str) -> tuple[int, ...]:
    """What argparse calls for `--verify-widths`; it turns a ValueError into a usage error."""
    return tuple(int(width) for width in text.split(",") if width)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Own arguments, and those after `--`."""
    own = list(arguments)
    if "--" not in own:
        return own, []
    index = own.index("--")
    return own[:index], own[index + 1 :]
