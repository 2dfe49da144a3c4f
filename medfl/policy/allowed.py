"""What a bundle's configuration may name as a component, and what arguments with a meaning of their own may say.

The names are gathered from what bundles of the public zoo use and MONAI 1.6 offers; what is on none of them
is refused. Left out on purpose although they look like the others: what locates a name given as text, compiles, fetches
weights by itself, or talks to a server (PerceptualLoss, TciaDataset, MLFlowHandler, ClearML*, TrtHandler,
GaussianMixtureModel, ...).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from medfl.core.untrusted import printable


def name_set(text: str) -> frozenset[str]:
    """Return the names in a text of them."""
    return frozenset(text.split())


def paths_of(members: Mapping[str, str]) -> frozenset[str]:
    """Return the dotted paths of module -> names of its members in a text."""
    paths: set[str] = set()
    for module, names in members.items():
        paths.update(f"{module}.{name}" for name in names.split())
    return frozenset(paths)


# Components

TRANSFORMS = name_set(
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
    ThresholdIntensity ToDevice ToMetaTensor ToNumpy ToTensor TorchVision Transpose VoteEnsemble Zoom RandTorchVision
    """
)
"""Transforms without the ending (d, D, Dict) of those for dictionaries."""

MONAI_COMPONENTS = name_set(
    """
    Compose OneOf RandomOrder SomeOf PadListDataCollate

    AUCMLoss AsymmetricUnifiedFocalLoss BarlowTwinsLoss BendingEnergyLoss BoundaryLoss BoxGIoULoss ContrastiveLoss
    DeepSupervisionLoss Dice DiceCELoss DiceFocalLoss DiceLoss DiffusionLoss FocalLoss GeneralizedDiceFocalLoss
    GeneralizedDiceLoss GeneralizedWassersteinDiceLoss GlobalMutualInformationLoss HausdorffDTLoss JukeboxLoss
    LocalNormalizedCrossCorrelationLoss LogHausdorffDTLoss MCCLoss MaskedDiceLoss MaskedLoss MultiScaleLoss NACLLoss
    PatchAdversarialLoss SSIMLoss SURELoss SoftDiceclDiceLoss SoftclDiceLoss TverskyLoss

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
    SlidingWindowSplitter VQVAETransformerInferer

    AbsoluteVolumeDifferenceMetric AveragePrecisionMetric CalibrationErrorMetric ConfusionMatrixMetric CumulativeAverage
    DiceMetric EmbeddingCollapseMetric FBetaScore FIDMetric GeneralizedDiceScore HausdorffDistanceMetric
    LabelQualityScore LossMetric MAEMetric MAPEMetric MMDMetric MSEMetric MeanIoU MultiScaleSSIMMetric PSNRMetric
    PanopticQualityMetric RMSEMetric ROCAUCMetric SSIMMetric SurfaceDiceMetric SurfaceDistanceMetric VarianceMetric

    AdversarialTrainer DiffusionPrepareBatch EnsembleEvaluator GanTrainer PrepareBatchDefault PrepareBatchExtraInput
    SupervisedEvaluator SupervisedTrainer VPredictionPrepareBatch

    ExponentialLR LinearLR Novograd WarmupCosineSchedule

    COCOMetric CSVDataset CSVIterableDataset DecathlonDataset Interaction MedNISTDataset Relabeld RetinaNet
    RetinaNetDetector TorchVisionFCModel VistaPostTransformd VistaPreTransformd resnet_fpn_feature_extractor
    AnchorGeneratorWithAnchorShape AutoencoderKlMaisi ControlNetMaisi DiffusionModelUNetMaisi
    """
)

_COMPONENTS = {
    "torch.nn.parallel": "DistributedDataParallel",
    "torch.utils.data": """
        BatchSampler ConcatDataset DataLoader Dataset RandomSampler SequentialSampler Subset SubsetRandomSampler
        TensorDataset WeightedRandomSampler
        """,
    "torch.utils.data.distributed": "DistributedSampler",
    "torch": "device",
    "torch.amp": "GradScaler",
    "torchvision.models": """
        densenet121 densenet169 densenet201 efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3
        mobilenet_v2 mobilenet_v3_large mobilenet_v3_small resnet18 resnet34 resnet50 resnet101 resnet152
        resnext50_32x4d swin_t vgg16 vit_b_16 wide_resnet50_2 convnext_tiny
        """,
    "torch.cuda.amp": "GradScaler",
    "ignite.metrics": """
        Accuracy Average AveragePrecision ClassificationReport CohenKappa ConfusionMatrix Fbeta Loss MeanAbsoluteError
        MeanPairwiseDistance MeanSquaredError PSNR Precision ROC_AUC Recall RootMeanSquaredError RunningAverage SSIM
        TopKCategoricalAccuracy
        """,
    "ignite.handlers": """
        CosineAnnealingScheduler EarlyStopping LinearCyclicalScheduler PiecewiseLinear TerminateOnNan
        """,
    "medfl.datasets": "CheckPatchd ReadPaird ReadPixelsd ReadVolumed WriteClassesd WriteMaskd",
    "medfl.networks": "build",
    "medfl.exported": "network",
    "medfl.medsam": "BoxOfMaskd load",
}
COMPONENTS = paths_of(_COMPONENTS)
"""Listed components of other packages; beside them every module of torch.nn, optimiser and learning rate scheduler."""

WRITERS = name_set(
    """
    CacheNTransDataset CheckpointSaver ClassificationSaver GDSDataset LMDBDataset LogfileHandler MetricsSaver
    PersistentDataset ProbMapProducer SaveClassification SaveImage TensorBoardImageHandler TensorBoardStatsHandler
    WriteClasses WriteFileMapping WriteMask
    """
)
"""Components that write files; medfl never makes them for a bundle (the ending of those for dictionaries left out)."""

TRUST_INDICES = name_set(
    """
    CTCLoss CircularPad1d CircularPad2d CircularPad3d EmbeddingBag MultiLabelMarginLoss MultiMarginLoss LazyConv1d
    LazyConv2d LazyConv3d LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d LazyLinear
    """
)
"""Modules of PyTorch that read where their inputs and sizes point to, in memory of others too."""

LOADS_WEIGHTS = frozenset(
    {"EfficientNetBN", "EfficientNetBNFeatures", "MILModel", "ResNetFeatures"}
)
"""Networks that fetch weights unless told `pretrained: false`."""


def without_ending(name: str) -> str:
    """Return the name of a component without the ending of those for dictionaries."""
    for ending in ("Dict", "d", "D"):
        if name.endswith(ending) and name.removesuffix(ending) in TRANSFORMS | WRITERS:
            return name.removesuffix(ending)
    return name


_REMOVED: dict[str, tuple[str, dict[str, object]]] = {
    "AddChannel": ("EnsureChannelFirst", {"channel_dim": "no_channel"}),
    "AsChannelFirst": ("EnsureChannelFirst", {"channel_dim": -1}),
    "SplitChannel": ("SplitDim", {"dim": 0}),
    "IgniteMetric": ("IgniteMetricHandler", {}),
}
"""Components that MONAI has removed: what does the same now, and what it is told for that."""


def replace_removed(node: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a component that MONAI has removed as the one that does the same now; any other as it is."""
    match = re.fullmatch(
        rf"(?:monai\.[\w.]*)?({'|'.join(_REMOVED)})(d|D|Dict)?", str(node.get("_target_")), re.ASCII
    )
    if match is None:
        return node
    new, arguments = _REMOVED[match[1]]
    renamed = {}
    for key, value in node.items():
        name = "dim" if (new, key) == ("SplitDim", "channel_dim") else key
        renamed[name] = value
    return {**arguments, **renamed, "_target_": new + (match[2] or "")}


# Arguments with a meaning of their own, whoever takes them

TORCHVISION = name_set(
    "CenterCrop ColorJitter GaussianBlur Grayscale Normalize Pad RandomAffine RandomGrayscale RandomHorizontalFlip "
    "RandomRotation RandomVerticalFlip Resize"
)
"""What `name` of TorchVision and RandTorchVision may say: it is looked up in torchvision."""

READERS = name_set(
    """
    ITKReader NibabelReader NrrdReader NumpyReader PILReader PydicomReader WSIReader itkreader nibabelreader nrrdreader
    numpyreader pilreader pydicomreader wsireader cucim cuCIM openslide OpenSlide tifffile TiffFile
    ITKWriter NibabelWriter PILWriter itkwriter nibabelwriter pilwriter AvgMerger
    """
)
"""What `reader`, `writer` and `merger_cls` may name: MONAI imports and calls anything else that they say."""

_NETWORK = re.compile(
    r"(densenet|efficientnet[-_][bv]|resnet|resnext|wide_resnet|vgg|vit_|swin_|convnext_|mobilenet_v|inception_v3)\w*"
)
"""What `model_name` may say: it is looked up among torchvision's networks, and called."""
TABLE_ARGUMENTS = (
    "sep", "delimiter", "header", "names", "index_col", "usecols", "dtype", "skiprows", "nrows", "encoding",
    "na_values",
)  # fmt: skip
"""What the reading of a CSV file may be told beside its path."""

_READING = name_set(
    "ITKReader ImageDataset LoadImage MaskedPatchWSIDataset NibabelReader NrrdReader NumpyReader PILReader "
    "PatchWSIDataset PydicomReader SlidingPatchWSIDataset WSIReader"
)
"""Components that hand what they do not know on to a reader, and a reader to what opens the file."""
_READING_ARGUMENTS = name_set(
    """
    additional_meta_keys affine_lps_to_ras allow_missing_keys allow_pickle as_closest_canonical backend center_location
    channel_dim converter data device dtype ensure_channel_first expanduser filter_fn fname_regex force image_files
    image_only include_label index_order keys label_dict label_transform labels level mask_level meta_key_postfix
    meta_keys mode mpp mpp_atol mpp_rtol npz_keys offset offset_limits overlap overwriting pad_mode patch_level
    patch_size power power_atol power_rtol prune_meta_pattern prune_meta_sep prune_metadata reader reverse_indexing seed
    seg_files seg_transform series_meta series_name simple_keys squeeze_non_spatial_dims swap_ij to_gpu transform
    transform_with_metadata
    """
)
"""What MONAI's readers and these take themselves: anything else says how a file is opened, as `mmap_mode: r+` does."""
SPECIAL_KEYS = ("_target_", "_disabled_", "_requires_", "_desc_", "_mode_")
"""Keys of a component that are not its arguments."""
PLACES = frozenset({"src", "npzfile", "root_dir", "load_path", "weights", "path"})
"""Arguments that name a file or folder, where they are texts or paths."""
_SWITCHES = ("download", "pretrained", "allow_pickle", "trust_remote_code", "expanduser", "fused")


def why_argument_refused(name: str, value: object, has_url: bool | None = None) -> str:
    """Return why an argument may not have this value (a literal, `...` where it is computed), "" if it may.

    `has_url` says whether one of its texts is a URL, where that is known.
    """
    if name in ("reader", "writer", "merger_cls"):
        readers = value if isinstance(value, list | tuple) else [value]
        if not all(reader is None or _is_reader(reader) for reader in readers):
            return f"argument {name!r} names what is imported and called: only readers and writers of MONAI can be"

    if name in _SWITCHES and value is not False and value is not None:
        return f"argument {name!r} can only be false here"
    if name != "data" and ("://" in _texts(value) if has_url is None else has_url):
        return f"argument {name!r} is a URL: nothing is fetched"
    if name == "weights_only" and value is not True:
        return "argument 'weights_only' can only be true here: nothing is unpickled"
    if name == "origin" or (name == "mode" and value in ("circular", "empty")):
        return f"argument {name!r}, by which memory of others is read"
    if name == "device" and "meta" in str(value):
        return "the device 'meta', whose tensors have no memory: others read that of others for it"
    if (
        name in ("pickle_module", "model_url", "pretrained_url", "pretrained_path")
        and value is not None
    ):
        return f"argument {name!r} cannot be given here: nothing is fetched and nothing unpickled"

    return ""


def why_component_refused(name: str, arguments: Mapping[str, object]) -> str:
    """Return why a listed component may not have these arguments, "" if it may: each by itself is checked apart.

    The name is without its module; arguments are literals, a computed one is a text that begins with `$` or `@`.
    """
    if name in LOADS_WEIGHTS and arguments.get("pretrained", True) not in (False, None):
        return f"{name} without 'pretrained: false', which would fetch weights"
    if (
        without_ending(name).endswith("TorchVision")
        and str(arguments.get("name")) not in TORCHVISION
    ):
        return f"{name} of {printable(arguments.get('name'))!r}, which is not on the list"

    # MONAI's default, where no name is given.
    model = str(arguments.get("model_name", "resnet18"))
    if name == "TorchVisionFCModel" and not _NETWORK.fullmatch(model):
        return f"{name} of {printable(model)!r}, which is none of torchvision's networks"
    if (name == "TorchVisionFCModel" or _NETWORK.fullmatch(name)) and arguments.get(
        "weights"
    ) is not None:
        return f"{name} with 'weights', which would be fetched"

    further = {*map(str, arguments)} - _READING_ARGUMENTS - {*SPECIAL_KEYS}
    if further and without_ending(name) in _READING:
        return f"{name} with {printable(min(further))!r}, which would say how a file is opened"

    # A reference or expression equals no option's name, so it is refused too.
    options = arguments.get("kwargs_read_csv") or {}
    further = {*map(str, options if isinstance(options, Mapping) else [options])}
    further -= {*TABLE_ARGUMENTS}
    if further:
        return f"{name} with {printable(min(further))!r}, which reading a CSV file is not told here"

    return ""


def _texts(value: object) -> str:
    """Return all texts and paths of a value, joined."""
    if isinstance(value, str | PurePath):
        return str(value)

    # Keys too: an argument may be handed on by its name.
    if isinstance(value, Mapping):
        value = [*value, *value.values()]

    if isinstance(value, list | tuple | set | frozenset):
        return "\n".join(map(_texts, value))

    return ""


def _is_reader(value: object) -> bool:
    """Tell whether a value is a reader's listed name, or a reader or writer that a listed component made."""
    if isinstance(value, str):
        return value.removeprefix("$monai.data.") in READERS
    # Here: text is judged without the seconds that MONAI takes to import.
    from monai.data import ImageReader, ImageWriter

    return isinstance(value, ImageReader | ImageWriter)
