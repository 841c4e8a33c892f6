"""`verl-prefix plan`: commands, scripts and files that it reads, and what it says of those that it cannot."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import verl  # noqa: F401
from omegaconf import OmegaConf
from plans import ACTOR, PREFIX, ROLLOUT, build, one_step, overrides, write_folder  # noqa: F401

from verl_prefix import cli
from verl_prefix.config.engines import MEGATRON, engine_of
from verl_prefix.tools.plan import command as plan
from verl_prefix.tools.plan import compose, figures, options, script


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("plan"))


def test_what_the_driver_refuses_is_said_and_is_the_exit_code(folder, capsys, tmp_path):
    words = overrides(folder, "actor_rollout_ref.actor.shuffle=true", "model_engine=dp")
    assert cli.main(["plan", "--response-lengths", "20,4", "--out", str(tmp_path / "plan.json"), *words]) == 1
    (first,) = capsys.readouterr().out.splitlines()
    assert first.startswith("Not possible: actor_rollout_ref.actor.shuffle=True")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["verdict"] == first == f"Not possible: {written['unsupported'][0]}"
    assert written["versions"]["verl"] and written["device"] and "commit" in written["git"]
    assert cli.main(["plan", *overrides(folder)]) == 0


def test_every_refusal_is_named_and_a_refused_model_has_no_figures(folder, capsys, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    words = overrides(
        folder,
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=3",
        "actor_rollout_ref.actor.use_kl_loss=true",
    )
    assert cli.main(["plan", *words]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(line.startswith("Not possible: ") for line in lines)
    keys = (
        "actor.fsdp_config.ulysses_sequence_parallel_size=3", "attention_dropout=0.1",
        "ref.fsdp_config.ulysses_sequence_parallel_size=3 does", "ref.fsdp_config.ulysses_sequence_parallel_size=3: of",
    )  # fmt: skip
    assert all(key in line for line, key in zip(lines, keys, strict=True))
    stock = (f"actor_rollout_ref.model.path={tmp_path}/model", "actor_rollout_ref.actor.prefix.schedule=stock")
    assert build(folder, *stock)["unsupported"] == []
    (reason,) = build(folder, "actor_rollout_ref.actor.prefix.mini_batches=prompts", "trainer.v1.trainer_mode=sync")[
        "unsupported"
    ]
    assert "mini_batches=prompts with trainer.use_v1=True and trainer.v1.trainer_mode=sync" in reason


@pytest.mark.parametrize(
    "start",
    [
        "",
        "python3 -m verl.trainer.main_ppo",
        "CUDA_VISIBLE_DEVICES=0,1 VERL_LOGGING_LEVEL=DEBUG env python -u -m verl.trainer.main_ppo",
        "uv run --no-sync python3 -X dev -m verl.trainer.main_ppo",
        "ray job submit --address=http://localhost:8265 --working-dir . -- python3 -m verl.trainer.main_ppo",
        "torchrun --nnodes=1 verl/trainer/main_ppo.py",
    ],
)
@pytest.mark.parametrize(
    ("options", "name"), [("", "ppo_trainer"), ("-cn prefix_grpo", "prefix_grpo"), ("--config-name=x.yaml", "x.yaml")]
)
def test_a_whole_command_is_planned_as_its_overrides_are(monkeypatch, start, options, name):
    found = []
    monkeypatch.setattr(compose, "_compose", lambda *arguments: found.append(arguments))
    monkeypatch.setattr(compose, "model_engine", lambda *_: "dp")
    words = [*start.split(), "a.b=1", *options.split(), "+c=[1,2]", "~d", "\\", " ", "$@"]
    # Nothing is composed.
    assert cli.main(["plan", "--shares", "update=0.5", *words, "--response-lengths", "20"]) == 2
    assert found == [(name, ["a.b=1", "+c=[1,2]", "~d", "model_engine=prefix"], "config")]


@pytest.mark.parametrize(
    ("name", "words"), [("ppo_trainer", ["model_engine=megatron"]), ("ppo_megatron_trainer.yaml", [])]
)
def test_a_megatron_command_is_planned_on_its_engine(folder, name, words):
    """Whichever way it names its engine; ranks of tensor and context parallelism have the same rows."""
    tensor = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    context = "actor_rollout_ref.actor.megatron.context_parallel_size=2"
    config = compose.compose_config(name, [*overrides(folder), *words, "trainer.n_gpus_per_node=8", tensor, context])
    assert engine_of(config.actor_rollout_ref.actor) is MEGATRON and compose.data_ranks(config) == 2


def test_a_config_of_the_users_own_says_which_engine_it_trains_with(tmp_path):
    searchpath = "hydra: {searchpath: ['pkg://verl.trainer.config']}"
    for name, engine in (("mine", "megatron"), ("titan", "torchtitan")):
        lines = searchpath, f"defaults: [ppo_trainer, {{override model_engine: {engine}}}, _self_]"
        lines += ("actor_rollout_ref: {actor: {prefix: {trees: off, verify: off}}}",) if name == "mine" else ()
        (tmp_path / f"{name}.yaml").write_text("\n".join(lines))
    assert compose.model_engine("mine", [], str(tmp_path)) == "megatron"
    assert compose.model_engine("mine", ["model_engine=dp"], str(tmp_path)) == "dp"
    actor = compose.compose_config("mine", [], str(tmp_path)).actor_rollout_ref.actor
    assert engine_of(actor) is MEGATRON and actor.prefix.trees == actor.prefix.verify == "off"
    with pytest.raises(options.Unsupported, match="this trains with torchtitan"):
        compose.model_engine("titan", [], str(tmp_path))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("model_engine=torchtitan", "torchtitan"), ("model_engine='automodel'", "automodel"),
        ("actor_rollout_ref.actor.strategy=torchtitan", "torchtitan"),
        ("actor_rollout_ref.actor.torchtitan.tensor_parallel_size=2", "torchtitan"),
    ],
)  # fmt: skip
def test_an_engine_of_verls_on_which_nothing_is_shared_is_said_to_be_one(folder, capsys, words, name):
    assert cli.main(["plan", *overrides(folder, words)]) == 1
    shared = "prefixes can be shared in trainings with model_engine=dp, veomni, megatron"
    line = f"Not supported: this trains with {name}; {shared}\n"
    assert capsys.readouterr().out == line
    assert cli.main(["plan", "--json", *overrides(folder, words)]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == line.strip()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        (f"{ROLLOUT}.name=vllmm", "vllmm: verl knows sglang, trtllm, vllm"),
        (f"{ROLLOUT}.name=hf", "hf: verl knows sglang, trtllm, vllm"),
        (f"{ROLLOUT}.name=vllmm +platform=cpu", "vllmm: verl knows hf, sglang, trtllm, vllm"),
        ("algorithm.adv_estimator=grop", "grop: verl knows gae, "),
        ("trainer.v1.trainer_mode=prefix_sink", "prefix_sink: verl knows colocate_async, "),
        (f"{ACTOR}.policy_loss.loss_mode=vanila", "vanila: verl knows bypass_mode, "),
    ],
)
def test_names_that_verl_does_not_know_are_refused(folder, word, says):
    assert build(folder, *word.split())["unsupported"][0].startswith(word.partition("=")[0] + "=" + says)


SCRIPT = """
set -euo pipefail
ray stop; touch ran; pip install nothing; source .venv/bin/activate
export PATH=/opt/bin:$PATH
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
P=${P:-4} G=$(nvidia-smi | wc -l)
DATA=("data.train_files=['$HERE/a b.parquet']" data.max_prompt_length=$((P * (1 + 2))))
[[ -n "$G" ]] || DATA+=(trainer.n_gpus_per_node=8)  # a comment with 'a quote
/usr/bin/env python3 -m verl.trainer.main_ppo --config-name=mine \\
    "${DATA[@]}" $UNSET \\
    "$@" 2>&1 | tee train.log
python3 -m verl.trainer.main_ppo second=1 > second.log
"""


def test_a_script_or_a_quoted_command_is_planned_and_not_run(monkeypatch, tmp_path):
    composed = []
    monkeypatch.setattr(compose, "_compose", lambda *arguments: composed.append(arguments))
    monkeypatch.setattr(compose, "model_engine", lambda *_: "dp")
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text(SCRIPT)
    monkeypatch.setenv("P", "5")
    words = [
        f"data.train_files=['{tmp_path}/a b.parquet']", "data.max_prompt_length=15",
        "trainer.n_gpus_per_node=8", "extra=1", "model_engine=prefix",
    ]  # fmt: skip
    for command in (["train.sh", "extra=1"], ["bash", "train.sh", "extra=1"]):
        assert (
            cli.main(["plan", "--turns", "2", "--thinking", "1", "--say", "1", "--tool", "1", *command]) == 2
        )  # nothing is composed
        assert composed.pop() == ("mine", words, "config")
    assert (
        cli.main(["plan", "P=3 python3 -u -m verl.trainer.main_ppo -cn mine \\\n a='1 2' b=\"$P\" > log", "c=3"]) == 2
    )
    assert composed.pop() == ("mine", ["a=1 2", "b=5", "c=3", "model_engine=prefix"], "config")
    assert [path.name for path in tmp_path.iterdir()] == ["train.sh"]


RUN = "python3 -m verl.trainer.main_ppo"


def test_a_launcher_may_have_an_option_that_begins_as_hydras(capsys, monkeypatch):
    monkeypatch.setattr(plan, "run", lambda options, *_: print(options.config[1], options.overrides) or 0)
    for words in (["srun", "-c", "8", *RUN.split(), "-cn", "mine", "a=1"], [f"srun -c 8 {RUN} -cn=mine a=1"]):
        assert cli.main(["plan", *words]) == 0
        assert capsys.readouterr().out == "mine ['a=1']\n"


# A loop ends after a second on a core; its programs that are not found take as long again, or longer.
@pytest.mark.parametrize(
    "text",
    [
        f"(while :; do nvidia-smi >> gpu; sleep 9; done) &\n{RUN} a=1 > log &",
        pytest.param(f"for i in 1 2; do (while :; do :; done) & done\n{RUN} a=1", marks=pytest.mark.more),
    ],
)
def test_no_loop_of_a_script_goes_on_behind_it(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "SECONDS", 600)  # beside other jobs
    Path("run.sh").write_text(text)
    assert script.expanded([str(tmp_path / "run.sh")]) == [*RUN.split(), "a=1"]
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert not psutil.wait_procs(left, timeout=300)[1]  # what is killed ends when it is its turn


def test_names_of_files_may_have_an_equals_sign_and_scripts_submit_jobs(monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr(compose, "_compose", lambda *arguments: found.append(arguments))
    monkeypatch.setattr(compose, "model_engine", lambda *_: "dp")
    file, steps = tmp_path / "run_lr=1e-6.sh", tmp_path / "lr=1e-6.jsonl"
    file.write_text(f"ray job submit --working-dir . -- {RUN} --config-name=prefix_grpo a.b=1\n")
    timings = {"timing_s/step": 4.0, "timing_s/update_actor": 2.0}
    steps.write_text("".join(json.dumps({"step": i, "data": timings}) + "\n" for i in (1, 2)))
    assert cli.main(["plan", "--shares", str(steps), str(file)]) == 2  # nothing is composed
    assert found == [("prefix_grpo", ["a.b=1", "model_engine=prefix"], "config")]
    assert options.shares(str(steps))["update"] == 0.5


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (f"pkill -f verl.trainer.main_ppo\n{RUN} a=1", [], ["a=1"]),
        ("MAIN=/opt/verl/trainer/main_ppo.py; python3 $MAIN a=1", [], ["a=1"]),
        (f"[[ $0 == verl.trainer.main_ppo ]]\necho {RUN} x=9\n{RUN} a=1", [], ["a=1"]),
        (f'RUN=({RUN} a=1 "b=c d")\n"${{RUN[@]}}" c=3 "$@"', ["d=4"], ["a=1", "b=c d", "c=3", "d=4"]),
        (f"E=${{1:-vllm}}; shift\n{RUN} name=$E", ["sglang", "b=2"], ["name=sglang", "b=2"]),
        (f'{RUN} n=8 n=4 "$@"', ["n=8"], ["n=8", "n=4", "n=8"]),
        (f". ./env.sh || exit 1\n{RUN} a=1", [], ["a=1"]),
        (f'D=$(cd -- "$(dirname -- "$0")" && pwd)\n{RUN} f=$D/t', [], ["f={folder}/t"]),
        (f"cd /data; {RUN} f=$PWD/t", [], ["f=/data/t"]),
        (f"command -v python3 || exit 1\nexec 3>&1 4>&2 5>&1\n{RUN} a=1", [], ["a=1"]),
        (f"PS4='[$LINENO] '\n{RUN} a=/数据\necho after", [], ["a=/数据"]),
        (f"history -s X; history -w mine.txt\n{RUN} a=1", [], ["a=1"]),
        (f'{{ date; {RUN} a=1 "b=c d"; }} > "$D/a log" 2>&1', [], ["a=1", "b=c d"]),
        (f"( {RUN} a=1 ) &>> log", [], ["a=1"]),
        (f"{{ {RUN} a=1; }} > 'my log' 2> \"$D\"/err_$(date +%s).txt", [], ["a=1"]),
        (f"{RUN} a=1 \\", [], ["a=1"]),
        (f"for n in 4 8; do {RUN} n=$n; done >/dev/null 2> err | cat", [], ["n=4"]),
        (f"if [ ! -d /none ]; then exit 1; fi > log\n[ -f none ] || {{ echo; exit 2; }}\n{RUN} a=1", [], ["a=1"]),
        (f'if [ -z "$E" ]; then N=8; else N=4; fi\nif ! command -v ray; then exit; fi\n{RUN} n=$N', [], ["n=8"]),
        (f"{{ while ((i++ < 5000)); do :; done; {RUN} a=1; }} > log &", [], ["a=1"]),
        (f'D=$(dirname "${{BASH_SOURCE[0]:-$0}}")\n{RUN} f=$D/t', [], ["f={folder}/t"]),
    ],
)  # fmt: skip
def test_a_script_is_read_as_bash_would_expand_it(tmp_path, monkeypatch, text, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LC_ALL", "C")
    Path("run.sh").write_text(text)
    expected = [word.format(folder=tmp_path) for word in words]
    for command in (["run.sh"], ["bash", "-x", "run.sh"]):
        found = script.expanded([*command, *arguments])
        assert found[found.index("python3") :][-len(expected) :] == expected and found[0] == "python3"
        assert len([word for word in found if "=" in word]) == len(expected)
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]


INNER = """HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
{ RUN n=$N m=$M local=$LOCAL f=$HERE/t "$@"; } > log 2>&1""".replace("RUN", RUN)


@pytest.mark.parametrize(
    "call",
    [
        "M=3 bash {name} a=1",
        "export M=3; cd sub && sh -x deep.sh a=1",
        "export M=3\nexec {name} a=1",
        "M=3 bash -e {quoted} a=1",
        "export M=3\n  {quoted} a=1 | tee log",
        'export M=3\nD=sub\nbash "$D/deep.sh" a=1',
        "bash $0; M=3 bash {name} a=1",
        'ON=(srun --nodes=1)\nM=3 "${{ON[@]}}" bash {name} a=1',
    ],
)
def test_a_script_that_is_called_is_read_with_what_is_exported(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("sub/deep.sh").write_text(INNER)
    name = "sub/deep.sh"
    Path("run.sh").write_text("export N=7\nLOCAL=9\n" + call.format(name=name, quoted=f'"$(dirname $0)/{name}"'))
    found = script.expanded(["run.sh"])
    assert found == [*RUN.split(), "n=7", "m=3", "local=", f"f={tmp_path}/sub/t", "a=1"]


SOURCED = """N=7; export PATH=/opt:$PATH
declare -a MORE=(m=3 "t=a b")
HERE=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
{ date; echo; } > log
[[ $1 != 9 ]] || return
run() { "$@" here=$HERE first=$1 n=$N; }
source ./sub/deep.sh
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f'source sub/env.sh\n{RUN} n=$N "${{MORE[@]}}" d=$DEEP', ["n=7", "m=3", "t=a b", "d=5"]),
        (f'. "$(dirname $0)/sub/env.sh" || exit 1\nrun {RUN}', ["here={folder}/sub", "first=python3", "n=7"]),
        (f"cd sub; source env.sh 9\n{RUN} n=$N f=$(type -t run)", ["n=7", "f="]),
        ("set -a; . sub/env.sh; set +a\nbash sub/train.sh", ["n=7"]),
        ("source sub/train.sh", ["n="]),
    ],
)
def test_a_file_that_is_sourced_is_read(tmp_path, monkeypatch, text, found):
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("sub/env.sh").write_text(SOURCED)
    Path("sub/deep.sh").write_text("typeset DEEP=5")
    Path("sub/train.sh").write_text(f"{RUN} n=$N")
    Path("run.sh").write_text(text)
    words = script.expanded(["run.sh"])
    assert [word for word in words if "=" in word] == [word.format(folder=tmp_path) for word in found]
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["deep.sh", "env.sh", "run.sh", "train.sh"]


def test_our_own_recipe_that_calls_another_is_read():
    recipes = Path(__file__).resolve().parents[2] / "recipes"
    command = script.expanded([str(recipes / "run_qwen3_5_9b_fsdp2.sh"), "musique", "trainer.nnodes=2"])
    assert command[:3] == RUN.split() and "actor_rollout_ref.model.path=Qwen/Qwen3.5-9B" in command
    assert command[-1] == "trainer.nnodes=2"


def test_of_several_trainings_the_first_that_trains_is_taken_and_named(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text(f"{RUN} a=0 trainer.val_only=True\nfor n in 4 8; do {RUN} a=$n; done\n{RUN} a=4")
    assert script.expanded([str(path)]) == [*RUN.split(), "a=4"]
    note = (
        f"note: {path} has 3 training commands, and this is number 2; to plan another, paste it behind verl-prefix plan"
    )
    assert capsys.readouterr().err == note + "\n"
    path.write_text(f"{RUN} a=0 ++trainer.val_only='true'\n" * 2)
    assert script.expanded([str(path)])[3] == "a=0" and capsys.readouterr().err == ""


def test_a_loop_that_sleeps_beside_the_training_costs_no_time(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "SECONDS", 600)
    text = "(while :; do nvidia-smi; sleep 9; done) &\nx=$(sleep 9999; echo 3)\nsleep 9999\n"
    (tmp_path / "run.sh").write_text(f"{text}{RUN} a=$x")
    assert script.expanded([str(tmp_path / "run.sh")]) == [*RUN.split(), "a=3"]


def test_a_script_that_is_not_read_to_the_end_is_told(tmp_path, capsys):
    (tmp_path / "run.sh").write_text(f'set -- "$@" b=2\n{RUN} "$@"')
    with pytest.raises(options.PlanError, match="sets its arguments by set --"):
        script.expanded([str(tmp_path / "run.sh")])
    (tmp_path / "run.sh").write_text(f"source common.sh\n{RUN} a=$A")
    assert script.expanded([str(tmp_path / "run.sh")])[-1] == "a="
    assert capsys.readouterr().err == "note: common.sh was not read; what it sets is empty here\n"
    (tmp_path / "run.sh").write_text(f"[ -d /none ] || exit 3\n{RUN} a=1")
    assert script.expanded([str(tmp_path / "run.sh")])[-1] == "a=1"
    assert capsys.readouterr().err == f"note: {tmp_path}/run.sh ends with exit 3 before it trains; it was read on\n"
    words = [sys.executable, "-m", "verl.trainer.main_ppo", "a=1"]
    assert script.expanded(words) == words and script.expanded(["bash", "-c", f"{RUN} a=1"])[-1] == "a=1"


@pytest.mark.parametrize("call", ["srun -N1 bash", "bash"])
def test_a_command_of_bash_c_is_no_file_however_long_and_comments_may_end_as_on_windows(tmp_path, call):
    waits = "; ".join(["sleep 1"] * 50)
    (tmp_path / "run.sh").write_bytes(f'# a note\r\n{call} -c "ray start --head; {waits}" &\n{RUN} a=1'.encode())
    assert script.expanded([str(tmp_path / "run.sh")])[-1] == "a=1"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '[ $1 ] || { echo "first word: write a or b" >&2; exit 1; }\n',
            "is written, and ends with 'first word: write a or b'; give its arguments, or the words of",
        ),
        (f"{RUN} a=1\r\n", "has Windows line ends, which bash reads as parts of words: sed -i 's/\\r$//' "),
    ],
)
def test_a_script_that_bash_would_not_come_through_says_why(tmp_path, capsys, text, says):
    (tmp_path / "run.sh").write_bytes(text.encode())
    assert cli.main(["plan", str(tmp_path / "run.sh")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"verl-prefix plan: {tmp_path}/run.sh ") and says in line


def test_a_command_that_only_validates_is_said_to_be_one(folder):
    (note,) = build(folder, "trainer.val_only=True")["notes"]
    assert note.startswith("trainer.val_only=True validates and trains nothing") and not build(folder)["notes"]


def test_a_script_without_a_training_command_is_named(tmp_path, capsys, monkeypatch):
    for text, says, seconds in (("echo python3", "comes to no python3 -m verl.trainer.main_ppo", 600),
                                (f"if true; then\n{RUN} a=1", "is no script that bash can read: line 3: syntax", 600),
                                ("while :; do :; done", "takes over 0.5 s to read", 0.5)):  # fmt: skip
        monkeypatch.setattr(script, "SECONDS", seconds)
        (tmp_path / "train.sh").write_text(text)
        assert cli.main(["plan", str(tmp_path / "train.sh")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"verl-prefix plan: {tmp_path}/train.sh {says}")


@pytest.mark.parametrize("module", ["verl.trainer.sft_trainer", "verl.trainer.fsdp_sft_trainer"])
def test_a_script_of_sft_is_not_supported_unless_it_also_trains_by_rl(tmp_path, capsys, module):
    path, text = tmp_path / "sft.sh", f"torchrun --nnodes=1 \\\n  -m {module} engine=automodel a=1 $@\n"
    path.write_text(text)
    assert cli.main(["plan", str(path), "a=1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"verl-prefix plan: not supported: {path} trains by {module}, whose rows share no prompt")
    path.write_text(f"{text}{RUN} a=1")
    assert script.expanded([str(path)]) == [*RUN.split(), "a=1"]


def test_alone_it_prints_how_it_is_used(capsys):
    assert cli.main(["plan"]) == cli.main(["plan", "--simulate"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("usage: verl-prefix plan [options] SCRIPT | COMMAND")


def test_json_stands_alone_on_stdout(folder, capsys, tmp_path):
    assert cli.main(["plan", "--json", "--out", str(tmp_path / "plan.json"), *overrides(folder)]) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "plan.json").read_text()
    assert json.loads(printed)["verdict"].startswith("Worth it: ")
    assert cli.main(["plan", "--out", "-", *overrides(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"].startswith("Worth it: ")


MESSAGE = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def data(folder) -> Path:
    """Train files that are one row, and some that are none."""
    messages = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
    for name, prompts, kind in (
        ("empty", [], messages),
        ("null", [[MESSAGE], None], messages),
        ("no_message", [[]], messages),
        ("text", ["a"], pa.string()),
    ):
        pq.write_table(pa.table({"prompt": pa.array(prompts, kind)}), folder / f"{name}.parquet")
    shutil.copytree(folder / "model", folder / "no_tokenizer", ignore=shutil.ignore_patterns("tok*", "chat*"))
    (folder / "broken.parquet").write_text("PAR")
    (folder / "broken.jsonl").write_text("{")
    (folder / "table.csv").write_text("prompt\n")
    (folder / "nothing.jsonl").touch()
    (folder / "odd.yaml").write_text("a: [1\n")
    shutil.copytree(folder / "model", folder / "odd")
    config = json.loads((folder / "odd" / "config.json").read_text())
    (folder / "odd" / "config.json").write_text(json.dumps(config | {"hidden_size": "big"}))
    (folder / "lines.jsonl").write_text(json.dumps({"prompt": [MESSAGE]}) + "\n")
    (folder / "list.json").write_text(json.dumps([{"prompt": [MESSAGE]}]))
    return folder


def test_train_files_are_json_too(data):
    lines, whole = (build(data, f"data.train_files={data}/{name}") for name in ("lines.jsonl", "list.json"))
    assert lines == whole and lines["prompt_tokens"]["count"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--shares update=0.9,old=0.9", "at most 1 together"),
        ("--shares update=-0.5", "--shares 'update=-0.5': write update=0.5"),
        ("--shares update=nan", "--shares 'update=nan': write update=0.5"),
        ("--shares update=0.5,update=0.4", "--shares 'update=0.5,update=0.4': write update=0.5"),
        ("--prompt-lengths 24,600", "--prompt-lengths '24,600': write MEAN,DEVIATION of the logarithm, as in 2400,0.4"),
        ("--turns 9999 --thinking 5 --say 5 --tool 5", "--turns 9999: give a number of at most 1000"),
        ("--config-path=DATA --config-name=odd", "/odd is no YAML: while parsing a flow sequence"),
        ("~data", "data.train_files is in a section that another override removes or replaces (~, =null); remove"),
        (
            f"data.max_response_length={10**20}",
            f"data.max_response_length={10**20}: set a number of at most 2147483647",
        ),
        ("data.train_files=5", "data.train_files: 5 is not a file here"),
        ("data.train_files=DATA/nothing.jsonl", "nothing.jsonl has no rows; name a file of training prompts"),
        ("data.train_files=DATA/table.csv", "table.csv cannot be read as parquet"),
        ("actor_rollout_ref.model.path=DATA/odd", "/odd cannot be read here (Validation error for field 'hidden_size'"),
        ("--simulate --gpu h100,network=0", "--gpu 'network=0': write RATE=NUMBER, one of matmul_16"),
        ("--simulate --gpu h100,per_node=2", "--gpu 'per_node=2': write RATE=NUMBER, one of matmul_16"),
        ("--simulate trainer.n_gpus_per_node=0", "trainer.n_gpus_per_node=0: set a number of 1 or more"),
        ("--response-lengths=-5", "--response-lengths '-5': write a mean"),
        ("--response-lengths inf", "--response-lengths 'inf': write a mean"),
        ("--response-lengths nan", "--response-lengths 'nan': write a mean"),
        ("--response-lengths 33", "--response-lengths '33': write a mean of 1 to 32 tokens (data.max_response_length;"),
        ("--response-lengths 20,inf", "a finite spread of at least 0"),
        ("--turns 4 --thinking 5 --say 5", "--turns 4: add --tool, tokens of each turn, as in --turns 10 --thinking"),
        ("--say 5", "--say is of sessions of several turns; add --turns 10, or another number"),
        ("--turns 4 --thinking 5 --say 5 --tool 5 --response-lengths 20", "--turns both say how long responses are"),
        ("--turns 4 --thinking 20 --say 15 --tool 5", "responses of 35 tokens are over data.max_response_length=32"),
        ("--dead-groups 1.5", "--dead-groups 1.5: write a share from 0 to below 1"),
        ("--dead-groups 0.4", "--dead-groups 0.4: they are computed without actor_rollout_ref.actor.prefix.skip_zero"),
        (f"--dead-groups 0.95 {PREFIX}.skip_zero_advantage=true", "leaves nothing of 8 prompts to update by; write"),
        ("--dead-groups 0.4 --turns 4 --thinking 5 --say 5 --tool 5", "--dead-groups is of groups that share whole"),
        (
            f"--simulate {ACTOR}.fsdp_config.offload_policy=True",
            f"--simulate knows no {ACTOR}.fsdp_config.offload_policy=True, with which less of the weights",
        ),
        (
            f"--simulate model_engine=veomni {ACTOR}.veomni.enable_fsdp_offload=True",
            f"--simulate knows no {ACTOR}.veomni.enable_fsdp_offload=True",
        ),
        (
            f"--simulate model_engine=megatron +{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True",
            f"--simulate knows no {ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True",
        ),
        (
            f"--simulate model_engine=megatron {ACTOR}.optim.use_precision_aware_optimizer=True",
            "use_precision_aware_optimizer=True, with which less of the weights, gradients or moments is on the device",
        ),
        (
            f"--simulate model_engine=megatron +{ACTOR}.megatron.override_ddp_config.grad_reduce_in_fp32=False",
            "grad_reduce_in_fp32=False, with which less of the weights, gradients or moments is on the device; leave",
        ),
        ("--simulate --fit 75 --turns 4 --thinking 5 --say 5 --tool 5", "--fit searches rows of one prompt, and these"),
        ("actor_rollout_ref.model.tokenizer_path=/none", "model.tokenizer_path=/none cannot be read"),
        ("actor_rollout_ref.model.path=DATA/no_tokenizer", "no_tokenizer cannot be read here (it has no tokenizer)"),
        ("--prompt-lengths many", "--prompt-lengths 'many': write MEAN or MEAN,DEVIATION of the logarithm, as in 24"),
        (
            "--prompt-lengths 9,-1",
            "--prompt-lengths '9,-1': write a mean of at least 1 and a finite spread of at least",
        ),
        ("--prompt-lengths 9999", "--prompt-lengths 9999 is over data.max_prompt_length=3072"),
        ("data.train_files=/nowhere.parquet", "/nowhere.parquet is not a file here; copy it"),
        ("data.train_files=null", "data.train_files=None has no rows; name a file"),
        ("data.train_files=DATA/empty.parquet", "empty.parquet has no rows; name a file of training prompts"),
        ("data.train_files=DATA/null.parquet", "null.parquet, row 1: prompt is None; write a list of messages"),
        ("data.train_files=DATA/no_message.parquet", "no_message.parquet, row 0: prompt is []; write a list"),
        ("data.train_files=DATA/text.parquet", "text.parquet, row 0: prompt is 'a'; write a list of messages"),
        ("data.train_files=DATA/broken.parquet", "broken.parquet cannot be read as parquet"),
        ("data.train_files=DATA/broken.jsonl", "broken.jsonl cannot be read as jsonl"),
        ("data.prompt_key=question", "has columns ['prompt']; set data.prompt_key"),
        ("data.max_prompt_length=5", "every prompt is longer"),
        ("data.train_batch_size=7 trainer.use_v1=false", "2 ranks: make the batch a multiple of the mini-batch"),
        ("data.train_batch_size=7 trainer.v1.trainer_mode=separate_async", "make the batch a multiple"),
        ("trainer.n_gpus_per_node=3", "make mini-batch times n a multiple of the ranks"),
        (f"data.train_batch_size=7 {ACTOR}.use_dynamic_bsz=false trainer.n_gpus_per_node=8", "times n a multiple of 8"),
        ("actor_rollout_ref.nonsense=1", "actor_rollout_ref.nonsense is no key of this config"),
        ("dat.train_files=8", "dat.train_files is no key of this config"),
        ("data.train_file=x", "data.train_file is no key of this config; the nearest is data.train_files"),
        (f"{PREFIX}.schedul=auto", f"{PREFIX}.schedul is no key of this config; the nearest is {PREFIX}.schedule"),
        (f"{ACTOR}.megatron.x=2", f"{ACTOR}.megatron.x is of verl's Megatron engine; set model_engine=megatron"),
        (f"model_engine=veomni {ACTOR}.fsdp_config.x=2", "is of verl's FSDP2 engine; set model_engine=dp"),
        ("model_engine=bogus", "model_engine=bogus is no engine; set one of prefix, prefix_veomni, prefix_megatron"),
        ("model_engine=prefx", "model_engine=prefx is no engine; the nearest is prefix"),
        ("=3", "'=3' is no Hydra override (key=value)"),
        ("data.seed=a=b", "the overrides do not compose: data.seed=a=b: mismatched input '='"),
        ("+algorithm.adv_estimator=grpo", "the overrides do not compose: Could not append to config. An item is"),
        ("actor@actor_rollout_ref.actor=dp_actor", "verl.workers.config.FSDPActorConfig, and model_engine=prefix"),
        ("--config-name=nope", "Cannot find primary config 'nope'"),
        ("--config-path=/none", "config directory '/none' exists"),
        ("python3 -m recipe.dapo.main_dapo", "'python3' is no Hydra override (key=value) and no script that is here;"),
        (f"{ACTOR}.prefix.schedule=fast", "prefix.schedule='fast': set one of auto, packed, phased, stock"),
        (f"{ACTOR}.prefix.attention=best", "prefix.attention='best': set one of auto, cpu"),
        (f"{ACTOR}.prefix.wave_tokens=-1", "prefix.wave_tokens=-1: set a number of tokens >= 1"),
        (f"{ACTOR}.prefix.logits_chunk=0", "prefix.logits_chunk=0: set a number of tokens >= 1"),
        (f"{ACTOR}.prefix.min_speedup=-1", "prefix.min_speedup=-1: set a number >= 0"),
        ("data.train_batch_size=0", "data.train_batch_size=0: set a number of 1 or more"),
        (
            "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=0",
            "fsdp_config.ulysses_sequence_parallel_size=0: set a number of 1 or more",
        ),
    ],
)
def test_bad_input_is_one_line_exit_code_2_and_no_file(data, tmp_path, capsys, words, message):
    words = words.replace("DATA", str(data)).split()
    assert cli.main(["plan", *overrides(data), *words, "--out", str(tmp_path / "plan.json")]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("verl-prefix plan: ") and message in line
    assert captured.out == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data.train_files=/nowhere.parquet", "/nowhere.parquet is not a file here; copy it"),
        ("data.train_files=DATA/broken.parquet", "broken.parquet cannot be read as parquet"),
        ("data.prompt_key=question", "has columns ['prompt']; set data.prompt_key"),
        ("data.train_batch_size=7 trainer.use_v1=false", "2 ranks: make the batch a multiple of the mini-batch"),
        ("--response-lengths 33", "--response-lengths '33': write a mean of 1 to 32 tokens"),
        ("--response-lengths DATA/lines.jsonl", "lines.jsonl is not what trainer.rollout_data_dir writes"),
        ("--turns 4 --thinking 20 --say 15 --tool 5", "responses of 35 tokens are over data.max_response_length=32"),
    ],
)
def test_what_needs_no_model_is_said_before_one_is_read(data, capsys, words, message):
    words = words.replace("DATA", str(data)).split()
    assert cli.main(["plan", *overrides(data, "actor_rollout_ref.model.path=/none"), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


EARLY = """
import json, sys
from verl_prefix import cli
code = cli.main(json.loads(sys.stdin.read()))
slow = {"torch", "transformers", "verl", "ray", "tensordict"} & sys.modules.keys()
assert code in (1, 2) and not slow, (code, slow)
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("actor_rollout_ref.nonsense=1", "actor_rollout_ref.nonsense is no key"),
        ("model_engine=torchtitan", "Not supported: this trains with torchtitan"),
        ("actor_rollout_ref.model.path=/none", "model.path=/none cannot be read here (nothing is there)"),
        *(pytest.param(*one, marks=pytest.mark.more) for one in (
            ("trainer.device=npu", "Not supported: this trains on npu (trainer.device); prefixes can be shared on"),
            ("data.train_files=/nowhere.parquet", "/nowhere.parquet is not a file here; copy it"),
            ("actor_rollout_ref.model.tokenizer_path=/none", "model.tokenizer_path=/none cannot be read here"),
        )),
    ],
)  # fmt: skip
def test_what_needs_no_model_is_said_before_anything_slow_is_imported(data, words, message):
    command = json.dumps(["plan", *overrides(data), words])
    done = subprocess.run(
        [sys.executable, "-c", EARLY], input=command, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and message in done.stdout + done.stderr, done.stderr


def test_sizes_are_numbers_above_0(folder):
    config = compose.compose_config("ppo_trainer", overrides(folder))
    compose.check_sizes(config)
    sizes = (
        "data.train_batch_size", "data.max_prompt_length", "data.max_response_length", f"{ROLLOUT}.n",
        f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_max_token_len_per_gpu", "trainer.n_gpus_per_node",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu", "trainer.nnodes",
    )  # fmt: skip
    for key in sizes:
        right = OmegaConf.select(config, key)
        for value in (0, -8, 8.5, "many") if key == sizes[0] else (0,):
            OmegaConf.update(config, key, value)
            with pytest.raises(options.PlanError, match=re.escape(f"{key}={value}: set a number of 1 or more")):
                compose.check_sizes(config)
        OmegaConf.update(config, key, right)
    OmegaConf.update(config, f"{ACTOR}.use_dynamic_bsz", False)
    OmegaConf.update(config, f"{ACTOR}.ppo_micro_batch_size_per_gpu", 0)
    with pytest.raises(options.PlanError, match=re.escape(f"{ACTOR}.ppo_micro_batch_size_per_gpu=0: set a number")):
        compose.check_sizes(config)


def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(folder, tmp_path, capsys):
    def refused(*words: str) -> str:
        capsys.readouterr()
        assert cli.main(["plan", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    missing = [*overrides(folder), f"actor_rollout_ref.model.path={tmp_path}/none"]
    assert f"actor_rollout_ref.model.path={tmp_path}/none cannot be read here" in refused(*missing)
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    tokenizer = f"actor_rollout_ref.model.tokenizer_path={folder / 'model'}"
    broken = [*overrides(folder), tokenizer, f"actor_rollout_ref.model.path={tmp_path}/model"]
    assert f"actor_rollout_ref.model.path={tmp_path}/model cannot be read here" in refused(*broken)


HUB = """
import json, sys
from verl_prefix import cli
sys.exit(cli.main(json.loads(sys.stdin.read())))
"""


@pytest.mark.more
def test_a_hub_that_cannot_be_reached_is_asked_once(folder):
    """Of a port where nothing listens, which Hugging Face's own client asks six times per file."""
    words = ["plan", "--prompt-lengths", "9", *overrides(folder, "actor_rollout_ref.model.path=some/model")]
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", HUB], input=json.dumps(words), env=env | {"HF_ENDPOINT": "http://127.0.0.1:1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "actor_rollout_ref.model.path=some/model cannot be read here" in line


def test_warnings_stand_behind_the_answer(folder, monkeypatch, capfd):
    """Of a script, of verl and of what is planned; those of a command that cannot be planned before what is wrong."""
    refusals = figures.refusals

    def warns(*arguments):
        print("verl's own print")
        return refusals(*arguments)

    monkeypatch.setattr(figures, "refusals", warns)
    (folder / "run.sh").write_text(f"source common.sh\n{RUN} {' '.join(overrides(folder))}")
    with redirect_stderr(sys.stdout):  # as on a terminal
        assert cli.main(["plan", str(folder / "run.sh")]) == 0
    told = capfd.readouterr().out.splitlines()
    assert told[0].startswith("Worth it: ") and told[-2].startswith("note: common.sh was not read")
    assert told[-1] == "verl's own print"
