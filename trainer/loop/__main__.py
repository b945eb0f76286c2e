"""Entry point of one rank: `torchrun -m trainer.loop --runs-dir DIR --run-id ID`.

    supervisor --torchrun--> [ rank ] --> WorkerLoop

Exit code 0: the phase in the store says why it ended. Anything else: it failed, and the phase says whether a
restart may help (torchrun does not pass exit codes on). Reads the environment, torchrun's variables, once.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from trainer.loop.tether import die_with_parent


def main() -> int:
    """Run one rank; returns the exit code."""
    die_with_parent()
    # The service stops a worker through the store; torchrun's SIGTERM is for those that do not listen.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="trainer.loop")
    parser.add_argument("--runs-dir", type=Path, required=True)
    parser.add_argument("--run-id", required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    from trainer.loop.attempt import run_attempt  # imports torch, after the tether holds

    return run_attempt(options.runs_dir, options.run_id, dict(os.environ))


if __name__ == "__main__":
    sys.exit(main())
