"""What a bundle's configuration may name: components for `_target_`; names, members and methods for expressions.

The lists are explicit, gathered from what bundles of the public zoo use and MONAI 1.6 offers; what is on none of them
is refused. Left out on purpose although they look like the others: what locates a name given as text, compiles, fetches
weights by itself, or talks to a server (PerceptualLoss, TciaDataset, MLFlowHandler, ClearML*, TrtHandler, TorchVision,
TorchVisionFCModel, GaussianMixtureModel, CSVDataset, ...).
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Components

TRANSFORMS = _names(
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

MONAI_COMPONENTS = _names(
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

_COMPONENTS = {
    "torch.nn.parallel": "DistributedDataParallel",
    "torch.utils.data": """
        BatchSampler ConcatDataset DataLoader Dataset RandomSampler SequentialSampler Subset SubsetRandomSampler
        TensorDataset WeightedRandomSampler
        """,
    "torch.utils.data.distributed": "DistributedSampler",
    "torch.amp": "GradScaler",
    "torch.cuda.amp": "GradScaler",
    "ignite.metrics": """
        Accuracy Average AveragePrecision ClassificationReport CohenKappa ConfusionMatrix Fbeta Loss MeanAbsoluteError
        MeanSquaredError PSNR Precision ROC_AUC Recall RootMeanSquaredError RunningAverage SSIM
        TopKCategoricalAccuracy
        """,
    "ignite.handlers": """
        CosineAnnealingScheduler EarlyStopping LinearCyclicalScheduler PiecewiseLinear TerminateOnNan
        """,
    "medfl.datasets": "CheckPatchd ReadPaird ReadPixelsd ReadVolumed WriteMaskd",
    "medfl.networks": "build",
    "medfl.exported": "network",
    "medfl.medsam": "BoxOfMaskd load",
}
COMPONENTS = frozenset(f"{module}.{name}" for module, names in _COMPONENTS.items() for name in names.split())
"""Listed components of other packages; beside them every module of torch.nn, optimiser and learning rate scheduler."""

WRITERS = _names(
    """
    CacheNTransDataset CheckpointSaver ClassificationSaver GDSDataset LMDBDataset LogfileHandler MetricsSaver
    PersistentDataset ProbMapProducer SaveClassification SaveImage TensorBoardImageHandler TensorBoardStatsHandler
    WriteFileMapping WriteMask
    """
)
"""Components that write files; medfl never makes them for a bundle (the ending of those for dictionaries left out)."""

WEIGHTS_OF_THEIR_OWN = frozenset({"EfficientNetBN", "EfficientNetBNFeatures", "MILModel", "ResNetFeatures"})
"""Networks that fetch weights unless told `pretrained: false`."""


def without_ending(name: str) -> str:
    """Return the name of a component without the ending of those for dictionaries."""
    for ending in ("Dict", "d", "D"):
        if name.endswith(ending) and name.removesuffix(ending) in TRANSFORMS | WRITERS:
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
        if not all(each is None or _is_reader(each) for each in names):
            return f"argument {name!r} names what is imported and called: only readers and writers of MONAI can be"
    if name in _SWITCHES and value is not False and value is not None:
        return f"argument {name!r} can only be false here: nothing is fetched and nothing unpickled"
    if name == "weights_only" and value is not True:
        return "argument 'weights_only' can only be true here: nothing is unpickled"
    if name in ("pickle_module", "model_url", "pretrained_url", "pretrained_path") and value is not None:
        return f"argument {name!r} cannot be given here: nothing is fetched and nothing unpickled"
    return ""


def _is_reader(value: object) -> bool:
    """Tell whether a value is a reader's listed name, or one that a listed component made."""
    return value in READERS if isinstance(value, str) else type(value).__module__.startswith("monai.data.")


# Expressions

BUILTINS = _names(
    """
    abs all any bool dict enumerate filter float int isinstance len list map max min range reversed round set
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
    "os.path": "abspath basename dirname exists isdir isfile join splitext",
    "pathlib": "Path",
    "scipy.ndimage": "binary_dilation binary_erosion binary_fill_holes gaussian_filter label zoom",
    "numpy": """
        abs all any arange argmax argmin array asarray bool_ ceil clip concatenate expand_dims exp eye float16 float32
        float64 floor inf int8 int16 int32 int64 linspace log max maximum mean median min minimum moveaxis nan ones pi
        prod round sqrt squeeze stack std sum transpose uint8 uint16 unique where zeros
        """,
    "numpy.random": "choice permutation rand randint randn seed shuffle",
    "torch": """
        abs arange argmax bfloat16 bool cat clamp device exp eye float float16 float32 float64 FloatTensor from_numpy
        full half int int8 int16 int32 int64 isnan linspace log long LongTensor max mean min nan_to_num ones permute
        rand randn round sigmoid softmax sqrt squeeze stack std sum tensor Tensor uint8 unsqueeze where zeros
        """,
    "torch.cuda": "device_count is_available",
    "torch.nn.functional": "interpolate normalize one_hot pad relu sigmoid softmax",
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

METHODS_OF = {
    "text": _names(
        """
        count endswith find format index isalpha isdigit join lower lstrip partition removeprefix removesuffix replace
        rfind rpartition rsplit rstrip split splitlines startswith strip title upper zfill
        """
    ),
    "list": _names("append copy count extend index insert pop reverse sort"),
    "tuple": _names("count index"),
    "dict": _names("copy get items keys pop setdefault update values"),
    "set": _names("add copy difference intersection issubset issuperset union update"),
    "number": _names("imag is_integer real"),
    "path": _names(
        """
        absolute as_posix exists glob is_absolute is_dir is_file iterdir joinpath name parent parents parts read_text
        relative_to resolve rglob stem suffix suffixes with_name with_suffix
        """
    ),
    "file": _names("close read readline readlines"),
    "time": _names("date day hour isoformat microsecond minute month second strftime time year"),
    "tensor": _names(
        """
        abs all any argmax argmin array astype bool clamp clip clone contiguous copy cpu cuda cumsum detach device dim
        double dtype expand flatten flip float half index_select int is_cuda item long max mean median meta min ndim
        ndimension nonzero numel numpy permute prod repeat requires_grad reshape round shape sigmoid size softmax
        squeeze std sum swapaxes T t to tolist transpose type type_as unique unsqueeze view
        """
    ),
    "network": _names(
        """
        attention bias children classifier cpu cuda decoder double encoder eval fc features float half head
        load_old_state_dict load_state_dict modules named_children named_parameters parameters state_dict to train
        weight
        """
    ),
    "device": _names("index type"),
    "picture": _names("convert crop height mode resize size width"),
    "component": _names(
        """
        attention batch_size data dataset decoder encoder get_last_lr head metrics output param_groups
        set_random_state state state_dict step transform transforms
        """
    ),
}
"""What expressions may ask of a value, by the kind of the value; a path can only be looked at, never changed."""
METHODS = frozenset().union(*METHODS_OF.values())
"""All of them: what an inspection, which knows no values, lets pass."""

STATEMENT_METHODS = _names(
    """
    add_event_handler attach close load_state_dict logger mkdir run setLevel set_trainer touch train
    """
)
"""Further ones in lists of statements such as `run` and `initialize`, which medfl never evaluates."""
