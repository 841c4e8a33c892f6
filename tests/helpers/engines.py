"""Engines of verl and ours on tiny batches: how both are built, measured and compared."""

import contextlib
import functools
import re
from collections.abc import Sequence
from unittest import mock

import torch
from forced_routes import routes_as
from shared_models import OURS
from whole_tensors import whole

TOLERANCE = 5e-6  # fp32, relative, of design.md
PAD = f"pad{7:032x}"  # a uid of verl's padding
# Options of every loss of verl with which it does what is its own on these rows.
LOSS_MODES = {
    "vanilla": {},
    "dppo_tv": {},
    "dppo_kl": {},
    "gspo": {},
    "sapo": {},
    "gpg": {},
    "clip_cov": {"clip_cov_lb": 0.0, "clip_cov_ratio": 0.2},
    "kl_cov": {"kl_cov_ratio": 0.2},
    "geo_mean": {},
    "dro": {"dro_beta": 0.1},
    "cispo": {},
    "bypass_mode": {},
}


def _lens(rank: int, empty: Sequence[str]) -> list[tuple[str, int, list[int], str]]:
    """(uid, prompt length, response lengths, kind) per group: ranks hold different numbers of groups, equal rows."""
    groups = {
        0: [("a", 23, [9, 17, 5], ""), ("b", 41, [3, 11, 1, 7], ""), ("c", 1, [6, 8], ""), ("d", 17, [13], "")],
        1: [("e", 37, [5, 12, 19, 2, 8, 4, 10, 3], ""), (PAD, 15, [1], "pad"), ("f", 29, [12], "holes")],
    }
    return [(uid, n, [0] * len(lens) if uid in empty else lens, kind) for uid, n, lens, kind in groups[rank]]


def rows_of(rank: int, options: dict) -> dict:
    """Options with rows of their own for ranks behind the first two."""
    if rank < 2:
        return options
    groups = [(f"{uid}x", n + rank, lens[:-1] or lens, kind) for uid, n, lens, kind in _lens(rank - 2, ())]
    return options | {"groups": groups}


def _turns(
    rank: int, vocab: int, generator: torch.Generator, kind: object = True
) -> list[tuple[str, torch.Tensor, torch.Tensor, int]]:
    """(uid, prompt, response, session) of a row per turn, whose messages end in token 2, as the tiny models' do: two
    sessions of three turns per uid. The next prompt goes on behind the last one ("stripped"; rank 0) or behind its
    response ("kept"; rank 1). "odd": a uid's second session was lost, one has a single turn, a last response is empty,
    two sessions are equal, and there are padding rows."""
    kept = rank == 1 if kind in (True, "odd") else kind == "kept"
    end, header = torch.tensor([2]), torch.tensor([5, 6])

    def some(length: int, more: int = 0) -> torch.Tensor:
        length += int(torch.randint(more + 1, (1,), generator=generator))
        return torch.cat([torch.randint(3, vocab, (length,), generator=generator), end])

    rows = []
    for uid in ("ab", "cd")[rank]:
        question = torch.cat([some(20), some(12)])
        for session in range(2):
            history = question
            for _ in range(3):
                thoughts, answer = some(4, 3)[:-1], some(5, 4)
                prompt, response = torch.cat([history, header]), torch.cat([thoughts, answer])
                rows.append((uid, prompt, response, session))
                history = torch.cat([history, header, response if kept else answer, some(10, 5)])
    if kind == "odd":
        (uid, prompt, response, _), last, equal = rows[0], rows[2], rows[6:9]
        rows[2] = (*last[:2], last[2][:0], 0)
        rows[3:6] = [(uid, prompt, response.flip(0), 2)]
        rows[-3:] = [(*row[:3], 1) for row in equal]
        rows += [(PAD, torch.full((127,), 2), torch.tensor([2]), session) for session in range(2)]
    return rows


def _batch(rank: int, vocab: int, options: dict):
    """Ragged random rows in verl's jagged form; rows of a group are not neighbours."""
    generator = torch.Generator().manual_seed(100 + rank)
    rows = []
    groups = options.get("groups")  # of this rank, if not as `_lens`
    for uid, prompt_len, response_lens, kind in groups or _lens(rank, options.get("empty", ())):
        prompt = torch.randint(3, vocab, (prompt_len,), generator=generator)
        if kind == "alike":  # a message that all begin with
            prompt[:-10] = torch.arange(prompt_len - 10) % 7 + 3
            prompt[-11] = 2
        for length in response_lens:
            response = torch.randint(3, vocab, (length,), generator=generator)
            mask = torch.ones(length, dtype=torch.int64)
            if kind == "pad" and options.get("padding_rows", True):
                mask[:] = 0
            if kind == "holes":
                mask[3:7] = 0
            if options.get("tool_tokens"):  # two of three were not sampled
                mask[1::3] = mask[2::3] = 0
            rows.append((uid, prompt, response, mask))
    if (
        rank == 0 and not groups
    ):  # a uid whose prompts differ, as after a tool call that rewrote the prompt: must not share
        other = torch.randint(3, vocab, (23,), generator=generator)
        rows[1] = ("a", other, *rows[1][2:])
    sessions = [0] * len(rows)
    if options.get("turns"):
        *columns, sessions = zip(*_turns(rank, vocab, generator, options["turns"]), strict=True)
        rows = [(*row, torch.ones_like(row[2])) for row in zip(*columns, strict=True)]
        for i, (*_, mask) in enumerate(rows):
            mask[1::3] = not options.get("tool_tokens")
            mask *= rows[i][0] != PAD
            # Of a session's three turns: those whose responses are in strands, or the others.
            if options.get("masked") == ("last" if i % 3 == 2 else "answers"):
                mask[:] = 0
    order = torch.randperm(len(rows), generator=generator).tolist()
    data = as_batch([rows[i] for i in order], [sessions[i] for i in order], options, generator)
    if "distillation" in options:
        import teachers

        teachers.add_teacher(data, options, [torch.Generator().manual_seed(99 * rank + i) for i in order], vocab)
    if "routes" in options:
        named = [(100 * rank + i, *rows[i][:3]) for i in order]
        data["routed_experts"] = routes_as(options["routes"], named, options["config"])
    return without_advantage(data, options["dead"]) if "dead" in options else data


def without_advantage(data, dead: Sequence[str] | int):
    """The batch with advantages of zero in rows of these uids; a number n: in every n-th row."""
    from verl.utils import tensordict_utils as tu

    lives = [row % dead != 0 if isinstance(dead, int) else u not in dead for row, u in enumerate(tu.get(data, "uid"))]
    rows = [x * live for x, live in zip(data["advantages"].unbind(), lives, strict=True)]
    nested = data["advantages"].is_nested
    data["advantages"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged) if nested else torch.stack(rows)
    return data


def as_batch(rows: list, sessions: list[int], options: dict, generator: torch.Generator, **more: object):
    """Rows (uid, prompt, response, loss mask) in verl's jagged form, or padded, with what losses read of them, and more
    fields, or others."""
    from verl.utils import tensordict_utils as tu

    def nested(tensors):
        return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)

    def noise(scale, shift=0.0):
        return nested(torch.randn(len(r[2]), generator=generator) * scale + shift for r in rows)

    fields = {
        "prompts": nested(r[1] for r in rows),
        "responses": nested(r[2] for r in rows),
        "input_ids": nested(torch.cat([r[1], r[2]]) for r in rows),
        "position_ids": nested(torch.arange(len(r[1]) + len(r[2])) for r in rows),
        "loss_mask": nested(r[3] for r in rows),
        "response_mask": nested(r[3] for r in rows),
        # Not centred: a loss near zero is a difference of large terms, whose relative error says nothing.
        "advantages": noise(1.0, 1.0),
        "old_log_probs": noise(0.3, -6.0),
        "ref_log_prob": noise(0.3, -6.0),
    }
    if options.get("critic"):
        fields |= {"values": noise(1.0), "returns": noise(1.0, 1.0)}
    if options.get("uid", True):
        fields["uid"] = [r[0] for r in rows]
        fields["session_id"] = sessions
    if options.get("temperature") == "per_row":
        fields["temperature"] = torch.rand(len(rows), generator=generator) + 0.5
    fields |= more
    flags = {
        "use_dynamic_bsz": options.get("use_dynamic_bsz", True),
        "max_token_len_per_gpu": options.get("budget", 400),
        "micro_batch_size_per_gpu": options.get("micro_batch_size_per_gpu", 2),
        "use_remove_padding": options.get("use_remove_padding", True),
        "use_fused_kernels": options.get("use_fused_kernels", False),
        "calculate_entropy": options.get("calculate_entropy", True),
        "calculate_sum_pi_squared": options.get("calculate_sum_pi_squared", False),
        "global_batch_size": 20,
    }
    if "routes" in options:  # as verl's worker tells engines of its own
        flags["enable_routing_replay"] = True
    if "temperature" not in fields:
        flags["temperature"] = options.get("temperature", 1.0)
    return _padded(fields, flags) if options.get("padded", False) else tu.get_tensordict(fields, flags)


def _padded(fields: dict, flags: dict, width: int | None = None):
    """The same rows as verl's legacy trainer hands them over, with wider padding than any of them needs."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    def pad(rows, left=False):
        wide = width or max(len(row) for row in rows) + 3
        sides = [(wide - len(row), 0) if left else (0, wide - len(row)) for row in rows]
        return torch.stack([torch.nn.functional.pad(row, side) for row, side in zip(rows, sides, strict=True)])

    prompts, responses = fields["prompts"].unbind(), fields["responses"].unbind()
    ones = [[torch.ones_like(row) for row in rows] for rows in (prompts, responses)]
    mask = torch.cat([pad(ones[0], left=True), pad(ones[1])], dim=1)
    positions = [
        torch.zeros(*row.shape[:-1], mask.shape[1], dtype=row.dtype) for row in fields["position_ids"].unbind()
    ]
    for to, row, row_mask in zip(positions, fields["position_ids"].unbind(), mask.bool(), strict=True):
        to[..., row_mask] = row
    dense = {name: x for name, x in fields.items() if not (isinstance(x, torch.Tensor) and x.is_nested)}
    for name in ("response_mask", "advantages", "old_log_probs", "ref_log_prob", "values", "returns"):
        if name in fields:
            dense[name] = pad(fields[name].unbind())
    if "routed_experts" in fields:
        rows = fields["routed_experts"].unbind()
        dense["routed_experts"] = torch.zeros(*mask.shape, *rows[0].shape[1:], dtype=rows[0].dtype)
        dense["routed_experts"][mask.bool()] = torch.cat(rows)
    dense |= {"prompts": pad(prompts, left=True), "responses": pad(responses), "attention_mask": mask}
    dense |= {
        "input_ids": torch.cat([dense["prompts"], dense["responses"]], dim=1), "position_ids": torch.stack(positions)
    }  # fmt: skip
    data = left_right_2_no_padding(tu.get_tensordict(dense, flags))
    if data["position_ids"].dim() == 3:  # verl's own are wrong where all rows are as long: its stock engine fails
        data["position_ids"] = tu.nested_tensor_from_tensor_list(fields["position_ids"].unbind())
    return data


def _configs(backend: str, model_path: str, options: dict, forward_only: bool = False) -> dict:
    """verl's config objects of an engine, by the name of its argument."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import EngineRouterReplayConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    from verl_prefix.backends.fsdp import PrefixCriticEngineConfig, PrefixEngineConfig
    from verl_prefix.config.options import PrefixConfig

    model_config = HFModelConfig(
        path=model_path,
        load_tokenizer="turns" in options,
        use_remove_padding=options.get("use_remove_padding", True),
        use_fused_kernels=options.get("use_fused_kernels", False),
        override_config={"attn_implementation": options.get("attn_implementation", "sdpa")}
        | options.get("override_config", {}),
        enable_gradient_checkpointing=options.get("gradient_checkpointing", False),
        enable_activation_offload=options.get("activation_offload", False),
        lora_rank=4 if "lora_targets" in options else 0,
        target_modules=options.get("lora_targets", "all-linear"),
    )
    shared = dict(
        forward_only=forward_only,
        fsdp_size=options.get("fsdp_size", -1),
        param_offload=options.get("param_offload", False),
        optimizer_offload=options.get("param_offload", False),
        full_determinism=options.get("full_determinism", False),
        ulysses_sequence_parallel_size=options.get("ulysses", 1),
        use_torch_compile=False,
        mixed_precision={"param_dtype": options.get("param_dtype", "fp32"), "reduce_dtype": "fp32"},
        model_dtype="fp32",
        reshard_after_forward=options.get("reshard_after_forward", True),
        entropy_from_logits_with_chunking=options.get("entropy_from_logits_with_chunking", False),
        entropy_checkpointing=options.get("entropy_checkpointing", False),
    )
    # verl's main branch has no such key
    if "use_no_sync" in options and "use_no_sync_for_gradient_accumulation" in FSDPEngineConfig.__dataclass_fields__:
        shared["use_no_sync_for_gradient_accumulation"] = options["use_no_sync"]
    if backend.startswith("prefix"):
        # Rows stay, so that what a rank computes is known; test_exchange.py is about those that travel.
        prefix = {"min_speedup": 0, "exchange": "off"} | {key: options[key] for key in OURS if key in options}
        frozen = options.get("frozen_tower", False)
        more = dict(freeze_vision_tower=frozen, ppo_epochs=options.get("epochs", 1))
        engine_type = PrefixCriticEngineConfig if options.get("critic") else PrefixEngineConfig
        if "replay" in options:
            shared["router_replay"] = EngineRouterReplayConfig(mode=options["replay"])
        engine_config = engine_type(**shared, prefix=PrefixConfig(**prefix), **more)
    else:
        engine_config = FSDPEngineConfig(**shared, strategy="fsdp2")
    return dict(
        model_config=model_config,
        engine_config=engine_config,
        # AdamW turns round-off into lr-sized steps where the true gradient is zero, so lr must be far above round-off
        # and far below the weights; a wrong gradient moves the weights by 5e-4 relative.
        optimizer_config=FSDPOptimizerConfig(
            lr=1e-5,
            weight_decay=0.01,
            clip_grad=1.0,
            # The same AdamW in one call, not in ten of each parameter's.
            override_optimizer_config=options.get("optimizer", {"fused": True}),
        ),
        checkpoint_config=CheckpointConfig(**options.get("checkpoint", {})),
    )


def _engine(backend: str, model_path: str, options: dict, forward_only: bool = False):
    import verl  # noqa: F401
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    torch.manual_seed(0)
    configs = _configs(backend, model_path, options, forward_only)
    build = FSDPEngine._build_module  # verl's FSDP engine has no key for what is trained

    def built(self):
        module = build(self)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(bool(re.search(options.get("trained", ""), name)))
        if options.get("halved_logits"):
            module.register_forward_hook(_halve_logits)
        return module

    with mock.patch.object(FSDPEngine, "_build_module", built):
        model_type = "value_model" if options.get("critic") else "language_model"
        configs["model_config"].model_type = model_type  # as TrainingWorker sets it
        engine = EngineRegistry.new(model_type=model_type, backend=backend, **configs)
        engine.initialize()
    return engine


def _halve_logits(module, args, output) -> None:
    output.logits = output.logits * 0.5


def _loss(options: dict):
    import teachers
    from verl.workers.config import ActorConfig, FSDPCriticConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    if options.get("critic"):
        config = FSDPCriticConfig(
            use_dynamic_bsz=True, loss_agg_mode=options.get("loss_agg_mode", "token-mean"),
            loss_scale_factor=options.get("loss_scale_factor", 32),
        )  # fmt: skip
        return functools.partial(value_loss, config=config)
    if "distillation" in options:
        return teachers.distillation_loss(options)
    return functools.partial(ppo_loss, config=_loss_config(ActorConfig, options))


def _loss_config(config_class: type, options: dict):
    from verl.trainer.config import RolloutCorrectionConfig
    from verl.workers.config import PolicyLossConfig

    policy_loss = dict(options.get("policy_loss", {}))
    if "rollout_correction" in policy_loss:
        policy_loss["rollout_correction"] = RolloutCorrectionConfig(**policy_loss["rollout_correction"])
    return config_class(
        strategy=options.get("strategy", "fsdp2"),
        rollout_n=4,
        use_dynamic_bsz=True,
        entropy_coeff=options.get("entropy_coeff", 0.01),
        use_kl_loss=options.get("use_kl_loss", False),
        kl_loss_coef=0.1,
        loss_agg_mode=options.get("loss_agg_mode", "token-mean"),
        loss_scale_factor=options.get("loss_scale_factor", 32),
        policy_loss=PolicyLossConfig(**policy_loss),
    )


def _responses(nested: torch.Tensor, data) -> list[torch.Tensor]:
    """What verl reads of a full-length output: values of response tokens, per row."""
    from verl.workers.utils.padding import no_padding_2_padding

    responses = data["responses"]
    lens = (
        responses.offsets().diff() if responses.is_nested else data["attention_mask"][:, -responses.shape[1] :].sum(1)
    )
    return [row[:n] for row, n in zip(no_padding_2_padding(nested, data), lens.tolist(), strict=True)]


def _measure(backend: str, model_path: str, rank: int, options: dict) -> dict:
    engine = _engine(backend, model_path, options)
    data = _batch(rank, engine.model_config.hf_config.vocab_size, options)
    with engine.eval_mode(disable_auto_offload=True):
        inferred = engine.infer_batch(data.copy())
    result = {name: torch.cat(_responses(x, data)) for name, x in inferred["model_output"].items()}
    result["lens"] = next(iter(inferred["model_output"].values())).offsets().diff()
    if "distillation" in options:
        import teachers

        teachers.tell_update(data, options)
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data.copy(), _loss(options))
        result["grads"] = whole({n: p.grad for n, p in engine.module.named_parameters() if p.requires_grad})
        result["grad_norm"] = engine.optimizer_step()
    result["loss"] = sum(output["loss"])
    result["metrics"] = output["metrics"]
    result["params"] = whole(dict(engine.module.named_parameters()))
    return result | (_adapters(engine, data) if "lora_targets" in options else {})


def _adapters(engine, data) -> dict:
    """Log-probs of the policy and, through the disabled adapter, of the ref policy, and what the rollout is sent."""
    result = {}
    for name, parameter in engine.module.named_parameters():
        if "lora_B" in name:  # after one step an adapter does next to nothing
            parameter.data.fill_(0.02)
    for name, context in (("adapted", contextlib.nullcontext()), ("ref", engine.disable_adapter())):
        with engine.eval_mode(disable_auto_offload=True), context:
            output = engine.infer_batch(data.copy())["model_output"]
        result[f"{name} log_probs"] = torch.cat(_responses(output["log_probs"], data))
    assert _relative(result["adapted log_probs"], result["ref log_probs"]) > 1e-3
    for merge in (False, True):
        engine.model_config.lora["merge"] = merge
        sent = [x.flatten() for _, x in engine.get_per_tensor_param(base_sync_done=True)[0]]
        result[f"sent, merged: {merge}"] = torch.cat(sent)
    return result


def _relative(ours: torch.Tensor, stock: torch.Tensor) -> float:
    return ((ours - stock).double().norm() / stock.double().norm().clamp(min=1e-30)).item()


def _compare(ours: dict, stock: dict) -> dict:
    errors = {
        name: _relative(ours[name], stock[name])
        for name in ours
        if (name in ("entropy", "sum_pi_squared", "values") or "log_probs" in name or name.startswith("sent"))
        and name in stock
    }
    errors["outputs"] = float(set(stock) ^ set(ours) != set())
    errors["metric names"] = float(bool(set(stock["metrics"]) - set(ours["metrics"])))
    first = "values" if "values" in stock else "log_probs"
    errors["dtypes"] = float(stock[first].dtype != ours[first].dtype)
    errors["lens"] = float((ours["lens"] != stock["lens"]).any())
    for name in ("loss", "grad_norm"):
        errors[name] = abs(ours[name] - stock[name]) / max(abs(stock[name]), 1e-30)
    errors["grads"] = max(_relative(ours["grads"][name], grad) for name, grad in stock["grads"].items())
    # All parameters as one vector: a LoRA matrix that starts at zero is lr * sign(gradient) after AdamW's first step.
    ours_all, stock_all = (torch.cat([p.flatten() for p in x["params"].values()]) for x in (ours, stock))
    errors["params"] = _relative(ours_all, stock_all)
    prefix = {k: v for k, v in ours["metrics"].items() if k.startswith(("prefix/", "timing_s/"))}
    return {"errors": errors, "metrics": prefix}


def _first_step_cost(model_path: str, rank: int, options: dict) -> float:
    """What log-probs and update compute only once, over stock's update of the same rows: tokens through a layer, three
    times where a backward follows."""
    from verl_prefix.auto import calibration

    engine, found = _engine("prefix", model_path, options), [0]
    data = _batch(rank, engine.model_config.hf_config.vocab_size, options)

    def count(module, args):
        found[-1] += args[0].shape[:-1].numel() * (3 if torch.is_grad_enabled() else 1)

    engine.module.model.layers[1].register_forward_pre_hook(count)
    # It measures, and finds these rates whatever the clock says: the path of both steps follows from them.
    with mock.patch.object(calibration, "_nonnegative_solution", lambda *measured: [0.0, 1.0, 1.0, 1.0]):
        for _ in range(2):
            with engine.eval_mode(disable_auto_offload=True):
                engine.infer_batch(data.copy())
            with engine.train_mode(disable_auto_offload=True):
                engine.forward_backward_batch(data.copy(), _loss(options))
            found.append(0)
    return (found[0] - found[1]) / (3 * (data["input_ids"].offsets()[-1].item() - len(data)))


def depends_on_rates(rank: int) -> dict:
    """64 rows and more, which are shared at any rates; the last group is cut in two or has phases, as rates say."""
    groups = [(name, 100 + 10 * rank, [30, 28, 26, 24, 30, 28, 26, 24], "") for name in "abcdefg"]
    groups.append(("h", 100 + 10 * rank, [30] * 9, ""))
    return {"groups": groups, "budget": 350, "wave_tokens": 90, "min_speedup": 1e-6}


def _accumulated(model_path: str, rank: int, options: dict, stock: dict) -> tuple[list[str], float]:
    """What ours does besides in the second of two batches without a step between, and the largest relative error of a
    parameter's gradient then, against the stock engine's."""
    from verl_prefix.engine import planner
    from verl_prefix.engine.checks import verify

    grads, seen = {}, []

    def spy(where, name):
        real = getattr(where, name)
        return mock.patch.object(where, name, lambda *args, **kw: seen.append(name) or real(*args, **kw))

    sure = {"groups": [(name, 100, [30, 28, 26, 24, 22, 20], "") for name in "ab"], "budget": 300}
    for backend, engine_options in (("fsdp2", stock), ("prefix", stock | options)):
        engine = _engine(backend, model_path, engine_options)
        with engine.train_mode(disable_auto_offload=True), spy(planner, "measure"), spy(verify, "Comparison"):
            engine.optimizer_zero_grad()
            for rows in (sure, {}):
                seen.clear()
                data = _batch(rank, engine.model_config.hf_config.vocab_size, stock | rows)
                engine.forward_backward_batch(data, _loss({}))
            grads[backend] = whole({n: p.grad for n, p in engine.module.named_parameters()})
    return seen, max(_relative(grads["prefix"][name], grad) for name, grad in grads["fsdp2"].items())


def _half_errors(result: dict, truth: dict) -> dict[str, float]:
    names = [name for name in ("log_probs", "entropy", "values") if name in truth]
    errors = {name: _relative(result[name].float(), truth[name]) for name in names}
    grads, true_grads = (torch.cat([g.flatten().float() for g in x["grads"].values()]) for x in (result, truth))
    return errors | {"grads": _relative(grads, true_grads)}
