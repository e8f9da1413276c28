"""The operations of torch that a saved network may have, by name and overload. All others are refused.

An operation is on the list if it returns new tensors or views, reads no memory but that of its arguments for any value
of them, and reads no memory that was not written: either its kernels for the processor check sizes and indices
themselves, or `operation_checks.py` does. Left out, although models may use them: grid_sample (converts coordinates to
integers without a check), max_unpool and all backward operations (trust indices), embedding_bag (trusts offsets),
segment_reduce, as_strided, empty and its kin (memory that was not written), batch_norm's inner operations (trust the
sizes of the statistics), lstm.data and its kin (trust batch sizes), sparse and quantized tensors, and operations whose
result has a size that depends on numbers (nonzero, masked_select, unique, bincount, repeat_interleave of a tensor).
tests/api/serving/test_allowed_operations.py compares the list with the operations of the installed torch.
"""

from __future__ import annotations

from collections.abc import Mapping

# Each number of the result depends on the numbers at the same place: sizes are checked by torch's TensorIterator.
_BY_ELEMENT = """
    abs absolute acos acosh add:Tensor,Scalar addcdiv addcmul alpha_dropout angle arctan arctan2 asin asinh atan
    atan2 atanh binary_cross_entropy binary_cross_entropy_with_logits bitwise_and:Tensor,Scalar,Scalar_Tensor
    bitwise_left_shift:Tensor,Tensor_Scalar bitwise_not bitwise_or:Tensor,Scalar,Scalar_Tensor
    bitwise_right_shift:Tensor,Tensor_Scalar bitwise_xor:Tensor,Scalar,Scalar_Tensor ceil celu
    clamp:default,Tensor clamp_max:default,Tensor clamp_min:default,Tensor clip:default,Tensor complex conj copy
    cos cosh div:Tensor,Scalar,Tensor_mode,Scalar_mode divide:Tensor,Scalar,Tensor_mode,Scalar_mode dropout elu
    eq:Tensor,Scalar erf erfc erfinv exp exp2 expm1 feature_alpha_dropout feature_dropout fill:Scalar,Tensor
    floor floor_divide:default,Scalar fmax fmin fmod:Tensor,Scalar frac ge:Tensor,Scalar gelu
    greater:Tensor,Scalar greater_equal:Tensor,Scalar gt:Tensor,Scalar hardshrink hardsigmoid hardswish hardtanh
    huber_loss imag isclose isfinite isin:Tensor_Tensor,Tensor_Scalar isinf isnan kl_div l1_loss
    le:Tensor,Scalar leaky_relu lerp:Scalar,Tensor less:Tensor,Scalar less_equal:Tensor,Scalar lgamma log log10
    log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit
    lt:Tensor,Scalar masked_fill:Scalar,Tensor maximum minimum mish mse_loss mul:Tensor,Scalar
    multiply:Tensor,Scalar nan_to_num ne:Tensor,Scalar neg negative not_equal:Tensor,Scalar
    pow:Tensor_Tensor,Tensor_Scalar,Scalar prelu real reciprocal relu relu6
    remainder:Tensor,Scalar,Scalar_Tensor resolve_conj resolve_neg round:default,decimals rrelu rsqrt
    rsub:Tensor,Scalar selu sigmoid sign silu sin sinc sinh smooth_l1_loss softplus softshrink special_expit
    special_xlogy sqrt square sub:Tensor,Scalar subtract:Tensor,Scalar tan tanh threshold
    true_divide:Tensor,Scalar trunc where:self,ScalarSelf,ScalarOther,Scalar
    xlogy:Tensor,Scalar_Self,Scalar_Other zero
"""
# Dimensions are checked; the result is not larger than the argument.
_OVER_DIMENSIONS = """
    all:default,dim,dims amax amin any:default,dim,dims argmax argmin argsort:default,stable cosine_similarity
    count_nonzero:default,dim_IntList cummax cummin cumprod cumsum diff glu linalg_matrix_norm linalg_norm
    linalg_vecdot linalg_vector_norm log_softmax:int logcumsumexp logsumexp max:default,dim,other
    mean:default,dim median:default,dim min:default,dim,other
    norm:Scalar,ScalarOpt_dim,ScalarOpt_dim_dtype,ScalarOpt_dtype norm_except_dim pairwise_distance
    prod:default,dim_int softmax:int sort:default,stable std:default,dim,correction
    std_mean:default,dim,correction sum:default,dim_IntList topk var:default,dim,correction
    var_mean:default,dim,correction
"""
# Shapes, strides and order: views within the argument's memory, and copies.
_SHAPES = """
    alias atleast_1d atleast_2d atleast_3d broadcast_to cat channel_shuffle chunk clone column_stack concat
    concatenate constant_pad_nd contiguous detach diag diag_embed diagonal diagonal_scatter dstack expand
    expand_as flatten:using_ints flip fliplr flipud hstack lift_fresh_copy mT meshgrid:default,indexing
    moveaxis:int,intlist movedim:int,intlist narrow:default pad permute pixel_shuffle pixel_unshuffle ravel
    reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave:self_int replication_pad1d
    replication_pad2d replication_pad3d reshape reshape_as roll select:int select_scatter slice:Tensor
    slice_scatter split:Tensor,sizes split_with_sizes squeeze:default,dim,dims stack swapaxes swapdims sym_numel
    sym_size:int t tensor_split:sections,indices tile to:dtype,dtype_layout,device,other _to_copy transpose:int
    tril triu type_as unbind:int unflatten:int unfold _unsafe_view unsqueeze view view_as view_as_complex
    view_as_real vstack
"""
# New tensors whose numbers are all written.
_FACTORIES = """
    arange:default,start,start_step eye:default,m full full_like linspace new_full new_ones new_zeros one_hot
    ones ones_like rand rand_like randn randn_like scalar_tensor tril_indices triu_indices zeros zeros_like
"""
_PRODUCTS = """
    addmm addmv baddbmm bilinear bmm cdist cross dot einsum inner linalg_matmul linear matmul mm mv outer
    tensordot vdot
"""
# Kernels that compare every index with the size (an index out of range raises an error).
_INDICES = """
    bucketize:Tensor embedding gather index:Tensor index_add index_copy index_fill:int_Scalar,int_Tensor
    index_put index_select masked_scatter scatter:src,value,reduce,value_reduce scatter_add scatter_reduce:two
    searchsorted:Tensor take take_along_dim
"""
_LAYERS = """
    adaptive_avg_pool1d adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d batch_norm
    conv1d:default,padding conv2d:default,padding conv3d:default,padding conv_transpose1d conv_transpose2d:input
    conv_transpose3d:input convolution fft_fft fft_fft2 fft_ifft fft_ifft2 fft_irfft fft_irfft2 fft_rfft
    fft_rfft2 group_norm gru:input gru_cell instance_norm layer_norm lstm:input lstm_cell max_pool1d max_pool2d
    max_pool3d _native_batch_norm_legit_no_training rms_norm rnn_relu:input rnn_relu_cell rnn_tanh:input
    rnn_tanh_cell scaled_dot_product_attention upsample_bicubic2d:default,vec upsample_bilinear2d:default,vec
    upsample_linear1d:default,vec upsample_nearest1d:default,vec upsample_nearest2d:default,vec
    upsample_nearest3d:default,vec upsample_trilinear3d:default,vec _weight_norm
"""


def _overloads(*lists: str) -> Mapping[str, frozenset[str]]:
    words = [word.partition(":") for text in lists for word in text.split()]
    return {name: frozenset(overloads.split(",") if colon else ["default"]) for name, colon, overloads in words}


ALLOWED = _overloads(_BY_ELEMENT, _OVER_DIMENSIONS, _SHAPES, _FACTORIES, _PRODUCTS, _INDICES, _LAYERS)


def allowed_names() -> list[str]:
    """All names as a graph has them: aten.NAME.OVERLOAD."""
    return sorted(f"aten.{name}.{overload}" for name, overloads in ALLOWED.items() for overload in overloads)
