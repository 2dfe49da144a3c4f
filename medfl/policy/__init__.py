"""A site's permissions: inspection of bundles, expressions, outbound rules, the privacy account, the audit log."""

from medfl.policy.inspection import inspect as inspect
from medfl.policy.policy import Policy as Policy
