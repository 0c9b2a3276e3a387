"""The default model: found in its wheel, unpacked once into the data directory."""

from __future__ import annotations

from typing import Final

EMBEDDED_MODEL: Final = "SmolLM2-135M-Instruct"
