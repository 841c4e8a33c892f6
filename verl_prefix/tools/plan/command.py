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
from verl_prefix.tools.plan.options import Options, Unsupported
from verl_prefix.tools.report import provenance, show

SCHEMA = "verl_prefix.plan/2"  # 1: `verdict` was about prefix.trees alone


def build(options: Options) -> dict[str, Any]:
    """The report, as JSON can hold it.

    Raises:
        PlanError: something that the report needs is missing or does not fit.
    """
    try:
        asked = read_command(options)
    except Unsupported as error:
        return {"unsupported": [str(error)], "verdict": f"Not supported: {error}", "notes": []}
    from verl_prefix.tools.plan.figures import figures

    return figures(asked)


def run(options: Options, out: Path | None, as_json: bool) -> int:
    """The command; returns 0, or 1 where the run would be refused, or by simulation fits no GPU.

    Args:
        as_json: on stdout, with no words.

    Raises:
        PlanError: see `build`.
    """
    with contextlib.redirect_stdout(sys.stderr):  # of what verl and transformers print
        report = build(options)
    refused = report["unsupported"]
    if as_json or out:
        text = json.dumps({**provenance(SCHEMA), **report}, indent=1) + "\n"
        if out:
            write_whole(out, text)
        if as_json:
            print(text, end="")
    if refused and not as_json:
        show([f"# {report['verdict']}", *(f"Not possible: {reason}" for reason in refused[1:])])
    elif not as_json:
        from verl_prefix.tools.plan.report import blocks

        show(blocks(report))
    if "simulated" in report:
        from verl_prefix.tools.simulate.command import fits_nothing

        return 1 if refused or fits_nothing(report["simulated"]) else 0
    return 1 if refused else 0
