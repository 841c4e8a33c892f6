"""Stock rows with routes of experts forced: routers of transformers written out again, with given experts' weights.

Where a token's experts are not all different it has none, and goes where its router says, as in verl's
VeOmniRouterReplay (verl/utils/veomni/router_replay.py). None of this is ours.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F


def _qwen3_moe(router, hidden, forced):
    hidden = hidden.reshape(-1, hidden.shape[-1])
    logits = F.linear(hidden, router.weight)
    scores = logits.softmax(-1, dtype=torch.float)
    experts = forced(scores.topk(router.top_k).indices)
    weights = scores.gather(1, experts)
    weights = weights / weights.sum(1, keepdim=True) if router.norm_topk_prob else weights
    return logits, weights.to(logits.dtype), experts


def _gpt_oss(router, hidden, forced):
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, router.bias)
    experts = forced(logits.topk(router.top_k).indices)
    return logits, logits.gather(1, experts).softmax(1), experts


def _by_groups(block, logits, forced):
    scores = logits.sigmoid()
    choice = scores + block.gate.e_score_correction_bias
    grouped = choice.unflatten(1, (block.n_group, -1))
    best = grouped.topk(2).values.sum(-1).topk(block.topk_group, sorted=False).indices
    kept = torch.zeros_like(grouped[..., 0]).scatter(1, best, 1.0).bool()
    choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    experts = forced(choice.topk(block.top_k, sorted=False).indices)
    weights = scores.gather(1, experts)
    weights = weights / (weights.sum(1, keepdim=True) + 1e-20) if block.norm_topk_prob else weights
    return experts, weights * block.routed_scaling_factor


def _kinds() -> dict[type, tuple]:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    by_block = "route_tokens_to_experts", _by_groups
    return {
        Qwen3MoeTopKRouter: ("forward", _qwen3_moe), GptOssTopKRouter: ("forward", _gpt_oss), Glm4MoeMoE: by_block,
        DeepseekV3MoE: by_block,
    }  # fmt: skip


def _call(route, module, chosen, x):
    return route(module, x, chosen)


@contextlib.contextmanager
def forced(engine) -> Iterator[list[torch.Tensor]]:
    """Context in which verl's stock fsdp2 engine forces the `routed_experts` of its micro-batches. Yields what routers
    chose of themselves, [tokens, layers, k] of each micro-batch."""
    now, kinds, own = SimpleNamespace(routes=None), _kinds(), []
    inputs = engine.prepare_model_inputs

    def prepare_model_inputs(micro_batch):
        from verl.utils import tensordict_utils as tu

        routes, packed = micro_batch["routed_experts"], tu.get_non_tensor_data(micro_batch, "use_remove_padding", True)
        now.routes = routes.values() if packed else torch.nn.utils.rnn.pad_sequence(routes.unbind(), True).flatten(0, 1)
        own.append(torch.zeros_like(now.routes))
        return inputs(micro_batch)

    def choose(layer):
        def of(native):
            given = now.routes[:, layer].long()
            own[-1][:, layer] = native
            distinct = torch.tensor([len({*row}) == len(row) for row in given.tolist()])
            return torch.where(distinct[:, None], given, native)

        return of

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(engine, "prepare_model_inputs", prepare_model_inputs))
        found = 0
        for number, layer in enumerate(engine.module.get_decoder().layers):
            for module in layer.modules():
                for kind, (name, route) in kinds.items():
                    if isinstance(module, kind):
                        found += 1

                        call = functools.partial(_call, route, module, choose(number))
                        stack.enter_context(mock.patch.object(module, name, call, create=True))
        assert found, "no router is forced"
        yield own


def routes_as(kind: str, rows: Sequence[tuple], config, seed: int = 0) -> torch.Tensor:
    """Routes of rows (name, uid, prompt, response) as a rollout might have recorded them, jagged int16 [rows, tokens,
    layers, k]. A token's follow from all tokens up to it. kind: "agree" on them; "tails" after the last whole block of
    16 prompt tokens, and "free" ones, are a row's own; "replicas" have two, odd and even rows. A row's last token has
    none, in every third row neither do the four before, nor one of its prompt in every fifth: but not of "whole" ones,
    which are as "tails"."""
    text = config.get_text_config()
    counts = (getattr(text, f"{name}_experts", None) for name in ("num", "n_routed", "num_local"))
    experts = next(count for count in counts if count)
    shape, generator, found = (text.num_hidden_layers, experts), torch.Generator(), []
    for name, uid, prompt, response in rows:
        ids, ours = torch.cat([prompt, response]).tolist(), []
        first_own = {"agree": len(ids), "replicas": len(ids), "free": 0}.get(kind, (len(prompt) - 1) // 16 * 16)
        tag = sum(map(ord, uid)) + 1000 * (name % 2 if kind == "replicas" else 0)
        for i, token in enumerate(ids):
            tag = (tag * 1_000_003 + token + 7919 * (i == first_own) * (name + 1) + seed) % 2**61
            generator.manual_seed(tag)
            ours.append(torch.rand(*shape, generator=generator).topk(text.num_experts_per_tok).indices)
        row = torch.stack(ours).to(torch.int16)
        row[-5 if name % 3 == 0 and kind != "whole" else -1 :] = 0
        row[: len(prompt) // 2][-1:] *= name % 5 > 0 or kind == "whole"
        found.append(row)
    return torch.nested.as_nested_tensor(found, layout=torch.jagged)
