"""A MONAI bundle read, configured and begun; the shipped ones lie in `bundles/`."""

from medfl.bundle.configuration import shipped_folders as shipped_folders
