"""A MONAI bundle read, configured and begun; the shipped ones lie in `bundles/`."""
