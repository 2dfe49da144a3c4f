"""What all other rooms use: errors, seeding, settings, messages, `Run`, untrusted text, the terminal."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.core.arrays import (
        Array,
        Bytes,
        Flags,
        Floats,
        Integers,
        Shape,
    )
    from medfl.core.declared import Declared, read_options
    from medfl.core.documents import Config, Document, Metrics
    from medfl.core.errors import (
        InputError,
        MedflError,
        RunError,
        as_text,
        beginning,
        did_you_mean,
        either,
        error_id,
        errors_safe_to_send,
        missing_package,
        reason,
        refuse_folder,
        refusing,
        root_cause,
        without_package,
    )
    from medfl.core.mappings import (
        fields_of,
        map_values,
        pick,
        pick_known,
        present,
        within,
        without,
    )
    from medfl.core.message import (
        Message,
        Messages,
        Tensors,
        Weights,
        byte_count,
        cpu_copies,
        is_finite,
    )
    from medfl.core.message_limits import MessageLimits
    from medfl.core.names import (
        NO_WALLS,
        PRIVATE_CACHE,
        alike,
        as_number,
        check_method_name,
        check_name,
        composed,
        from_cell,
        is_name,
        is_plain_text,
        listed,
        method_names,
        not_among,
        outside_walls,
        readable_file_name,
        refuse_untrusted_module,
        respelled,
        slug,
        split_commas,
        trust_module,
        trusting_any_module,
        words_of,
    )
    from medfl.core.release import (
        DISTRIBUTION,
        VERSION,
        pip_install,
        version_of,
        versions_of,
    )
    from medfl.core.run import (
        DataRecord,
        PartitionRecord,
        PublicRecord,
        Run,
        TextRecord,
        examines,
        hash_as_recorded,
        withdrawn_settings,
        without_round_limit,
    )
    from medfl.core.seeding import derive, generator_of, stream
    from medfl.core.setting_values import (
        ALL,
        FROM_MASKS,
        SURFACE_METRICS,
        WAYS,
        by_site,
        check_coverage,
        device,
        metrics,
        site_names,
        spacings,
    )
    from medfl.core.settings import (
        COMPUTING,
        LOSSLESS,
        MEAN,
        OF_PROTOCOL,
        POLY,
        ROBUSTNESS,
        SETTINGS,
        SITES,
        TRAINING,
        GeneralSettings,
        ProtocolSettings,
        check_limits,
    )
    from medfl.core.tables import (
        csv_text,
        formatted_table,
        label_row,
        latex_text,
        markdown_table,
        markdown_text,
        on_screen,
        screen_width,
        text_table,
        wrap,
    )
    from medfl.core.task import (
        OF_TARGETS,
        OF_VECTORS,
        SECTIONS,
        TASKS,
        Constants,
        Task,
    )
    from medfl.core.terminal import (
        Print,
        bar,
        hanging_indent,
        pass_on,
        take_sigterm,
    )
    from medfl.core.type_checks import (
        Count,
        check_arguments,
        matches_type,
        type_errors,
        type_mismatches,
    )
    from medfl.core.untrusted import (
        JSON_BYTES,
        JSON_VALUES,
        LOADER,
        MOST_BYTES,
        Plain,
        Refused,
        check_visible,
        decode_text,
        folders_below,
        json_values,
        not_plain,
        open_plain,
        override_value,
        printable,
        read_bytes,
        read_json,
        read_json_bytes,
        read_plain,
        read_table,
        typed_value,
        visible,
    )
else:
    __all__, __getattr__ = lazy_names(__name__)
