"""Tiny drawn data for a bundle of others, in the layout that its own configuration looks for.

    python -m tools.synthetic_data path/to/bundle --out DIR

For trying a bundle of the model zoo whose images are not at hand. It watches which files the bundle's code looks for by
an audit hook, which a process keeps for good: so it is a program of its own.
"""
