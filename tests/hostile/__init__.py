"""Malicious bundles that inspection has to refuse, and harmless ones in the zoo's styles that it has to accept."""
