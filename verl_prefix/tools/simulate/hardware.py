"""GPUs that are simulated: rates that a roofline needs. Peaks are the vendors'; what of them is reached is assumed."""

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Hardware:
    """One GPU and its links. Rates are in FLOP/s and bytes/s, times in seconds.

    Args:
        matmul_16, matmul_32: matrix products of 16-bit and fp32 inputs, as reached by cuBLAS on large shapes.
        attention_forward, attention_backward: flash attention 2 (aten's and flash-attn's), as reached on long rows.
        memory: device memory, as reached by elementwise kernels. capacity: bytes of it.
        network: of a collective per rank inside a node. nodes: the same where ranks lie on several nodes of `per_node`.
        pcie: to and from pinned host memory.
        launch: host time of an operation that launches a kernel. kernel: shortest time of a kernel.
        empty_block: device time of a thread block of flash attention that finds no token
            (`operations.FakeFlashAttention.empty_blocks`): 1 us, two at a time on each of an H100's 132 SMs; others
            have 78 to 132.
    """

    matmul_16: float
    matmul_32: float
    attention_forward: float
    attention_backward: float
    memory: float
    capacity: float
    network: float
    nodes: float = 50e9
    pcie: float = 50e9
    launch: float = 5e-6
    kernel: float = 2e-6
    empty_block: float = 4e-9
    per_node: float = 8


GIB = float(2**30)
# 70 % of the published dense bf16 peak and 85 % of the memory's, H20 85 % of both; FA2 as its authors report for A100.
GPUS = {
    "h100": Hardware(0.70 * 989e12, 0.70 * 67e12, 350e12, 300e12, 0.85 * 3.35e12, 79.6 * GIB, 350e9),
    "h200": Hardware(0.70 * 989e12, 0.70 * 67e12, 350e12, 300e12, 0.85 * 4.8e12, 139.8 * GIB, 350e9),
    "h20": Hardware(0.85 * 148e12, 0.85 * 44e12, 120e12, 110e12, 0.85 * 4.0e12, 95.6 * GIB, 350e9),
    "a100": Hardware(0.70 * 312e12, 0.70 * 19.5e12, 200e12, 170e12, 0.85 * 2.04e12, 79.3 * GIB, 230e9, 25e9, 25e9),
}


def read_hardware(spec: str) -> Hardware:
    """The GPU of `--gpu`: a name of `GPUS`, with rates of one's own behind it, as in "h100,network=25e9".

    Raises:
        ValueError: an unknown name or rate, or a rate that is no positive number.
    """
    name, *changes = spec.split(",")
    if name not in GPUS:
        raise ValueError(f"--gpu {name!r} is unknown; use one of {', '.join(GPUS)}, as in h100 or h100,network=25e9")
    known = [field.name for field in fields(Hardware) if field.name != "per_node"]  # the trainer's n_gpus_per_node
    values: dict[str, float] = {}
    for change in changes:
        key, _, text = change.partition("=")
        try:
            values[key] = float(text)
        except ValueError:
            values[key] = -1.0
        if key not in known or not 0 < values[key] < float("inf"):
            raise ValueError(f"--gpu {change!r}: write RATE=NUMBER, one of {', '.join(known)}, above 0")
    return replace(GPUS[name], **values)
