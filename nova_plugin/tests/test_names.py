"""Names against the rules of Placement: CUSTOM_[A-Z0-9_]+, at most 255 characters."""

from __future__ import annotations

import re

import pytest
from gpupool_nova import names

RULE = re.compile(r"CUSTOM_[A-Z0-9_]+")


@pytest.mark.parametrize(
    ("model", "trait"),
    [
        ("NVIDIA H200", "CUSTOM_GPUPOOL_MODEL_H200"),
        ("NVIDIA A100-SXM4-80GB", "CUSTOM_GPUPOOL_MODEL_A100_SXM4_80GB"),
        ("Tesla T4", "CUSTOM_GPUPOOL_MODEL_TESLA_T4"),
        ("nvidia  RTX PRO 6000 (Blackwell)", "CUSTOM_GPUPOOL_MODEL_RTX_PRO_6000_BLACKWELL"),
    ],
)
def test_models(model, trait):
    assert names.model_trait(model) == trait
    assert RULE.fullmatch(trait)


@pytest.mark.parametrize(
    ("profile", "name"),
    [
        ("1g.10gb", "CUSTOM_GPUPOOL_MIG_1G_10GB"),
        ("1g.10gb+me", "CUSTOM_GPUPOOL_MIG_1G_10GB_ME"),
        ("7g.80gb", "CUSTOM_GPUPOOL_MIG_7G_80GB"),
    ],
)
def test_profiles(profile, name):
    assert names.mig_class(profile) == name
    assert RULE.fullmatch(name)


def test_names_that_cannot_be_made():
    for bad in ("", "  ", "+++", "x" * 300):
        with pytest.raises(ValueError):
            names.model_trait(bad)


def test_constants_obey_the_rule():
    for name in (names.MEMORY_MIB, names.COMPUTE_PERCENT, names.OWNER_TRAIT):
        assert RULE.fullmatch(name)


def test_providers_of_two_hosts_differ():
    assert names.provider_name("a", "GPU-1") != names.provider_name("b", "GPU-1")
