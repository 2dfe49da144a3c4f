"""Sites as clients of MONAI FL."""
