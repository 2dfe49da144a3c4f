"""The same training steps, done faster: captured, compiled, packed."""
