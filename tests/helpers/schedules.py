"""Errors of packed and phased passes against rows by themselves."""

import torch


def measure(model, run) -> dict:
    """Log-probs, gradients, and weights after one AdamW step of a run on `model`, whose weights it restores."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    log_probs = torch.cat(run())
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
    return {"log_probs": log_probs, "grads": grads, "weights": after}


def errors(ours: dict, truth: dict) -> dict[str, float]:
    def relative(a, b):
        return ((a - b).norm() / b.norm()).item()

    return {
        "log_probs": relative(ours["log_probs"], truth["log_probs"]),
        **{key: max(relative(ours[key][n], truth[key][n]) for n in truth[key]) for key in ("grads", "weights")},
    }
