"""A model as Megatron's ranks have it, on fake tensors: shards, gradient buffers, optimizer, and what they send.

Hugging Face's modules run, with a rank's part of their weights. Read from megatron-core 0.16.1
(tensor_parallel/layers.py, transformer/moe/token_dispatcher.py, distributed/param_and_grad_buffer.py,
optimizer/distrib_optimizer.py): linear layers that share an input gather it once, and again in backward; weights'
gradients are added to an fp32 buffer by the product that makes them; gradients are reduced after the last pass, and
weights gathered after the step. Not modelled: TransformerEngine's fused norms and rotary angles, communication beside
computation, experts that get more tokens than others. No GPU has measured this here.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from verl_prefix.auto.megatron import Division
from verl_prefix.auto.shape import experts_of, is_undivided
from verl_prefix.tools.simulate import products
from verl_prefix.tools.simulate.experts import Gather, Products, Scatter, check_gated, sent
from verl_prefix.tools.simulate.products import Exchanged, Gathered, Product, Summed
from verl_prefix.tools.simulate.scans import launch
from verl_prefix.tools.simulate.tracker import Tracker

_ROWS = ("o_proj", "down_proj")  # whose inputs are cut, and outputs summed over ranks


class Groups:
    """Process groups of rank 0, on the first stage of a pipeline. Every rank of a tensor-parallel group is next to the
    others, and every rank of a stage (megatron/core/parallel_state.py)."""

    def __init__(self, division: Division) -> None:
        tensor, expert_tensor, world = division.tensor, division.expert_tensor, division.world // division.stages
        spread = division.experts * expert_tensor
        self.tensor = dist.new_group(range(tensor))
        self.data = dist.new_group(range(0, world, tensor))
        self.experts = dist.new_group(range(0, spread, expert_tensor))
        self.expert_tensor = dist.new_group(range(expert_tensor))
        self.expert_data = dist.new_group(range(0, world, spread)) if division.experts > 1 else self.data


class MegatronModel:
    """A model's shards, and what Megatron keeps beside them.

    Args:
        model: Hugging Face's, whole; its modules get a rank's part. dtype: of weights.
    """

    def __init__(self, model: Any, division: Division, dtype: torch.dtype, tracker: Tracker) -> None:
        self.model, self.division, self.tracker = model, division, tracker
        self.groups = Groups(division)
        text = model.config.get_text_config()
        self.hidden_size: int = text.hidden_size
        self.head_dim: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self.tokens = 0  # of the pass that runs
        body, head = model.get_decoder(), model.get_output_embeddings()
        experts = experts_of(body)
        of_experts = {id(p) for one in experts for p in one.parameters()}
        tied = head.weight is model.get_input_embeddings().weight
        kept: dict[str, list[torch.nn.Parameter]] = {"dense": [], "experts": []}
        for module_name, module in model.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if tied and module is head:
                    continue
                spread = id(parameter) in of_experts
                part = self._part(f"{module_name}.{name}", parameter, spread).to(dtype)
                setattr(module, name, cut := torch.nn.Parameter(part))
                kept["experts" if spread and division.experts > 1 else "dense"].append(cut)
        if tied:
            head.weight = model.get_input_embeddings().weight
        self.buffers = [
            _Buffer(parameters, group, division.distributed, tracker)
            for parameters, group in ((kept["dense"], self.groups.data), (kept["experts"], self.groups.expert_data))
            if parameters
        ]
        self._replace_forwards(body, head, experts)

    def _part(self, name: str, whole: torch.Tensor, is_expert: bool) -> torch.Tensor:
        """A rank's part of a parameter. Which dimension is cut decides nothing but shapes of matrices."""
        whole, division = whole.detach(), self.division
        if is_expert:
            part = whole[: len(whole) // division.experts]
            outer = 2 if name.endswith("gate_up_proj") else 1  # of [experts, ., .]; some models have them transposed
            dim = 3 - outer if part.shape[outer] == self.hidden_size else outer
            return part.narrow(dim, 0, part.shape[dim] // division.expert_tensor).clone()
        if is_undivided(name, whole):
            return whole.clone()
        module = name.split(".")[-2]
        dim = 1 if whole.dim() > 1 and module in _ROWS else 0
        least = self.head_dim if module in ("k_proj", "v_proj") else 1  # a head that several ranks have
        return whole.narrow(dim, 0, max(-(-whole.shape[dim] // division.tensor), least)).clone()

    def _replace_forwards(self, body: Any, head: Any, experts: Sequence[Any]) -> None:
        tell = functools.partial(_Columns, self)
        embedding, norm = self.model.get_input_embeddings(), body.norm
        embed, normed = embedding.forward, norm.forward
        embedding.forward = lambda ids: self.summed(self._in_vocabulary(embed, ids))
        norm.forward = lambda x: self._whole(normed(x))
        head.forward = tell([head], gathers=False)
        for layer in body.layers:
            attention = layer.self_attn
            columns = [c for n, c in attention.named_children() if n in ("q_proj", "k_proj", "v_proj")]
            firsts = [c for n, c in attention.named_children() if n in ("q_a_proj", "kv_a_proj_with_mqa")]
            seconds = [c for n, c in attention.named_children() if n in ("q_b_proj", "kv_b_proj")]
            _Attention(self, attention, columns, firsts)
            for one in seconds:
                one.forward = tell([one], gathers=False)
            attention.o_proj.forward = functools.partial(self._row, attention.o_proj)
            for module in layer.mlp.modules():
                if hasattr(module, "down_proj") and isinstance(module.down_proj, torch.nn.Linear):
                    pair: list[Any] = [module.gate_proj, module.up_proj]
                    pair[0].forward = pair[1].forward = tell(pair)
                    down: Any = module.down_proj
                    down.forward = functools.partial(self._row, down)
        for one in experts:
            check_gated(one)
            one.forward = functools.partial(self._experts, one)

    def _in_vocabulary(self, embed: Any, ids: torch.Tensor) -> torch.Tensor:
        """This rank's part of the embeddings: zero for tokens of other ranks."""
        self.tokens = ids.shape[-1]
        if self.division.tensor == 1:
            return embed(ids)
        elsewhere = ids < 0
        return embed(ids.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """[..., t, H] of this rank -> [..., T, H] of all, where they share tokens."""
        return Exchanged.apply(x, self.groups.tensor, self.tokens) if self.division.sequence else x

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        """As `gathered`, ahead of lm_head, which sums gradients."""
        return Gathered.apply(x, self.groups.tensor, self.tokens) if self.division.sequence else x

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """[..., T, H] -> their sum over ranks, whole or this rank's tokens of it."""
        if self.division.tensor == 1:
            return x
        if self.division.sequence:
            return Exchanged.apply(x, self.groups.tensor, None)
        return Summed.apply(x, self.groups.tensor)

    def _row(self, linear: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = Product.apply(x, None, 0, linear.weight)[0]
        return self.summed(made)

    def _experts(self, experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """A layer's experts on a rank's own tokens: hidden [t, H], chosen and weights [t, k] -> [t, H]."""
        gate_up, down = experts.gate_up_proj, experts.down_proj
        if gate_up.shape[-1] != hidden.shape[-1]:
            gate_up, down = gate_up.mT, down.mT
        division, groups, rows = self.division, self.groups, chosen.numel()
        num = len(gate_up) * division.experts
        sizes = [rows // num + (i < rows % num) for i in range(num)]
        places = launch([chosen], [chosen.new_empty(rows)])[0]
        if division.experts * division.expert_tensor > 1:  # how many rows each rank sends to each
            counts = chosen.new_zeros(num)
            of_all = counts.new_empty(num * division.experts * division.expert_tensor)
            dist.all_gather_into_tensor(of_all, counts, group=groups.experts)
            self.tracker.read()

        def in_order(x: torch.Tensor) -> torch.Tensor:
            return torch.cat(x.split(sizes)) if division.experts > 1 else x

        given = Scatter.apply(hidden, places)
        if division.experts > 1:
            given = sent(given, groups.experts)
        of_rows = rows * division.expert_tensor
        if division.expert_tensor > 1:
            given = Exchanged.apply(given, groups.expert_tensor, of_rows)
            tokens = len(weights) * division.expert_tensor
            weights, places = Exchanged.apply(weights, groups.expert_tensor, tokens), places.new_empty(of_rows)
        ends = chosen.new_empty(len(gate_up), dtype=torch.int32)
        order = in_order if division.expert_tensor == 1 else torch.clone
        made = order(Products.apply(order(given), gate_up, down, ends, weights, places))
        if division.expert_tensor > 1:
            made, places = Exchanged.apply(made, groups.expert_tensor, None), places[:rows]
        if division.experts > 1:
            made = sent(made, groups.experts)
        back: torch.Tensor = Gather.apply(made, places, len(hidden))
        return back

    def outputs_of(self, logits: torch.Tensor, labels: torch.Tensor, entropy: bool, temperature: float) -> torch.Tensor:
        """As `model.outputs_of`."""
        return products.outputs_of(logits, labels, entropy, self.groups.tensor)

    def step(self) -> None:
        """Gradients reduced, their norm, AdamW, and weights gathered."""
        for buffer in self.buffers:
            buffer.reduce()
        norm = torch.stack([buffer.norm() for buffer in self.buffers]).sum()
        dist.all_reduce(norm)
        self.tracker.read()
        for buffer in self.buffers:
            buffer.step()

    def zero_grad(self) -> None:
        for buffer in self.buffers:
            buffer.gradients.zero_()


class _Buffer:
    """Weights and fp32 gradients of parameters that the same ranks have, each in one piece, and AdamW's tensors."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], group: dist.ProcessGroup, distributed: bool, tracker: Tracker
    ) -> None:
        self.group, self.ranks = group, dist.get_world_size(group)
        self.distributed = distributed and self.ranks > 1
        padded = math.lcm(self.ranks, 128)
        numel = -(-sum(p.numel() for p in parameters) // padded) * padded
        like = parameters[0]
        self.weights = like.detach().new_empty(numel)
        self.gradients = self.weights.new_empty(numel, dtype=torch.float32)
        kept = numel // self.ranks if self.distributed else numel
        self.state = [self.gradients.new_empty(kept) for _ in range(3)]  # fp32 weights, and two moments
        owners = ("parameters", "gradients", *["optimizer"] * 3)
        for tensor, owner in zip((self.weights, self.gradients, *self.state), owners, strict=True):
            tracker.assign(tensor, owner)
        start = 0
        for p in parameters:
            p.data = self.weights[start : start + p.numel()].view(p.shape)
            p.main_grad = self.gradients[start : start + p.numel()].view(p.shape)  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(_add_to_main_grad)
            start += p.numel()

    @property
    def _own(self) -> torch.Tensor:
        return self.gradients[: len(self.state[0])]

    def reduce(self) -> None:
        if self.distributed:
            dist.reduce_scatter_tensor(self._own, self.gradients, group=self.group)
        elif self.ranks > 1:
            dist.all_reduce(self.gradients, group=self.group)

    def norm(self) -> torch.Tensor:
        norm: torch.Tensor = launch([self._own], [self.gradients.new_empty(())])[0]
        return norm

    def step(self) -> None:
        launch([self._own, *self.state], [*self.state])
        weights = self.weights[: len(self.state[0])]
        launch([self.state[0]], [weights])
        if self.distributed:
            dist.all_gather_into_tensor(self.weights, weights, group=self.group)


def _add_to_main_grad(parameter: Any) -> None:
    """As DistributedDataParallel's hook, of what no product added."""
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


class _Columns:
    """Forward of linear layers that share an input: the first that is called computes all of them.

    Args:
        gathers: the input is this rank's tokens.
    """

    def __init__(self, owner: MegatronModel, linears: Sequence[Any], gathers: bool = True) -> None:
        self.owner, self.linears, self.gathers = owner, linears, gathers
        self.made: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.made:
            division = self.owner.division
            group = self.owner.groups.tensor if division.tensor > 1 else None
            tokens = self.owner.tokens if self.gathers and division.sequence else 0
            weights = [linear.weight for linear in self.linears]
            self.made = list(Product.apply(x, group, tokens, *weights))
            for i, linear in enumerate(self.linears):
                if linear.bias is not None:
                    self.made[i] = self.made[i] + linear.bias
        return self.made.pop(0)


class _Attention:
    """Forward of an attention module whose input is this rank's tokens, and which sees all of them.

    Args:
        columns: projections of the input to heads. firsts: to a latent, which every rank has of its own tokens.

    Attributes:
        hidden: what comes in, while the module runs.
    """

    hidden: Any

    def __init__(self, owner: MegatronModel, module: Any, columns: Sequence[Any], firsts: Sequence[Any]) -> None:
        self.owner, self.inner = owner, module.forward
        self.hidden = None
        together = _Columns(owner, columns)
        for one in columns:
            one.forward = lambda _: together(self.hidden)
        for one in firsts:
            forward = _Columns(owner, [one], gathers=False)
            one.forward = lambda _, forward=forward: owner.gathered(forward(self.hidden))
        module.forward = self

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.hidden = hidden_states
        self.owner.tokens = kwargs["position_embeddings"][0].shape[1]  # a checkpoint runs behind other passes
        shape = (1, self.owner.tokens, hidden_states.shape[-1])
        made = self.inner(hidden_states.detach()[:, :1, :1].expand(shape), *args, **kwargs)
        self.hidden = None
        return made
