"""The search for GPUs that a PyTorch optimizer makes in every step."""

import os

import torch


def search_cheaply() -> None:
    """Where there is no GPU, let Adam and its like find that out without a search of the disk in every step.

    Lightning's import sets the variable to 1: PyTorch then looks for GPUs through NVIDIA's library NVML, and without a
    GPU searches the disk for it every time. Its other way to look is free there. On a machine with a GPU Lightning's
    setting stands: it lets processes fork.
    """
    if not torch.cuda.is_available():
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
