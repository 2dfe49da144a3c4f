"""Jobs for NVIDIA FLARE: their content, how they run and resume, and sites with their own images."""
