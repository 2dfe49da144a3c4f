"""How training steps are computed: precision, compiled networks, and arithmetic with the same bits everywhere."""
