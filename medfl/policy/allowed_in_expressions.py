"""What the expressions of a bundle's configuration may name: built-in functions, members of modules, and methods.

As in `medfl.policy.allowed` the names are gathered from what bundles of the public zoo use.
"""

from __future__ import annotations

from medfl.policy.allowed import name_set, paths_of

BUILTINS = name_set(
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
    "operator": "eq ge gt le lt ne",
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
    "torch.distributed": "get_rank get_world_size is_available is_initialized",
    "torch.nn.functional": """
        adaptive_avg_pool2d adaptive_avg_pool3d affine_grid avg_pool2d avg_pool3d gelu interpolate
        leaky_relu log_softmax max_pool2d max_pool3d normalize one_hot pad relu sigmoid softmax
        """,
    "ignite.engine.Events": """
        COMPLETED EPOCH_COMPLETED EPOCH_STARTED ITERATION_COMPLETED ITERATION_STARTED STARTED
        """,
    "monai.apps.pathology.handlers.utils": "from_engine_hovernet",
    "monai.auto3dseg.utils": "datafold_read",
    "monai.data": """
        Dataset decollate_batch ITKReader list_data_collate load_decathlon_datalist NibabelReader NrrdReader NumpyReader
        pad_list_data_collate partition_dataset partition_dataset_classes PILReader PydicomReader
        select_cross_validation_folds
        """,
    "monai.data.utils": "list_data_collate no_collation pad_list_data_collate partition_dataset",
    "monai.engines": "default_metric_cmp_fn default_prepare_batch",
    "monai.handlers": "from_engine",
    "monai.networks": "copy_model_state normal_init",
    "monai.networks.nets": "vista3d132",
    "monai.networks.utils": "copy_model_state",
    "monai.utils": "ensure_tuple ensure_tuple_rep first set_determinism",
    "monai.transforms": "concatenate",
    "monai.utils.misc": "first",
    "monai.utils.CommonKeys": "IMAGE LABEL LOSS METADATA PRED",
    "medfl.datasets": "datalist locate unlabelled",
    "medfl.datasets.own": "above labelled listed paired",
}
MEMBERS = paths_of(_MEMBERS) | {"datetime.datetime"}
"""Functions, classes and constants of modules, by their full path."""
OLDER = frozenset({"numpy.bool", "numpy.float", "numpy.int"})
"""Members that an older NumPy had; `medfl.bundle.zoo.compatibility` gives it those back that it lacks."""
MEMBERS |= OLDER

TORCH_FUNCTIONS = name_set(
    """
    abs absolute acos add addcdiv addcmul addmm all allclose amax amin aminmax angle any arange arctan2 argmax argmin
    argsort argwhere asin atan atan2 baddbmm bernoulli bincount bitwise_and bitwise_not bitwise_or bitwise_xor bmm
    broadcast_to bucketize cat ceil chunk clamp clamp_max clamp_min clip clone column_stack combinations complex concat
    concatenate conj copysign corrcoef cos cosh cosine_similarity count_nonzero cov cross cummax cummin cumprod cumsum
    deg2rad det detach diag diag_embed diagonal diff dist div divide dot dropout eq equal erf erfc erfinv exp exp2
    expm1 eye fix flatten flip fliplr flipud floor floor_divide fmax fmin fmod frac from_numpy full full_like gather ge
    greater greater_equal gt heaviside histc hstack hypot imag index_add index_fill index_select inner inverse isclose
    isfinite isin isinf isnan isreal is_complex is_floating_point kron kthvalue lcm le lerp less less_equal linspace log
    log10 log1p log2 log_softmax logaddexp logical_and logical_not logical_or logical_xor logit logspace logsumexp lt
    masked_fill masked_select matmul matrix_power max maximum mean median min minimum mm mode moveaxis mul multinomial
    multiply mv nan_to_num nanmean nanmedian nanquantile nansum narrow ne neg negative nonzero normal not_equal numel
    ones ones_like outer pairwise_distance permute poisson polar positive pow prod quantile rad2deg rand rand_like
    randint randint_like randn randn_like randperm ravel real reciprocal relu remainder repeat_interleave reshape roll
    rot90 round rsqrt scalar_tensor scatter scatter_add searchsorted select sgn sigmoid sign signbit sin sinc sinh
    softmax sort sqrt square squeeze stack std std_mean sub subtract sum swapaxes swapdims t take take_along_dim tan
    tanh tensor tensor_split threshold tile topk trace transpose tril triu true_divide trunc unbind unflatten unsqueeze
    vander var var_mean vdot view_as_complex view_as_real vstack where xlogy zeros zeros_like
    """
)
"""Functions of `torch` that make a tensor of its own from others, and check sizes and indices before they touch memory.

Left out: what changes its argument (`add_`), looks at memory as something else (`frombuffer`, `as_strided`, `asarray`),
trusts indices that it is given (`sparse_coo_tensor`, `embedding_bag`; `grid_sample` infinite ones), and the backends'
own (`mkldnn_...`).
"""

_NEED_PERMISSION = {
    "distributed": """
        torch.distributed.init_process_group torch.distributed.destroy_process_group torch.cuda.set_device
        """,
    "pickle": "torch.load torch.jit.load",
    "sys.path": "sys.path.append sys.path.insert",
}
PERMISSION_OF: dict[str, str] = {}
for _permission, _members in _NEED_PERMISSION.items():
    PERMISSION_OF |= dict.fromkeys(_members.split(), _permission)
"""Members that need a permission of the site's policy, and which."""

MODULES = frozenset(path.partition(".")[0] for path in MEMBERS)
"""The packages of these; Python of a bundle's own may not take their names."""

_METHODS_OF = {
    "text": """
        count endswith find format index isalpha isdigit join lower lstrip partition removeprefix removesuffix replace
        rfind rpartition rsplit rstrip split splitlines startswith strip title upper zfill
        """,
    "list": "copy count index pop reverse sort",
    "tuple": "count index",
    "dict": "copy get items keys pop setdefault update values",
    "set": "add copy difference intersection issubset issuperset union update",
    "number": "imag is_integer real",
    "path": """
        absolute as_posix exists glob is_absolute is_dir is_file iterdir joinpath name parent parents parts read_text
        relative_to resolve rglob stem suffix suffixes with_name with_suffix
        """,
    "file": "close read readline readlines",
    "time": "date day hour isoformat microsecond minute month second strftime time year",
    "random": "choice integers normal permutation rand randint randn random sample shuffle uniform",
    "table": """
        columns dropna head iloc index isin loc reset_index shape size sort_values tail to_dict to_list to_numpy tolist
        unique values
        """,
    "tensor": """
        abs all any argmax argmin array astype bool clamp clip clone contiguous copy cpu cuda cumsum detach device dim
        double dtype expand flatten flip float half index_select int is_cuda item long max mean median meta min ndim
        ndimension nonzero numel numpy permute prod requires_grad reshape round shape sigmoid size softmax
        squeeze std sum swapaxes T t to tolist transpose type type_as unique unsqueeze view
        """,
    "network": """
        apply attention bias children classifier cpu cuda decoder double encoder eval fc features float half head
        load_old_state_dict load_state_dict modules named_children named_parameters network parameters
        set_atss_matcher set_balanced_sampler set_box_coder_weights set_box_regression_loss
        set_box_selector_parameters set_cls_loss set_hard_negative_sampler set_regular_matcher
        set_sliding_window_inferer set_target_keys state_dict to train weight
        """,
    "device": "index type",
    "picture": "convert crop height mode resize size width",
    "component": """
        attention batch batch_size data dataset decoder disable_share_memory_cache encoder epoch epoch_length
        get_last_lr head iteration max_epochs metrics output param_groups set_random_state state state_dict step
        transform transforms
        """,
}
METHODS_OF = {kind: name_set(names) for kind, names in _METHODS_OF.items()}
"""What expressions may ask of a value, by the kind of the value; a path can only be looked at, never changed."""
METHODS = frozenset().union(*METHODS_OF.values())
"""All of them: what an inspection, which knows no values, lets pass."""
