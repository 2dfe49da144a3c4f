"""Files: replaced atomically, weights, third-party checkpoints, the run folder."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.storage.atomic import (
        atomic_replace,
        made,
        new_folder,
        write_atomic,
        writing,
    )
    from medfl.storage.files import (
        State,
        file_sha256,
        hashed,
        load_pickled,
        load_state,
        load_weights,
        read_weights,
        save_state,
        save_weights,
        to_device,
        weights_sha256,
        write_json,
    )
    from medfl.storage.places import (
        CALIBRATION_SUMS,
        CONTRIBUTION,
        CROSS_SITE,
        FOLDS,
        GRID,
        LOCAL_REFERENCE,
        PHANTOM,
        cache_folder,
        check_which,
        config_file,
        default_run_folder,
        is_run,
        record_of,
        require_new_bundle,
        require_there,
        require_unused,
        required_cache,
        weights_file,
    )
    from medfl.storage.run_documents import (
        ALL_SITES,
        read_rows,
        read_run,
        read_summary,
    )
    from medfl.storage.run_folder import RunFolder, safe_file_name
    from medfl.storage.run_reader import RunReader, Table
else:
    __all__, __getattr__ = lazy_names(__name__)
