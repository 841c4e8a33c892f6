"""`verl-prefix plan`: from a training command's own overrides, what sharing the prefix would do to it.

Composes the same Hydra config as the command and reads its train files, in a second; the rest (`figures`) imports torch
and verl.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from verl_prefix.files import write_whole
from verl_prefix.tools.plan.compose import read_command
from verl_prefix.tools.plan.options import CONFIG_PATH, Turns
from verl_prefix.tools.report import provenance, show

SCHEMA = "verl_prefix.plan/2"  # 1: `verdict` was about prefix.trees alone


def build(
    config_name: str,
    words: list[str],
    responses: str | None,
    parts: dict[str, float] | None,
    config_path: str = CONFIG_PATH,
    gpu: str = "h100",
    simulate: bool = False,
    fit_gib: float | None = None,
    turns: Turns | None = None,
) -> dict[str, Any]:
    """The plan, as JSON can hold it.

    Args:
        config_name, words, config_path, responses, turns: see `read_command`. Others: see `figures`.

    Raises:
        PlanError: something that the plan needs is missing or does not fit.
    """
    asked = read_command(config_name, words, config_path, responses, turns)
    from verl_prefix.tools.plan.figures import figures

    return figures(asked, parts or {}, gpu, simulate, fit_gib)


def run(out: Path | None, as_json: bool, *command: Any, **options: Any) -> int:
    """The command; returns 0, or 1 where the run would be refused, or by simulation fits no GPU.

    Args:
        as_json: on stdout, with no words. command, options: of `build`.

    Raises:
        PlanError: see `build`.
    """
    with contextlib.redirect_stdout(sys.stderr):  # of what verl and transformers print
        report = build(*command, **options)
        from verl_prefix.tools.plan.report import blocks
        from verl_prefix.tools.simulate.command import fits_nothing
    text = json.dumps({**provenance(SCHEMA), **report}, indent=1) + "\n"
    if as_json:
        print(text, end="")
    else:
        show(blocks(report))
    if out:
        write_whole(out, text)
    return 1 if report["unsupported"] or ("simulated" in report and fits_nothing(report["simulated"])) else 0
