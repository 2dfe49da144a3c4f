"""Jobs for NVIDIA FLARE: what they carry, how they are run and resumed, and what a site of its own offers."""
