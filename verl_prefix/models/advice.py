"""What users set where a model cannot share prefixes, or no attention kernel can run it."""

from collections.abc import Iterator
from contextlib import contextmanager

from verl_prefix.core.errors import CannotShare, NoFastKernel, NoKernel

WITHOUT_SHARING = "actor_rollout_ref.actor.prefix.schedule=stock"  # users of verl, whatever their engine
WHOLE_ROWS = f"set {WITHOUT_SHARING}, or without verl call the model on whole rows"
_KERNEL = "actor_rollout_ref.actor.prefix.attention"
_OTHER_KERNEL = f"set {_KERNEL}=auto, or without verl pass attention='auto'"
_REMEDIES = {
    "16 bits": "on FSDP2 set +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16 (without verl: call "
    "inside torch.autocast), or ",
    "flash-attn": "install flash-attn, or ",
    None: "",
}
_SLOW_KERNEL = f"set {_KERNEL}=reference (without verl: pass attention='reference'), which is dense and slow"


@contextmanager
def advising() -> Iterator[None]:
    """Context, or decorator, of a model's forward: errors of `core` that its layers raise also say what to set."""
    try:
        yield
    except CannotShare as error:
        error.args = (f"{error}; {WHOLE_ROWS}",)
        raise
    except NoFastKernel as error:
        error.args = (f"{error}; {_REMEDIES[error.remedy]}{_SLOW_KERNEL}",)
        raise
    except NoKernel as error:
        error.args = (f"{error}; {_OTHER_KERNEL}",)
        raise
