"""Memory in use, in lines to print."""

from __future__ import annotations


def log_gpu_memory(label: str = "") -> None:
    """Print how much memory is in use: a line per visible GPU, on a CPU that of this process.

    It prints on whatever rank calls it; `if gs.is_main_process():` in front of it keeps to one.

    Args:
        label: put in front of each line, such as "after step 100".
    """
    for line in memory_lines():
        print(f"{label}: {line}" if label else line, flush=True)


def memory_lines() -> list[str]:
    """The lines of `log_gpu_memory`; GB are 10**9 bytes."""
    import torch

    from gradsync.runtime.machine import available_bytes
    from gradsync.runtime.memory import resident_bytes

    if not torch.cuda.is_available():
        return [
            f"process: {resident_bytes() / 1e9:.2f} GB resident, "
            f"{available_bytes() / 1e9:.2f} GB available on the host"
        ]
    lines = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        lines.append(
            f"cuda:{index} {torch.cuda.get_device_name(index)}: "
            f"{torch.cuda.memory_allocated(index) / 1e9:.2f} GB allocated, "
            f"{torch.cuda.memory_reserved(index) / 1e9:.2f} GB reserved, "
            f"peak {torch.cuda.max_memory_allocated(index) / 1e9:.2f} GB, "
            f"{free / 1e9:.2f} of {total / 1e9:.2f} GB free"
        )
    return lines
