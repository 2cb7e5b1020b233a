"""Names are of real traces and sources, some with arguments left out; classes are judged from
the operator behind.
"""

import random

import pytest

from cs336.analysis.kernels.classes import (
    OF_OPTIMIZER,
    OF_TRAINING,
    KernelClass,
    classify_kernel,
    own_rules,
)
from cs336.analysis.kernels.short_names import short_name
from tests.analysis.kernels import public_names
from tests.analysis.kernels.foreign_names import OTHER_FIELDS, drawn_names

NATIVE = "void at::native::"
UNNAMED = "void at::native::(anonymous namespace)::"
CUB = "void at_cuda_detail::cub::detail::"
LAMBDA = (
    "(at::TensorIteratorBase&)::{lambda()#2}::operator()() const::{lambda()#7}::operator()() const"
)

# of a training step on an A100 as nsys demangles it: model and AdamW written out, fp32
AMPERE = {
    # linear layers and the products of attention
    "ampere_sgemm_128x64_tn": KernelClass.MATMUL,
    "ampere_sgemm_64x32_sliced1x4_nt": KernelClass.MATMUL,
    (
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nt_align1>(T1::Params)"
    ): KernelClass.MATMUL,
    # residual, p.add_
    f"{NATIVE}vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>, "
    "std::array<char *, (unsigned long)3>>(int, T2, T3)": KernelClass.ELEMENT_WISE,
    # m.mul_(beta)
    f"{NATIVE}vectorized_elementwise_kernel<(int)4, at::native::AUnaryFunctor<float, float, "
    "float, at::native::binary_internal::MulFunctor<float>>, std::array<char *, (unsigned "
    "long)2>>(int, T2, T3)": (KernelClass.ELEMENT_WISE),
    # .contiguous()
    f"{NATIVE}elementwise_kernel<(int)128, (int)2, void "
    "at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase"
    " &)::[lambda() (instance 3)]::operator ()() const::[lambda() (instance 7)]::operator ()() "
    "const::[lambda(float) (instance 1)]>(at::TensorIteratorBase &, const T1 &)::[lambda(int) "
    "(instance 1)]>(int, T3)": KernelClass.COPY_AND_FILL,
    # zeros_like
    f"{NATIVE}vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>, "
    "std::array<char *, (unsigned long)1>>(int, T2, T3)": KernelClass.COPY_AND_FILL,
    # the sum of a softmax written out, and its maximum
    f"{NATIVE}reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, "
    "at::native::func_wrapper_t<float, at::native::sum_functor<float, float, float>::operator "
    "()(at::TensorIterator &)::[lambda(float, float) (instance 1)]>, unsigned int, float, "
    "(int)4>>(T3)": KernelClass.REDUCTION,
    f"{NATIVE}reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, "
    "at::native::MaxOps<float>, unsigned int, float, (int)4>>(T3)": KernelClass.REDUCTION,
    # torch.where(mask, scores, -inf)
    f"{NATIVE}elementwise_kernel<(int)128, (int)2, void "
    "at::native::gpu_kernel_impl_nocast<at::native::<unnamed>::where_kernel_impl(at::TensorIterato"
    "r &)::[lambda() (instance 1)]::operator ()() const::[lambda() (instance 7)]::operator ()() "
    "const::[lambda(bool, float, float) (instance 1)]>(at::TensorIteratorBase &, const T1 "
    "&)::[lambda(int) (instance 1)]>(int, T3)": KernelClass.ELEMENT_WISE,
    # rotated halves put side by side
    "void at::native::<unnamed>::CatArrayBatchedCopy<at::native::<unnamed>::OpaqueType<(unsigned "
    "int)4>, unsigned int, (int)4, (int)64, (int)64>(T1 *, "
    "at::native::<unnamed>::CatArrInputTensorMetadata<T1, T2, T4, T5>, "
    "at::native::<unnamed>::TensorSizeStride<T2, (unsigned int)4>, int, T2)": (
        KernelClass.COPY_AND_FILL
    ),
    # weight[token_ids]
    f"{NATIVE}index_elementwise_kernel<(int)128, (int)4, void at::native::gpu_index_kernel<void "
    "at::native::index_kernel_impl<at::native::OpaqueType<(int)4>>(at::TensorIteratorBase &, "
    "c10::ArrayRef<long>, c10::ArrayRef<long>)::[lambda(char *, const char *, long) (instance "
    "1)]>(at::TensorIteratorBase &, c10::ArrayRef<long>, c10::ArrayRef<long>, const T1 "
    "&)::[lambda(int) (instance 1)]>(long, T3)": (KernelClass.COPY_AND_FILL),
    # its gradient: sort the ids, then add up rows
    "void "
    "at_cuda_detail::cub::DeviceRadixSortSingleTileKernel<at_cuda_detail::cub::DeviceRadixSortPoli"
    "cy<long, at::cuda::cub::detail::OpaqueType<(int)8>, unsigned long long>::Policy900, (bool)0, "
    "long, at::cuda::cub::detail::OpaqueType<(int)8>, unsigned long long, "
    "at_cuda_detail::cub::detail::identity_decomposer_t>(const T3 *, T3 *, const T4 *, T4 *, T5, "
    "int, int, T6)": KernelClass.SORT,
    "void <unnamed>::indexing_backward_kernel<float, (int)4>(const long *, const long *, const T1 "
    "*, T1 *, long, long, long, long, bool)": KernelClass.REDUCTION,
    # the logit of the target, and its gradient
    f"{NATIVE}_scatter_gather_elementwise_kernel<(int)128, (int)4, void "
    "at::native::_cuda_scatter_gather_internal_kernel<(bool)0, "
    "at::native::OpaqueType<(int)4>>::operator ()<at::native::TensorAssign>(at::TensorIterator &, "
    "long, long, long, const T1 &)::[lambda(int) (instance 1)]>(int, T3)": (
        KernelClass.COPY_AND_FILL
    ),
    f"{NATIVE}_scatter_gather_elementwise_kernel<(int)128, (int)4, void "
    "at::native::_cuda_scatter_gather_internal_kernel<(bool)1, float>::operator "
    "()<at::native::ReduceAdd>(at::TensorIterator &, long, long, long, const T1 &)::[lambda(int) "
    "(instance 1)]>(int, T3)": KernelClass.REDUCTION,
}

MATMULS = (
    "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_align"
    "c4_execute_kernel__5x_cublas",
    "void "
    "cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::Gem"
    "mUniversal<cute::tuple<int, int, int>, "
    "cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<5>"
    ", cutlass::bfloat16_t>>>>(Params)",
    "_ZN7cutlass7Kernel2I66cutlass_80_tensorop_f16_s16816gemm_f16_128x128_32x4_tn_align8EEvNT_6Par"
    "amsE",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, "
    "true, false, false>(cublasLt::cublasSplitKParams<float>, float const*, __nv_bfloat16 const*, "
    "__nv_bfloat16*)",
    "void splitKreduce_kernel<float, float, float, float>(cublasSplitKParams<float>, float "
    "const*, float const*)",
    "void gemvNSP_kernel<float, float, float, float, 1, 32, 4, 1024, false, "
    "cublasGemvParamsEx<int, cublasGemvTensorStridedBatched<float const>, "
    "cublasGemvTensorStridedBatched<float const>, cublasGemvTensorStridedBatched<float>, float> "
    ">(cublasGemvParamsEx<int>)",
    "Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI16x16x4x1_SE",
    "triton_tem_fused_mm_25",
    "triton_tem_fused_bmm_7",
    "triton_tem_fused_addmm_t_view_3",
    "triton_tem_fused__unsafe_view_gelu_mm_mul_t_view_28",
    "triton_tem_fused__to_copy__unsafe_view_add_addmm_bmm_clone_mean_mul_pow_rsqrt_transpose_view_"
    "139",
    "triton_red_fused_mm_9",  # one row times a matrix: products, summed
    "triton_red_fused_mm_mul_silu_t_9",
    "triton_red_fused_bmm_7",
    "matmul_kernel_tma_persistent",
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::linear",
    "aten::mv",
    "kernel_cutlass_kernel___main__DenseGemmKernel_object_at__TiledMMA_ThrLayoutVMNK11110000",
    "kernel_cutlass_kernel_quackgemm_sm90GemmSm90_object_at__tensor000o1",
    "Custom_Cijk_Ailk_Bljk_BBS_BH_Bias_MT256x256x64_MI16x16x1",
    "fused_moe_kernel",
    "void fbgemm_gpu::f8f8bf16_gemm_kernel<128>(int)",
)
CONVOLUTIONS = (
    "void cudnn::cnn::implicit_convolve_sgemm<float, float, 128, 5, 5, 3, 3, 3, 1, false>(int)",
    "void cudnn::cnn::conv2d_grouped_direct_kernel<float, float>(cudnnTensorStruct)",
    "volta_scudnn_128x128_stridedB_splitK_small_nn_v1",
    "cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1",
    "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(int)",
    "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_st"
    "age4_execute_kernel",
    "void "
    "cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688wgrad_optimized_tf32_128x128_16x4>(Params)",
    "void dgrad2d_grouped_direct_kernel<float, int, float, 3>(cudnnTensorStruct)",
    "void at::native::im2col_kernel<float>(long, float const*, long)",
    "miopenSp3AsmConv_v30_3_1_gfx94x_fp32_f2x3_stride1",
    "igemm_fwd_gtcx3_nhwc_fp16_bx0_ex0_bt256x128x32_wt32x32x8",
    "aten::mkldnn_convolution",
    "aten::convolution_backward",
    "triton_tem_fused_convolution_4",
)
ATTENTION = (
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, "
    "false, false, cutlass::bfloat16_t, pytorch_flash::Flash_kernel_traits<64, 128, 128, 4, "
    "cutlass::bfloat16_t> >, false, true, false, false, true, true, false, "
    "false>(pytorch_flash::Flash_fwd_params)",
    "flash_fwd_kernel",
    "void "
    "cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveM"
    "ainloopFwdSm90<(int)2, cute::tuple<cute::C<(int)1>, cute::C<(int)1>, cute::C<(int)1>>, "
    "(int)128, cutlass::half_t, float>>>>(T1)",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bf"
    "loat16_t, cutlass::arch::Sm80, true, 64, 128, 128, true, true>::Params)",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*, void*, "
    "void*, unsigned int)",
    "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int, unsigned "
    "int, unsigned int)",
    "_attn_fwd",
    "_attn_bwd_dkdv",
    "triton_tem_fused_flex_attention_0",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    # FlashAttention 4, as Kineto names its four kernels
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor"
    "0000o11101213_tensor",
    "kernel_cutlass_kernel_flash_attncuteflash_bwd_preprocessFlashAttentionBackwardPreprocess_obje"
    "ct_at__tensorptrbf16",
    "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__tenso"
    "r0000o11101213_tens",
    "kernel_cutlass_kernel_flash_attncuteflash_bwd_postprocessFlashAttentionBackwardPostprocess_ob"
    "ject_at__tensorptrf",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__tens"
    "or000o1",
    "void ck_tile::kentry<256, 1, "
    "ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipelineQRKSVS<float>>>(int)",
    "_ZN5aiter37fmha_fwd_hd128_bf16_causal_rtne_groupE",
    "_ZN5aiter19mla_dec_stage1_bf16E",
    "_ZN5aiter33pa_bf16_pertokenFp8_gqa8_2tg_4wE",
)
SOFTMAX = (
    f"{UNNAMED}softmax_warp_forward<float, float, float, 9, false, false>(float*, float const*, "
    "int, int, int)",
    f"{UNNAMED}nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*, float*, float "
    "const*, long const*)",
    "liger_cross_entropy_kernel",
    "_cross_entropy_losses",  # this project's kernel
    "_cross_entropy_scale",
    "triton_per_fused__softmax_add_clone_detach_1",
    "triton_per_fused__softmax_backward_data_mul_11",
    "triton_per_fused__softmax__to_copy_bitwise_and_cat_exp_expand_le_mul_prepare_softmax_online_s"
    "calar_tensor_sub_unsqueeze_view_where_14",
    "triton_red_fused__log_softmax_16",
    "triton_red_fused__log_softmax__log_softmax_backward_data__to_copy__unsafe_view_div_mul_nll_lo"
    "ss_backward_nll_loss_forward_view_0",
    "triton_per_fused_amax_div_exp_sub_sum_3",  # written out
    "triton_red_fused_exp_max_sub_sum_4",
    "triton_per_fused_nll_loss_forward_4",
    "cpp_fused__softmax_backward_data_native_dropout_backward_4",
    "aten::_softmax",
    "aten::nll_loss_forward",
)
NORMALISATION = (
    f"{UNNAMED}vectorized_layer_norm_kernel<float, float, false>(int, float, float const*, float "
    "const*, float*)",
    f"{UNNAMED}RowwiseMomentsCUDAKernel<float, float>(long, float, float const*, float*, float*)",
    f"{UNNAMED}GammaBetaBackwardCUDAKernelTemplate<float, float, 32u, 1u, 32u, true, true, "
    "false>(long, long)",
    "void cuComputeGradGammaBeta<float, float, float>(float const*, float const*, int, int, int, "
    "float*, float*)",
    f"{UNNAMED}ComputeInternalGradientsCUDAKernel<float>(long, float const*, float const*, "
    "float*, float*)",
    f"{UNNAMED}ComputeBackwardFusedParamsCUDAKernel<float>(long, long)",
    f"{NATIVE}vectorized_elementwise_kernel<4, at::native::(anonymous "
    "namespace)::GroupNormKernelImplInternal<float>(at::Tensor const&)::{lambda(float, float)#1}, "
    "std::array<char*, 3ul> >(int)",
    "void transformer_engine::normalization::ln_fwd_tuned_kernel<Kernel_traits<float>>(FwdParams)",
    "void "
    "transformer_engine::normalization::rmsnorm_bwd_tuned_kernel<Kernel_traits<float>>(BwdParams)",
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1, true>(cudnnTensorStruct)",
    "_rms_norm_forward_kernel",
    "triton_per_fused_native_layer_norm_relu_15",
    "triton_per_fused__fused_rms_norm__fused_rms_norm_backward__to_copy_add_0",
    "triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_11",  # RMSNorm written out
    "triton_per_fused_add_embedding_mean_mul_pow_rsqrt_6",
    "triton_per_fused__to_copy_add_addmm_native_layer_norm_4",  # the bias of the product before it
    # the embedding's gradient and the loss only lend constants
    "triton_per_fused_add_embedding_dense_backward_masked_fill_mul_native_layer_norm_backward_22",
    "triton_per_fused__to_copy_add_embedding_dense_backward_native_dropout_backward_native_layer_n"
    "orm_backward_nll_loss_forward_30",
    "aten::native_layer_norm_backward",
    "cs336::add_norm",  # this project's operator
    "_add_norm_values",
    "_add_norm_grads",
    "kernel_cutlass_kernel_quackrmsnormRMSNorm_object_at__tensorptrbf16gmem",
    "void ck_tile::kentry<256, 1, ck_tile::Rmsnorm2dFwd<float>>(int)",
)
ELEMENT_WISE = (
    f"{NATIVE}vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl{LAMBDA}, "
    "std::array<char*, 2ul> >(int)",
    f"{NATIVE}elementwise_kernel<128, 4, "
    "at::native::gpu_kernel_impl_nocast<at::native::(anonymous "
    "namespace)::masked_fill_kernel(at::TensorIterator&, c10::Scalar const&)::{lambda()#1}>>",
    f"{UNNAMED}fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, "
    "bool>(at::cuda::detail::TensorInfo<float>)",
    f"{NATIVE}triu_tril_kernel<bool, int, false, 8, false>(at::cuda::detail::TensorInfo<bool, "
    "int>)",
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEv"
    "iT0_T1_",
    "_swiglu_forward_kernel",
    "_swiglu_values",  # this project's kernel
    "_bias_gelu_values",
    "_bias_gelu_grads",
    "_swiglu_grads",
    "_rope_heads",
    "_rope_packed",
    "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)",
    "triton_poi_fused_add_mul_3",
    "triton_poi_fused_gelu_view_7",
    "triton_poi_fused_addmm_relu_3",
    "triton_poi_fused_add_addmm_mul_2",
    "triton_poi_fused__to_copy__unsafe_view_add_arange_bmm_cat_clone_cos_expand_mul_neg_sin_slice_"
    "transpose_unsqueeze_view_8",
    "triton_poi_fused_add_mul_nll_loss_forward_silu_5",
    "triton_poi_fused_0",
    "cpp_fused_add_mul_0",
    "aten::mul",
    "aten::add_",
    "aten::where",
    "aten::gt",
    "aten::logical_not",
    "aten::silu_backward",
    "void at::native::vectorized_elementwise_kernel<4, fbgemm_gpu::SomeFunctor<float>, "
    "std::array<char*, 2> >(int)",
)
REDUCTION = (
    f"{UNNAMED}embedding_backward_feature_kernel<float, float, long>(long const*, float const*, "
    "float*, int)",
    # embedding_dense_backward on an H200, in its order: the tokens sorted, cut into segments, and
    # their rows added up
    f"{CUB}scan::DeviceCompactInitKernel<at_cuda_detail::cub::ScanTileState<unsigned long long, "
    "true>, long*>(at_cuda_detail::cub::ScanTileState<unsigned long long, true>, int, long*)",
    f"{CUB}unique_by_key::DeviceUniqueByKeySweepKernel<at_cuda_detail::cub::detail::unique_by_key:"
    ":policy_hub<long, int>::Policy1000, long const*, "
    "thrust::THRUST_300001_SM_750_800_860_900_1000_1200_NS::counting_iterator<int>, long*, "
    "at_cuda_detail::cub::detail::unique_by_key::VSMemHelper>(long const*, long*)",
    f"{UNNAMED}krn_partials_per_segment<long>(long*, long const*, long const*, long)",
    f"{CUB}scan::DeviceScanInitKernel<at_cuda_detail::cub::ScanTileState<long, true> >(int)",
    f"{UNNAMED}compute_num_of_partial_segments<long>(long const*, long const*, long const*, long*)",
    f"{UNNAMED}compute_grad_weight<float, long>(long const*, float const*, long const*, long)",
    f"{UNNAMED}sum_and_scatter<float, long>(long const*, float*, long, long const*, long const*, "
    "long)",
    "void "
    "at_cuda_detail::cub::DeviceReduceSingleTileKernel<at_cuda_detail::cub::DeviceReducePolicy<int"
    ">>(int*)",
    f"{NATIVE}tensor_kernel_scan_innermost_dim<float, std::plus<float> >(float*, float const*, "
    "unsigned int)",
    "triton_per_fused_mul_0",
    "triton_red_fused__to_copy_mul_sum_view_4",
    "triton_red_fused__to_copy_add_div_embedding_dense_backward_expand_mul_nll_loss_forward_pow_su"
    "m_view_22",
    "triton_poi_fused_embedding_dense_backward_15",
    "triton_poi_fused_embedding_dense_backward_nll_loss_forward_22",
    "triton_per_fused_abs_amax_1",  # a maximum without an exponential is no softmax
    "triton_per_fused_linalg_vector_norm_2",
    "cpp_fused_sum_view_3",
    "aten::sum",
    "aten::any",
    "aten::embedding_dense_backward",
    f"{UNNAMED}multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::TensorListMetadata<1>, at::native::LpNormFunctor<c10::BFloat16, "
    "(at::native::NormType)2, c10::BFloat16, 1, 1, 0>, float*, int>()",
    f"{UNNAMED}lpnorm_cleanup<c10::BFloat16, (at::native::NormType)2, c10::BFloat16, true, "
    "float>(float const*)",
    "_reduce_sums",  # this project's kernels
    "_reduce_packed",
    "_lookup_grads",
    "void split_embedding_codegen_forward_unweighted_kernel<float, float, long, 4>(int)",
)
SORT = (
    "DeviceRadixSortSingleTileKernel",
    f"{NATIVE}bitonicSortKVInPlace<2, -1, 16, 16, float, "
    "long>(at::cuda::detail::TensorInfo<float>)",
)
OPTIMIZER = (
    "_adamw_chunks",  # this project's kernel
    f"{UNNAMED}multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous "
    "namespace)::FusedAdamMathFunctor<float, 4, (at::native::(anonymous namespace)::ADAM_MODE)1, "
    "false>, float const*, double, double, double, double, double, bool, float*, float*>()",
    "void "
    "at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::TensorListMetadata<(i"
    "nt)2>, at::native::<unnamed>::BinaryOpListAlphaFunctor<float, (int)2, (int)2, (int)0>, "
    "std::plus<float>, float>(T1, T2)",
    f"{UNNAMED}multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::TensorListMetadata<1>, at::native::(anonymous namespace)::UnaryOpFunctor<float, "
    "1, 1, 0>, "
    "at::native::_amp_foreach_non_finite_check_and_unscale_cuda_(c10::ArrayRef<at::Tensor>, "
    "at::Tensor&, at::Tensor const&)::{lambda()#1}>()",
    "multi_tensor_apply_kernel",
    f"{UNNAMED}lpnorm_cleanup<float, (at::native::NormType)1>(float const*, float*)",
    "triton_for_fused_0",
    "Optimizer.step#AdamW.step",
    "aten::_fused_adamw_",
    "aten::_foreach_add_",
)
COPY_AND_FILL = (
    "Memcpy DtoH (Device -> Pageable)",
    "Memset (Device)",
    "[CUDA memcpy Host-to-Device]",
    "[CUDA memset]",
    f"{NATIVE}vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda{LAMBDA}, "
    "std::array<char*, 2>>()",
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIiEENS_6detail5ArrayIPcLi1E"
    "EEEEviT0_T1_",
    "_cut_heads_grads",
    "_cast_part",  # this project's kernel
    f"{UNNAMED}indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, "
    "true>(at::cuda::detail::TensorInfo<float>)",
    f"{NATIVE}vectorized_gather_kernel<(int)16, long>(char *, char *, T2 *, int, long, long, "
    "long, long, bool)",
    "at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char **, char **, "
    "long *)",
    f"{UNNAMED}multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::TensorListMetadata<2>, at::native::(anonymous namespace)::CopyFunctor<float, "
    "c10::BFloat16, 2, 1, 1>, at::native::Copy<float, c10::BFloat16> >()",
    f"{UNNAMED}multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::TensorListMetadata<2>, at::native::(anonymous namespace)::UnaryOpFunctor<float, "
    "2, 1, 1>, at::native::Copy<float, float> >()",
    "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, "
    "true>(cudnn::ops::nchw2nhwc_params_t<float>)",
    "triton_poi_fused__to_copy_2",  # a cast
    "triton_poi_fused_clone_transpose_view_4",
    "triton_poi_fused_embedding_0",
    "triton_poi_fused_mm_86",  # a product's operand, padded or laid out anew
    "triton_poi_fused_mm_t_2",
    "aten::copy_",
    "aten::fill_",
    "aten::zeros_like",
    "aten::index",
    "void fbgemm_gpu::permute_2D_data_kernel<false, int, int, float>(int, int, int)",
    "__amd_rocclr_fillBufferAligned",
)
COMMUNICATION = (
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, "
    "2>(c10::BFloat16**)",
    "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>(sglang::RankData*)",
    "nccl:all_reduce",
)
OTHER = (
    "",
    "kernel",
    "void something_unusual<float>(float*)",
    "weighted_sum_fwd",
    "triton_tem_fused_0",  # a template that does not say which
    "triton_unk_fused_mul_0",
    "void hadamard_transform_kernel<float>(HadamardParams)",
    "aten::empty",
    "cudaGraphLaunch",
)
KNOWN = AMPERE | {
    name: kind
    for kind, names in (
        (KernelClass.MATMUL, MATMULS),
        (KernelClass.CONVOLUTION, CONVOLUTIONS),
        (KernelClass.ATTENTION, ATTENTION),
        (KernelClass.SOFTMAX, SOFTMAX),
        (KernelClass.NORMALISATION, NORMALISATION),
        (KernelClass.ELEMENT_WISE, ELEMENT_WISE),
        (KernelClass.REDUCTION, REDUCTION),
        (KernelClass.SORT, SORT),
        (KernelClass.OPTIMIZER, OPTIMIZER),
        (KernelClass.COPY_AND_FILL, COPY_AND_FILL),
        (KernelClass.COMMUNICATION, COMMUNICATION),
        (KernelClass.OTHER, OTHER),
    )
    for name in names
}


def test_real_names() -> None:
    assert {name: classify_kernel(name) for name in KNOWN} == KNOWN


def test_names_of_public_projects() -> None:
    """No name of a public project gets a wrong class; all do for which rules were written."""
    wrong = {
        name: kind
        for name in public_names.ALL
        if (kind := classify_kernel(name)) is not public_names.ALL[name]
    }
    assert set(wrong) <= public_names.HELD_BACK
    assert set(wrong.values()) <= {KernelClass.OTHER}
    assert len(wrong) <= len(public_names.HELD_BACK) // 20


@pytest.mark.parametrize("seed", range(3))
def test_a_name_that_says_nothing_stays_unknown(seed: int) -> None:
    names = [*OTHER_FIELDS, *drawn_names(200, seed)]
    known = {name for name in names if classify_kernel(name) is not KernelClass.OTHER}
    assert not known


def test_every_rule_decides_for_a_real_name() -> None:
    """No rule is dead: each is the first to match some name of this file."""
    first = {
        next((pattern for pattern, _ in own_rules().rules if pattern.search(name)), None)
        for name in [*KNOWN, *public_names.ALL]
        if not name.startswith(("triton_", "cpp_fused"))
    }
    assert {pattern for pattern, _ in own_rules().rules} <= first


def test_a_short_name_has_the_class_of_the_whole() -> None:
    for name, kind in {**KNOWN, **public_names.ALL}.items():
        if classify_kernel(name) is not kind:
            continue  # held back, and unknown
        short = short_name(name)
        assert classify_kernel(short) is kind, name
        assert len(short) <= len(name)
        assert short_name(short) == short, name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (list(AMPERE)[2], "cutlass_80_simt_sgemm_128x32_8x5_nt_align1"),
        (list(AMPERE)[3], "vectorized_elementwise_kernel<add>"),
        (list(AMPERE)[4], "vectorized_elementwise_kernel<mul>"),
        (list(AMPERE)[5], "elementwise_kernel<direct_copy>"),
        (list(AMPERE)[6], "vectorized_elementwise_kernel<fill>"),
        (list(AMPERE)[7], "reduce_kernel<sum>"),
        (list(AMPERE)[8], "reduce_kernel<max>"),
        (list(AMPERE)[9], "elementwise_kernel<where>"),
        (list(AMPERE)[10], "CatArrayBatchedCopy"),
        (list(AMPERE)[15], "_scatter_gather_elementwise_kernel<ReduceAdd>"),
        (SOFTMAX[0], "softmax_warp_forward"),
        (ELEMENT_WISE[0], "vectorized_elementwise_kernel<gelu>"),
        (NORMALISATION[0], "vectorized_layer_norm_kernel"),
        (OPTIMIZER[1], "multi_tensor_apply_kernel<FusedAdam>"),
        (OPTIMIZER[2], "multi_tensor_apply_kernel<plus>"),
        (ATTENTION[0], "flash_fwd_kernel"),
        (ATTENTION[2], "device_kernel<FlashAttnFwdSm90>"),
        (ATTENTION[3], "fmha_cutlassF_bf16_aligned_64x128_rf_sm80"),
        (
            next(name for name in ATTENTION if "bwd_sm90FlashAttention" in name),
            "FlashAttentionBackwardSm90",
        ),
        (COMMUNICATION[0], "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>(float)", "splitKreduce_kernel"),
        (
            "std::enable_if<!T7, void>::type internal::gemvx::kernel<int, float>(T13)",
            "gemvx::kernel",
        ),
        # nothing to shorten
        ("triton_poi_fused_add_mul_3", "triton_poi_fused_add_mul_3"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn", "sm80_xmma_gemm_f32f32_f32f32_f32_tn"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        ("aten::mm", "aten::mm"),
        ("", ""),
    ],
)
def test_short_names(name, short) -> None:
    assert short_name(name) == short


def test_a_function_that_says_nothing_keeps_the_word_that_does() -> None:
    """The class would be lost with the arguments: the word that gives it stays."""
    name = "void run<int, Policy, my_softmax_op>(float*)"
    assert short_name(name) == "run<my_softmax_op>"
    # only several words together give the class, so none can go
    name = "void nothing<transpose_, ::>(at::native)"
    assert classify_kernel(short_name(name)) is classify_kernel(name)


PARTS = (
    "void ",
    "at::native::",
    "<",
    ">",
    "(",
    ")",
    "::",
    " ",
    "_",
    ",",
    "a",
    "aten::",
    "mm",
    "softmax",
    "add",
    "fill",
    "elementwise_kernel",
    "reduce_kernel",
    "Kernel2",
    "kernel",
    "FillFunctor",
    "MulFunctor",
    "CopyFunctor",
    "<copy>",
    "multi_tensor_apply_kernel",
    "triton_poi_fused_",
    "{lambda()#1}",
    "embedding_dense_backward",
    "cutlass_80_x",
)


def test_no_two_classes_share_a_short_name() -> None:
    """Whatever the name: the class of the short name is that of the whole, and shortening again
    changes nothing.
    """
    generator = random.Random(0)
    for _ in range(3_000):
        name = "".join(generator.choices(PARTS, k=generator.randint(1, 12)))
        short = short_name(name)
        assert classify_kernel(short) is classify_kernel(name), name
        assert short_name(short) == short, name


WITHIN = {"adam": ("hadamard", "madam", "adamantine", "Adamant"), "gemm": ("gemma", "gemma3")}
"""Words that have the letters of another."""


@pytest.mark.parametrize("seed", range(30))
def test_letters_within_another_word_say_nothing(seed: int) -> None:
    """A name of drawn parts, with the word itself and with one that only has its letters."""
    draw = random.Random(seed)
    before = [*draw.sample(["triton", "my", "bf16", "k2", "x"], draw.randrange(3)), ""]
    after = ["", *draw.sample(["kernel", "v2", "rows", "tile"], draw.randrange(3))]
    parts = "_".join(before), "_".join(after)
    classes = {"adam": KernelClass.OPTIMIZER, "gemm": KernelClass.MATMUL}
    for word, others in WITHIN.items():
        assert classify_kernel(word.join(parts)) is classes[word]
        other = draw.choice(others).join(parts)
        assert classify_kernel(other) is KernelClass.OTHER
        assert not OF_OPTIMIZER.search(other)
        assert not OF_TRAINING.search(other)
    assert OF_OPTIMIZER.search("adam".join(parts))
