"""The op table: what ops do, where neither their schemas nor their tags say it.

A row names ops, the kind under which costs list them (``-`` for none of its own), and what holds of them:

====================  =====================================================================================
``product``           Sums products of elements of two arguments, which have one dtype.
``library``           Products that a library's kernel computes, under a compiler, too, and rounds as it stores them.
``multiplies``        Multiplies matrices, as precisely as modes of torch say.
``cudnn``             May be computed by cuDNN, or by oneDNN's convolutions, as their modes say.
``once``              Rounds once, so that where it overflows does not depend on the kernel.
``moves``             Returns numbers of its arguments, or their negatives, or constants: it does not round.
``copies``            Returns its argument as it is, or a copy of it.
``selects``           Returns elements of one argument alone, up to the dtype.
``replaces``          Returns its first argument with a part of it replaced.
``uncached``          Torch's fake mode must not cache its results: it would return two tensors for the one that the op
                      returns twice, and one at the beginning of its memory where the op returns part of another.
``decides``           Maps many values to few: a comparison, a rounding, a sort.
``cancels``           Sums that may cancel within the call: what is left is how its arguments round.
``casts``             Changes the dtype or the place, and keeps integers as they are.
``counts``            Its whole numbers are as large as its arguments say.
``lenient``           Accepts any integers, although it is not elementwise.
``bounded``           Its indices lie within the dimension that they index, which a compiled function checks too late.
``divides``           A division, which a host does not do by an integer zero.
``checks``            Checks numbers of any dtype, or reads memory where they say.
``untagged``          Elementwise, though torch does not tag it so, or makes a value of nothing.
``one_pass``          A kernel computes it in one pass over its arguments, or two.
``normalizes``        Normalizes an argument, and returns its mean, if it takes one, and 1 / deviation after the result.
``shapeless``         Shapes of its arguments say nothing to it but which dimensions are alike.
``by_place``          Makes each element for the one at its place in an argument, though torch does not tag it so.
``fresh``             Makes a tensor like an argument, of which it reads no number.
``zeros``             Makes zeros.
``puts``              Writes a value into a tensor; it may be a number on the host.
``lifts``             Makes a tensor of a program from one that a literal such as ``torch.tensor([1, 2])`` made.
``asks``              Asks for a number on the host.
``masks``             Its indices may be masks: then the shape of its result, or which elements it writes, is not known.
``statistics``        Writes running statistics, unless it is told that it does not train; its schema need not say so.
``lists``             Does the same for each tensor of its lists.
``by_row``            Computes each row of its results, along the first dimension, from the same row of its arguments.
====================  =====================================================================================

A name with ``*`` stands for all that match it, and an op in place has the rows of the one out of place.
An op has what all of its rows say, and the kind of the longest name. What has no row has none of this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

__all__ = ["OpRow", "row_of"]

_TABLE = """
mm addmm bmm                                matmul         product library once
baddbmm                                     matmul         product library
addbmm mv addmv dot                         matmul         product
linear matmul                               -              library
_scaled_mm _int_mm                          matmul
convolution                                 convolution    product library
convolution_backward                        convolution    library
convolution* _convolution cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu    convolution
_slow_conv*                                 convolution
scaled_dot_product* _scaled_dot_product* _flash_attention* _efficient_attention*    attention
_cudnn_attention*                           attention
_scaled_dot_product_flash_attention* _scaled_dot_product_efficient_attention*    -    by_row
_scaled_dot_product_cudnn_attention* _scaled_dot_product_fused_attention*        -    by_row
_fused_ada* _fused_sgd*                     optimizer      lists
_foreach_*                                  -              lists
_foreach_max _foreach_norm _foreach_powsum  reduction
*mm *mm_* *mv *dot *linear *linear_*        -              multiplies
*attention* *lstm* *gru*                    -              multiplies
*conv[!e]* *rnn*                            -              multiplies cudnn
*cudnn*                                     -              cudnn

add sub mul sum                             -              once
div                                         -              once
div divide floor_divide remainder fmod      -              divides
floor_divide                                -              decides untagged
remainder fmod                              -              decides

native_layer_norm* native_batch_norm* native_group_norm* cudnn_batch_norm*    normalization    one_pass
native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward      -                cancels
native_layer_norm_backward native_group_norm_backward                         -                cancels
native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit                  -    statistics
_batch_norm_with_update batch_norm_update_stats batch_norm_gather_stats*                       -    statistics
_native_batch_norm_legit _fused_rms_norm _fused_rms_norm_backward             -                one_pass

native_layer_norm native_batch_norm native_group_norm cudnn_batch_norm        -                normalizes
_native_batch_norm_legit _fused_rms_norm                                      -                normalizes

_softmax* _log_softmax* nll_loss* logsumexp* logcumsumexp*    softmax
_softmax _log_softmax                       -              one_pass
_softmax_backward_data _log_softmax_backward_data    -     one_pass cancels

embedding* gather* index* scatter* take* slice_scatter* _unsafe_index*    indexing
embedding gather index index_select scatter slice_scatter                 -    moves
select_scatter diagonal_scatter as_strided_scatter                        -    moves
index index_put _index_put_impl _unsafe_index _unsafe_index_put           -    bounded masks
gather scatter scatter_add scatter_reduce index_select index_add          -    bounded
index_reduce index_copy index_fill embedding embedding_dense_backward     -    bounded
nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward take put    -    bounded

zeros zeros_like new_zeros                  -              zeros
zeros* ones* full* empty* new_* arange* scalar_tensor* fill* zero eye*    fill
zeros ones full arange                      -              moves untagged
eye                                         -              untagged
empty zeros_like ones_like full_like empty_like new_zeros new_full new_empty    -    moves

clone* copy* _to_copy* cat* stack* _foreach_copy* constant_pad* repeat*    copy
clone flip roll ravel _conj constant_pad_nd lift_fresh_copy    -    moves
copy                                        -              moves casts
_to_copy                                    -              casts once untagged
cat stack repeat                            -              moves lenient
alias clone detach                          -              copies selects
to _to_copy copy view _unsafe_view expand unsqueeze select slice                     -    selects
index_put _unsafe_index_put                 -              replaces
slice_scatter select_scatter diagonal_scatter as_strided_scatter                     -    replaces uncached
mkldnn_rnn_layer_backward _new_zeros_with_same_feature_meta                          -    uncached
where masked_fill tril triu                 -              moves untagged
clamp clamp_min clamp_max hardtanh nan_to_num conj_physical    -    moves
relu neg abs maximum minimum max_pool2d_with_indices    -  moves
amax amin                                   -              moves lenient

lt le gt ge eq ne argmax argmin topk argsort nonzero       -    decides
floor ceil round trunc sign frac isnan isinf isfinite      -    decides
logical_not logical_and logical_or                         -    decides
max min                                     -              decides lenient
sort                                        -              decides moves lenient
bucketize searchsorted                      -              decides counts
sum cumsum                                  -              counts lenient
nansum prod cumprod count_nonzero bincount  -              counts
any all                                     -              lenient
scaled_dot_product_dropout_attention scaled_dot_product_dropout_attention_backward    -    lenient

random_bits* rand*                          random
bernoulli* normal*                          random         checks
multinomial* binomial* poisson* binary_cross_entropy* fractional_max_pool* grid_sampler*    -    checks
_unsafe_masked_index* linalg_eig* _linalg_* _assert_async*                                  -    checks

_prelu_kernel hardswish leaky_relu          -              untagged
normalized                                  -              untagged
_prelu_kernel_backward elu_backward glu glu_backward hardshrink_backward hardsigmoid_backward    -    one_pass
hardswish_backward hardtanh_backward leaky_relu_backward log_sigmoid_forward mish_backward       -    one_pass
log_sigmoid_backward rrelu_with_noise_backward softplus_backward softshrink_backward             -    one_pass
binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits              -    one_pass
huber_loss huber_loss_backward mse_loss mse_loss_backward soft_margin_loss                       -    one_pass
smooth_l1_loss smooth_l1_loss_backward soft_margin_loss_backward                                 -    one_pass
avg_pool2d_backward max_pool2d_with_indices_backward upsample_nearest2d_backward _unsafe_view    -    one_pass

_batch_norm_with_update _native_batch_norm_legit native_batch_norm native_batch_norm_backward    -    shapeless
batch_norm_backward native_layer_norm native_layer_norm_backward native_group_norm              -    shapeless
_fused_rms_norm _fused_rms_norm_backward native_dropout_backward                                -    shapeless
_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data addr floor_divide       -    shapeless
elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward          -    shapeless
hardtanh_backward leaky_relu_backward log_sigmoid_forward log_sigmoid_backward mish_backward    -    shapeless
sigmoid_backward silu_backward softplus_backward softshrink_backward tanh_backward              -    shapeless
threshold_backward binary_cross_entropy_backward huber_loss huber_loss_backward                 -    shapeless
mse_loss_backward smooth_l1_loss_backward soft_margin_loss                                      -    shapeless

_to_copy alias clone copy detach zero nan_to_num where    -    by_place
fill                                        -              by_place puts
copy index_put masked_fill index_fill       -              puts
lift_fresh                                  -              by_place lifts
lift lift_fresh_copy                        -              lifts
empty_like full_like ones_like zeros_like   -              by_place fresh
new_empty new_empty_strided new_full new_ones new_zeros    -    fresh
_local_scalar_dense equal allclose is_nonzero item         -    asks
"""
_OURS = ("aten", "prims", "fcg")


@dataclass(frozen=True, slots=True)
class OpRow:
    """What holds of an op; the columns of the table above. ``kind`` is None for an op without a kind of its own."""

    kind: str | None = None
    product: bool = False
    library: bool = False
    multiplies: bool = False
    cudnn: bool = False
    once: bool = False
    moves: bool = False
    copies: bool = False
    selects: bool = False
    replaces: bool = False
    uncached: bool = False
    decides: bool = False
    cancels: bool = False
    casts: bool = False
    counts: bool = False
    lenient: bool = False
    bounded: bool = False
    divides: bool = False
    checks: bool = False
    untagged: bool = False
    one_pass: bool = False
    normalizes: bool = False
    shapeless: bool = False
    by_place: bool = False
    fresh: bool = False
    zeros: bool = False
    puts: bool = False
    lifts: bool = False
    asks: bool = False
    masks: bool = False
    statistics: bool = False
    lists: bool = False
    by_row: bool = False


def row_of(op: Any) -> OpRow:
    """Return the row of an op; an empty one for other functions.

    Example:
      >>> import torch
      >>> from functional_cg.tensors.op_table import row_of
      >>> row_of(torch.ops.aten.addmm_.default).product
      True
    """
    schema = getattr(op, "_schema", None)
    return OpRow() if schema is None else _row(schema.name)


@cache
def _row(full_name: str) -> OpRow:
    space, _, name = full_name.partition("::")
    if space not in _OURS:
        return OpRow()
    name = name.rstrip("_")
    rows = [row for row in _rows() if fnmatchcase(name, row[0])]
    kinds = [(len(pattern), kind) for pattern, kind, _ in rows if kind != "-"]
    return OpRow(max(kinds)[1] if kinds else None, **{word: True for _, _, words in rows for word in words})


@cache
def _rows() -> tuple[tuple[str, str, list[str]], ...]:
    """Return (pattern of names, kind, words) of each row of the table."""
    lines = [re.split(r"\s{2,}", line) for line in _TABLE.splitlines() if line]
    return tuple(
        (name, kind, " ".join(words).split()) for names, kind, *words in lines for name in names.split()
    )
