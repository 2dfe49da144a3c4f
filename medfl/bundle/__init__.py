"""A MONAI bundle read, configured and begun; the shipped ones lie in `bundles/`."""

from medfl.bundle.files import shipped_folders as shipped_folders
