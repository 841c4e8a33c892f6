"""verl's losses of distillation on random teachers' rows, as an option `distillation` of `engines`: what is not default
of verl's DistillationLossConfig."""

import functools
from collections.abc import Callable, Iterable

import torch
from engines import _loss_config

K = 5
TOPK = {"loss_mode": "forward_kl_topk", "topk": K, "use_policy_gradient": False}
ONLY = {"use_task_rewards": False}  # under TOPK no policy loss is computed, and no log-probs are


def distillation_config(options: dict):
    from verl.workers.config import DistillationConfig, DistillationLossConfig

    chosen = DistillationLossConfig(**TOPK | dict(options["distillation"]))
    return DistillationConfig(enabled=False, distillation_loss=chosen)


def distillation_loss(options: dict):
    """As verl's worker makes it, which is loss and processor of logits."""
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.workers.config import ActorConfig

    actor, config = _loss_config(ActorConfig, options), distillation_config(options)
    return functools.partial(distillation_ppo_loss, config=actor, distillation_config=config)


def or_nothing(loss: Callable):
    """The loss, or zero where none of a micro-batch's tokens counts."""

    def of_verls(**given):
        output = given.get("model_output")
        if output is None or given["data"]["response_mask"].any():
            return loss(**given)
        return 0.0 * next(iter(output.values())).values().sum(), {}

    return of_verls


def tell_update(data, options: dict) -> None:
    """Sets the flags that verl's trainer sets of an update, and of no other batch."""
    from verl.utils import tensordict_utils as tu

    config = distillation_config(options).distillation_loss
    topk = config.loss_settings.use_topk
    only = topk and not config.use_task_rewards and not config.use_policy_gradient
    tu.assign_non_tensor(data, distillation_use_topk=topk, distillation_only=only)


def add_teacher(data, options: dict, generators: Iterable[torch.Generator], vocab: int) -> None:
    """Adds to a batch what a teacher says after every token, each row's by its own generator."""
    offsets = data["input_ids"].offsets()
    is_topk = distillation_config(options).distillation_loss.loss_settings.use_topk
    lens = zip(offsets.diff().tolist(), generators, strict=True)
    logits = torch.cat([torch.randn(n, vocab if is_topk else 1, generator=generator) for n, generator in lens])
    # Of a token alone, near those that a tiny model gives.
    values, ids = (2 * logits).log_softmax(-1).topk(K) if is_topk else (logits / 3 - 4.5, torch.zeros_like(logits))
    data["teacher_ids"] = torch.nested.nested_tensor_from_jagged(ids.int(), offsets)
    data["teacher_logprobs"] = torch.nested.nested_tensor_from_jagged(values, offsets)
