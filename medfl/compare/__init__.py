"""Many runs side by side: grids, tests, tables, curves, gains, the papers' tables."""
