"""What can be seen from outside: where a thread stands, and what the text of torch's error says."""

import os
import sys
import sysconfig

import torch

TIMED_OUT, LOST = "timed out", "lost its peer"


def where(thread: int) -> str:
    """File and line of a thread's innermost frame that is not the standard library's or torch's, or ""."""
    frame = sys._current_frames().get(thread)
    while frame is not None and not _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""


def _is_ours(file: str) -> bool:
    is_standard = file.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in file
    return not (is_standard or file.startswith(("<", os.path.dirname(torch.__file__))))


def reason(error: Exception) -> str | None:
    """TIMED_OUT, LOST, or None for neither: torch has no error classes that tell these apart."""
    text = str(error)
    if "imed out" in text or "imeout" in text:
        return TIMED_OUT
    return LOST if any(word in text for word in ("onnection", "roken pipe", "ocket", "NCCL")) else None
