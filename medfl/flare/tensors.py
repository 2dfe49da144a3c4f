"""FLARE's own transfer of tensors, except that unreadable ones do not end the job.

FLARE ends the server's job process, and so the whole job, when a site's tensors are not valid safetensors. Here they
arrive as `Unreadable`, which `wire.from_model` refuses, naming tensor and site.
"""

from __future__ import annotations

from typing import Any

from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs


class Unreadable:
    """Stands in for a tensor that could not be read."""


class _AllUnreadable(dict[str, Any]):
    """The result of an unreadable download: has an `Unreadable` under every name."""

    def __contains__(self, name: object) -> bool:
        return True

    def get(self, name: str, default: Any = None) -> Any:
        """Return an `Unreadable`."""
        return Unreadable()


class Tensors(TensorDecomposer):  # type: ignore[misc]
    """FLARE's decomposer with `Unreadable` in place of errors."""

    def download(self, *args: Any, **settings: Any) -> tuple[str, Any]:
        """Return ("", tensors by name)."""
        try:
            error, items = super().download(*args, **settings)
        except Exception as failed:  # of any kind: the bytes are somebody else's
            error = str(failed)
            items = None

        if error:
            self.logger.warning(f"tensors that cannot be read: {error}")
            return "", _AllUnreadable()

        return "", items

    def native_recompose(self, data: bytes, manager: Any = None) -> Any:
        """Return the tensor."""
        try:
            return super().native_recompose(data, manager)
        except Exception as failed:  # as above
            self.logger.warning(f"a tensor that cannot be read: {failed}")
            return Unreadable()


def register() -> None:
    """Have FLARE use `Tensors` in this process."""
    fobs.register(Tensors)
