#!/usr/bin/env bash
# Everything to look at on a machine with a GPU, in a few minutes: the kernels against float64
# references and the memory bandwidth, swaps beside a busy stream, then the main job end to end on the GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}

"$python" benchmarks/gpu_kernels.py
"$python" benchmarks/gpu_swap.py
"$python" -m tidemill demo --fresh --packages 4
