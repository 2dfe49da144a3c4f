"""Limits on a process, enforced by the operating system."""
