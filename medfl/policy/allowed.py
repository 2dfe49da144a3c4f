"""What a bundle's configuration may name: components for `_target_`; names, members and methods for expressions.

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
    ThresholdIntensity ToDevice ToMetaTensor ToNumpy ToTensor TorchVision Transpose VoteEnsemble Zoom RandTorchVision
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

    CSVDataset CSVIterableDataset TorchVisionFCModel
    COCOMetric Interaction RetinaNet RetinaNetDetector resnet_fpn_feature_extractor
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
COMPONENTS = frozenset(f"{module}.{name}" for module, names in _COMPONENTS.items() for name in names.split())
"""Listed components of other packages; beside them every module of torch.nn, optimiser and learning rate scheduler."""

WRITERS = _names(
    """
    CacheNTransDataset CheckpointSaver ClassificationSaver GDSDataset LMDBDataset LogfileHandler MetricsSaver
    PersistentDataset ProbMapProducer SaveClassification SaveImage TensorBoardImageHandler TensorBoardStatsHandler
    WriteClasses WriteFileMapping WriteMask
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

TORCHVISION = _names(
    "CenterCrop ColorJitter GaussianBlur Grayscale Normalize Pad RandomAffine RandomGrayscale RandomHorizontalFlip "
    "RandomRotation RandomVerticalFlip Resize"
)
"""What `name` of TorchVision and RandTorchVision may say: it is looked up in torchvision."""

READERS = _names(
    """
    ITKReader NibabelReader NrrdReader NumpyReader PILReader PydicomReader WSIReader itkreader nibabelreader nrrdreader
    numpyreader pilreader pydicomreader wsireader cucim cuCIM openslide OpenSlide tifffile TiffFile
    ITKWriter NibabelWriter PILWriter itkwriter nibabelwriter pilwriter AvgMerger
    """
)
"""What `reader`, `writer` and `merger_cls` may name: MONAI imports and calls anything else that they say."""

_NETWORK = re.compile(
    r"(densenet|efficientnet[-_][bv]|resnet|resnext|wide_resnet|vgg|vit_|swin_|convnext_|mobilenet_v)\w*"
)
"""What `model_name` may say: it is looked up among torchvision's networks, and called."""
TABLE_ARGUMENTS = (
    "sep", "delimiter", "header", "names", "index_col", "usecols", "dtype", "skiprows", "nrows", "encoding",
    "na_values",
)  # fmt: skip
"""What the reading of a CSV file may be told beside its path."""

PLACES = frozenset({"src", "npzfile", "root_dir", "load_path", "weights", "path"})
"""Arguments that name a file or folder, where they are texts or paths."""
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
    if name != "data" and "://" in _texts(value):
        return f"argument {name!r} is a URL: nothing is fetched"
    if name == "weights_only" and value is not True:
        return "argument 'weights_only' can only be true here: nothing is unpickled"
    if name in ("pickle_module", "model_url", "pretrained_url", "pretrained_path") and value is not None:
        return f"argument {name!r} cannot be given here: nothing is fetched and nothing unpickled"
    return ""


def component_refused(name: str, arguments: Mapping[str, Any]) -> str:
    """Return why a listed component may not have these arguments, "" if it may: each by itself is checked apart.

    Args:
        name: of the component, without its module.
        arguments: literals; a computed one is a text that begins with `$` or `@`.
    """
    if name in WEIGHTS_OF_THEIR_OWN and arguments.get("pretrained", True) not in (False, None):
        return f"{name} without 'pretrained: false', which would fetch weights"
    if without_ending(name).endswith("TorchVision") and arguments.get("name") not in TORCHVISION:
        return f"{name} of {printable(arguments.get('name'))!r}, which is not on the list"
    model = str(arguments.get("model_name", "resnet18"))
    if name == "TorchVisionFCModel" and not _NETWORK.fullmatch(model):
        return f"{name} of {printable(model)!r}, which is none of torchvision's networks"
    if (name == "TorchVisionFCModel" or _NETWORK.fullmatch(name)) and arguments.get("weights") is not None:
        return f"{name} with 'weights', which would be fetched"
    if others := set(arguments.get("kwargs_read_csv") or ()) - set(TABLE_ARGUMENTS):
        return f"{name} with {printable(min(others))!r}, which reading a CSV file is not told here"
    return ""


def _texts(value: object) -> str:
    """Return all texts and paths of a value, joined."""
    if isinstance(value, str | PurePath):
        return str(value)
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    return "\n".join(map(_texts, value)) if isinstance(value, list | tuple | set | frozenset) else ""


def _is_reader(value: object) -> bool:
    """Tell whether a value is a reader's listed name, or a reader or writer that a listed component made."""
    if isinstance(value, str):
        return value in READERS
    from monai.data import ImageReader, ImageWriter

    return isinstance(value, ImageReader | ImageWriter)


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
    "os": "getcwd listdir sep",
    "os.path": "abspath basename dirname exists isdir isfile join splitext",
    "pathlib": "Path",
    "pandas": "read_csv",
    "scipy.ndimage": "binary_dilation binary_erosion binary_fill_holes gaussian_filter label zoom",
    "numpy": """
        all any arange argmax argmin argsort array asarray bool_ clip concatenate expand_dims eye flip float16 float32
        float64 inf int8 int16 int32 int64 linspace max mean median min moveaxis nan ones pad percentile pi prod
        quantile round squeeze stack std sum transpose uint8 uint16 unique where zeros
        """,
    "skimage.measure": "label",
    "random": "choice randint sample seed shuffle uniform",
    "numpy.random": "RandomState choice default_rng permutation rand randint randn seed shuffle",
    "torch": """
        bfloat16 bool device float float16 float32 float64 FloatTensor half int int8 int16 int32 int64 long LongTensor
        Tensor uint8
        """,
    "torch.cuda": "device_count is_available",
    "torch.nn.functional": """
        adaptive_avg_pool2d adaptive_avg_pool3d affine_grid avg_pool2d avg_pool3d gelu grid_sample interpolate
        leaky_relu log_softmax max_pool2d max_pool3d normalize one_hot pad relu sigmoid softmax
        """,
    "ignite.engine.Events": """
        COMPLETED EPOCH_COMPLETED EPOCH_STARTED ITERATION_COMPLETED ITERATION_STARTED STARTED
        """,
    "monai.apps.pathology.handlers.utils": "from_engine_hovernet",
    "monai.auto3dseg.utils": "datafold_read",
    "monai.data": """
        Dataset decollate_batch list_data_collate load_decathlon_datalist pad_list_data_collate
        partition_dataset partition_dataset_classes select_cross_validation_folds
        """,
    "monai.data.utils": "list_data_collate no_collation pad_list_data_collate partition_dataset",
    "monai.engines": "default_metric_cmp_fn default_prepare_batch",
    "monai.handlers": "from_engine",
    "monai.networks": "copy_model_state normal_init",
    "monai.networks.nets": "vista3d132",
    "monai.networks.utils": "copy_model_state",
    "monai.utils": "ensure_tuple ensure_tuple_rep first set_determinism",
    "monai.utils.CommonKeys": "IMAGE LABEL LOSS METADATA PRED",
    "medfl.datasets": "datalist locate unlabelled",
    "medfl.datasets.own": "above labelled listed paired",
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

MODULES = frozenset(path.partition(".")[0] for path in MEMBERS)
"""The packages of these; Python of a bundle's own may not take their names."""

METHODS_OF = {
    "text": _names(
        """
        count endswith find format index isalpha isdigit join lower lstrip partition removeprefix removesuffix replace
        rfind rpartition rsplit rstrip split splitlines startswith strip title upper zfill
        """
    ),
    "list": _names("copy count index pop reverse sort"),
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
    "random": _names("choice integers normal permutation rand randint randn random sample shuffle uniform"),
    "table": _names(
        """
        columns dropna head iloc index isin loc reset_index shape size sort_values tail to_dict to_list to_numpy tolist
        unique values
        """
    ),
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
        apply attention bias children classifier cpu cuda decoder double encoder eval fc features float half head
        load_old_state_dict load_state_dict modules named_children named_parameters network parameters
        set_atss_matcher set_balanced_sampler set_box_coder_weights set_box_regression_loss
        set_box_selector_parameters set_cls_loss set_hard_negative_sampler set_regular_matcher
        set_sliding_window_inferer set_target_keys state_dict to train weight
        """
    ),
    "device": _names("index type"),
    "picture": _names("convert crop height mode resize size width"),
    "component": _names(
        """
        attention batch batch_size data dataset decoder encoder epoch epoch_length get_last_lr head iteration max_epochs
        metrics output param_groups
        set_random_state state state_dict step transform transforms
        """
    ),
}
"""What expressions may ask of a value, by the kind of the value; a path can only be looked at, never changed."""
METHODS = frozenset().union(*METHODS_OF.values())
"""All of them: what an inspection, which knows no values, lets pass."""
