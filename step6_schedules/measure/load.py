"""What else the machine does while something is measured, and what it is: a number without these says little."""

import os
import platform
import time
from pathlib import Path

import psutil
import torch

DISTURBED = 0.1  # of all cores


class Load:
    """Between `start` and `stop`: how much of all cores others used, 0..1.

    Others are all processes but those whose seconds are given to `stop`, and, on a virtual machine, its neighbours.
    """

    def start(self) -> None:
        """From here on."""
        self._busy, self._wall = _busy_seconds(), time.perf_counter()

    def stop(self, own_seconds: float) -> float:
        """Up to here; own_seconds: CPU time of the processes that were measured."""
        busy, wall = _busy_seconds() - self._busy, time.perf_counter() - self._wall
        return max(0.0, busy - own_seconds) / (wall * (os.cpu_count() or 1))


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Linux counts guests' time in user's as well.
    return sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)


def conditions() -> dict[str, object]:
    """The machine and what runs on it: cores, processor, GPUs, versions."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1] for line in info.read_text().splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    return names[0].strip() if names else platform.processor() or "unknown"
