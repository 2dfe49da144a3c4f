"""medfl: federated training of MONAI bundles across sites that may not share data."""
