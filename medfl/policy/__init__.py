"""What a site allows: inspection of bundles, expressions, what leaves, the privacy account, the audit log."""
