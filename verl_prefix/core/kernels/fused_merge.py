"""`merge.merge` as one Triton kernel, in place: no temporaries, where torch takes some twenty kernels.

Imported where it is called, on CUDA, where triton is installed; `TRITON_INTERPRET=1` runs it on a CPU.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
import torch
import triton
import triton.language as tl

_BLOCK = 16  # queries of a program: 30 to 56 registers on sm_80, 90 and 100, and nothing spilled


# One compilation of a dtype and head dim, whatever the number of queries and wherever a view begins.
@triton.jit(
    do_not_specialize=["num_queries", "lse_head", "lse_2_head"], do_not_specialize_on_alignment=["lse", "lse_2"]
)
def _merge(
    out, lse, out_2, lse_2, num_queries,
    out_query, out_head, lse_head, lse_query, out_2_query, out_2_head, lse_2_head, lse_2_query,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    query = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    exists = query < num_queries
    inside = exists[:, None] & (column < DIM)[None, :]
    a = tl.load(lse + head * lse_head + query * lse_query, mask=exists, other=0.0)
    b = tl.load(lse_2 + head * lse_2_head + query * lse_2_query, mask=exists, other=0.0)
    smaller = tl.exp(-tl.abs(a - b))  # sum of exp(scores): the smaller part's over the larger's
    total = tl.maximum(a, b) + tl.log(1.0 + smaller)
    pointer = out + head * out_head + query[:, None] * out_query + column[None, :]
    pointer_2 = out_2 + head * out_2_head + query[:, None] * out_2_query + column[None, :]
    one = tl.load(pointer, mask=inside, other=0.0).to(total.dtype)
    other = tl.load(pointer_2, mask=inside, other=0.0).to(total.dtype)
    weight = tl.where(a >= b, 1.0, smaller) / (1.0 + smaller)
    weight_2 = tl.where(a >= b, smaller, 1.0) / (1.0 + smaller)
    merged = one * weight[:, None] + other * weight_2[:, None]
    tl.store(pointer, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + head * lse_head + query * lse_query, total, mask=exists)


def merge_into(out: torch.Tensor, lse: torch.Tensor, out_2: torch.Tensor, lse_2: torch.Tensor) -> None:
    """Merges two partial attentions of the same queries into the first, in place.

    Args:
        out, out_2: [T, H, D] of one dtype, whose last dimension is contiguous. lse, lse_2: [H, T] fp32. Views may be of
            larger tensors.

    Raises:
        ValueError: rows of `out` or `out_2` have gaps.
    """
    num_queries, heads, dim = out.shape
    if out.stride(-1) != 1 or out_2.stride(-1) != 1:
        raise ValueError(f"strides {out.stride()} and {out_2.stride()}: the last dimension has to be contiguous")
    grid = (triton.cdiv(num_queries, _BLOCK), heads)
    _merge[grid](
        out, lse, out_2, lse_2, num_queries, out.stride(0), out.stride(1), *lse.stride(), out_2.stride(0),
        out_2.stride(1), *lse_2.stride(), DIM=dim, WIDTH=triton.next_power_of_2(dim), BLOCK=_BLOCK,
    )  # fmt: skip
