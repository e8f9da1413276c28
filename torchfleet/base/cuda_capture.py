"""Captures of CUDA graphs. While one is under way, the host must not wait for the GPU, query an event, or copy from
memory that is not pinned; unless the capture has capture_error_mode="thread_local", no other thread may either.
"""

from __future__ import annotations

import torch


def is_capturing(device: torch.device) -> bool:
    """Whether this thread's current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
