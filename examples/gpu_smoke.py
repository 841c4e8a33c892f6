"""`make gpu-smoke`: what only GPUs can show, in the order in which it would break; ten minutes on one node.

Every step runs in a process of its own; the first that fails ends it. gpu_smoke.json names what was checked with the
values found, after every step. `--dry-run` runs every step on gloo ranks with tiny models; the checks that need a GPU
are named as skipped there. Not yet run on a GPU.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from smoke.checks import Checks
from training_process import process_group

from verl_prefix.files import write_whole
from verl_prefix.tools.arguments import Parser, folder_to_write
from verl_prefix.tools.report import provenance

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600

# Where each step is; imported in its own process alone, on the platform that it runs on.
STEPS = {
    "kernels": "smoke.kernels:kernels", "engines": "smoke.engines:engines", "megatron": "smoke.megatron:megatron",
    "grpo": "smoke.training:grpo", "video": "smoke.training:video", "profile": "smoke.profiling:profiled",
}  # fmt: skip


def run_step(name: str, dry_run: bool, out: Path) -> int:
    """One step, in this process; its checks go to NAME.json, and what ended it, if anything did."""
    checks, failure = Checks(dry_run, out), None
    try:
        module, function = STEPS[name].split(":")
        getattr(importlib.import_module(module), function)(checks)
    except AssertionError as error:
        failure = str(error)
    (out / f"{name}.json").write_text(json.dumps({"checks": checks.found, "failure": failure}))
    return int(failure is not None)


def run(dry_run: bool, out: Path, start_step: Callable[[str, float], int]) -> dict[str, Any]:
    """The report. start_step: (name, seconds that are left) -> exit code of the step, which wrote NAME.json."""
    report = {**provenance("verl_prefix.gpu_smoke/1"), "dry_run": dry_run, "holds": False, "steps": {}}
    start = time.monotonic()
    for name in STEPS:
        began = time.monotonic()
        code = start_step(name, LIMIT_S - (began - start))
        path = out / f"{name}.json"
        step = json.loads(path.read_text()) if path.exists() else {"checks": [], "failure": f"it ended with {code}"}
        report["steps"][name] = {"seconds": time.monotonic() - began, **step}
        failed = bool(code or step["failure"])
        report["holds"] = not failed and len(report["steps"]) == len(STEPS)
        write_whole(out / "gpu_smoke.json", json.dumps(report, indent=1) + "\n")
        skipped = sum("skipped" in check for check in step["checks"])
        made = len(step["checks"]) - skipped
        print(f"{name}: {made} checks, {skipped} skipped, {step['failure'] or 'all hold'}", flush=True)
        if failed:
            break
    return report


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="gloo ranks and tiny models, without a GPU")
    parser.add_argument("--out", type=folder_to_write, default=str(ROOT / "outputs" / "gpu_smoke"),
        help="folder of gpu_smoke.json")  # fmt: skip
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    out = args.out.resolve()
    if args.dry_run:
        os.environ.update(VERL_PLATFORM="cpu", CUDA_VISIBLE_DEVICES="")
    elif not torch.cuda.is_available():
        parser.error("torch.cuda.is_available() is False; add --dry-run to try the steps on a CPU")
    if args.step:
        return run_step(args.step, args.dry_run, out)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("gpu_smoke", *STEPS):  # of an earlier run; what else is there may be someone's
        (out / f"{name}.json").unlink(missing_ok=True)

    def start_step(name: str, seconds: float) -> int:
        # megatron-core is in an environment of its own where this is developed (`make setup-megatron`).
        own = ROOT / ".venv-megatron/bin/python"
        python = own if args.dry_run and name == "megatron" and own.exists() else sys.executable
        command = [str(python), __file__, "--step", name, "--out", str(out), *["--dry-run"] * args.dry_run]
        log = out / f"{name}.log"
        with process_group(command, dict(os.environ), log) as process:
            try:
                code = process.wait(timeout=None if args.dry_run else max(seconds, 1))
            except subprocess.TimeoutExpired:
                code = 124
        if code:
            print(log.read_text(errors="replace")[-4000:])
        return code

    return int(not run(args.dry_run, out, start_step)["holds"])


if __name__ == "__main__":
    sys.exit(main())
