"""Names of pooled GPUs in Placement.

Custom classes throughout: the standard class VGPU belongs to Nova's own accounting of mediated
devices. A custom name is CUSTOM_ followed by A-Z, 0-9 and _ only, at most 255 characters in all
(Placement API reference, "resource classes" and "traits").
"""

from __future__ import annotations

import re

MEMORY_MIB = "CUSTOM_GPUPOOL_MEMORY_MIB"
COMPUTE_PERCENT = "CUSTOM_GPUPOOL_CORE_PCT"

#: marks every provider that gpupool owns
OWNER_TRAIT = "CUSTOM_GPUPOOL"
#: a standard trait: the provider serves all that share an aggregate with it
SHARES_TRAIT = "MISC_SHARES_VIA_AGGREGATE"
#: consumer type of slices that were made by hand
CONSUMER_TYPE = "GPUPOOL_SLICE"

_LONGEST = 255


def _custom(prefix: str, text: str) -> str:
    words = re.sub(r"[^A-Z0-9]+", "_", text.upper()).strip("_")
    if not words:
        raise ValueError(f"{text!r} has no letter or digit")
    name = f"{prefix}_{words}"
    if len(name) > _LONGEST:
        raise ValueError(f"the name made of {text!r} is longer than {_LONGEST} characters")
    return name


def model_trait(model: str) -> str:
    """The trait of a GPU model: "NVIDIA H200" is CUSTOM_GPUPOOL_MODEL_H200.

    Raises ValueError if the model's name has no letter or digit, or is too long.
    """
    return _custom("CUSTOM_GPUPOOL_MODEL", re.sub(r"(?i)^\s*nvidia\s+", "", model))


def mig_class(profile: str) -> str:
    """The resource class of a MIG profile: "1g.10gb" is CUSTOM_GPUPOOL_MIG_1G_10GB.

    "+me" and "+gfx" are kept as words, so that 1g.10gb+me is another class than 1g.10gb.
    """
    return _custom("CUSTOM_GPUPOOL_MIG", profile)


def provider_name(host: str, gpu_uuid: str) -> str:
    """The name of a card's resource provider, unique in the cloud."""
    return f"{host}_gpupool_{gpu_uuid}"
