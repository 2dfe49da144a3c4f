"""Many runs side by side: grids, tests, tables, curves, gains, tables of papers."""
