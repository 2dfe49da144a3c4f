"""A bundle for images of one's own, written by looking at them: what `medfl new` does."""
