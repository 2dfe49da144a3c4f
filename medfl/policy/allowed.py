"""What a bundle's configuration may name: components for `_target_`; names, members and methods for expressions.

The lists are explicit, gathered from what bundles of the public zoo use and MONAI 1.6 offers; what is on none of them
is refused. Left out on purpose although they look like the others: what locates a name given as text, compiles, fetches
weights by itself, or talks to a server (PerceptualLoss, TciaDataset, MLFlowHandler, ClearML*, TrtHandler, TorchVision,
TorchVisionFCModel, GaussianMixtureModel, CSVDataset, ...).
"""

from __future__ import annotations

import re


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Components

_TRANSFORMS = _names(
    """
    Activations AddCoordinateChannels AddExtremePointsChannel AdjustContrast Affine AffineGrid AsChannelLast AsDiscrete
    BorderPad BoundingRect CastToType CenterScaleCrop CenterSpatialCrop ClassesToIndices ClipIntensityPercentiles
    ComputeHoVerMaps ConcatItems ConvertBoxMode ConvertToMultiChannelBasedOnBratsClasses CopyItems Crop CropForeground
    CutMix CutOut DeleteItems DetectEnvelope DistanceTransformEDT DivisiblePad EnsureChannelFirst EnsureType
    FgBgToIndices FillHoles FlattenSequence FlattenSubKeys Flip ForegroundMask FromMetaTensor GaussianSharpen
    GaussianSmooth GenerateHeatmap GibbsNoise GridDistortion GridPatch GridSplit HistogramNormalize Identity
    IntensityStats Invert KSpaceSpikeNoise KeepLargestConnectedComponent LabelFilter LabelToContour LabelToMask Lambda
    LoadImage MapLabelValue MaskIntensity MeanEnsemble MedianSmooth MixUp NormalizeIntensity Orientation ProbNMS
    Rand2DElastic Rand3DElastic RandAdjustContrast RandAffine RandAffineGrid RandAxisFlip RandBiasField
    RandCoarseDropout RandCoarseShuffle RandCropByLabelClasses RandCropByPosNegLabel RandCrop RandDeformGrid RandFlip
    RandGaussianNoise RandGaussianSharpen RandGaussianSmooth RandGibbsNoise RandGridDistortion RandGridPatch
    RandHistogramShift RandIdentity RandKSpaceSpikeNoise RandLambda RandRicianNoise RandRotate RandRotate90
    RandScaleCrop RandScaleIntensity RandScaleIntensityFixedMean RandShiftIntensity RandSimulateLowResolution
    RandSmoothDeform RandSmoothFieldAdjustContrast RandSmoothFieldAdjustIntensity RandSpatialCrop RandSpatialCropSamples
    RandStdShiftIntensity RandWeightedCrop RandZoom RemoveRepeatedChannel RemoveSmallObjects RepeatChannel Resample
    ResampleToMatch Resize ResizeWithPadOrCrop Rotate Rotate90 SaveClassification SaveImage SavitzkyGolaySmooth
    ScaleIntensity ScaleIntensityFixedMean ScaleIntensityRange ScaleIntensityRangePercentiles SelectItems ShiftIntensity
    SobelGradients Spacing SpatialCrop SpatialPad SpatialResample SplitDim SqueezeDim StdShiftIntensity
    ThresholdIntensity ToDevice ToMetaTensor ToNumpy ToTensor Transpose VoteEnsemble Zoom
    """
)
"""Transforms without the ending (d, D, Dict) of those for dictionaries."""

_MONAI = _names(
    """
    Compose OneOf RandomOrder SomeOf PadListDataCollate

    AsymmetricUnifiedFocalLoss BarlowTwinsLoss BendingEnergyLoss BoxGIoULoss ContrastiveLoss DeepSupervisionLoss Dice
    DiceCELoss DiceFocalLoss DiceLoss DiffusionLoss FocalLoss GeneralizedDiceFocalLoss GeneralizedDiceLoss
    GeneralizedWassersteinDiceLoss GlobalMutualInformationLoss HausdorffDTLoss LocalNormalizedCrossCorrelationLoss
    LogHausdorffDTLoss MaskedDiceLoss MaskedLoss MultiScaleLoss NACLLoss PatchAdversarialLoss SSIMLoss SURELoss
    SoftDiceclDiceLoss SoftclDiceLoss TverskyLoss

    AHNet AttentionUnet AutoEncoder AutoencoderKL BasicUNet BasicUNetPlusPlus Classifier ControlNet Critic DAF3D
    DecoderOnlyTransformer DenseNet DenseNet121 DenseNet169 DenseNet201 DenseNet264 DiNTS DiffusionModelUNet
    Discriminator DynUNet EfficientNet EfficientNetBN EfficientNetBNFeatures FlexibleUNet FullyConnectedNet Generator
    GlobalNet HighResNet HoVerNet LocalNet MILModel MaskedAutoEncoderViT MedNeXt MultiScalePatchDiscriminator NaViT
    NetAdapter PatchDiscriminator Quicknat RegUNet Regressor ResNet ResNetFeatures SENet SENet154 SEResNet50 SEResNet101
    SEResNet152 SEResNext50 SEResNext101 SPADEAutoencoderKL SPADEDiffusionModelUNet SPADENet SegResNet SegResNetDS
    SegResNetDS2 SegResNetVAE SwinUNETR TopologyConstruction TopologyInstance TopologySearch UNETR
    UNet VISTA3D VNet VQVAE VarAutoEncoder VarFullyConnectedNet ViT ViTAutoEnc VoxelMorph VoxelMorphUNet
    resnet10 resnet18 resnet34 resnet50 resnet101 resnet152 resnet200
    DDIMScheduler DDPMScheduler PNDMScheduler RFlowScheduler

    ArrayDataset CacheDataset CacheNTransDataset DataLoader Dataset DistributedSampler DistributedWeightedRandomSampler
    GridPatchDataset ImageDataset IterableDataset ITKReader LMDBDataset MaskedPatchWSIDataset NPZDictItemDataset
    NibabelReader NrrdReader NumpyReader PILReader PatchDataset PatchIter PatchIterd PatchWSIDataset PersistentDataset
    PydicomReader ShuffleBuffer SlidingPatchWSIDataset SmartCacheDataset ThreadBuffer ThreadDataLoader WSIReader
    ZipDataset

    AveragePrecision CalibrationError CheckpointLoader CheckpointSaver ClassificationSaver ConfusionMatrix
    DecollateBatch EarlyStopHandler GarbageCollector HausdorffDistance IgniteMetricHandler LogfileHandler
    LrScheduleHandler MeanAbsoluteError MeanDice MeanIoUHandler MeanSquaredError MetricLogger MetricsSaver
    PanopticQuality ParamSchedulerHandler PeakSignalToNoiseRatio PostProcessing ProbMapProducer ROCAUC
    RootMeanSquaredError SmartCacheHandler StatsHandler SurfaceDistance TensorBoardImageHandler TensorBoardStatsHandler
    ValidationHandler

    AvgMerger ControlNetDiffusionInferer ControlNetLatentDiffusionInferer DiffusionInferer LatentDiffusionInferer
    PatchInferer SaliencyInferer SimpleInferer SliceInferer SlidingWindowInferer SlidingWindowInfererAdapt
    SlidingWindowSplitter VQVAETransformerInferer WSISlidingWindowSplitter

    AveragePrecisionMetric ConfusionMatrixMetric CumulativeAverage DiceMetric FBetaScore GeneralizedDiceScore
    HausdorffDistanceMetric LossMetric MAEMetric MSEMetric MeanIoU MultiScaleSSIMMetric PSNRMetric PanopticQualityMetric
    RMSEMetric ROCAUCMetric SSIMMetric SurfaceDiceMetric SurfaceDistanceMetric VarianceMetric

    AdversarialTrainer DiffusionPrepareBatch EnsembleEvaluator GanTrainer PrepareBatchDefault PrepareBatchExtraInput
    SupervisedEvaluator SupervisedTrainer VPredictionPrepareBatch

    ExponentialLR LinearLR Novograd WarmupCosineSchedule

    DecathlonDataset MedNISTDataset Relabeld VistaPreTransformd VistaPostTransformd AnchorGeneratorWithAnchorShape
    AutoencoderKlMaisi DiffusionModelUNetMaisi ControlNetMaisi
    """
)

_TARGETS = re.compile(
    r"""
    torch\.nn\.[A-Z]\w*
    | torch\.nn\.parallel\.DistributedDataParallel
    | torch\.optim\.[A-Z]\w*
    | torch\.optim\.lr_scheduler\.[A-Z]\w*(LR | OnPlateau | Scheduler | WarmRestarts)
    | torch\.utils\.data\.(DataLoader | Dataset | ConcatDataset | Subset | TensorDataset | RandomSampler
        | SequentialSampler | WeightedRandomSampler | SubsetRandomSampler | BatchSampler
        | (distributed\.)?DistributedSampler)
    | torch\.(cuda\.)?amp\.GradScaler
    | ignite\.metrics\.(Accuracy | Average | AveragePrecision | ClassificationReport | CohenKappa | ConfusionMatrix
        | Fbeta | Loss | MeanAbsoluteError | MeanSquaredError | PSNR | Precision | Recall | ROC_AUC
        | RootMeanSquaredError | RunningAverage | SSIM | TopKCategoricalAccuracy)
    | ignite\.handlers\.(CosineAnnealingScheduler | EarlyStopping | LinearCyclicalScheduler | PiecewiseLinear
        | TerminateOnNan)
    | medfl\.datasets\.(CheckPatchd | ReadPaird | ReadPixelsd | ReadVolumed | WriteMaskd)
    | medfl\.networks\.build
    | medfl\.exported\.network
    | medfl\.medsam\.(BoxOfMaskd | load)
    """,
    re.VERBOSE | re.ASCII,
)
_IN_MONAI = re.compile(
    r"(?:monai\.(?:transforms|losses|networks|data|handlers|inferers|metrics|engines|optimizers|apps)\."
    r"(?:[a-z0-9_]+\.)*)?([A-Za-z]\w*)",
    re.ASCII,
)

WEIGHTS_OF_THEIR_OWN = frozenset({"EfficientNetBN", "EfficientNetBNFeatures", "MILModel", "ResNetFeatures"})
"""Networks that fetch weights unless told `pretrained: false`."""


def target_allowed(target: str) -> bool:
    """Tell whether a `_target_` is on the lists."""
    if _TARGETS.fullmatch(target):
        return True
    found = _IN_MONAI.fullmatch(target)
    return found is not None and (found[1] in _MONAI or _without_ending(found[1]) in _TRANSFORMS)


def _without_ending(name: str) -> str:
    for ending in ("Dict", "d", "D"):
        if name.endswith(ending) and name.removesuffix(ending) in _TRANSFORMS:
            return name.removesuffix(ending)
    return name


# Arguments with a meaning of their own, whoever takes them

READERS = _names(
    """
    ITKReader NibabelReader NrrdReader NumpyReader PILReader PydicomReader WSIReader itkreader nibabelreader nrrdreader
    numpyreader pilreader pydicomreader wsireader cucim cuCIM openslide OpenSlide tifffile TiffFile
    ITKWriter NibabelWriter PILWriter itkwriter nibabelwriter pilwriter AvgMerger
    """
)
"""What `reader`, `writer` and `merger_cls` may name: MONAI imports and calls anything else that they say."""


_SWITCHES = ("download", "pretrained", "allow_pickle", "trust_remote_code", "expanduser")


def argument_refused(name: str, value: object) -> str:
    """Return why an argument may not have this value, "" if it may.

    Args:
        name: of the argument.
        value: a literal; `...` where it is computed.
    """
    if name in ("reader", "writer", "merger_cls"):
        names = value if isinstance(value, list | tuple) else [value]
        if not all(each is None or (isinstance(each, str) and each in READERS) for each in names):
            return f"argument {name!r} names what is imported and called: only readers and writers of MONAI can be"
    if name in _SWITCHES and value not in (False, None):
        return f"argument {name!r} can only be false here: nothing is fetched and nothing unpickled"
    if name == "weights_only" and value is not True:
        return "argument 'weights_only' can only be true here: nothing is unpickled"
    if name in ("pickle_module", "model_url", "pretrained_url", "pretrained_path") and value is not None:
        return f"argument {name!r} cannot be given here: nothing is fetched and nothing unpickled"
    return ""


# Expressions

BUILTINS = _names(
    """
    abs all any bool dict enumerate filter float int isinstance len list map max min print range reversed round set
    slice sorted str sum tuple zip
    """
)

_MEMBERS = {
    "copy": "copy deepcopy",
    "csv": "DictReader reader",
    "datetime": "datetime.now",
    "functools": "partial",
    "glob": "glob",
    "json": "load loads",
    "logging": "DEBUG ERROR INFO WARNING",
    "math": "ceil floor inf log pi sqrt",
    "os": "getcwd listdir",
    "os.path": "basename dirname exists isdir isfile join splitext",
    "pathlib": "Path",
    "scipy.ndimage": "binary_dilation binary_erosion binary_fill_holes gaussian_filter label zoom",
    "numpy": """
        abs all any arange argmax argmin array asarray bool_ ceil clip concatenate expand_dims exp eye float16 float32
        float64 floor inf int8 int16 int32 int64 linspace log max maximum mean median min minimum moveaxis nan ones pi
        prod round sqrt squeeze stack std sum transpose uint8 uint16 unique where zeros
        """,
    "torch": """
        abs arange argmax bfloat16 bool cat clamp device exp eye float float16 float32 float64 FloatTensor from_numpy
        full half int int8 int16 int32 int64 isnan linspace log long LongTensor max mean min nan_to_num ones permute
        round sigmoid softmax sqrt squeeze stack std sum tensor Tensor uint8 unsqueeze where zeros
        """,
    "torch.cuda": "device_count is_available",
    "torch.nn": """
        AdaptiveAvgPool2d BCELoss BCEWithLogitsLoss BatchNorm2d BatchNorm3d Conv2d Conv3d CrossEntropyLoss Dropout
        Flatten Identity L1Loss LeakyReLU Linear MSELoss ModuleList PReLU ReLU Sequential Sigmoid SmoothL1Loss Softmax
        Tanh
        """,
    "torch.nn.functional": "interpolate normalize one_hot pad relu sigmoid softmax",
    "torch.utils.data": "ConcatDataset Subset TensorDataset",
    "ignite.engine.Events": """
        COMPLETED EPOCH_COMPLETED EPOCH_STARTED ITERATION_COMPLETED ITERATION_STARTED STARTED
        """,
    "monai.data": """
        decollate_batch list_data_collate load_decathlon_datalist pad_list_data_collate partition_dataset
        partition_dataset_classes select_cross_validation_folds
        """,
    "monai.data.utils": "list_data_collate pad_list_data_collate partition_dataset",
    "monai.engines": "default_metric_cmp_fn default_prepare_batch",
    "monai.handlers": "from_engine",
    "monai.inferers": "SimpleInferer",
    "monai.utils": "ensure_tuple ensure_tuple_rep first set_determinism",
    "monai.utils.CommonKeys": "IMAGE LABEL LOSS METADATA PRED",
    "medfl.datasets": "datalist locate",
    "medfl.datasets.own": "above labelled paired",
}
MEMBERS = frozenset(f"{module}.{name}" for module, names in _MEMBERS.items() for name in names.split()) | {
    "datetime.datetime"
}
"""Functions, classes and constants of modules, by their full path."""

_WORDED = {
    "distributed": """
        torch.distributed.get_rank torch.distributed.get_world_size torch.distributed.is_available
        torch.distributed.is_initialized torch.distributed.init_process_group torch.distributed.destroy_process_group
        torch.cuda.set_device
        """,
    "pickle": "torch.load torch.jit.load",
    "sys.path": "sys.path.append sys.path.insert",
}
WORDED = {member: word for word, members in _WORDED.items() for member in members.split()}
"""Members that need a word of the site's policy, and the word."""

MODULES = frozenset(
    {
        path.rpartition(".")[0][:end]
        for path in MEMBERS
        for end in [*(i for i, c in enumerate(path.rpartition(".")[0]) if c == "."), None]
    }
    - {"ignite.engine.Events", "monai.utils.CommonKeys", "datetime.datetime"}
    | {"ignite.metrics", "ignite.handlers", "medfl.medsam", "medfl.networks", "monai.transforms", "monai.networks.nets"}
)
"""What may be imported without a word."""
WORDED_MODULES = {"torch.distributed": "distributed", "torch.jit": "pickle", "sys": "sys.path"}

METHODS = _names(
    """
    append argmax argmin astype attention bool clip copy count cpu data decoder detach device dim double dtype
    encoder endswith eval exists expand flatten float get glob half head index int is_dir is_file isdigit item items
    iterdir join keys load_old_state_dict long lower lstrip max mean metrics min name ndim numel numpy output
    parameters parent permute read read_text replace requires_grad reshape resolve rsplit rstrip set_random_state
    shape size sort split splitlines squeeze startswith state state_dict std stem step strftime strip suffix sum T
    title to tolist transforms transpose unsqueeze upper values view zfill
    """
)
"""Attributes and methods of values: of references, of what calls return, of a lambda's arguments."""

STATEMENT_METHODS = _names(
    """
    add_event_handler attach close load_state_dict logger mkdir run setLevel set_trainer touch train
    """
)
"""Further ones in lists of statements such as `run` and `initialize`, which medfl never evaluates."""
