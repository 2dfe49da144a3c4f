"""How training steps are computed: precision, compiled networks, and arithmetic that is the same on every processor."""
