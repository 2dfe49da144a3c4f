"""The server's half of an encrypted federation: FLARE's own components, and a witness of what they get.

medfl has no part in it, and the job none in the encryption, which is the sites' own rule (`encrypted_site.RULES`).
`HEInTimeAccumulateWeightedAggregator` adds ciphertexts and multiplies by one over the sum of the sample counts; nothing
here can decrypt, for the server's kit has no secret key.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from encrypted_site import TRAIN, VALIDATE
from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.app_common.workflows.cross_site_model_eval import CrossSiteModelEval
from nvflare.app_common.workflows.scatter_and_gather import ScatterAndGather
from nvflare.app_opt.he import decomposers
from nvflare.app_opt.he.intime_accumulate_model_aggregator import (
    HEInTimeAccumulateWeightedAggregator,
)
from nvflare.app_opt.he.model_serialize_filter import HEModelSerializeFilter
from nvflare.app_opt.he.model_shareable_generator import HEModelShareableGenerator
from nvflare.app_opt.pt.file_model_locator import PTFileModelLocator
from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from tenseal import CKKSVector  # type: ignore[import-untyped]

from medfl.core.run import Run
from medfl.flare.job import REQUEST_INTERVAL

SERVER_KEYS, SITE_KEYS = "startup/server_context.tenseal", "startup/client_context.tenseal"
"""In a kit: what the server has of the keys, and what every site has: the same secret key."""
CAME, WENT = "came", "went"


class Witness(Filter):  # type: ignore[misc]
    """Writes down what kinds of values pass, and how large the ciphertexts are; changes nothing.

    Args:
        log: file of JSON lines.
        direction: `CAME` or `WENT`, as seen from the server.
    """

    def __init__(self, log: str, direction: str) -> None:
        """Keep the arguments under their names: FLARE writes them into the job from there."""
        super().__init__()
        self.log, self.direction = log, direction

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Let FLARE take ciphertexts apart."""
        if event_type == EventType.START_RUN:
            decomposers.register()

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Note it; return it."""
        line = {
            "direction": self.direction,
            "task": str(shareable.get_header(ReservedHeaderKey.TASK_NAME, "")),
        }
        with Path(self.log).open("a") as file:
            file.write(json.dumps({**line, **seen(shareable)}) + "\n")
        return shareable


def seen(value: Any) -> dict[str, Any]:
    """Return what there is in a value with all that is in it.

    Returns:
        `kinds`: type -> number of values; `open`: names of plain numbers; `bytes`: of ciphertexts as they cross, with
        the part of the keys that FLARE puts beside each; `numbers`: how many they encrypt; `secret_keys`: how many
        carry the key to open them.
    """
    found: dict[str, Any] = {
        "kinds": Counter(),
        "open": [],
        "bytes": 0,
        "numbers": 0,
        "secret_keys": 0,
    }
    for name, leaf in _leaves("", value):
        found["kinds"][type(leaf).__name__] += 1
        if isinstance(leaf, CKKSVector):
            found["bytes"] += sum(
                len(part) for part in decomposers.CKKSVectorDecomposer().decompose(leaf)
            )
            found["numbers"] += leaf.size()
            found["secret_keys"] += leaf.context().has_secret_key()
        elif isinstance(leaf, bytes):
            found["bytes"] += len(leaf)
        elif isinstance(leaf, int | float) and not isinstance(leaf, bool):
            found["open"].append(name)
    return found


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all values, each with the name that it has in the innermost mapping around it."""
    if isinstance(value, FLContext | Client):
        value = vars(value)
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from _leaves(name if key == "value" else str(key), member)
    elif isinstance(value, list | tuple | set):
        for member in value:
            yield from _leaves(name, member)
    else:
        yield name, value


def job(run: Run, carried: Path, clients: list[str], executor: Any, witnessed: Path) -> Any:
    """Return the FLARE job of an encrypted run.

    Args:
        run: of a method that keeps FedAvg's server half, as the executor makes sure.
        carried: file with its record, which the job takes along.
        clients: FLARE's names of the sites.
        executor: of each site.
        witnessed: file for the witness.
    """
    rounds = ScatterAndGather(
        min_clients=len(clients), num_rounds=run.rounds, wait_time_after_min_received=0, task_check_period=0.1,
        aggregator_id="aggregator", shareable_generator_id="generator", persistor_id="persistor",
        persist_every_n_rounds=run.rounds, snapshot_every_n_rounds=0, allow_empty_global_weights=True,
    )  # fmt: skip
    made = FedJob(name=f"medfl-{run.run_hash[:16]}", min_clients=len(clients))
    made.set_app_packages(["medfl", __name__, "encrypted_site"])  # installed, never shipped
    server = {
        "aggregator": HEInTimeAccumulateWeightedAggregator(expected_data_kind="WEIGHTS"),
        "generator": HEModelShareableGenerator(),
        "serializer": HEModelSerializeFilter(),
        "persistor": PTFileModelPersistor(filter_id="serializer"),
        "reader": PTFileModelPersistor(),  # without the serializer: ciphertexts stay bytes, others FLARE cannot copy
        "locator": PTFileModelLocator(pt_persistor_id="reader"),
    }
    for name, component in server.items():
        made.to_server(component, id=name)
    made.to_server(rounds)
    made.to_server(
        CrossSiteModelEval(
            model_locator_id="locator", submit_model_task_name="", task_check_period=0.1
        )
    )
    made.to_server({"server": {"task_request_interval": REQUEST_INTERVAL}})
    made.to_clients(executor, tasks=["*"])
    both = [TRAIN, VALIDATE]
    for direction, kind in ((WENT, FilterType.TASK_DATA), (CAME, FilterType.TASK_RESULT)):
        made.to_server(Witness(str(witnessed), direction), tasks=both, filter_type=kind)
    made.add_file_to_server(str(carried), app_folder_type="config")
    made.add_file_to_clients(str(carried), app_folder_type="config")
    return made


NEEDED = [f"{part.__module__}.{part.__name__}" for part in (PTFileModelPersistor, Witness)]
"""Class paths that the server's list of classes has to have beyond FLARE's default."""
