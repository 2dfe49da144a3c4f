"""A MONAI bundle read, configured and opened; the shipped ones are in `bundles/`."""

from medfl.bundle.files import shipped_folders as shipped_folders
