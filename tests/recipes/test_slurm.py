"""recipes/slurm.sh: what it runs where. Slurm and the nodes are stand-ins: no machine here has them."""

import os
import re
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "slurm.sh"
# Writes down the node, the command, and the settings that it inherits; runs nothing but what asks for addresses.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
    [[ $1 != --nodelist=* ]] || node=${1#*=}
    shift
done
if [[ $1 == hostname ]]; then echo "10.0.0.7 fe80::1"; exit; fi
if [[ $1 == timeout ]]; then set -- wait "${@: -1}"; fi
settings="$RAY_ADDRESS $RAY_AUTH_MODE $RAY_AUTH_TOKEN $NNODES $NGPUS_PER_NODE"
printf '%s|%s|%s\\n' "$node" "$settings" "${*//$'\\n'/ }" >> "$LOG"
[[ $1 != bash ]] || exit 7
if [[ $1 == ray ]]; then exec sleep 3600; fi
if [[ $1 == wait ]]; then
    nodes=${2##*< } && nodes=${nodes%%:*}
    until (( $(grep -c '|ray start' "$LOG") >= nodes )); do sleep 0.05; done
fi
"""


def test_ray_starts_on_every_node_and_then_the_command_on_the_first(tmp_path: Path) -> None:
    tools = {"srun": SRUN, "scontrol": "#!/bin/sh\nprintf 'n1\\nn2\\nn3\\n'\n"}
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")}
    env |= {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CPUS_PER_TASK": "64", "SLURM_GPUS_PER_NODE": "h100:8"}
    command = ["bash", "run.sh", "a b"]
    done = subprocess.run(["bash", SCRIPT, *command], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 7, done.stderr  # of the command, although Ray still runs
    calls = [line.split("|", 2) for line in (tmp_path / "log").read_text().splitlines()]
    (settings,) = {settings for _, settings, _ in calls}
    address, mode, token, nodes, gpus = settings.split()
    assert (address, mode, nodes, gpus, len(token)) == ("10.0.0.7:6379", "token", "3", "8", 32)
    started = {node: words for node, _, words in calls if words.startswith("ray start")}
    resources = "--num-cpus=64 --num-gpus=8 --block"
    assert started == {
        "n1": f"ray start --head --node-ip-address=10.0.0.7 --port=6379 {resources}",
        "n2": f"ray start --address=10.0.0.7:6379 {resources}",
        "n3": f"ray start --address=10.0.0.7:6379 {resources}",
    }
    waits = [(node, re.search(r"< (\d):", words)[1]) for node, _, words in calls if words.startswith("wait")]
    assert waits == [("n1", "1"), ("n1", "3")]
    assert [node for node, _, words in calls if words == " ".join(command)] == ["n1"]
