"""The habits of bundles that others publish: older MONAI, paths, trainers of their own."""
