"""How tensors cross in FLARE: as FLARE's own, except that those which cannot be read stop nobody.

FLARE ends the server's job process, and with it everybody's job, when a site's tensors are no safetensors. Here they
arrive as `Unreadable`, which `flare_wire.from_model` refuses by the name of the tensor and of the site.
"""

from __future__ import annotations

from typing import Any

from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs


class Unreadable:
    """Stands for a tensor that could not be read."""


class _AllUnreadable(dict[str, Any]):
    """What a download gave that could not be read: whatever is asked for."""

    def __contains__(self, name: object) -> bool:
        return True

    def get(self, name: str, default: Any = None) -> Any:
        """Return what stands for it."""
        return Unreadable()


class Tensors(TensorDecomposer):  # type: ignore[misc]
    """FLARE's tensors."""

    def download(self, *args: Any, **settings: Any) -> tuple[str, Any]:
        """Return ("", tensors by name)."""
        try:
            error, items = super().download(*args, **settings)
        except Exception as failed:  # of any kind: the bytes are somebody else's
            error, items = str(failed), None
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
    """Let FLARE take tensors apart in this process."""
    fobs.register(Tensors)
