"""Harmless training configurations in the zoo's styles: with the words that each needs, they have to be accepted."""

from __future__ import annotations

from typing import Any

_FROM_ENGINE = "$monai.handlers.from_engine(['pred', 'label'])"

FRIENDLY: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "spleen_with_a_decathlon_list": (
        (),
        {
            "imports": ["$import glob", "$import os", "$import ignite"],
            "ckpt_dir": "$@bundle_root + '/models'",
            "train_datalist": "$monai.data.load_decathlon_datalist(@dataset_dir + '/dataset.json')[:-9]",
            "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
            "network": "$@network_def.to(@device)",
            "optimizer": {
                "_target_": "torch.optim.Adam",
                "params": "$@network.parameters()",
                "lr": 1e-4,
            },
            "metric": {"_target_": "MeanDice", "output_transform": _FROM_ENGINE},
            "initialize": [
                "$monai.utils.set_determinism(seed=123)",
                "$setattr(torch.backends.cudnn, 'benchmark', True)",
            ],
        },
    ),
    "brats_with_lambdas_over_channels": (
        (),
        {
            "imports": [
                "$import glob",
                "$import os",
                "$import numpy as np",
                "$from pathlib import Path",
                "$from functools import partial",
            ],
            "make": "$Path(@bundle_root, 'eval').exists()",
            "label": {
                "_target_": "Lambdad",
                "keys": "label",
                "func": "$lambda x: np.where(x == 4, 3, x).astype(np.uint8)",
            },
            "channel": {
                "_target_": "Lambdad",
                "keys": "pred",
                "func": "$lambda x: x[:, 1:2] > 0.5",
            },
            "collate": "$partial(monai.data.list_data_collate)",
            "run": ["$Path(@bundle_root, 'eval').mkdir(exist_ok=True)", "$@train#trainer.run()"],
        },
    ),
    "pathology_with_comprehensions": (
        (),
        {
            "imports": ["$import json", "$import os", "$import glob"],
            "listing": "$json.load(open(@dataset_dir + '/training.json'))",
            "cases": "$[{**c, 'image': os.path.join(@dataset_dir, c['image'])} for c in @listing['training']]",
            "classes": "$sorted({c['label'] for c in @cases})",
            "index": "$dict(zip(@classes, range(len(@classes))))",
            "reader": None,
            "load": {
                "_target_": "LoadImaged",
                "keys": "image",
                "reader": "WSIReader",
                "backend": "cucim",
            },
        },
    ),
    "swin_unetr_with_a_scheduler_and_macros": (
        (),
        {
            "net": {
                "_target_": "monai.networks.nets.SwinUNETR",
                "in_channels": 1,
                "out_channels": 14,
            },
            "schedule": {
                "_target_": "torch.optim.lr_scheduler.CosineAnnealingLR",
                "optimizer": "@o",
                "T_max": "@epochs",
            },
            "epochs": 100,
            "o": {"_target_": "torch.optim.AdamW", "params": "$@net.parameters()"},
            "validation": {
                "transforms": "%train#dataset",
                "size": "$@#roi[0] * 2",
                "roi": [96, 96, 96],
            },
        },
    ),
    "dints_with_a_learning_rate_formula": (
        (),
        {
            "rate": "$lambda epoch: 0.1 if epoch < @warmup else 1.0 - epoch / @epochs",
            "warmup": 10,
            "epochs": "$max(@warmup * 4, 100)",
            "search": {"_target_": "monai.networks.nets.TopologySearch", "device": "@where"},
            "where": "$torch.device('cpu')",
            "name": '$f"{@epochs}-epochs"',
        },
    ),
    "an_ensemble_over_folds": (
        (),
        {
            "fold": 0,
            "folds": "$monai.data.partition_dataset(@images, num_partitions=5, shuffle=True, seed=@fold)",
            "ids": "$[i for i in range(5) if i != @fold]",
            "+imports": ["$import math"],
            "steps": "$math.ceil(len(@folds[0]) / 4)",
        },
    ),
    "generative_with_maisi_networks": (
        (),
        {
            "vae": {
                "_target_": "monai.apps.generation.maisi.networks.autoencoderkl_maisi.AutoencoderKlMaisi",
                "spatial_dims": 3,
            },
            "steps": {
                "_target_": "monai.networks.schedulers.ddpm.DDPMScheduler",
                "num_train_timesteps": 1000,
            },
            "inferer": {"_target_": "monai.inferers.LatentDiffusionInferer", "scheduler": "@steps"},
        },
    ),
    "handlers_by_a_condition": (
        (),
        {
            "handlers": [
                {"_target_": "StatsHandler", "output_transform": "$lambda output: output['loss']"}
            ],
            "chosen": "$@handlers + @more if @amp else @handlers",
            "more": [],
            "amp": False,
            "imports": ["$import logging", "$import glob", "$import os"],
            "initialize": [
                "$@train#trainer.logger.setLevel(logging.WARNING if @amp else logging.INFO)"
            ],
        },
    ),
    "idioms_of_plain_python": (
        (),
        {
            "imports": ["$import glob", "$import os", "$from pathlib import Path"],
            "names": '$[f"{n:03d}.png" for n in range(3)]',
            "text": "$'fold{}_{name}'.format(1, name='a')",
            "poly": "$lambda epoch, epochs=100: (1 - epoch / epochs) ** 0.9",
            "first": {"_target_": "Lambdad", "keys": "image", "func": "$lambda x: x[..., 0]"},
            "affine": {
                "_target_": "Lambdad",
                "keys": "image",
                "func": "$lambda x: x.meta['affine']",
            },
            "grey": {
                "_target_": "LoadImaged",
                "keys": "image",
                "reader": "PILReader",
                "converter": "$lambda i: i.convert('L')",
            },
            "folder": "$os.path.abspath(@dataset_dir)",
            "joined": "$Path(@bundle_root).joinpath('models').name",
            "moved": "$@network_def.cuda()",
            "noise": "$torch.randn(1, 2)",
            "linear": "$torch.nn.Linear(2, 2)",
        },
    ),
    "statements_under_other_names": (
        (),
        {
            "download_data": [
                "$urllib.request.urlretrieve('https://example.org/a.zip', @bundle_root + '/a.zip')"
            ],
            "evaluate": [
                "$setattr(torch.backends.cudnn, 'benchmark', True)",
                "$@train#trainer.run()",
            ],
            "display": ["$plt.imshow(@images[0])", "$plt.show()"],
        },
    ),
    "nuclei_and_how_they_are_read": (
        (),
        {
            "read": {
                "_target_": "LoadImaged",
                "keys": "image",
                "reader": "$monai.data.PILReader",
                "converter": "$lambda x: x.convert('RGB')",
            },
            "inferer": {"_target_": "SlidingWindowHoVerNetInferer", "roi_size": 256, "cval": 0},
            "example": "${'image': '/workspace/data/nuclei.png', 'label_prompt': [3]}",
        },
    ),
    "several_gpus": (
        (),
        {
            "imports": ["$import torch.distributed as dist", "$import glob", "$import os"],
            "device": "$torch.device(f'cuda:{dist.get_rank()}')",
            "parallel": {
                "_target_": "torch.nn.parallel.DistributedDataParallel",
                "module": "$@network_def.to(@device)",
                "device_ids": ["@device"],
            },
            "initialize": [
                "$dist.is_initialized() or dist.init_process_group(backend='nccl')",
                "$torch.cuda.set_device(@device)",
            ],
            "finalize": ["$dist.is_initialized() and dist.destroy_process_group()"],
        },
    ),
    "weights_to_start_from": (
        (),
        {
            "initialize": [
                "$@network_def.load_state_dict(torch.load(@bundle_root + '/models/model.pt'))"
            ]
        },
    ),
    "weights_that_an_id_reads": (
        ("pickle",),
        {"code": "$torch.load(@bundle_root + '/models/search.pt')['arch_code']"},
    ),
    "further_members_and_networks": (
        (),
        {
            "imports": ["$import glob", None, "$import os", "$import operator"],
            "metric_cmp_fn": "$operator.lt",
            "joined": "$monai.transforms.concatenate((@train#dataset, 1))",
            "one": "$monai.utils.misc.first(@images)",
            "alone": {
                "_target_": "DataLoader",
                "_requires_": ["$@train#dataset.disable_share_memory_cache()"],
            },
            "net": {
                "_target_": "TorchVisionFCModel",
                "model_name": "inception_v3",
                "num_classes": 2,
            },
        },
    ),
    "root_in_a_home": ((), {"bundle_root": "/home/author/bundle"}),
    "data_beside_the_bundle": ((), {"dataset_dir": "../../MedNIST/Hand"}),
    "weights_of_a_whole_pickle": (
        ("pickle",),
        {"state": "$torch.load(@bundle_root + '/a.pt', weights_only=False)"},
    ),
    "tables_and_other_readers": (
        (),
        {
            "imports": [
                "$import pandas as pd",
                "$import glob",
                "$import os",
                "$import skimage",
                "$import urllib",
            ],
            "images": "$list(@dataset_dir + pd.read_csv(@dataset_dir + '/train.csv').t2)",
            "items": {
                "_target_": "CSVDataset",
                "src": "$@bundle_root + '/a.csv'",
                "kwargs_read_csv": {"header": None},
            },
            "slides": {
                "_target_": "monai.data.wsi_datasets.PatchWSIDataset",
                "data": "@items",
                "reader": "@backend",
            },
            "backend": "cuCIM",
            "jitter": {
                "_target_": "TorchVisiond",
                "keys": "image",
                "name": "ColorJitter",
                "hue": 0.04,
            },
            "net": {
                "_target_": "TorchVisionFCModel",
                "model_name": "resnet18",
                "pretrained": "@start",
            },
            "tool": {
                "_target_": "FlexibleUNet",
                "backbone": "efficientnet-b2",
                "pretrained": "@start",
            },
            "nuclei": {"_target_": "HoVerNet", "pretrained_url": "$None"},
            "start": False,
            "parts": "$lambda x: skimage.measure.label(x)",
            "batch": "$lambda data, *_, **__: data.to(@device)",
            "handlers": [
                {
                    "_target_": "StatsHandler",
                    "name": "$lambda engine: print(engine.state.iteration)",
                }
            ],
            "mode": "$monai.utils.GridSampleMode.BILINEAR",
            "key_metric": {
                "val/mean dice": {"_target_": "MeanDice"},
                "val-accuracy": {"_target_": "MeanDice"},
            },
            "flipped": "$lambda x: torch.flip(x, dims=[1])",
        },
    ),
    "placeholder_paths_elsewhere": (
        ("paths",),
        {"dataset_dir": "/workspace/data/x", "output_dir": "/data/out"},
    ),
}
