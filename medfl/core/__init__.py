"""What all other rooms use: errors, seeding, settings, messages, `Run`, untrusted text, the terminal."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.core.arrays import (
        Array as Array,
        Bytes as Bytes,
        Flags as Flags,
        Floats as Floats,
        Integers as Integers,
        Shape as Shape,
    )
    from medfl.core.declared import Declared as Declared, read_options as read_options
    from medfl.core.documents import Config as Config, Document as Document, Metrics as Metrics
    from medfl.core.errors import (
        InputError as InputError,
        MedflError as MedflError,
        RunError as RunError,
        as_text as as_text,
        beginning as beginning,
        did_you_mean as did_you_mean,
        either as either,
        error_id as error_id,
        errors_safe_to_send as errors_safe_to_send,
        missing_package as missing_package,
        reason as reason,
        refuse_folder as refuse_folder,
        refusing as refusing,
        root_cause as root_cause,
        without_package as without_package,
    )
    from medfl.core.mappings import (
        fields_of as fields_of,
        map_values as map_values,
        pick as pick,
        pick_known as pick_known,
        present as present,
        within as within,
        without as without,
    )
    from medfl.core.message import (
        Message as Message,
        Messages as Messages,
        Tensors as Tensors,
        Weights as Weights,
        byte_count as byte_count,
        cpu_copies as cpu_copies,
        is_finite as is_finite,
    )
    from medfl.core.message_limits import MessageLimits as MessageLimits
    from medfl.core.names import (
        NO_WALLS as NO_WALLS,
        PRIVATE_CACHE as PRIVATE_CACHE,
        alike as alike,
        as_number as as_number,
        check_method_name as check_method_name,
        check_name as check_name,
        composed as composed,
        from_cell as from_cell,
        is_name as is_name,
        is_plain_text as is_plain_text,
        listed as listed,
        method_names as method_names,
        not_among as not_among,
        outside_walls as outside_walls,
        readable_file_name as readable_file_name,
        refuse_untrusted_module as refuse_untrusted_module,
        respelled as respelled,
        slug as slug,
        split_commas as split_commas,
        trust_module as trust_module,
        trusting_any_module as trusting_any_module,
        words_of as words_of,
    )
    from medfl.core.release import (
        DISTRIBUTION as DISTRIBUTION,
        VERSION as VERSION,
        pip_install as pip_install,
        version_of as version_of,
        versions_of as versions_of,
    )
    from medfl.core.run import (
        DataRecord as DataRecord,
        PartitionRecord as PartitionRecord,
        PublicRecord as PublicRecord,
        Run as Run,
        TextRecord as TextRecord,
        examines as examines,
        hash_as_recorded as hash_as_recorded,
        withdrawn_settings as withdrawn_settings,
        without_round_limit as without_round_limit,
    )
    from medfl.core.seeding import derive as derive, generator_of as generator_of, stream as stream
    from medfl.core.setting_values import (
        ALL as ALL,
        FROM_MASKS as FROM_MASKS,
        SURFACE_METRICS as SURFACE_METRICS,
        WAYS as WAYS,
        by_site as by_site,
        check_coverage as check_coverage,
        device as device,
        metrics as metrics,
        site_names as site_names,
        spacings as spacings,
    )
    from medfl.core.settings import (
        COMPUTING as COMPUTING,
        LOSSLESS as LOSSLESS,
        MEAN as MEAN,
        OF_PROTOCOL as OF_PROTOCOL,
        POLY as POLY,
        ROBUSTNESS as ROBUSTNESS,
        SETTINGS as SETTINGS,
        SITES as SITES,
        TRAINING as TRAINING,
        GeneralSettings as GeneralSettings,
        ProtocolSettings as ProtocolSettings,
        check_limits as check_limits,
    )
    from medfl.core.tables import (
        csv_text as csv_text,
        formatted_table as formatted_table,
        label_row as label_row,
        latex_text as latex_text,
        markdown_table as markdown_table,
        markdown_text as markdown_text,
        on_screen as on_screen,
        screen_width as screen_width,
        text_table as text_table,
        wrap as wrap,
    )
    from medfl.core.task import (
        OF_TARGETS as OF_TARGETS,
        OF_VECTORS as OF_VECTORS,
        SECTIONS as SECTIONS,
        TASKS as TASKS,
        Constants as Constants,
        Task as Task,
    )
    from medfl.core.terminal import (
        Print as Print,
        bar as bar,
        hanging_indent as hanging_indent,
        pass_on as pass_on,
        take_sigterm as take_sigterm,
    )
    from medfl.core.type_checks import (
        Count as Count,
        check_arguments as check_arguments,
        matches_type as matches_type,
        type_errors as type_errors,
        type_mismatches as type_mismatches,
    )
    from medfl.core.untrusted import (
        JSON_BYTES as JSON_BYTES,
        JSON_VALUES as JSON_VALUES,
        LOADER as LOADER,
        MOST_BYTES as MOST_BYTES,
        Plain as Plain,
        Refused as Refused,
        check_visible as check_visible,
        decode_text as decode_text,
        folders_below as folders_below,
        json_values as json_values,
        not_plain as not_plain,
        open_plain as open_plain,
        override_value as override_value,
        printable as printable,
        read_bytes as read_bytes,
        read_json as read_json,
        read_json_bytes as read_json_bytes,
        read_plain as read_plain,
        read_table as read_table,
        typed_value as typed_value,
        visible as visible,
    )
else:
    __all__, __getattr__ = lazy_names(__name__)
