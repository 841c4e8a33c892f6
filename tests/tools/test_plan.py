"""`verl-prefix plan`: what it counts and prices. No Ray, no weights; what a run then measures is compared in
examples/results."""

import functools
import json
import math
import shlex
import shutil
import subprocess
import sys
from importlib.util import spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import verl  # noqa: F401
from omegaconf import OmegaConf
from plans import ACTOR, PREFIX, ROLLOUT, build, one_step, overrides, write_folder  # noqa: F401
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import hf_tokenizer
from verl.utils import tensordict_utils as tu

from verl_prefix import cli
from verl_prefix.auto.shape import ModelShape
from verl_prefix.config import engines
from verl_prefix.config.engines import VEOMNI, engine_of
from verl_prefix.engine.grouping import TreeRule, group_rows
from verl_prefix.engine.rows import BatchRows
from verl_prefix.models.messages import end_tokens
from verl_prefix.testing import write_tiny_model, write_tiny_vlm
from verl_prefix.tools.plan import command as plan
from verl_prefix.tools.plan import compose, options, predict, report, turns, verdict, work
from verl_prefix.tools.plan.options import Options
from verl_prefix.tools.plan.predict import PADDING_TOKENS, Sizes
from verl_prefix.tools.plan.training_command import Prompt
from verl_prefix.tools.plan.turns import LEVELS


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("plan"))


built_as_it_is = functools.cache(build)  # where nothing is patched


def test_of_prompts_with_images_no_value_of_trees_is_counted(folder, monkeypatch):
    """Which have no tokens to compare; reading them takes long."""
    read = work.read_prompts

    def without_ids(*args):
        prompts, overlong = read(*args)
        return [prompt._replace(ids=()) for prompt in prompts], overlong

    monkeypatch.setattr(work, "read_prompts", without_ids)
    found = build(folder)
    assert found["worth_it"] and not found["trees"] and found["speedup"]["update"] > 1


def test_tokens_groups_and_speedups_of_equal_prompts(folder):
    import ray

    found = build(folder, shares="update=0.5,old=0.1,ref=0.1")
    assert not ray.is_initialized() and found["unsupported"] == []
    assert not any(word in json.dumps(found) for word in ("river", str(folder))), "a plan may be shown to others"
    prefix = found["prompt_tokens"]["p50"] - 1
    assert found["prompt_tokens"]["p5"] == found["prompt_tokens"]["p95"] and prefix > 100
    assert found["response_tokens"]["mean"] == 20
    # 8 prompts in 2 mini-batches on 2 ranks; the prefix once instead of 4 times.
    assert found["groups_per_rank_and_mini_batch"]["p5"] == found["groups_per_rank_and_mini_batch"]["p95"] == 2
    assert found["tokens"]["ratio"] == pytest.approx((4 * prefix + 80) / (prefix + 80))
    assert found["packed_groups"] == 8 and found["phased_groups"] == 0
    for name in ("update", "old", "ref"):
        assert 1.5 < found["speedup"][name] < 2 * found["tokens"]["ratio"]
    shares = {"update": 0.5, "old": 0.1, "ref": 0.1}
    after = 0.3 + sum(share / found["speedup"][name] for name, share in shares.items())
    assert found["speedup"]["step"] == pytest.approx(1 / after)


def test_dead_groups_are_left_out_of_updates_alone(folder):
    """8 prompts in two mini-batches on two ranks, of which a half is dead: as long as the slowest rank's live ones."""
    whole, options = (
        built_as_it_is(folder),
        overrides(folder, "actor_rollout_ref.actor.prefix.skip_zero_advantage=true"),
    )
    found = plan.build(Options(options, response_lengths="20,0", dead_groups=0.5))
    assert found["speedup"]["old"] == whole["speedup"]["old"] and found["speedup"]["ref"] == whole["speedup"]["ref"]
    assert 1.2 * whole["speedup"]["update"] < found["speedup"]["update"] <= 2.01 * whole["speedup"]["update"]
    assert found["trees"] == {} and "prefix.trees" not in found["advice"]
    assert found["worth_it"] and any("50% of groups have no advantage" in text for text in found["assumed"])
    for ratio in ("ratio", "ratio_without_exchange"):
        assert found["tokens"][ratio] == pytest.approx(2 * whole["tokens"][ratio])
    assert plan.build(Options(options, response_lengths="20,0"))["speedup"] == whole["speedup"]


def test_ranks_with_a_copy_of_the_parameters_each_hold_all_of_it(folder):
    key = "actor_rollout_ref.actor.fsdp_config.fsdp_size"
    shared, alone = built_as_it_is(folder), build(folder, f"{key}=1")
    assert alone["resident_gib"] == pytest.approx(2 * shared["resident_gib"])
    assert build(folder, f"{key}=2")["resident_gib"] == shared["resident_gib"]


@pytest.mark.more
def test_sequence_parallel_gpus_are_half_the_ranks_with_twice_the_budget(folder):
    role, budget = "actor_rollout_ref", "max_token_len_per_gpu"
    keys = (f"{role}.actor.ppo_{budget}", f"{role}.rollout.log_prob_{budget}", f"{role}.ref.log_prob_{budget}")
    ulysses = f"{role}.actor.ulysses_sequence_parallel_size=2"  # ref's key follows it
    both = build(folder, ulysses, "trainer.n_gpus_per_node=4", *(f"{key}=75" for key in keys))
    alone = build(folder, *(f"{key}=150" for key in keys))
    assert both["phased_groups"] and not both["unsupported"]
    for name in ("tokens", "packed_groups", "phased_groups"):
        assert both[name] == alone[name], name
    assert both["speedup"] == pytest.approx(alone["speedup"])
    assert both["resident_gib"] == pytest.approx(alone["resident_gib"] / 2)
    for path in ("packed", "phased", "stock"):  # half of the activations; FSDP2's buffers are as large
        assert 0.4 < both["added_gib"][path] / alone["added_gib"][path] < 1
    own_key = f"{role}.actor.fsdp_config.ulysses_sequence_parallel_size=2"  # ref's own does not
    actor_alone = build(folder, own_key, "trainer.n_gpus_per_node=4", *(f"{key}=75" for key in keys))
    plain = build(folder, "trainer.n_gpus_per_node=4", *(f"{key}=75" for key in keys))
    assert actor_alone["speedup"] == pytest.approx(both["speedup"] | {"ref": plain["speedup"]["ref"]})
    assert plain["speedup"]["ref"] != both["speedup"]["ref"]


def test_a_small_budget_makes_phases_and_nothing_shared_gains_nothing(folder):
    small = build(folder, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=200")
    assert small["packed_groups"] == 0 and small["phased_groups"] == 8
    assert small["added_gib"]["phased"] <= built_as_it_is(folder)["added_gib"]["packed"]
    alone = build(folder, "actor_rollout_ref.rollout.n=1")
    assert alone["tokens"]["ratio"] == 1.0
    stock = build(folder, "actor_rollout_ref.actor.prefix.schedule=stock")
    assert stock["speedup"] == {"update": 1.0, "old": 1.0, "ref": 1.0} and stock["tokens"]["ratio"] == 1.0


def test_verls_offload_of_activations_is_said_to_be_off(folder):
    offload = "actor_rollout_ref.model.enable_activation_offload=true"
    plain, offloads = build(folder), build(folder, offload)
    (note,) = offloads["notes"]
    added, before = offloads["added_gib"], plain["added_gib"]
    assert f"is off in this engine: an update adds {added['auto']:.3g} GiB, and" in note
    assert f"{added['stock']:.3g} with that offload" in note
    assert (added["auto"], offloads["speedup"]) == (before["auto"], plain["speedup"]) and plain["notes"] == []
    stock = build(folder, offload, "actor_rollout_ref.actor.prefix.schedule=stock")
    assert not any("off in this engine" in line for line in stock["notes"])


def test_megatrons_ranks_of_context_parallelism_share_a_pass(monkeypatch, folder):
    monkeypatch.setattr(engines, "installed_version", lambda name: "0.16.1")
    words = ["model_engine=megatron", "trainer.n_gpus_per_node=4"]
    context = "actor_rollout_ref.actor.megatron.context_parallel_size"
    alone, shared = build(folder, *words), build(folder, *words, f"{context}=2")
    assert alone["unsupported"] == [] == shared["unsupported"]
    assert shared["groups_per_rank_and_mini_batch"]["mean"] == 2 * alone["groups_per_rank_and_mini_batch"]["mean"]
    assert shared["resident_gib"] == alone["resident_gib"]  # ranks of one pass share moments as others do
    reason, *_ = build(folder, *words, f"{context}=4", "trainer.n_gpus_per_node=2")["unsupported"]
    assert f"{context}=4 does not divide 2 GPUs" in reason


def test_a_veomni_command_is_planned_on_its_engine(folder):
    """Its ranks share a row by its own key, and parameters with it; weights are bf16 where it mixes no precision."""
    veomni = "actor_rollout_ref.actor.veomni"
    config = compose.compose_config("ppo_trainer", [*overrides(folder), "model_engine=veomni"])
    assert engine_of(config.actor_rollout_ref.actor) is VEOMNI
    words = ["model_engine=veomni", "trainer.n_gpus_per_node=4"]
    alone, shared = build(folder, *words), build(folder, *words, f"{veomni}.ulysses_parallel_size=2")
    assert alone["unsupported"] == [] == shared["unsupported"]
    assert ": this trains with veomni: set model_engine=prefix_veomni" in alone["verdict"]
    assert shared["groups_per_rank_and_mini_batch"]["mean"] == 2 * alone["groups_per_rank_and_mini_batch"]["mean"]
    assert shared["resident_gib"] == alone["resident_gib"] == build(folder, "trainer.n_gpus_per_node=4")["resident_gib"]
    replicas = build(folder, *words, f"{veomni}.fsdp_size=2")
    assert replicas["resident_gib"] == pytest.approx(2 * alone["resident_gib"])
    half = build(folder, *words, f"{veomni}.mixed_precision=false")
    assert half["resident_gib"] == pytest.approx(alone["resident_gib"] / 2)
    (reason,) = build(folder, *words, f"{veomni}.router_replay.mode=R2")["unsupported"]
    assert f"{veomni}.router_replay.mode=R2" in reason


def test_a_loss_that_workers_may_load_is_not_refused(folder):
    words = f"{ACTOR}.policy_loss.loss_mode=mine", "actor_rollout_ref.model.external_lib=my_losses"
    assert build(folder, *words)["unsupported"] == []


def test_what_is_set_is_not_told_again(folder):
    assert "set model_engine=prefix" in built_as_it_is(folder)["verdict"]
    assert build(folder, "model_engine=prefix")["verdict"].endswith(" if rollout is half of it")
    stock = build(folder, "+model_engine=prefix", f"{PREFIX}.schedule=stock")["verdict"]
    assert stock.endswith(f" if rollout is half of it: set {PREFIX}.schedule=auto")


def test_a_ref_that_nobody_builds_refuses_nothing(folder):
    assert build(folder, "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=3")["unsupported"] == []


@pytest.mark.parametrize(
    ("overrides_", "share"),
    [
        (["actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"], 0.5),
        (["actor_rollout_ref.actor.fsdp_config.offload_policy=true"], 0.0),
        (["actor_rollout_ref.model.lora_rank=1"], 0.26),
        # verl's FSDP engine adds no adapters by these, and trains the whole model.
        (["actor_rollout_ref.model.lora.rank=1"], 1.0),
        (["actor_rollout_ref.model.lora_adapter_path=/an/adapter"], 1.0),
    ],
)
def test_what_is_not_trained_has_neither_gradients_nor_moments(folder, overrides_, share):
    # A rank of 1 in this model of 0.4 M parameters is 1.2 % of it.
    whole = built_as_it_is(folder)["resident_gib"]
    assert build(folder, *overrides_)["resident_gib"] == pytest.approx(share * whole, rel=0.06)


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("", "Worth it: update {update:.2f}x, step about"),
        (f"{PREFIX}.schedule=stock", "Worth it: update "),
        (f"{PREFIX}.min_speedup=99", "Not worth it: prompts are 89 % of the tokens; sharing them would gain "),
        (f"{PREFIX}.min_speedup=2 {ROLLOUT}.n=1", f"Not worth it as it is: a prompt has one response ({ROLLOUT}.n=1)"),
        ("--gpu h100,capacity=1e6", "Worth it, but does not fit: update {update:.2f}x, step about"),
        pytest.param(
            "--shares update=0.5,old=0.1",
            "Worth it: update {update:.2f}x, step {step:.2g}x: set model_engine=prefix\nFits in {needed:.3g} of 80 ",
            marks=pytest.mark.more,
        ),
        ("+platform=cpu --shares update=0.5", "Worth it: update {update:.2f}x, step {step:.2g}x: set model_engine"),
    ],
)
def test_the_first_line_is_the_verdict(folder, capsys, tmp_path, words, first):
    out = tmp_path / "plan.json"
    assert cli.main(["plan", "--out", str(out), *overrides(folder), *words.split()]) == 0
    found, told = json.loads(out.read_text()), capsys.readouterr().out.splitlines()
    line = told[0]
    assert words or len(line) <= 90, "as wide as GitHub shows it"
    assert {"lengths", "FLOPs of verl's path over ours; the slowest rank counts"} <= set(told), "titles of tables"
    gains = {name: found["speedup"].get(name, 0) for name in ("update", "step")}
    assert line == found["verdict"]
    assert "\n".join(told).startswith(first.format(**gains, needed=found["resident_gib"] + found["added_gib"]["auto"]))
    assert found["worth_it"] == line.startswith("Worth it")


def test_sharing_is_worth_it_where_auto_shares(folder):
    """At the longest responses with which it does, and just behind them."""
    found = {}
    for length in (100, 200, 400, 800, 1600, 3200):
        found[length] = build(folder, "data.max_response_length=3200", responses=f"{length},0")
    shared = [one["packed_groups"] + one["phased_groups"] > 0 for one in found.values()]
    assert [one["worth_it"] for one in found.values()] == shared and {True, False} == set(shared)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trainer.v1.trainer_mode=sync", "trainer.v1.trainer_mode=prefix_sync"),
        (f"{PREFIX}.exchange=off trainer.v1.trainer_mode=sync actor_rollout_ref.actor.ppo_mini_batch_size=8",
         f"{PREFIX}.exchange=auto"),
        pytest.param(f"{PREFIX}.schedule=stock", f"{PREFIX}.schedule=auto", marks=pytest.mark.more),
        pytest.param(
            f"{PREFIX}.schedule=packed actor_rollout_ref.actor.ppo_max_token_len_per_gpu=175",
            f"{PREFIX}.schedule=auto", marks=pytest.mark.more,
        ),
        ("", None),
    ],
)  # fmt: skip
def test_the_change_that_gains_most_gains_what_its_own_plan_says(folder, tmp_path, monkeypatch, words, expected):
    """Of prompts that begin differently, so that `trees` gains nothing."""
    monkeypatch.setattr(predict, "NUM_STEPS", 4)  # as it is: what modes gain depends on what is drawn
    prompts = [[{"role": "user", "content": f"{i} is the river " * 30}] for i in range(16)]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "train.parquet")
    file = f"data.train_files={tmp_path}/train.parquet"
    found = build(folder, file, *words.split(), responses=None)
    if expected is None:
        assert found["change"] is None and found["advice"].endswith("\nNo change that was tried gains 2 % more")
        return
    change = found["change"]
    assert change["overrides"] == [expected] and change["instead_of"] == found["speedup"]["update"]
    again = build(folder, file, *words.split(), *change["overrides"], responses=None)
    assert change["update"] == pytest.approx(again["speedup"]["update"], rel=0.01) and change["update"] > 1.1
    assert change["needed_gib"] == again["needed_gib"]
    said = f"Gains most: {expected}, update {change['update']:.2f}x, not {change['instead_of']:.2f}x"
    assert found["advice"].splitlines()[1] == said


def test_what_does_not_fit_is_changed_until_it_does(folder):
    words = overrides(folder, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=700")

    def plan_on(words: list[str], **more: str) -> dict:
        return plan.build(Options(words, response_lengths="20,0", **more))

    needed = plan_on(words)["needed_gib"]
    found = plan_on(words, gpu=f"h100,capacity={0.99 * needed * 2**30}")
    assert not found["fits"] and found["advice"].startswith(f"Fits in {found['change']['needed_gib']:.3g} GiB: ")
    again = plan_on([*words, *found["change"]["overrides"]], gpu=f"h100,capacity={0.99 * needed * 2**30}")
    assert again["fits"] and again["needed_gib"] == found["change"]["needed_gib"] < 0.99 * needed
    small = plan_on(words, gpu="h100,capacity=1000")
    assert small["change"] is None and small["advice"] == "No change that was tried fits: use more GPUs"


@pytest.mark.parametrize(
    ("trees", "turns", "told"), [("uid", 0.0, ["batch"]), ("off", 0.0, ["batch"]), ("batch", 0.0, ["off"]),
                                 ("uid", 2.0, ["off", "batch"])]
)  # fmt: skip
def test_a_value_of_trees_that_changes_nothing_is_not_tried(folder, trees, turns, told):
    config = compose.compose_config("ppo_trainer", overrides(folder, f"{PREFIX}.trees={trees}"))
    rows = SimpleNamespace(steps=[SimpleNamespace(size=work.sizes(config))], turns=turns, priced=8)
    levels = LEVELS if turns else LEVELS[::2]
    tried = [change[0] for change in verdict._changes(config, rows, levels, fits=False)]
    assert [x for x in tried if "prefix.trees=" in x] == [f"{PREFIX}.trees={level}" for level in told]


@pytest.mark.parametrize("linked", [False, True], ids=["", "with verl behind a link"])
def test_a_config_of_the_users_own_composes(folder, tmp_path, monkeypatch, linked):
    if linked:
        installed = tmp_path / "some" / "environment" / "verl"
        installed.parent.mkdir(parents=True)
        installed.symlink_to(Path(verl.__file__).parent)
        monkeypatch.setattr(verl, "__spec__", spec_from_file_location("verl", installed / "__init__.py"))
    lines = ("hydra: {searchpath: [pkg://verl.trainer.config]}", "defaults: [ppo_trainer, _self_]",
             "data: {max_response_length: 24}")  # fmt: skip
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    words = [word for word in overrides(folder) if "max_response" not in word]
    found = plan.build(Options(words, config_path=str(tmp_path), config_name="mine"))
    assert found["response_tokens"]["p5"] < 12 < found["response_tokens"]["p95"] <= 24
    assert found["assumed"][0].startswith(
        "response lengths are drawn around 12 tokens with a deviation of 6, from 1 to 24"
    )


def test_one_response_has_one_verdict_and_no_advice_to_sample_more(folder, capsys):
    for more in ([], ["algorithm.adv_estimator=gae", f"critic.model.path={folder / 'model'}"]):
        assert cli.main(["plan", *overrides(folder, f"{ROLLOUT}.n=1", f"{PREFIX}.exchange=off", *more)]) == 0
        verdict, *told = capsys.readouterr().out.splitlines()
        assert verdict.startswith("Nothing is shared (a prompt has one response), but lm_head skips prompts: update 1.")
        assert not any("n=1" in line or line.startswith("warning: ") for line in told)
    assert build(folder, f"{ROLLOUT}.n=1", f"{PREFIX}.trees=batch")["verdict"].startswith("Worth it: ")


@pytest.mark.more
def test_what_tears_prompts_apart_is_priced_and_what_keeps_them_is_told(folder, capsys):
    """Eight prompts of four rows: over two ranks, and over two mini-batches."""
    sync, off = "trainer.v1.trainer_mode=sync", "actor_rollout_ref.actor.prefix.exchange=off"
    one = [sync, "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    together, apart = build(folder, *one), build(folder, *one, off)
    gain = f"{off.replace('off', 'auto')}, update {together['speedup']['update']:.2f}x, not "
    assert "exchange" not in together["advice"] and gain in apart["advice"]
    assert together["tokens"]["ratio"] > 1.2 * apart["tokens"]["ratio"]
    ratios = [plan["tokens"]["ratio_without_exchange"] for plan in (together, apart)]
    assert ratios == [apart["tokens"]["ratio"]] * 2
    assert cli.main(["plan", *overrides(folder, sync)]) == 0
    told = capsys.readouterr().out.splitlines()
    # By what is drawn where nothing is known, the mode matters, and the other one's gain is that of its own plan.
    torn, whole = (build(folder, *more, responses=None) for more in ((sync,), ()))
    assert whole["notes"] == [] and whole["tokens"]["ratio"] > torn["tokens"]["ratio"]
    assert whole["speedup"]["update"] > torn["speedup"]["update"]
    assert told[1].startswith("Fits in ") and told[2].startswith(f"Gains most: {PREFIX}.trees=batch, update ")
    gains = (one["speedup"]["update"] for one in (whole, torn))
    assert told[3] == "Gains too: trainer.v1.trainer_mode=prefix_sync, update {:.2f}x, not {:.2f}x".format(*gains)
    assert torn["notes"] == [] and not any(line.startswith("warning: ") for line in told)
    (said,) = whole["assumed"]
    assert said.startswith("response lengths are drawn around 16 tokens with a deviation of 8, from 1 to 32")
    assert f"assumed: {said}" in told
    assert build(folder, responses="16,8")["assumed"] == [] == build(folder, responses="16,0")["assumed"]
    assert build(folder, responses="16") == whole


ASYNC = {
    "fully_async_policy.fully_async_main": ["data.train_batch_size=0", "async_training.require_batches=2"],
    "one_step_off_policy.main_ppo": ["data.train_batch_size=8"],
}


@pytest.mark.more
@pytest.mark.parametrize("module", ASYNC)
def test_an_asynchronous_command_is_planned_in_its_own_config_by_the_trainers_update(
    folder, tmp_path, capsys, monkeypatch, module
):
    monkeypatch.chdir(tmp_path)  # no clone of verl, whose folders their configs look for
    out, apart = tmp_path / "plan.json", "actor_rollout_ref.hybrid_engine=False"
    words = [word for word in overrides(folder, *ASYNC[module], apart) if "trainer_mode" not in word]

    def planned(*more: str, wrap: bool = False) -> dict:
        command = ["python3", "-m", f"verl.experimental.{module}", *words, *more]
        (tmp_path / "run.sh").write_text(shlex.join(command))
        assert cli.main(["plan", "--out", str(out), *(["run.sh"] if wrap else command)]) == 0
        return json.loads(out.read_text())

    found, whole = planned(), build(folder, responses=None)
    # The same prompts, mini-batches and ranks; whole prompts go to each.
    for name in ("tokens", "updates", "packed_groups", "resident_gib", "notes"):
        assert found[name] == whole[name], name
    assert found["speedup"]["update"] == whole["speedup"]["update"] > 1.5
    said = planned(wrap=True)["verdict"]
    assert said == found["verdict"] and "while it need not wait for the rollout, which is apart" in said
    if "fully" in module:
        assert planned("async_training.require_batches=1")["updates"] == 1
        capsys.readouterr()
        wrong = [*words, "async_training.require_batches=0"]
        assert cli.main(["plan", "python3", "-m", f"verl.experimental.{module}", *wrong]) == 2
        assert capsys.readouterr().err.endswith("async_training.require_batches=0: set a number of 1 or more\n")
    torn = ["plan", "python3", "-m", f"verl.experimental.{module}", *words, f"{ACTOR}.use_prefix_grouper=False"]
    assert cli.main(torn) == 1
    assert "set trainer.balance_batch=False" in capsys.readouterr().out


def test_a_step_has_no_rollout_where_that_is_apart_and_no_old_log_probs_in_bypass_mode():
    seconds = {"stock": {"update": 4.0, "old": 1.0, "ref": 1.0}, "auto": {"update": 1.0, "old": 1.0, "ref": 1.0}}
    predicted = SimpleNamespace(schedule="auto", gains={"auto": {}}, seconds=seconds)

    def gain(bypass: bool, **trainer: object) -> float:
        actor, algorithm = {"use_kl_loss": False}, {"use_kl_in_reward": False}
        algorithm["rollout_correction"] = {"bypass_mode": bypass}
        config = {"actor_rollout_ref": {"actor": actor}, "algorithm": algorithm, **trainer}
        return verdict.step_gain(OmegaConf.create(config), predicted, {})

    def of_mode(mode: str) -> dict:
        return {"trainer": {"use_v1": True, "v1": {"trainer_mode": mode}}}

    assert gain(False, **of_mode("sync")) == pytest.approx(1 / (0.5 + 0.5 * 2 / 5))
    assert gain(True, **of_mode("sync")) == pytest.approx(1 / (0.5 + 0.5 / 4))
    for apart in of_mode("separate_async"), of_mode("prefix_separate_async"), of_mode("sync") | {"rollout": {}}:
        assert gain(False, **apart) == pytest.approx(5 / 2) and gain(True, **apart) == pytest.approx(4)


def test_in_bypass_mode_updates_are_decided_alone(folder):
    """Old log-probs would share prompts that mini-batches tear."""
    words = "trainer.v1.trainer_mode=sync", f"{PREFIX}.min_speedup=3.8"
    follows, alone = (
        build(folder, *words, f"algorithm.rollout_correction.bypass_mode={bypass}", responses=None)
        for bypass in (False, True)
    )
    assert follows["speedup"]["old"] == alone["speedup"]["old"] > 3.8
    assert follows["worth_it"] and 1 < follows["speedup"]["update"] < 3.8
    assert not alone["worth_it"] and alone["speedup"]["update"] == 1
    assert alone["verdict"].endswith("x, and auto shares from 3.8x on")


def test_prompts_torn_by_the_legacy_trainer_are_told_what_keeps_them(folder):
    legacy = "trainer.use_v1=false", "trainer.v1.trainer_mode=sync"
    torn, whole = (
        build(folder, *legacy, *more, responses=None) for more in ([f"{ACTOR}.use_prefix_grouper=False"], [])
    )
    assert torn["tokens"]["physical"] > whole["tokens"]["physical"]
    assert "trainer.balance_batch=False, update " in torn["advice"] and "balance_batch" not in whole["advice"]


def test_separate_async_makes_updates_of_whole_prompts(folder):
    found = build(folder, "trainer.v1.trainer_mode=separate_async")
    assert found["notes"] == [] and "rollout, which is apart" in found["verdict"]
    assert found["tokens"] == built_as_it_is(folder)["tokens"]


def test_ref_is_priced_with_its_own_micro_batches(folder):
    ref = "actor_rollout_ref.ref.log_prob"

    def gains(*more: str) -> dict:
        return build(folder, *more)["speedup_by_schedule"]["packed"]

    tokens = gains(f"{ref}_max_token_len_per_gpu=200")
    assert tokens["ref"] < tokens["old"] == gains()["old"] == gains()["ref"]
    rows = gains(f"{ref}_use_dynamic_bsz=false", f"{ref}_micro_batch_size_per_gpu=1")
    assert rows["ref"] < rows["old"] == tokens["old"]
    # With LoRA the actor computes ref too.
    adapter = gains("actor_rollout_ref.model.lora_rank=8", f"{ref}_max_token_len_per_gpu=200")
    assert adapter["ref"] == adapter["old"]


def test_waves_that_leave_nothing_of_a_pass_are_refused_as_by_the_driver(folder):
    waves = "actor_rollout_ref.actor.prefix.wave_tokens"
    (reason,) = build(folder, f"{waves}=100000")["unsupported"]
    assert reason.endswith("or null") and f"{waves}=100000 leaves nothing for prefixes of the " in reason


def test_a_missing_micro_batch_is_refused_where_its_pass_runs(folder):
    rows = ("actor_rollout_ref.ref.log_prob_use_dynamic_bsz=false",)
    assert build(folder, *rows)["unsupported"] == []  # no KL, no ref
    for more in (rows, ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=null",)):
        (reason,) = build(folder, "actor_rollout_ref.actor.use_kl_loss=true", *more)["unsupported"]
        unit = "micro_batch_size" if more is rows else "max_token_len"
        assert reason.startswith(f"actor_rollout_ref.ref.log_prob_{unit}_per_gpu=null")
    other = ("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false",)
    (reason,) = build(folder, *other, "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1")["unsupported"]
    assert reason.startswith("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False, and")


TOOLS = """
from verl.tools.function_tool import function_tool

@function_tool
def {name}(city: str) -> str:
    \"\"\"Tells how high the water of a river is.

    Args:
        city: Where it is measured.
    \"\"\"
    return city
"""


SCHEMA = """
tools:
  - class_name: verl.tools.base_tool.BaseTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: tides
        description: Tells when the sea is highest.
        parameters: {type: object, properties: {}, required: []}
"""


def show_tools(model: Path) -> None:
    """Makes the model's chat template print its tools first."""
    template = model / "chat_template.jinja"
    template.write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + template.read_text())


def test_prompts_hold_the_schemas_of_their_tools(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    show_tools(tmp_path / "model")
    (tmp_path / "tools.py").write_text(TOOLS.format(name="water_level"))
    (tmp_path / "tools.yaml").write_text(SCHEMA)
    model = f"actor_rollout_ref.model.path={tmp_path / 'model'}"
    alone = build(folder, model)["prompt_tokens"]["p50"]
    assert alone == built_as_it_is(folder)["prompt_tokens"]["p50"]
    turns = "actor_rollout_ref.rollout.multi_turn"
    native, function = f"{turns}.tool_config_path={tmp_path}/tools.yaml", f"data.function_tool_path={tmp_path}/tools.py"
    one, other, both = (
        build(folder, model, *keys)["prompt_tokens"]["p50"] - alone
        for keys in ((native,), (function,), (native, function))
    )
    # Two lists become one: their brackets and a comma make the difference.
    assert one > 20 and other > 20 and abs(both - one - other) <= 3
    with pytest.raises(
        options.PlanError,
        match="data.function_tool_path=/nowhere.py: these tools cannot be loaded .*plan with PYTHONPATH=/, or",
    ):
        build(folder, model, "data.function_tool_path=/nowhere.py")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ raise_exception('no user here') }}")
    with pytest.raises(options.PlanError, match="row 0: the model's chat template fails: TemplateError: no user here"):
        build(folder, model)


def test_response_lengths_from_rollout_dumps(folder, tmp_path, monkeypatch):
    """Which are read once."""
    (tmp_path / "1.jsonl").write_text(json.dumps({"output": "a"}) + "\n")
    with monkeypatch.context() as patch:
        patch.setattr(compose, "read_dumps", lambda path: (options.read_dumps(path), shutil.rmtree(path))[0])
        found = build(folder, responses=str(tmp_path))
    assert found["response_tokens"]["mean"] == 2 and not tmp_path.exists()  # the letter and the end token
    assert found["assumed"] == [
        f"of {tmp_path} only the lengths of 1 responses are used: no uid there is of a session with several rows "
        "(uid_session_turn, as verl's v1 trainer writes it)"
    ]
    assert 3 < build(folder, responses="10,3")["response_tokens"]["p5"] < 10
    wide = build(folder, responses="31,1e308")["response_tokens"]
    assert (wide["p5"], wide["p95"]) == (1, 32)


def test_prompt_lengths_stand_for_data_and_tokenizer(folder, tmp_path):
    """All alike they are planned as data of that length are; spread they have the mean and the deviation."""
    prompts = [[{"role": "user", "content": f"{i} is the river " * 30}] for i in range(16)]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "train.parquet")
    of_data = build(folder, f"data.train_files={tmp_path}/train.parquet")
    length = int(of_data["prompt_tokens"]["p50"])
    shutil.copytree(folder / "model", tmp_path / "model", ignore=shutil.ignore_patterns("tok*", "chat*"))
    words = overrides(folder, "data.train_files=/none", f"actor_rollout_ref.model.path={tmp_path}/model")
    alike = plan.build(Options(words, response_lengths="20,0", prompt_lengths=str(length)))
    assert of_data["prompt_tokens"]["p5"] == length == alike["prompt_tokens"]["p95"]
    assert alike["speedup"] == pytest.approx(of_data["speedup"], rel=0.02)
    assert alike["trees"]["batch"]["tokens"] == alike["trees"]["off"]["tokens"]
    spread = plan.build(Options(words, response_lengths="20,0", prompt_lengths="900,0.5"))["prompt_tokens"]
    kept = spread["count"] / (spread["count"] + spread["overlong"])  # up to data.max_prompt_length
    assert 0.98 < kept < 1 and spread["mean"] == pytest.approx(900, rel=0.05)
    assert math.log(spread["p95"] / spread["p5"]) == pytest.approx(2 * 1.645 * 0.5, rel=0.05)
    turns = options.Turns(turns=4, thinking=12, say=5, tool=9)
    assert plan.build(Options(words, prompt_lengths="100", **turns._asdict()))["turns"] == 4


class Session:
    """A row per call of a chat whose thoughts no later prompt has, as real rows have them: [(prompt, response)]."""

    def __init__(self, tokenizer, question: str, names: list[str]) -> None:
        def ids(messages: list[dict], **options: bool) -> list[int]:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            return tokenizer(text, add_special_tokens=False).input_ids

        system = {"role": "system", "content": "you know each river and its pilots " * 4}
        messages, self.rows = [system, {"role": "user", "content": question}], []
        for name in names:
            prompt = ids(messages, add_generation_prompt=True)
            messages.append({"role": "assistant", "content": f"{name} knows the river, I think"})
            said = ids(messages)[len(prompt) :]
            thoughts = tokenizer(f"{name}, let me think " * 3, add_special_tokens=False).input_ids
            self.rows.append((prompt, thoughts + said))
            messages.append({"role": "user", "content": f"{name} says that the water is high " * 2})


def engine_tokens(rows: list[tuple[str, int, list[int], list[int]]], ends: set[int]) -> dict[str, int]:
    """Tokens that the engine computes of (uid, session, prompt, response), by prefix.trees."""

    def jagged(tokens: list[list[int]]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(one) for one in tokens], layout=torch.jagged)

    uids, _, prompts, responses = map(list, zip(*rows, strict=True))
    whole = [p + r for p, r in zip(prompts, responses, strict=True)]
    fields = {"prompts": jagged(prompts), "responses": jagged(responses), "input_ids": jagged(whole),
              "position_ids": jagged([list(range(len(row))) for row in whole]), "uid": uids}  # fmt: skip
    batch = BatchRows(tu.get_tensordict(fields, {"temperature": 1.0}))
    found = {"stock": sum(map(len, whole)) - len(whole)}
    for over in ("off", "uid", "batch"):
        trees = TreeRule(over, frozenset(ends))
        trees.see(uids, batch.keys)
        groups = group_rows(batch, trees)
        found[over] = sum(group.num_physical_tokens for group in groups)
    return found


ONE_RANK = ("trainer.n_gpus_per_node=1", "data.train_batch_size=4", "actor_rollout_ref.actor.prefix.schedule=packed",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100000")  # fmt: skip


@pytest.mark.parametrize("rollouts", [1, 3])
def test_turns_by_numbers_share_what_the_engine_shares(folder, rollouts):
    turns = options.Turns(turns=4, thinking=12, say=5, tool=9)
    size = (f"actor_rollout_ref.rollout.n={rollouts}", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    found = plan.build(Options(overrides(folder, *ONE_RANK, *size), **turns._asdict()))
    assert found["turns"] == 4 and found["updates"] == 1 and found["notes"] == []
    tokenizer = hf_tokenizer(str(folder / "model"))
    ends = end_tokens(tokenizer)
    chat = [{"role": "user", "content": "the river " * 60}]
    question = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    generator, rows = torch.Generator().manual_seed(1), []

    def some(length: int, end: int | None = None) -> list[int]:
        ids = torch.randint(10**6, 10**9, (length,), generator=generator).tolist()
        return ids if end is None else [*ids[1:], end]

    for uid in range(4):
        for session in range(rollouts):
            history = question
            for _ in range(turns.turns):
                thoughts, said, tool = some(12), some(5, min(ends)), some(9, min(ends))
                rows.append((str(uid), session, history, thoughts + said))
                history = history + said + tool
    counted = engine_tokens(rows, ends)
    assert found["tokens"]["logical"] == counted.pop("stock")
    assert 2 * counted["uid"] < counted["off"] and counted["batch"] < counted["uid"]
    for over, tokens in counted.items():
        assert found["trees"][over]["tokens"] == dict.fromkeys(("update", "old", "ref"), tokens), over
    assert found["tokens"]["ratio"] > 2, "prefix.trees is uid"
    updates = {over: one["speedup"]["update"] for over, one in found["trees"].items()}
    assert updates["off"] < updates["uid"] < updates["batch"]
    assert found["change"]["overrides"] == ["actor_rollout_ref.actor.prefix.trees=batch"]
    assert [found["change"][key] for key in ("update", "instead_of")] == [updates["batch"], updates["uid"]]


def test_rows_of_turns_in_rollout_dumps_share_what_the_engine_shares(folder, tmp_path):
    """By verl's own writer. Its texts have no special tokens, of which real rows have one or two a message."""
    tokenizer = hf_tokenizer(str(folder / "model"))
    rows = [
        (f"{uid}a-7", session, *row)
        for uid in range(4)
        for session in range(3)
        for row in Session(tokenizer, f"{uid} is the place, and how high is its river " * 8,
                           [f"{uid}{session}{turn} pilots" for turn in range(2 + session)]).rows
    ]  # fmt: skip
    inputs, outputs = ([tokenizer.decode(row[i], skip_special_tokens=True) for row in rows] for i in (2, 3))
    turn = [sum(row[:2] == other[:2] for other in rows[:i]) for i, row in enumerate(rows)]
    keys = [f"{uid}_{session}_{t}" for (uid, session, *_), t in zip(rows, turn, strict=True)]
    nothing = [None] * len(rows)
    PPOTrainer._write_generations(inputs, outputs, nothing, nothing, {"uid": keys}, str(tmp_path), 1)
    words = overrides(
        folder, *ONE_RANK, "actor_rollout_ref.rollout.n=3", "actor_rollout_ref.actor.ppo_mini_batch_size=12"
    )
    found = plan.build(Options(words, response_lengths=str(tmp_path)))
    assert found["turns"] == 3 and found["updates"] == 1
    counted = engine_tokens(rows, end_tokens(tokenizer))
    assert 0.4 * counted["off"] < counted["uid"] < 0.6 * counted["off"]
    for over in ("off", "uid", "batch"):
        tokens = found["trees"][over]["tokens"]["update"]
        assert found["tokens"]["logical"] / tokens == pytest.approx(counted["stock"] / counted[over], rel=0.05), over
    assert "without the special tokens" in found["assumed"][0] and len(found["assumed"]) == 1
    half = plan.build(Options([*words, "data.train_batch_size=8"], response_lengths=str(tmp_path)))
    assert half["tokens"]["logical"] > 1.9 * found["tokens"]["logical"]
    assert half["assumed"][1] == "4 prompts stand for the 8 of a step"
    assert half["trees"]["uid"]["tokens"]["update"] == 2 * found["trees"]["uid"]["tokens"]["update"]


def test_ranks_of_one_row_each_are_no_slower_than_stocks(folder):
    """Which cannot share the longest row either."""
    words = overrides(
        folder, "trainer.n_gpus_per_node=4", "data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=1",
        "data.max_response_length=2048",
    )  # fmt: skip
    found = plan.build(Options(words, response_lengths="1024,600"))
    assert found["tokens"]["ratio"] == 1 and found["speedup"]["update"] >= 1


def test_a_step_that_would_be_slower_is_not_worth_it(folder, monkeypatch):
    monkeypatch.setattr(verdict, "step_gain", lambda *_: 0.97)
    found = build(folder)
    gain = f"update {found['speedup']['update']:.2f}x, step about 0.97x if rollout is half of it"
    assert not found["worth_it"] and f": {gain}: sharing would be slower" in found["verdict"]
    monkeypatch.setattr(verdict, "step_gain", lambda *_: 1.04)
    assert "step about 1.04x if rollout" in build(folder)["verdict"], "not 1x"
    assert found["verdict"].startswith("Not worth it")


def test_nobody_is_told_that_grpo_has_no_critic(folder, recwarn):
    build(folder, f"{PREFIX}.mini_batches=prompts")
    assert not [found for found in recwarn if "critic" in str(found.message)]


@pytest.mark.more
def test_what_mini_batches_that_count_rows_cost_is_told(folder):
    turns = options.Turns(turns=4, thinking=12, say=5, tool=9)

    def built(*more: str) -> dict:
        return plan.build(Options(overrides(folder, *more), **turns._asdict()))

    torn, whole = built("trainer.v1.trainer_mode=sync"), built("actor_rollout_ref.actor.ppo_mini_batch_size=16")
    assert (torn["updates"], whole["updates"], whole["notes"]) == (8, 2, [])
    assert whole["speedup"]["update"] > 1.1 * torn["speedup"]["update"]
    remedy = f"{PREFIX}.mini_batches=prompts trainer.v1.trainer_mode=prefix_sync"
    gains = (one["speedup"]["update"] for one in (whole, torn))
    assert "{}, update {:.2f}x, not {:.2f}x".format(remedy, *gains) in torn["advice"]
    prompts = built("actor_rollout_ref.actor.prefix.mini_batches=prompts")
    assert prompts["updates"] == 2 and prompts["notes"] == []
    assert prompts["tokens"] == whole["tokens"] and prompts["speedup"] == whole["speedup"]
    short = built("actor_rollout_ref.actor.ppo_mini_batch_size=16", "data.max_prompt_length=160")
    assert short["notes"][0].startswith("histories have up to 1") and "max_prompt_length=160 ends" in short["notes"][0]


@pytest.mark.more
def test_prompts_with_clips_are_as_long_as_verl_makes_them(tmp_path):
    """Every clip and still of the recipe is 40 x 40 pixels in the end: the tokens can be counted by hand."""
    pytest.importorskip("qwen_vl_utils")
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "video_rlvr"
    model = write_tiny_vlm(tmp_path / "model", family="qwen2_5_vl")

    def run(script: str, *words: object) -> None:
        environment = {"PYTHONPATH": ":".join(sys.path)}
        subprocess.run([sys.executable, recipe / script, *map(str, words)], check=True, timeout=300, env=environment)

    run("make_clips.py", "--output", tmp_path, "--clips", 2, "--stills", 0, "--size", 80)
    limits = (
        "--max-frames",
        8,
        "--long",
        "sample",
        "--min-pixels",
        64,
        "--max-pixels",
        1600,
        "--image-max-pixels",
        1600,
    )
    run("prepare.py", "--input", tmp_path / "questions.json", "--output", tmp_path, "--val-size", 2, *limits)
    words = overrides(tmp_path, "data.image_patch_size=4", f"actor_rollout_ref.model.path={model}")
    found = plan.build(Options(words, response_lengths="20"))
    text = pq.read_table(tmp_path / "train.parquet")["prompt"].to_pylist()
    tokenizer = hf_tokenizer(model)
    asked = [len(tokenizer(row[0]["content"], add_special_tokens=False).input_ids) for row in text]
    # 8 frames in pairs of 100 patches, four of them one token: 4 x 25 tokens, and the text.
    assert found["prompt_tokens"]["count"] == len(text)
    assert min(asked) + 100 <= found["prompt_tokens"]["p5"] <= found["prompt_tokens"]["p95"] <= max(asked) + 120
    assert found["unsupported"] == [] and found["speedup"]["update"] > 1.5
    show_tools(Path(model))
    (tmp_path / "tools.py").write_text(TOOLS.format(name="river_depth"))
    shown = plan.build(Options([*words, f"data.function_tool_path={tmp_path}/tools.py"], response_lengths="20"))
    assert shown["prompt_tokens"]["p50"] > found["prompt_tokens"]["p50"] + 20
    for clip in tmp_path.rglob("*.mp4"):
        clip.write_bytes(b"")
    with pytest.raises(options.PlanError, match="row 0: its images or videos cannot be read"):
        plan.build(Options(words, response_lengths="20"))


def test_a_leak_of_verls_own_path_is_said_and_priced(folder, tmp_path):
    write_tiny_model(tmp_path / "model", family="lfm2")
    words = (f"actor_rollout_ref.model.path={tmp_path}/model", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096")
    found, padded = (
        build(folder, *words, f"actor_rollout_ref.model.use_remove_padding={x}") for x in ("true", "false")
    )
    assert found["unsupported"] == [] and padded["notes"] == built_as_it_is(folder)["notes"] == []
    assert "model_engine=dp would be wrong for this model: verl does not tell Lfm2ShortConv" in found["notes"][0]
    role, micro = "actor_rollout_ref", "micro_batch_size_per_gpu"
    alone = (
        f"{role}.actor.use_dynamic_bsz=false", f"{role}.rollout.log_prob_use_dynamic_bsz=false",
        f"{role}.actor.ppo_{micro}=1", f"{role}.rollout.log_prob_{micro}=1", f"{role}.ref.log_prob_{micro}=1",
    )  # fmt: skip
    assert build(folder, *words, *alone)["notes"] == []
    spread = build(
        folder, *words, *alone, "trainer.n_gpus_per_node=2", f"{role}.actor.ulysses_sequence_parallel_size=2"
    )
    assert spread["unsupported"] == [] and spread["notes"][0].endswith("ulysses_sequence_parallel_size=1")
    assert found["added_gib"]["stock"] < padded["added_gib"]["stock"], "logits of one row"
    assert found["added_gib"]["packed"] == padded["added_gib"]["packed"]


@pytest.mark.parametrize(("num_turns", "prompts"), [pytest.param(1, 768, marks=pytest.mark.more), (3, 256)])
def test_a_part_of_a_large_step_is_priced_without_padding(num_turns, prompts):
    """1024 prompts x 5 in mini-batches of 256 prompts: 4,000 rows would be filled up with 1,120 of padding."""
    size = Sizes(1024, 5, mini_batches=4, ranks=8, micro_batches={})
    shape = ModelShape(1e6, 1e5, 1e2, (None,), 1.0, 1.0, 1.0, 100)
    made = turns.made_up(
        size, shape, [Prompt(4, ids=[3, 4, 5, 6])], {2}, options.Turns(num_turns, 1, 2, 1), iter([3] * 5120), 1280
    )
    assert None not in made.keys and len(set(made.keys)) == prompts and made.size.mini_batches == 3


def test_a_critic_is_priced_by_its_own_model_and_counts_in_the_step(folder):
    shares = "update=0.3,old=0.1,values=0.1,critic=0.3"
    gae = "algorithm.adv_estimator=gae", f"critic.model.path={folder / 'model'}"
    ours, verls = build(folder, *gae, shares=shares), build(folder, *gae, "critic=dp_critic", shares=shares)
    alone = build(folder, shares=shares)
    assert ours["unsupported"] == [] and ours["speedup"]["update"] == alone["speedup"]["update"]
    critic = ours["critic"]
    # No lm_head, whose logits verl computes for prompts too: nearer to the ratio of tokens.
    assert 1.5 < critic["speedup"]["critic"] < alone["speedup"]["update"]
    assert critic["tokens"]["logical"] == alone["tokens"]["logical"]
    assert verls["critic"]["speedup"] == {"values": 1.0, "critic": 1.0}
    gained = sum(share * (1 - 1 / critic["speedup"][name]) for name, share in (("values", 0.1), ("critic", 0.3)))
    assert 1 / verls["speedup"]["step"] - 1 / ours["speedup"]["step"] == pytest.approx(gained)
    assert ours["needed_gib"] > alone["needed_gib"] + 0.7 * critic["resident_gib"]
    assert "critic, resident" in str(report.blocks(ours)) and "critic" not in str(report.blocks(alone))


@pytest.mark.parametrize(
    "words", [pytest.param("data.train_batch_size=6", marks=pytest.mark.more), "data.train_batch_size=3",
              "data.train_batch_size=6 algorithm.adv_estimator=gae critic.ppo_mini_batch_size=2"]
)  # fmt: skip
@pytest.mark.parametrize("mode", ["prefix_sync", "sync"])
def test_a_batch_that_is_no_multiple_of_a_mini_batch_is_padded_as_by_verl(folder, words, mode):
    words = [*words.split(), f"critic.model.path={folder / 'model'}", f"trainer.v1.trainer_mode={mode}"]
    found, config = build(folder, *words), compose.compose_config("ppo_trainer", overrides(folder, *words))
    trainer = SimpleNamespace(config=config, use_critic="gae" in str(words), global_steps=1)
    multiple = PPOTrainer._get_required_batch_multiple(trainer, dp_size=2)
    rows, real = work.padded_rows(config), config.data.train_batch_size * 4
    assert real < rows == real + -real % multiple and found["unsupported"] == []
    assert found["updates"] == work.sizes(config).mini_batches == rows // 16
    if critic := work.as_actor(config):
        assert work.sizes(critic).mini_batches == rows // 8
        assert found["critic"]["tokens"]["logical"] == found["tokens"]["logical"]
    of_row = found["prompt_tokens"]["p50"] + 20 - 1  # nothing follows the last token
    assert found["tokens"]["logical"] == real * of_row + (rows - real) * (PADDING_TOKENS - 1)
    # The step by tokens is padded by another function.
    assert found["trees"]["off"]["tokens"]["update"] == found["tokens"]["physical"]


def test_an_engine_whose_turn_it_is_not_needs_what_it_does_not_offload(folder):
    words = ["algorithm.adv_estimator=gae", f"critic.model.path={folder / 'model'}"]
    sections = f"{ACTOR}.fsdp_config", "critic.fsdp"
    actor, critic = ([f"{key}.{kind}_offload=true" for kind in ("param", "optimizer")] for key in sections)
    alone = built_as_it_is(folder)
    # Of four parts of the same size one is gradients, which no turn leaves behind.
    for offloaded, parts in (critic[:0], 3), (critic[:1], 2), (critic, 0):
        found = build(folder, *words, *actor, *offloaded)
        more = found["needed_gib"] - alone["needed_gib"]
        assert more == pytest.approx(parts / 4 * found["critic"]["resident_gib"], abs=1e-9)
    now, critic = (SimpleNamespace(schedule="auto", peaks={"auto": 0.0}, resident_gib=4.0, idle_gib=x) for x in (3, 1))
    assert verdict.needed_gib(now, critic) == 4 + 3, "in the critic's turn"
    assert verdict.needed_gib(now, critic, simulated=9.0) == 9 + 1


def test_a_critic_that_cannot_be_read_here_is_a_note_and_one_that_is_refused_is_named(folder, tmp_path):
    found = build(folder, "algorithm.adv_estimator=gae", f"critic.model.path={tmp_path / 'nothing'}")
    assert found["unsupported"] == [] and "critic" not in found
    assert any("critic is not priced" in note for note in found["notes"])
    path = write_tiny_model(tmp_path / "lfm2", family="lfm2")
    found = build(folder, "algorithm.adv_estimator=gae", f"critic.model.path={path}")
    assert any("critic=dp_critic" in reason for reason in found["unsupported"])
