"""What a replay of many steps showed, without a line per step.

    python examples/ab_figures.py outputs/ab_100/tiny/report/report.json examples/results/ab_tiny_cpu.json

In place of the steps: how many there were, the weights' distance from stock's after the last one, and mean errors of
those that have a truth. The worst step of each figure is in the report's tolerances already.
"""

import json
import sys
from pathlib import Path
from statistics import fmean

report = json.loads(Path(sys.argv[1]).read_text())
steps = report.pop("steps")
truth = [step["truth_errors"] for step in steps if step["truth_errors"]]
arms = [arm for arm in steps[-1]["arms"] if arm != "stock"]
report |= {
    "replayed_steps": len(steps),
    "weights_after_the_last": {arm: steps[-1]["arms"][arm]["own_weights"]["params"] for arm in arms},
    "steps_with_truth": len(truth),
    "mean_truth_errors": {
        arm: {name: fmean(step[arm][name] for step in truth) for name in truth[0][arm]} for arm in truth[0]
    },
}
Path(sys.argv[2]).write_text(json.dumps(report, indent=1) + "\n")
