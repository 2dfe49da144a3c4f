"""Code shared by several methods; code of a single method is in that method's file or package."""
