"""Names what decides over a generation's bits, and over where it ends.

Workers of one fingerprint go on with each other's checkpoints; another one begins a job anew.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

SAMPLES, SAMPLE_BYTES = 64, 1 << 16
"""How much of a file is read: 4 MiB."""
PACKAGES = ("tidemill", "torch", "transformers", "tokenizers", "numba", "llguidance")
"""Whose code it is: products and noise, text and stop strings, what a grammar allows."""


def fingerprint_of(folder: Path, *facts: str) -> str:
    """Digest of the model's files, the code, and `facts` about the machine.

    Of each file its size and evenly spaced samples are read, so that a large model costs no minutes.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for path in folder.glob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(sample * size // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    for package in PACKAGES:
        digest.update(f"{package}={version(package)};".encode())
    digest.update(";".join(facts).encode())
    return digest.hexdigest()
