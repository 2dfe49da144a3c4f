"""Runtimes: the same method and sites, run by a simulator in one place or by a federation engine."""
