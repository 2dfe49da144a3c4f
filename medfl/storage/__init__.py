"""Files: replaced atomically, weights, third-party checkpoints, the run folder."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.storage.atomic import (
        atomic_replace as atomic_replace,
        made as made,
        new_folder as new_folder,
        write_atomic as write_atomic,
        writing as writing,
    )
    from medfl.storage.files import (
        State as State,
        file_sha256 as file_sha256,
        hashed as hashed,
        load_pickled as load_pickled,
        load_state as load_state,
        load_weights as load_weights,
        read_weights as read_weights,
        save_state as save_state,
        save_weights as save_weights,
        to_device as to_device,
        weights_sha256 as weights_sha256,
        write_json as write_json,
    )
    from medfl.storage.places import (
        CALIBRATION_SUMS as CALIBRATION_SUMS,
        CONTRIBUTION as CONTRIBUTION,
        CROSS_SITE as CROSS_SITE,
        FOLDS as FOLDS,
        GRID as GRID,
        LOCAL_REFERENCE as LOCAL_REFERENCE,
        PHANTOM as PHANTOM,
        cache_folder as cache_folder,
        check_which as check_which,
        config_file as config_file,
        default_run_folder as default_run_folder,
        is_run as is_run,
        record_of as record_of,
        require_new_bundle as require_new_bundle,
        require_there as require_there,
        require_unused as require_unused,
        required_cache as required_cache,
        weights_file as weights_file,
    )
    from medfl.storage.run_documents import (
        ALL_SITES as ALL_SITES,
        read_rows as read_rows,
        read_run as read_run,
        read_summary as read_summary,
    )
    from medfl.storage.run_folder import RunFolder as RunFolder, safe_file_name as safe_file_name
    from medfl.storage.run_reader import RunReader as RunReader, Table as Table
else:
    __all__, __getattr__ = lazy_names(__name__)
