"""What several methods share; a method's file imports `base` and these, no other method."""
