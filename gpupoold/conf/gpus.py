"""[gpus]: where the driver is and how cards are filled."""

from __future__ import annotations

from oslo_config import cfg

GROUP = "gpus"

OPTIONS = [
    cfg.StrOpt(
        "driver_directory",
        help="Directory that holds the driver's libcuda.so.1 and libnvidia-ml.so.1. Unset: the "
        "system's driver is looked for, and where there is none the host runs without GPUs. Set: "
        "a directory without a driver is an error.",
    ),
    cfg.IntOpt(
        "memory_reserve_mib",
        default=2048,
        min=0,
        help="MiB of each card that are not given to slices, for what the driver itself needs: "
        "each running program holds a context (about 500 MiB on current data-centre cards, "
        "measure it with nvidia-smi), and modules, printf buffers and heaps. Take the size of a "
        "context times the most programs that run on a card at once.",
    ),
    cfg.StrOpt(
        "placement_policy",
        default="pack",
        choices=[
            ("pack", "the fullest card that has room, so that others stay free for large slices"),
            ("spread", "the emptiest card, so that slices disturb each other least"),
        ],
        help="Which card a slice goes to when the request names none.",
    ),
    cfg.IntOpt(
        "health_interval",
        default=30,
        min=1,
        max=3600,
        help="Seconds between two looks at the health of the cards.",
    ),
]
