"""Traces: what is written is what is read, recording ends where it should, and whatever is damaged is named.

tests/tools/test_ab.py records a run of real verl; here an engine trains at most, by itself.
"""

import dataclasses
import errno
import functools
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import _batch
from safetensors.torch import load_file, save_file
from tensordict import NonTensorStack, TensorDict
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss, sft_loss

from verl_prefix import trace
from verl_prefix.engine.rows import BatchRows
from verl_prefix.testing import write_tiny_model
from verl_prefix.tools.ab.arm import to_tensordict
from verl_prefix.tools.ab.options import Options
from verl_prefix.tools.ab.source import Source, synthetic_rows
from verl_prefix.trace import writer as trace_writer

CONFIG = ActorConfig(strategy="fsdp2", rollout_n=3, ppo_micro_batch_size_per_gpu=1)
LOSS = functools.partial(ppo_loss, config=CONFIG)


def rows(step: int, rank: int) -> trace.StepRows:
    made = synthetic_rows((9, 4 + step, 3, 2), vocab_size=50, seed=10 * step + rank)
    made.jagged["old_log_probs"] = made.jagged["advantages"]
    return made


def writers(folder: Path, model: str, max_steps: int = 100, max_gib: float = 1.0) -> list[trace_writer.TraceWriter]:
    described = {"model": {"path": model, "fingerprint": trace.model_fingerprint(model)}, "engine": {}, "optimizer": {}}
    return [trace_writer.TraceWriter(str(folder), rank, 2, max_steps, max_gib, lambda: described) for rank in range(2)]


def mini_batch(step: int, rank: int) -> TensorDict:
    return to_tensordict(rows(step, rank))


def record(ranks: list[trace_writer.TraceWriter], steps: int, make=mini_batch, loss=LOSS) -> None:
    """All ranks at once, in threads: a rank that reduces less often than the others breaks the barrier."""
    barrier, asked = threading.Barrier(len(ranks), timeout=300), {}

    def run(writer: trace_writer.TraceWriter) -> None:
        def reduce_max(counts: list[int]) -> list[int]:
            asked[writer.rank] = counts
            barrier.wait()
            found = [max(column) for column in zip(*asked.values(), strict=True)]
            barrier.wait()
            return found

        for step in range(steps):
            writer.record(BatchRows(make(step, writer.rank)), loss, reduce_max)

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(run, writer) for writer in ranks]
    for future in futures:
        future.result()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path, model) -> Path:
    record(writers(tmp_path / "trace", model), steps=3)
    return tmp_path / "trace"


def test_what_is_written_is_what_is_read(folder, model):
    recorded = trace.Trace(folder)
    recorded.check_model(model)
    assert recorded.num_steps == 3
    recorded.check()
    for step in range(3):
        for rank in range(2):
            found, wanted = recorded.read(step, rank), rows(step, rank)
            assert found.uids == wanted.uids and found.flags == wanted.flags
            assert set(found.jagged) == set(wanted.jagged)
            for name, pair in wanted.jagged.items():
                assert all(torch.equal(a, b) for a, b in zip(found.jagged[name], pair, strict=True)), name


@pytest.mark.parametrize("exists", [False, True])
def test_only_the_owner_may_read_what_is_recorded(tmp_path, model, exists):
    place, umask = tmp_path / "new" / "trace", os.umask(0)
    try:
        if exists:
            place.mkdir(parents=True)
        record(writers(place, model), steps=2)
    finally:
        os.umask(umask)
    assert place.stat().st_mode & 0o777 == (0o777 if exists else 0o700)  # a folder of the user's own stays as it is
    written = list(place.rglob("*"))
    assert len(written) == 2 + 1 + 2 * 2 * 2
    assert {path.stat().st_mode & 0o777 for path in written if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in written if path.is_file()} == {0o600}


def test_padded_rows_of_the_legacy_trainer_are_recorded_as_jagged_ones(tmp_path, model):
    for name in ("jagged", "padded"):
        options = {"padded": name == "padded"}
        record(writers(tmp_path / name, model), 1, lambda step, rank, options=options: _batch(rank, 50, options))
    for rank in range(2):
        jagged, padded = (trace.Trace(tmp_path / name).read(0, rank) for name in ("jagged", "padded"))
        assert padded.uids == jagged.uids and padded.flags == jagged.flags
        assert set(padded.jagged) == set(jagged.jagged) and set(padded.dense) == set(jagged.dense)
        for name, pair in jagged.jagged.items():
            assert all(torch.equal(a, b) for a, b in zip(padded.jagged[name], pair, strict=True)), name


@pytest.mark.parametrize("as_tensor", [False, True])
def test_sessions_of_turns_are_recorded_which_placement_reads(tmp_path, model, as_tensor):
    made = [_batch(rank, 50, {"turns": True}) for rank in range(2)]
    sessions = [torch.tensor([*data["session_id"]]) for data in made]
    for data, session in zip(made, sessions, strict=True):
        if as_tensor:
            data["session_id"] = session
    record(writers(tmp_path / "trace", model), 1, lambda step, rank: made[rank])
    for rank, session in enumerate(sessions):
        replayed = to_tensordict(trace.Trace(tmp_path / "trace").read(0, rank))
        assert torch.equal(replayed["session_id"], session) and len({*session.tolist()}) == 2


def test_ranks_join_in_order(folder):
    joined = trace.join_rows([trace.Trace(folder).read(1, rank) for rank in range(2)])
    assert joined.num_rows == 12 and joined.uids == rows(1, 0).uids + rows(1, 1).uids
    last = to_tensordict(joined, order=[11])["input_ids"].unbind()[0]
    assert torch.equal(last, rows(1, 1).jagged["input_ids"][0][-14:])


def test_recording_ends_at_its_bounds_on_every_rank(tmp_path, model):
    record(writers(tmp_path / "steps", model, max_steps=2), steps=5)
    assert trace.Trace(tmp_path / "steps").num_steps == 2
    small = writers(tmp_path / "gib", model, max_gib=1e-5)  # 5 KiB a rank
    record(small, steps=5)
    assert 0 < trace.Trace(tmp_path / "gib").num_steps < 5
    assert sum(f.stat().st_size for f in (tmp_path / "gib").rglob("*.safetensors")) <= 1e-5 * 2**30
    # A rank stops where another one is full, though it has room itself.
    ranks = writers(tmp_path / "other", model)
    ranks[1].max_bytes = 10
    record(ranks, steps=2)
    assert ranks[0].ended and not (tmp_path / "other").exists()


def test_a_folder_with_a_trace_and_a_foreign_loss_are_refused(folder, tmp_path, model):
    with pytest.raises(trace.TraceError, match="already holds a trace"):
        record(writers(folder, model), steps=1)
    with pytest.raises(trace.TraceError, match="ppo_loss.*sft_loss"):
        record(writers(tmp_path / "sft", model), steps=1, loss=functools.partial(sft_loss, config=CONFIG))

    def named_as_verls(config, **_):
        raise AssertionError

    named_as_verls.__name__ = "ppo_loss"
    for loss in (functools.partial(named_as_verls, config=CONFIG), ppo_loss, functools.partial(ppo_loss, CONFIG)):
        with pytest.raises(trace.TraceError, match="verl's ppo_loss.*remove trace_dir"):
            record(writers(tmp_path / "other", model), steps=1, loss=loss)


def test_a_run_that_goes_on_from_a_checkpoint_leaves_its_trace_as_it_is_and_starts_none(folder, tmp_path, model):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for place in (folder, tmp_path / "other"):
        ranks = writers(place, model)
        for writer in ranks:
            writer.resumed = True
        record(ranks, steps=2)
        assert all(writer.ended for writer in ranks)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("broken", [0, 1])
def test_a_disk_that_is_full_on_one_rank_ends_the_recording_on_all(tmp_path, model, monkeypatch, broken):
    """A write that fails with ENOSPC at the edge that no test machine has: rank `broken`'s disk, in the third step."""
    ranks = writers(tmp_path / "trace", model)
    record(ranks, steps=2)
    write_whole = trace_writer.write_whole

    def full_disk(path: Path, content: bytes, **options: int) -> None:
        if path.parent.name == f"rank_{broken:05d}":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_whole(path, content, **options)

    monkeypatch.setattr(trace_writer, "write_whole", full_disk)
    record(ranks, steps=2, make=lambda step, rank: to_tensordict(rows(step + 2, rank)))
    assert all(writer.ended for writer in ranks) and trace.Trace(tmp_path / "trace").num_steps == 2


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("field", "value"),
    [("multi_modal_inputs", {"pixel_values": torch.zeros(2, 3)}), ("session_id", "a-b"), ("old_log_probs", None)],
)
def test_what_one_rank_cannot_record_ends_the_run_on_all_and_later_on_only_the_recording(
    tmp_path, model, first, field, value
):
    def odd(step: int, rank: int):
        data = to_tensordict(rows(step, rank))
        if rank and step >= first:
            data[field] = NonTensorStack.from_list([value] * len(data))
        return data

    ranks = writers(tmp_path / "trace", model)
    if first:
        record(ranks, steps=3, make=odd)
        assert all(writer.ended for writer in ranks) and trace.Trace(tmp_path / "trace").num_steps == 1
        return
    with pytest.raises(trace.TraceError, match="another rank cannot record"):
        record(ranks, steps=1, make=odd)
    assert not (tmp_path / "trace").exists()
    with pytest.raises(trace.TraceError, match="trace_dir"):
        writers(tmp_path / "trace", model)[1].record(BatchRows(odd(0, 1)), LOSS, lambda counts: counts)


def test_a_model_that_cannot_be_described_ends_the_run_on_all_ranks(tmp_path, model):
    """Only rank 0 describes it, and the others wait."""
    ranks = writers(tmp_path / "trace", model)
    ranks[0].describe = lambda: {"engine": object.no_such_attribute}
    with pytest.raises(trace.TraceError, match="no_such_attribute"):
        ranks[0].record(BatchRows(to_tensordict(rows(0, 0))), LOSS, lambda counts: counts)
    with pytest.raises(trace.TraceError, match="another rank cannot record"):
        ranks[1].record(BatchRows(to_tensordict(rows(0, 1))), LOSS, lambda counts: [True, *counts[1:]])
    assert not (tmp_path / "trace").exists()


def test_positions_of_a_vision_language_model_are_refused(tmp_path, model):
    """verl gives them to text-only rows too where the processor knows them: [4, tokens] per row."""

    def with_positions(step: int, rank: int):
        data = to_tensordict(rows(step, rank))
        positions = [row.expand(4, -1) for row in data["position_ids"].unbind()]
        data["position_ids"] = torch.nested.as_nested_tensor(positions, layout=torch.jagged)
        return data

    with pytest.raises(trace.TraceError, match="does not record position_ids of shape"):
        record(writers(tmp_path / "trace", model), steps=1, make=with_positions)


def test_a_killed_run_leaves_the_steps_that_all_ranks_finished(folder):
    # Rank 1 was killed in its third step: its tensors are half written beside their name, its JSON is not there.
    step = folder / "rank_00001" / "step_00002.json"
    step.unlink()
    tensors = step.with_suffix(".safetensors")
    tensors.rename(tensors.with_name(f"{tensors.name}.part"))
    assert trace.Trace(folder).num_steps == 2


def _train(rank: int, scratch: Path, model: str) -> None:
    """Two steps of one batch by the prefix engine, recorded, on its own path and on verl's."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    from verl_prefix.backends.fsdp import PrefixEngineConfig
    from verl_prefix.config.options import PrefixConfig

    os.environ.update(RANK=str(rank), WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", init_method=f"file://{scratch / 'rendezvous'}", rank=0, world_size=1)
    for schedule in ("auto", "stock"):
        options = PrefixConfig(schedule=schedule, trace_dir=str(scratch / schedule), trace_max_steps=2)
        parts = dict(
            model_config=HFModelConfig(
                path=model,
                override_config={"attn_implementation": "sdpa"},
                enable_activation_offload=schedule == "auto",
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-4),
            checkpoint_config=CheckpointConfig(),
        )
        for forward_only in (False, True):  # a ref engine beside it records nothing, and does not mind the folder
            config = PrefixEngineConfig(
                prefix=options, forward_only=forward_only, use_torch_compile=False,
                mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
            )  # fmt: skip
            engine = EngineRegistry.new("language_model", "prefix", engine_config=config, **parts)
            engine.initialize()
            with engine.eval_mode(disable_auto_offload=True):
                engine.infer_batch(to_tensordict(rows(0, 0)))
            for step in range(0 if forward_only else 3):
                with engine.train_mode(disable_auto_offload=True):
                    engine.train_batch(to_tensordict(rows(step, 0)), LOSS)
    torch.distributed.destroy_process_group()


def test_an_engine_records_its_updates_alone_whatever_its_schedule(tmp_path, model, spawn):
    spawn(_train, args=(tmp_path, model))
    for schedule in ("auto", "stock"):
        recorded = trace.Trace(tmp_path / schedule)
        recorded.check_model(model)
        assert recorded.num_steps == 2 and recorded.manifest["engine"]["prefix"]["schedule"] == schedule
        assert recorded.manifest["model"]["enable_activation_offload"] == (schedule == "auto"), "off in ours alone"
        assert recorded.manifest["optimizer"]["lr"] == 1e-4 and recorded.manifest["loss"]["clip_ratio"] == 0.2
        for step in range(2):
            found, wanted = recorded.read(step, 0), rows(step, 0)
            assert found.uids == wanted.uids and found.flags == wanted.flags
            for name, pair in wanted.jagged.items():
                assert all(torch.equal(a, b) for a, b in zip(found.jagged[name], pair, strict=True)), name


def cut(name: str):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-7])


def unlink(name: str):
    return lambda folder: (folder / name).unlink()


def edit(name: str, **changes):
    def damage(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))

    return damage


def rewrite(change):
    def damage(folder: Path) -> None:
        path = folder / "rank_00000" / "step_00001.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


MANIFEST, STEP, TENSORS = "manifest.json", "rank_00001/step_00001.json", "rank_00001/step_00001.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *[(damage(name), f"{name} cannot be read: ") for name in (STEP, TENSORS) for damage in (cut, unlink)],
        (cut(MANIFEST), "manifest.json cannot be read: "),
        (unlink(MANIFEST), "is no trace, which has a manifest.json; record one with"),
        (lambda folder: (folder / MANIFEST).write_text("[1]"), "manifest.json cannot be read: "),
        (edit(MANIFEST, schema="trace/99"), "schema is 'trace/99', and .* reads 'verl_prefix.trace/1'; record the"),
        (edit(MANIFEST, world_size="2"), "manifest.json cannot be read: "),
        (edit(MANIFEST, world_size=0), "manifest.json cannot be read: "),
        (edit(MANIFEST, loss=None), r"manifest.json cannot be read: .* lacks \['loss'\]"),
        (edit(STEP, flags=[1]), f"{STEP} cannot be read: "),
        (edit(STEP, uids=["a"]), "step_00001.safetensors cannot be read: .* do not have the 6 rows"),
        (rewrite(lambda t: t.pop("loss_mask")), "step_00001.safetensors cannot be read: KeyError: 'loss_mask'"),
        (rewrite(lambda t: t.update({"responses/lengths": t["responses/lengths"] + 1})), "does not fit the rows"),
        (rewrite(lambda t: t.update(prompts=t["prompts"][:-1])), "prompts does not fit the rows"),
        (rewrite(lambda t: t.update(temperature=torch.ones(5))), "do not have the 6 rows"),
        (rewrite(lambda t: t.update(temperature=torch.tensor(1.0))), "step_00001.safetensors cannot be read: TypeEr"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_named_before_anything_is_replayed(folder, damage, message):
    damage(folder)
    with pytest.raises(trace.TraceError, match=message):
        trace.Trace(folder).check()


def test_another_model_is_named(folder, tmp_path, model):
    recorded = trace.Trace(folder)
    other = write_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(trace.TraceError, match="other is another model than the trace was recorded with"):
        recorded.check_model(other)
    config = Path(write_tiny_model(tmp_path / "config")) / "config.json"
    recorded.check_model(config.parent)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-5}))
    with pytest.raises(trace.TraceError, match="another model"):
        recorded.check_model(config.parent)
    with pytest.raises(trace.TraceError, match="has no config.json"):
        recorded.check_model(tmp_path)


def test_a_hub_name_is_the_model_in_the_hubs_cache(tmp_path, model, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert trace.model_fingerprint("someone/model") is None
    snapshot = tmp_path / "models--someone--model" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(model)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    assert trace.model_fingerprint("someone/model") == trace.model_fingerprint(model)


def test_an_empty_folder_is_no_trace(tmp_path):
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(trace.TraceError, match="is no trace, which has a manifest.json; record one with"):
            trace.Trace(folder)


def test_a_trace_of_veomni_becomes_one_of_fsdp2(folder):
    from verl.workers.config import VeOmniOptimizerConfig

    from verl_prefix.config.veomni import PrefixVeOmniEngineConfig
    from verl_prefix.tools.ab import arm
    from verl_prefix.tools.ab.other_engines import of_fsdp2

    recorded = trace.Trace(folder).manifest
    assert of_fsdp2(recorded) is recorded
    for mixed, weights in ((True, "fp32"), (False, "bf16")):
        engine = PrefixVeOmniEngineConfig(mixed_precision=mixed, attn_implementation="veomni_flash_attention_2_with_sp")
        found = of_fsdp2(
            recorded
            | {"engine": dataclasses.asdict(engine), "optimizer": dataclasses.asdict(VeOmniOptimizerConfig(lr=3e-6))}
        )
        arm.check_manifest(found)
        model, options, optimizer = arm._configs(found)
        assert arm.precision(found) == "bf16" and options["model_dtype"] == weights
        assert options["mixed_precision"]["reduce_dtype"] == weights and optimizer.lr == 3e-6
        assert model["override_config"]["attn_implementation"] == "flash_attention_2"
    with pytest.raises(ValueError, match="actor.optim.optimizer=muon of VeOmni, and a replay has AdamW alone; compare"):
        of_fsdp2(found | {"optimizer": {"optimizer": "muon"}})


@pytest.mark.parametrize("in_fp32", [None, False])
def test_a_trace_of_megatron_becomes_one_of_fsdp2(folder, in_fp32):
    from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig

    from verl_prefix.tools.ab import arm
    from verl_prefix.tools.ab.other_engines import of_fsdp2

    ddp = {} if in_fp32 is None else {"grad_reduce_in_fp32": in_fp32}
    engine = McoreEngineConfig(tensor_model_parallel_size=2, override_ddp_config=ddp)
    optimizer = McoreOptimizerConfig(lr=3e-6, override_optimizer_config={"optimizer_cpu_offload": True})
    found = of_fsdp2(
        trace.Trace(folder).manifest
        | {"engine": dataclasses.asdict(engine), "optimizer": dataclasses.asdict(optimizer)}
    )
    arm.check_manifest(found)
    _, options, replayed = arm._configs(found)
    assert arm.precision(found) == "bf16" and options["model_dtype"] == "fp32"
    assert options["mixed_precision"]["reduce_dtype"] == ("fp32" if in_fp32 is None else "bf16")
    assert (replayed.lr, replayed.optimizer, replayed.override_optimizer_config) == (3e-6, "AdamW", None)
    with pytest.raises(ValueError, match="actor.optim.optimizer=muon of Megatron, and a replay has AdamW alone"):
        of_fsdp2(found | {"optimizer": {"optimizer": "muon"}})


@pytest.mark.parametrize("of", [{"tensor_model_parallel_size": 2}, {"expert_parallel_size": 2}])
def test_to_record_again_is_no_advice_for_an_optimizer_that_no_replay_has(folder, model, of):
    edit(MANIFEST, engine=of, optimizer={"optimizer": "sgd"})(folder)
    with pytest.raises(trace.TraceError) as error:
        Source(Options(trace=str(folder), model=model))
    assert "optimizer=sgd of" in str(error.value) and str(error.value).endswith("`verl-prefix ab --runs STOCK OURS`")


@pytest.mark.parametrize("key", ["lora_adapter_path", "hf_config_path"])
def test_a_model_with_a_part_outside_of_its_folder_is_neither_recorded_nor_replayed(folder, tmp_path, model, key):
    from verl.workers.config import HFModelConfig

    from verl_prefix.config.options import PrefixConfig

    config = HFModelConfig(path=model, load_tokenizer=False)
    assert config.hf_config_path == model
    vars(config)[key] = "elsewhere"
    engine = SimpleNamespace(engine_config=None, optimizer_config=None)
    says = f"cannot hold actor_rollout_ref.model.{key}=elsewhere, since a replay reads model.path alone; record a run"
    writer = trace_writer.open_trace(PrefixConfig(trace_dir=str(tmp_path / "new")), 0, 1, True, engine, config)
    with pytest.raises(trace.TraceError, match=says):
        writer.record(BatchRows(mini_batch(0, 0)), LOSS, lambda counts: counts)
    edit(MANIFEST, model={"path": model, key: "elsewhere"})(folder)
    with pytest.raises(trace.TraceError, match=says):
        Source(Options(trace=str(folder), model=model))


def test_a_trace_brings_no_code_along():
    """What a manifest may decide is data: no remote code, no module of its choice as optimizer, and no adapter's
    config, which may name modules."""
    from verl_prefix.tools.ab import arm, source

    assert not {"trust_remote_code", "external_lib", "lora_adapter_path"} & {*arm.MODEL_KEYS}
    assert source.OPTIMIZERS == ("torch.optim", "torchao.optim", "bitsandbytes.optim")
