"""What a site allows: inspection of bundles, expressions, what leaves, the privacy account, the audit log."""

from medfl.policy.inspection import inspect as inspect
from medfl.policy.policy import Policy as Policy
