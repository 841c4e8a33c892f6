"""The runner of verl's Megatron engine: passes one after the other, then what mcore does once after the last."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from verl_prefix.core.forward import TokenBatch
from verl_prefix.core.plan import Plan
from verl_prefix.core.runner import PlanRunner
from verl_prefix.models.mcore import router_counts, scale_auxiliary_losses, unwrapped
from verl_prefix.models.mcore_pipeline import gather_routes
from verl_prefix.models.replaced import replaced


@dataclass(eq=False)
class MegatronRunner(PlanRunner):
    """A runner whose gradients mcore reduces once, after the last backward, as on the stock path. The reduction cannot
    overlap a backward, since no backward finishes all gradients: phase C, for example, has no lm_head.

    Attributes:
        module: the model, in mcore's DistributedDataParallel where it is trained.
    """

    module: Any = field(kw_only=True)

    def run(self, batch: TokenBatch, plan: Plan) -> None:
        """Runs all passes of `plan`. With backward it then does once what mcore does after its last backward."""
        device = batch.input_ids.device
        if self.backward is None:
            with self._recording(batch):
                self._run_passes(batch, plan)
            return
        self._weigh_auxiliary_losses(plan)
        self._scale_auxiliary_losses(plan, device)
        # With both off, mcore's hooks do not insist on gradients of all parameters. mcore's fused kernels leave none in
        # the phase C of an offloaded prefix: in place of a parameter they find a tensor without mcore's marks.
        with self.module.no_sync(), replaced(self.module.ddp_config, "overlap_grad_reduce", False):
            self._run_passes(batch, plan)
        try:
            self._give_counts_to_routers()
            self._reduce_gradients(device)
        except BaseException:
            for counted in router_counts(self.module):  # else the next update would count these tokens, too
                counted.zero_()
            raise

    def _run_passes(self, batch: TokenBatch, plan: Plan) -> None:
        """Runs the passes one after the other, each with its backward."""
        super().run(batch, plan)

    def _weigh_auxiliary_losses(self, plan: Plan) -> None:
        """Undoes the dummies' share of the mean of auxiliary losses over passes. The mean counts all passes, and a
        dummy has no auxiliary loss: with 3 passes of rows and 1 dummy each loss gets the weight 4 / 3.

        A model with auxiliary losses has packed passes alone (`config.megatron.check_built`)."""
        model: Any = self.forward.model
        num_with_rows = sum(bool(planned.groups) for planned in plan.passes)
        model.auxiliary_weight = len(plan.passes) / max(num_with_rows, 1)

    def _scale_auxiliary_losses(self, plan: Plan, device: torch.device) -> None:
        """Makes mcore take the mean of auxiliary losses over passes."""
        scale_auxiliary_losses(self.module, len(plan.passes), device)

    def _give_counts_to_routers(self) -> None:
        """Adds the tokens by expert of all passes to the counts of routers that have a bias. A bf16 model has these
        counts in bf16, where a small wave alone would add nothing."""
        model: Any = self.forward.model
        for layer in model.layers:
            router = getattr(layer.mlp, "router", None)
            if router is not None and router.enable_expert_bias:
                router.local_tokens_per_expert += model.expert_loads.of(layer.layer_number - 1)

    def _reduce_gradients(self, device: torch.device) -> None:
        """Does what mcore does once after the last backward."""
        if self.module.ddp_config.overlap_grad_reduce:
            self.module.start_grad_sync()
        config = unwrapped(self.module).config
        # Under context parallelism Megatron-Bridge sets calculate_per_token_loss: mcore then sums gradients over ranks,
        # and divides by the sum of the ranks' token counts. A count of 1 on each rank makes this the mean over ranks.
        count = torch.ones((), dtype=torch.int, device=device)
        config.finalize_model_grads_func([self.module], count if config.calculate_per_token_loss else None)

    @contextmanager
    def _recording(self, batch: TokenBatch) -> Iterator[None]:
        """Context of passes that may record routes. Each stage records its own layers. On leaving, every stage gets the
        routes of all layers."""
        if not batch.records:
            yield
            return
        assert batch.routes is not None
        batch.routes.fill_(-1)  # routers choose, and write their choices here
        yield
        batch.routes.clamp_(min=0)  # -1 is left of tokens that no pass has computed
        gather_routes(batch.routes, batch.input_ids.device)
