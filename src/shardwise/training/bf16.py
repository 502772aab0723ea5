"""Whether this machine's processor can do what bfloat16 needs."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from shardwise.errors import ShardwiseError

VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
TRIAL = "import torch; torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()"


def check_bf16(device: torch.device) -> None:
    """Raises where a product of matrices would end the process.

    A processor may name AMX units that its operating system, or the sandbox around it, does not let
    programs use; oneDNN uses them all the same. So another process tries.
    """
    if device.type != "cpu" or VARIABLE in os.environ or not torch.cpu._is_amx_tile_supported():
        return
    if subprocess.run([sys.executable, "-c", TRIAL], capture_output=True).returncode < 0:
        raise ShardwiseError(
            "precision=bf16: this machine does not let programs use the AMX units that its "
            f"processor names; set {VARIABLE}={WITHOUT_AMX} in the environment"
        )
