"""GRPO post-training recipes on accelerate's FSDP2: packing that cannot leak, MFU that is right or absent."""

__version__ = "0.1.0"
