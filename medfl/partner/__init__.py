"""What a clinical partner runs: look at a bundle, decide, check, tell, keep a log."""
