"""The worker of a site of a FLARE job, which `RemoteExecutor` starts: `python -m medfl.flare.site_worker`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfl.runtimes.monai_fl.worker import begin

if TYPE_CHECKING:
    from medfl.runtimes import Federation
    from medfl.storage import State


def open_job(job: State) -> tuple[Federation, str]:
    """Return the federation as the site of a job sees it, and the site's name."""
    import torch

    from medfl.core import Run
    from medfl.flare.site_config import SiteConfig, open_site

    run = Run.from_dict(job["run"])
    settings: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in job["config"].items()}
    torch.set_num_threads(run.threads)
    carried = Path(job["carried"])
    name = job["name"]
    # Its output is a line of the site's log, written by the keeper
    return open_site(run, name, SiteConfig(**settings), carried, partial(print, flush=True)), name


if __name__ == "__main__":
    begin(open_job)
