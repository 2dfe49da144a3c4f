"""Jobs for NVIDIA FLARE: their content, how they run and resume, and sites with images of their own."""
