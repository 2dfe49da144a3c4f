"""Malicious bundles: each is the harmless one of `base` with one thing changed, and what the refusal has to say.

Inspection is a filter and lets some through; the walls hold all of them (tests/safety/test_walls.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.hostile.base import METADATA


@dataclass(frozen=True)
class Hostile:
    """A change, and a part of the line that refuses it.

    Attributes:
        says: part of the line; "" where inspection lets it through.
        train: further ids of configs/train.json.
        files: further files.
        word: a word of the policy that would allow it; "" where nothing can.
    """

    says: str
    train: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    word: str = ""


def _target(target: Any, **arguments: Any) -> Hostile:
    return Hostile("_target_", {"x": {"_target_": target, **arguments}})


def _runs(expression: str, says: str, word: str = "") -> Hostile:
    return Hostile(says, {"x": f"${expression}"}, word=word)


def _imports(
    statement: str, uses: str = "1", says: str = "of no module", word: str = ""
) -> Hostile:
    return Hostile(
        says,
        {"imports": ["$import glob", "$import os", f"${statement}"], "x": f"${uses}"},
        word=word,
    )


def _yaml(text: str, says: str) -> Hostile:
    return Hostile(says, files={"configs/evaluate.yaml": text})


def _metadata(says: str, **more: Any) -> Hostile:
    return Hostile(says, files={"configs/metadata.json": json.dumps({**METADATA, **more})})


_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
_MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
_BIDI = "\u202e"

HOSTILE: dict[str, Hostile] = {
    # memory taken for numbers, and numbers for objects
    "pointers_of_objects": _runs("torch.frombuffer(np.ones(2), dtype=torch.int64)", ""),
    "strides_beyond_memory": _runs("torch.as_strided(torch.ones(2), (9,), (9,))", ""),
    "indices_beyond_memory": _runs("torch.sparse_coo_tensor([[9]], [1.0], (2,))", ""),
    "written_into_memory": _runs("torch.fill_(torch.ones(2), 1)", ""),
    # components
    "os_system": _target("os.system", command="id"),
    "eval_without_a_module": _target("eval", source="1"),
    "builtins_exec": _target("builtins.exec", object="1"),
    "subprocess": _target("subprocess.Popen", args=["id"]),
    "importlib": _target("importlib.import_module", name="antigravity"),
    "pickle_loads": _target("pickle.loads", data="x"),
    "torch_load": _target("torch.load", f="x.pt", weights_only=False),
    "torch_jit_load": _target("torch.jit.load", f="x.ts"),
    "torch_hub_load": _target("torch.hub.load", repo_or_dir="a/b", model="c"),
    "torch_extension": _target("torch.utils.cpp_extension.load", name="a", sources=["a.cpp"]),
    "through_torch_to_os": _target("torch.os.system", command="id"),
    "through_torch_nn_to_os": _target("torch.nn.modules.module.os.system", command="id"),
    "through_a_transform_to_sympy": _target(
        "monai.transforms.transform.torch._higher_order_ops.triton_kernel_wrap.sympy.Lambda",
        signature="x",
        expr="1",
    ),
    "through_a_loss_to_torchvision": _target(
        "monai.losses.perceptual.torchvision.models.resnet18", weights="DEFAULT"
    ),
    "through_networks_to_numpy": _target("monai.networks.utils.np.Dataset"),
    "listed_name_of_another_package": _target("torch.utils.data.dataset.Generator"),
    "listed_name_in_a_module_of_medfl": _target("medfl.bundle.configuration.Dataset"),
    "attribute_of_a_listed_class": _target("monai.networks.nets.UNet.load_state_dict"),
    "torch_nn_s_functions": _target("torch.nn.functional.relu"),
    "torch_optim_s_base_by_another_path": _target("torch.optim.optimizer.functools.partial"),
    "monai_s_own_locate": _target("monai.bundle.config_item.instantiate"),
    "path_with_a_dot_at_its_end": _target("monai.transforms."),
    "path_with_two_dots": _target("monai..transforms.Lambda"),
    "path_of_a_private_module": _target("monai._extensions.loader.load_module"),
    "bundle_run": _target("monai.bundle.run", config_file="x.json"),
    "bundle_run_by_its_short_name": _target("run_workflow", config_file="x.json"),
    "bundle_load": _target("monai.bundle.load", name="x"),
    "init_bundle": _target("monai.bundle.init_bundle", bundle_dir="x"),
    "config_parser": _target("ConfigParser", config={}),
    "download_url": _target("monai.apps.download_url", url="x", filepath="y"),
    "download_and_extract_by_its_short_name": _target("download_and_extract", url="x"),
    "run_cmd": _target("monai.utils.run_cmd", cmd_list=["id"]),
    "monai_instantiate": _target("monai.utils.instantiate", _mode="default"),
    "monai_optional_import": _target("optional_import", module="os"),
    "monai_extension_loader": _target("monai._extensions.load_module", module_name="x"),
    "nnunet_runner": _target("monai.apps.nnunet.nnUNetV2Runner", input_config={}),
    "perceptual_loss_runs_hub_code": _target("PerceptualLoss", spatial_dims=2),
    "mlflow_talks_to_a_server": _target("MLFlowHandler", tracking_uri="x"),
    "torchvision_fetches_weights": Hostile(
        "'weights'",
        {"x": {"_target_": "TorchVisionFCModel", "model_name": "resnet18", "weights": "DEFAULT"}},
    ),
    "torchvision_looks_up_a_name": Hostile(
        "",
        {"x": {"_target_": "TorchVisionFCModel", "model_name": "get_model"}},
    ),
    "torchvision_transform_of_any_name": Hostile(
        "", {"x": {"_target_": "TorchVision", "name": "Lambda"}}
    ),
    "torchvision_network_with_weights": Hostile(
        "'weights'", {"x": {"_target_": "torchvision.models.resnet18", "weights": "DEFAULT"}}
    ),
    "pretrained_by_a_reference": Hostile(
        "", {"x": {"_target_": "DenseNet121", "pretrained": "@wanted"}, "wanted": True}
    ),
    "key_with_a_slash_beside_a_relative_reference": Hostile("", {"a/b": {"b": 2, "x": "$@#b"}}),
    "reader_by_a_reference_to_two_things": Hostile(
        "",
        {
            "rd": {"v": "NumpyReader"},
            "rd#v": {"_target_": "IterableDataset", "data": ["os.system"]},
            "x": {"_target_": "LoadImage", "reader": "@rd#v", "command": "id"},
        },
    ),
    "reader_that_another_file_changes": Hostile(
        "",
        {"rd": "NumpyReader", "x": {"_target_": "LoadImage", "reader": "@rd", "command": "id"}},
        {"configs/evaluate.json": '{"rd": {"_target_": "IterableDataset", "data": ["os.system"]}}'},
    ),
    "reader_by_a_reference": Hostile(
        "",
        {"x": {"_target_": "LoadImaged", "keys": "a", "reader": "@wanted"}, "wanted": "os.mkdir"},
    ),
    "table_from_an_address": _runs("[n for n in ['s3://a/b.csv']]", "URL"),
    "csv_dataset_reads_urls": Hostile(
        "URL", {"x": {"_target_": "CSVDataset", "src": "https://example.org/a.csv"}}
    ),
    "csv_dataset_reads_as_told": Hostile(
        "",
        {
            "x": {
                "_target_": "CSVDataset",
                "src": "x",
                "kwargs_read_csv": {"storage_options": {"a": 1}},
            }
        },
    ),
    "fire": _target("fire.Fire", component="x"),
    "functools_partial": _target("functools.partial", func="x"),
    "medfl_itself": _target("medfl.cli.verbs.main", arguments=["data"]),
    "scripts_that_are_not_there": _target("scripts.net.Net"),
    "target_by_expression": _target("$@network_def.forward"),
    "target_by_reference": _target("@network_name"),
    "target_by_macro": Hostile("_target_", {"name": "os.system", "x": {"_target_": "%name"}}),
    "target_joined": _target("os." + "system ", command="id"),
    "target_of_another_type": _target(["os.system"]),
    "target_in_fullwidth_letters": _target("\uff4f\uff53.system", command="id"),
    "target_with_a_cyrillic_letter": _target("\u041eneOf", transforms=[]),
    "target_by_an_override_from_another_key": Hostile(
        "_target_", {"network_def#_target_": "os.system"}
    ),
    "target_by_an_override_with_colons": Hostile(
        "_target_", {"network_def::_target_": "os.system"}
    ),
    "target_in_evaluate_only": _yaml("network_def#_target_: os.system\n", "_target_"),
    "target_in_federated_settings": Hostile(
        "_target_",
        files={
            "configs/federated.yaml": "presets: {p: {config: {optimizer: {_target_: os.system, command: id}}}}\n"
        },
    ),
    "target_in_the_description": _metadata(
        "in a description", network={"_target_": "os.system", "command": "id"}
    ),
    "disabled_today": _target("os.system", command="id", _disabled_=True),
    "mode_debug": Hostile("_mode_", {"x": {"_target_": "UNet", "_mode_": "debug"}}),
    "mode_callable": Hostile("_mode_", {"x": {"_target_": "UNet", "_mode_": "callable"}}),
    "mode_by_reference": Hostile("_mode_", {"x": {"_target_": "UNet", "_mode_": "@mode"}}),
    "debug_argument": Hostile("", {"x": {"_target_": "UNet", "_debug_": True}}),
    "required_first": Hostile(
        "two underscores",
        {"x": {"_target_": "UNet", "_requires_": ["$__import__('os').system('id')"]}},
    ),
    "disabled_by_running": Hostile(
        "the name exec", {"x": {"_target_": "UNet", "_disabled_": "$exec('1')"}}
    ),
    "described_by_running": Hostile(
        "the name eval", {"x": {"_target_": "UNet", "_desc_": "$eval('1')"}}
    ),
    # arguments that MONAI imports, or that fetch
    "reader_that_is_a_program": Hostile(
        "'reader'", {"x": {"_target_": "LoadImage", "reader": "subprocess.Popen", "args": ["id"]}}
    ),
    "reader_in_a_list": Hostile(
        "'reader'", {"x": {"_target_": "LoadImaged", "keys": "a", "reader": ["exec"]}}
    ),
    "reader_by_reference": Hostile(
        "", {"r": "os.mkdir", "x": {"_target_": "LoadImage", "reader": "@r"}}
    ),
    "reader_by_an_override": Hostile("", {"x": {"_target_": "LoadImage"}, "x#reader": "os.mkdir"}),
    "reader_by_an_override_of_an_item": Hostile(
        "",
        {"x": {"_target_": "LoadImage", "reader": ["ITKReader"]}, "x#reader#0": "os.mkdir"},
    ),
    "writer_that_is_a_program": Hostile(
        "'writer'", {"x": {"_target_": "SaveImage", "writer": "os.mkdir"}}
    ),
    "merger_that_is_a_program": Hostile(
        "'merger_cls'", {"x": {"_target_": "PatchInferer", "merger_cls": "os.mkdir"}}
    ),
    "pickled_arrays": Hostile(
        "'allow_pickle'", {"x": {"_target_": "LoadImage", "allow_pickle": True}}
    ),
    "images_opened_to_be_changed": Hostile(
        "",
        {"x": {"_target_": "LoadImaged", "keys": "a", "reader": "NumpyReader", "mmap_mode": "r+"}},
    ),
    "reader_that_opens_to_change": Hostile(
        "", {"x": {"_target_": "NumpyReader", "mmap_mode": "r+"}}
    ),
    "reader_with_a_number_for_a_name": Hostile(
        "", files={"configs/evaluate.yaml": "x: {_target_: PILReader, 1: 2}\n"}
    ),
    "attributes_by_the_keys_of_a_dictionary": Hostile(
        "", {"x": {"_target_": "torch.nn.ParameterDict", "parameters": {"forward": 1}}}
    ),
    "cache_of_pickles": Hostile(
        "'weights_only'", {"x": {"_target_": "PersistentDataset", "weights_only": False}}
    ),
    "download_of_data": Hostile(
        "'download'", {"x": {"_target_": "DecathlonDataset", "download": True}}
    ),
    "pretrained_by_a_reference_in_inference": Hostile(
        "",
        files={
            "configs/inference.yaml": "wanted: true\nx: {_target_: DenseNet121, pretrained: '@wanted'}\n"
        },
    ),
    "download_of_weights": Hostile(
        "'pretrained'", {"x": {"_target_": "DenseNet121", "pretrained": True}}
    ),
    "download_of_weights_by_default": Hostile(
        "would fetch", {"x": {"_target_": "EfficientNetBN", "model_name": "b0"}}
    ),
    "download_of_weights_by_a_full_name": Hostile(
        "would fetch",
        {"x": {"_target_": "monai.networks.nets.resnet.ResNetFeatures", "model_name": "resnet18"}},
    ),
    "download_of_weights_by_an_override": Hostile("", {"network_def#_target_": "EfficientNetBN"}),
    "url": Hostile("a URL", {"x": {"_target_": "Dataset", "data": "http://example.org/a.json"}}),
    "url_in_an_expression": _runs("@dataset_dir + 'ftp://example.org'", "a URL"),
    # expressions
    "import_function": _runs("__import__('os').system('id')", "two underscores"),
    "eval": _runs("eval('1')", "the name eval"),
    "exec": _runs("exec('import os')", "the name exec"),
    "compile": _runs("compile('1', '', 'eval')", "the name compile"),
    "getattr": _runs("getattr(os, 'system')('id')", "the name getattr"),
    "vars": _runs("vars(os)", "the name vars"),
    "globals": _runs("globals()", "the name globals"),
    "breakpoint": _runs("breakpoint()", "the name breakpoint"),
    "input": _runs("input()", "the name input"),
    "member_of_an_allowed_module": _runs("os.system('id')", "os.system"),
    "environment": _runs("dict(os.environ)", "os.environ"),
    "moved_by_the_class_of_paths": Hostile(
        "pathlib.Path.replace",
        {
            "imports": ["$import glob", "$import os", "$import pathlib"],
            "x": "$pathlib.Path.replace(@a, @b)",
        },
    ),
    "moved_by_an_imported_class": Hostile(
        "pathlib.Path.replace",
        {
            "imports": ["$import glob", "$import os", "$from pathlib import Path"],
            "x": "$Path.replace(@a, @b)",
        },
    ),
    "renamed_by_a_path": _runs("@bundle_root.rename('b')", ".rename"),
    "removed_by_a_path": _runs("@bundle_root.unlink()", ".unlink"),
    "linked_by_a_path": _runs("@bundle_root.symlink_to('b')", ".symlink_to"),
    "rights_changed_by_a_path": _runs("@bundle_root.chmod(0)", ".chmod"),
    "opened_by_a_path": _runs("@bundle_root.open('w')", ".open"),
    "written_by_an_array": _runs("@images.tofile('a')", ".tofile"),
    "written_by_numpy": _runs("np.save('a', @images)", "numpy.save"),
    "read_by_numpy": _runs("np.fromfile('a')", "numpy.fromfile"),
    "memory_of_numpy": _runs("np.memmap('a')", "numpy.memmap"),
    "printed": _runs("print(@images)", "the name print"),
    "asked_of_the_user": _runs("input()", "the name input"),
    "broken_into": _runs("breakpoint()", "the name breakpoint"),
    "listed_by_vars": _runs("vars(@images)", "the name vars"),
    "type_of": _runs("type(@images)", "the name type"),
    "hash_of_an_object": _runs("object()", "the name object"),
    "memory_view": _runs("memoryview(@images)", "the name memoryview"),
    "super_of": _runs("super()", "the name super"),
    "environment_by_getenv": _runs("os.getenv('HOME')", "os.getenv"),
    "folder_changed": _runs("os.chdir('a')", "os.chdir"),
    "folder_walked": _runs("os.walk('a')", "os.walk"),
    "process_killed": _runs("os.kill(1, 9)", "os.kill"),
    "through_numpy_to_os": _runs("np.lib.npyio.os.remove('a')", "numpy.lib"),
    "through_torch_to_sys": _runs("torch.sys.modules", "torch.sys"),
    "through_monai_to_torch_hub": _runs("monai.apps.utils.urlretrieve('a', 'b')", "urlretrieve"),
    "state_of_the_generators": _runs("torch.random.set_rng_state(@images)", ""),
    "default_dtype": _runs("torch.set_default_dtype(torch.float64)", ""),
    "operators_of_torch": _runs("torch.ops.load_library('a.so')", "torch.ops"),
    "classes_of_torch": _runs("torch.classes.load_library('a.so')", "torch.classes"),
    "from_file_of_torch": _runs("torch.from_file('a', shared=True, size=1)", "torch.from_file"),
    "hook_of_a_network": _runs(
        "@network_def.register_forward_hook(print)", ".register_forward_hook"
    ),
    "apply_of_a_network": _runs("@network_def.apply(os.system)", "os.system"),
    "format_with_an_index": _runs("'{0[0]}'.format(@images)", ""),
    "format_map": _runs("'{a}'.format_map(@images)", ""),
    "encoded_text": _runs("'a'.encode()", ""),
    "translated_text": _runs("'a'.translate(@images)", ""),
    "huge_range": _runs("range(99999999)", ""),
    "huge_power": _runs("2 ** 5000", ""),
    "shifted": _runs("1 << 99999", ""),
    "matrix_product": _runs("@images @ @images", "does not parse"),
    "complex_number": _runs("1j", ""),
    "many_levels": _runs("-" * 900 + "1", ""),
    "walrus_in_a_comprehension": _runs("[(y := i) for i in @images]", ""),
    "asynchronous_comprehension": _runs("[i async for i in @images]", ""),
    "public_data_by_a_path": Hostile(
        "by their names only",
        files={"configs/federated.yaml": "methods: {fedmd: {public: data/inner}}\n"},
    ),
    "teacher_by_a_path": Hostile(
        "by their names only",
        files={"configs/federated.yaml": "methods: {fedhelp: {teachers: 'bundle:inner'}}\n"},
    ),
    "public_data_in_a_list": Hostile(
        "by their names only",
        files={"configs/federated.yaml": "methods: {fedmd: {public: [data/inner]}}\n"},
    ),
    "teacher_of_a_preset_in_a_list": Hostile(
        "by their names only",
        files={
            "configs/federated.yaml": "presets: {p: {methods: {fedhelp: {teachers: {a: ['run:x']}}}}}\n"
        },
    ),
    "partition_by_a_path": Hostile(
        "a table that only a user names",
        files={"configs/federated.yaml": "partition: file:/etc/passwd\n"},
    ),
    "deleted_files": _runs("os.remove('a')", "os.remove"),
    "moved_files": _runs("os.replace('a', 'b')", "os.replace"),
    "moved_by_a_path": _runs("@bundle_root.replace('b')", ".replace"),
    "moved_by_a_method_handed_on": _runs("list(map(@bundle_root.replace, ['b']))", ".replace"),
    "written_by_a_path": _runs("@bundle_root.write_text('a')", ".write_text"),
    "folder_made_where_it_is_evaluated": _runs("@bundle_root.mkdir()", ".mkdir"),
    "class_of": _runs("@images.__class__", "two underscores"),
    "subclasses": _runs("().__class__.__base__.__subclasses__()", "two underscores"),
    "globals_of_a_function": _runs("@images.func_globals", ".func_globals"),
    "frame_of_a_generator": _runs("(i for i in @images).gi_frame.f_back", ".f_back"),
    "private_attribute": _runs("@images._modules", "._modules"),
    "dunder_in_a_text": _runs("'{0.__class__}'", "two underscores"),
    "format": _runs("'{0.name}'.format(@images)", ""),
    "format_of_a_text_that_is_computed": _runs("(@a + '}').format(@images)", ""),
    "format_of_its_own": _runs("f'{@images:>10000}'", ""),
    "conversion": _runs("f'{@images!r}'", ""),
    "walrus": _runs("(y := @images)", ""),
    "await": _runs("(lambda: (yield 1))", ""),
    "lambda_with_a_hostile_default": _runs("lambda x=os.remove: x", "os.remove"),
    "lambda_that_takes_a_module_s_name": _runs("(lambda os: os.getcwd)", ""),
    "comprehension_that_takes_a_module_s_name": _runs(
        "[torch for torch in @images]", "torch, of no module"
    ),
    "comprehension_that_assigns": _runs("[0 for @images[0] in [1]]", "an assignment"),
    "module_as_a_value": _runs("os", "os, of no module"),
    "module_in_a_list": _runs("[os][0].getcwd()", "os, of no module"),
    "monai_bundle_as_a_value": _runs("monai.bundle", "monai.bundle"),
    "monai_download": _runs("monai.apps.download_url('a', 'b')", "monai.apps.download_url"),
    "monai_config_parser": _runs("monai.bundle.ConfigParser({})", "monai.bundle.ConfigParser"),
    "monai_transform_made_by_hand": _runs(
        "monai.transforms.LoadImage('subprocess.Popen')", "LoadImage"
    ),
    "torch_hub": _runs("torch.hub.load('a/b', 'c')", "torch.hub.load"),
    "torch_load_by_name": _runs("torch.load(@bundle_root + '/a.pt')", "'pickle'", word="pickle"),
    "torch_save": _runs("torch.save(1, 'a')", "torch.save"),
    "numpy_load": _runs("np.load('a.npy', allow_pickle=True)", "'allow_pickle'"),
    "pickles_in_a_call": _runs("np.array(@images, allow_pickle=True)", "'allow_pickle'"),
    "numpy_ctypes": _runs("np.ctypeslib.load_library('a', 'b')", "numpy.ctypeslib"),
    "reader_in_a_call": _runs("@images(reader='os.mkdir')", "'reader'"),
    "arguments_with_two_stars": _runs("@images(**@settings)", ""),
    "arguments_with_a_star": _runs("@images(*@settings)", ""),
    "open_to_write": _runs("open(@bundle_root + '/a', 'w')", "'open'", word="open"),
    "open_in_a_mode_that_is_computed": _runs("open(@images, @mode)", "'open'", word="open"),
    "open_handed_on": _runs("list(map(open, @images))", "the name open"),
    "open_with_an_opener": _runs("open('a', opener=@images)", "'open'", word="open"),
    "setattr": _runs("setattr(@images, 'a', 1)", "'setattr'", word="setattr"),
    "power": _runs("9 ** 9 ** 9", ""),
    "large_number": _runs("[0] * 99999999999", ""),
    "bytes": _runs("b'x'", ""),
    "two_expressions": _runs("1; 2", "exactly one"),
    "second_line": _runs("1\n2", "exactly one"),
    "statement": _runs("del os", "a statement"),
    "import_where_it_is_evaluated": _runs("import os", "a statement"),
    "not_python": _runs("(", "does not parse"),
    "long_expression": _runs("1" + " + 1" * 300, "more than 1000 characters"),
    "deep_expression": _runs("(" * 300 + "1" + ")" * 300, "does not parse"),
    "expression_with_an_escape": Hostile(
        "the name eval", files={"configs/evaluate.json": '{"x": "\\u0024ev\\u0061l(1)"}'}
    ),
    "identifier_in_fullwidth_letters": _runs("\uff45\uff56\uff41\uff4c('1')", "outside of ASCII"),
    "identifier_in_mathematical_letters": _runs("@images.\U0001d41a", "outside of ASCII"),
    "right_to_left": Hostile("U+202E", {"x": f"a{_BIDI}b"}),
    "right_to_left_in_the_file": _yaml(f"# {_BIDI} }}\nx: 1\n", "U+202E"),
    "right_to_left_by_an_escape": _yaml('x: "\\u202e"\n', "U+202E"),
    "zero_width_in_a_key": Hostile("U+200B", {"a\u200bb": 1}),
    "terminal_escape_in_a_key": Hostile("U+001B", {"a\u001b[2Jb": 1}),
    "statement_list_that_is_referred_to": Hostile(
        ".mkdir", {"run": ["$@bundle_root.mkdir()"], "x": "$[1, @run]"}
    ),
    "statement_list_with_a_danger": Hostile(
        "os.system", {"initialize": ["$os.system('id')"], "x": "$@initialize"}
    ),
    "list_of_another_name_that_is_referred_to": Hostile(
        "os.system", {"evaluate": ["$os.system('id')"], "x": "$[1, @evaluate#0]"}
    ),
    "list_of_an_id_that_is_asked_for": Hostile("os.system", {"inferer": ["$os.system('id')"]}),
    "list_of_another_name_with_more_than_expressions": Hostile(
        "os.system", {"test": ["$os.system('id')", 1]}
    ),
    "list_in_settings": Hostile(
        "os.system", files={"configs/federated.yaml": "test: [\"$os.system('id')\"]\n"}
    ),
    # references and macros
    "reference_to_everything": _runs("[@]", ""),
    "reference_to_an_import": _runs("@imports#1.getcwd()", ""),
    "reference_from_an_import": Hostile(
        "does not parse", {"imports": ["$import os", "$@#0.remove('a')"]}
    ),
    "reference_to_an_import_by_steps": Hostile("", {"a": {"b": "$@###imports#0"}}),
    "reference_inside_a_text": _runs("'@images'", "inside a text"),
    "reference_that_runs_into_a_name": _runs("x@images", "the name x_reference_0"),
    "reference_as_an_argument_s_name": _runs("dict(@images=1)", ""),
    "reference_with_something_behind_it": Hostile("", {"x": "@images; rm"}),
    "local_references": _runs("__local_refs['images']", "two underscores"),
    "code_in_a_key_for_a_relative_reference": Hostile(
        "", {"0 or os.mkdir('canary') or @images": {"a": 1, "b": "$@#a"}}
    ),
    "key_with_an_underscore_word": Hostile("", {"_meta_": {"a": 1}}),
    "import_by_an_override": Hostile("", {"imports#2": "$import subprocess"}),
    "imports_that_are_no_list": Hostile("not a list", {"imports": {"a": "$import subprocess"}}),
    "imports_that_are_a_text": Hostile("not an import", {"imports": ["%network_def"]}),
    "macro_of_another_file": Hostile("the macro", {"x": "%/tmp/other.json#net"}),
    "macro_of_a_file_beside_it": Hostile("the macro", {"x": "%other.json"}),
    "macro_of_a_file_in_capitals": Hostile("the macro", {"x": "%other.YAML::net"}),
    "macro_of_everything": Hostile("the macro", {"x": "%"}),
    "macro_of_an_import": Hostile("", {"x": "%imports#1"}),
    "macro_of_macros": Hostile("", {"a": [1, 2], "b": ["%a", "%a"], "c": ["%b", "%b"]}),
    "macro_of_itself": Hostile("", {"a": {"b": "%a"}}),
    "macro_that_is_relative": Hostile("the macro", {"a": {"b": 1, "c": "%#b"}}),
    "macro_in_an_expression": _runs("@images %#b", "a macro inside"),
    "expression_in_the_description": _metadata("would be evaluated", description="$exec('1')"),
    "macro_in_the_description": _metadata("would be evaluated", description="%/etc/x.json"),
    # imports
    "import_subprocess": _imports("import subprocess", "subprocess.run('id')"),
    "import_importlib": _imports("import importlib", "importlib.import_module('x')"),
    "import_socket": _imports("import socket", "socket.socket()"),
    "import_urllib": _imports("import urllib.request", "urllib.request.urlopen('x')"),
    "import_pickle": _imports("import pickle as p", "p.load(open(@dataset_dir + '/x'))"),
    "import_monai_bundle": _imports("from monai import bundle", "bundle.run()"),
    "import_sys": _imports("import sys", "sys.path.append('x')", "'sys.path'", word="sys.path"),
    "import_distributed": _imports(
        "import torch.distributed as dist",
        "dist.init_process_group()",
        "'distributed'",
        word="distributed",
    ),
    "import_of_a_function": _imports("from os import system", "system('id')"),
    "import_of_load": _imports("from torch import load", "load('x.pt')", "'pickle'", word="pickle"),
    "import_of_everything": _imports("from os import *", says="of everything"),
    "import_that_is_relative": _imports("from . import x", says="relative import"),
    "import_of_two": _imports("import glob, subprocess", says=""),
    "import_and_more": _imports("import glob; import subprocess", says="exactly one"),
    "import_under_another_module_s_name": _imports("import os as torch", says=""),
    "import_under_a_builtin_s_name": _imports("import os as len", says=""),
    "import_under_two_names": _imports("import json as os", says="json.path.join"),
    "import_of_own_code_that_is_not_there": _imports("import scripts", "scripts.x()"),
    # paths
    "path_upwards": Hostile("leads upwards", {"x": "../../other/data"}),
    "path_upwards_in_an_expression": _runs(
        "os.path.join(@bundle_root, '..', 'other')", "leads upwards"
    ),
    "path_of_the_system": Hostile("folder of the system", {"x": "/etc/passwd"}),
    "path_upwards_inside_of_data": Hostile("leads upwards", {"dataset_dir": "../a/../../b"}),
    "path_upwards_of_another_id": Hostile("leads upwards", {"output_dir": "../a"}),
    "path_of_the_system_as_data": Hostile("folder of the system", {"dataset_dir": "/etc"}),
    "path_of_the_system_behind_a_reference": _runs(
        "@bundle_root + '/etc/passwd'", "folder of the system"
    ),
    "path_into_a_home": _runs(
        "os.path.expanduser('~/images')",
        "os.path.expanduser, for which the policy has to allow 'paths'",
        word="paths",
    ),
    "import_of_another_file": _runs(
        "datetime.datetime.now()",
        "the name datetime, which is not imported",
    ),
    "path_that_is_absolute": Hostile("'paths'", {"x": "/data/other"}, word="paths"),
    "path_by_join": _runs("os.path.join(@bundle_root, '/data')", ""),
    "path_in_a_listing": _runs("os.listdir('/')", ""),
    "path_of_a_home": Hostile("outside of bundle", {"x": "~/.ssh/id_rsa"}),
    "path_of_windows": Hostile("outside of bundle", {"x": "C:\\Windows"}),
    # files
    "yaml_tag": _yaml("x: !!python/object/apply:os.system [id]\n", "the YAML tag"),
    "yaml_directive": _yaml("%TAG ! tag:yaml.org,2002:python/\n---\nx: 1\n", "directive"),
    "yaml_binary": _yaml("x: !!binary aWQ=\n", "the YAML tag"),
    "yaml_bomb": _yaml(_BOMB, "too many values"),
    "yaml_bomb_of_merges": _yaml(_MERGES, "merge key"),
    "yaml_alias_of_itself": _yaml("x: &x [*x]\n", "alias of itself"),
    "yaml_key_twice": _yaml("x: 1\nx: $eval('1')\n", "twice"),
    "yaml_key_that_is_a_list": _yaml("? [a, b]\n: 1\n", "no text"),
    "yaml_documents": _yaml("x: 1\n---\nx: $eval('1')\n", "not valid YAML"),
    "yaml_levels": _yaml("[" * 500 + "]" * 500, "levels"),
    "json_key_twice": Hostile(
        "twice", files={"configs/evaluate.json": '{"x": 1, "x": "$eval(1)"}'}
    ),
    "json_levels": Hostile("levels", files={"configs/evaluate.json": "[" * 100_000}),
    "json_that_is_a_list": Hostile("keys and values", files={"configs/evaluate.json": "[1]"}),
    "json_not_a_number": Hostile("NaN", files={"configs/evaluate.json": '{"x": NaN}'}),
    "json_with_an_ending_in_capitals": Hostile(
        "in capitals", files={"configs/evaluate.JSON": "{}"}
    ),
    "half_a_surrogate": Hostile("U+D800", files={"configs/evaluate.json": '{"x": "\\ud800"}'}),
    "not_text": Hostile("not UTF-8", files={"configs/evaluate.json": b"\xff\xfe{}"}),
    "many_values": Hostile("more than", {"x": [0] * 30_000}),
    "huge_configuration": Hostile(
        "at most", files={"configs/evaluate.json": '{"x": "' + "a" * 1_100_000 + '"}'}
    ),
    "own_python_with_a_module_s_name": Hostile(
        "'scripts'", files={"glob.py": "print('here')\n"}, word="scripts"
    ),
    "compiled_python": Hostile("compiled", files={"scripts/__pycache__/net.cpython-311.pyc": b"x"}),
    "shared_library": Hostile("compiled", files={"libx.so": b"\x7fELF"}),
    "file_name_with_right_to_left": Hostile("U+202E", files={f"docs/a{_BIDI}txt.md": "x"}),
}
