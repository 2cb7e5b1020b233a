"""Names that say nothing of a class of ours: kernels of other fields, and drawn nonsense."""

import random
from collections.abc import Iterator

OTHER_FIELDS = (
    # molecular dynamics: GROMACS, LAMMPS, NAMD, AMBER, OpenMM
    "nbnxn_kernel_ElecEw_VdwLJ_F_prune_cuda",
    "void pme_spline_and_spread_kernel<4, true, true, false>(PmeGpuCudaKernelParams)",
    "void pme_solve_kernel<(GridOrdering)0, true>(PmeGpuCudaKernelParams)",
    "void LAMMPS_NS::PairLJCutKokkos::compute_item<1>(int)",
    "nonbondedForceKernel",
    "void calcBondedForces<double>(double*)",
    "computeNonbonded",
    "kCalculatePMENonbondEnergy_kernel",
    "settle_kernel",
    # Fourier transforms: cuFFT, VkFFT
    "void regular_fft<256u, EPT<16u>, 8u, 8u, (padding_t)6, (twiddle_t)0>(kernel_arguments_t)",
    "void vector_fft<128u, EPT<8u>, 16u, 8u>(kernel_arguments_t)",
    "void dpRadix0064B::kernel1Mem<unsigned int, double>(kernel_parameters_t)",
    "VkFFT_main",
    # lattice, fluids, climate, particles: QUDA, AMReX, PIConGPU, Nek, ICON
    "void quda::raw_kernel<quda::wilsonApply, quda::WilsonArg<short, 3>>(int)",
    "void amrex::launch_global<256, WarpX::PushPX>(WarpX::PushPX)",
    "picongpu_deposit_current_kernel",
    "ax_helm_kernel_strs",
    "void lbm_stream_collide<D3Q19>(float*, float*)",
    "graupel_run_kernel",
    "advance_muphys",
    "eos_ideal_gas_hydro",
    # sparse solvers: cuSPARSE, AmgX, HYPRE
    "void cusparse::csrmv_v3_partition_kernel<int, double>(int)",
    "void amgx::multicolor_gs_smooth_kernel<double>(int const*)",
    "hypreCUDAKernel_IVAXPY",
    "jacobi_iterate",
    # databases and graphs: cuDF, cuGraph, HeavyDB, BlazingSQL
    "void cudf::detail::valid_if_kernel<256>(unsigned int*)",
    "void cugraph::detail::bfs_kernel::topdown_expand_kernel<int>(int const*)",
    "hash_join_build_tbl",
    "row_func_hoisted_literals",
    "parse_page_headers",
    # pictures and video: OpenCV, NPP, nvJPEG, Blender, OptiX
    "void cv::cudev::grid_remap::remapKernel<float>(float*)",
    "ForEachPixelNaive",
    "void nvjpeg::DecodeHuffmanKernel<32>(nvjpeg::Params)",
    "kernel_gpu_integrator_shade_surface",
    "__raygen__pathtrace_megakernel",
    "yuv420_to_rgb24",
    "lanczos_upscale_rows",
    # cryptography, genomes, finance
    "m22000_loop",
    "ethash_search_dag",
    "void msm_accumulate_buckets<bls12_381>(affine_t*)",
    "smith_waterman_antidiagonal",
    "monteCarloOptionPaths",
    # vague names of anybody
    "main_kernel",
    "kernel_0",
    "fused_kernel",
    "forward",
    "backward_kernel",
    "update",
    "process_batch",
    "dispatch",
    "combine",
    "dispatch_rays",
    "combine_layers_of_fog",
    "chunk",
    "chunk_of_terrain",
    "recurrent_visitors",
    "lookup_table_query",
    "vehicle_routing_2opt",
    "quantum_walk",
    "quantile_of_income",
    "topology_refine",
    "marlin_population_model",
    "machete_blade",
    "lambda_calculus",
    "internodes",
    "apply_gate",
    "state_machine_tick",
    "optimizer_of_logistics",
    "communicate_results",
    "global_positioning",
)

_TRAPS = (
    *("madam", "adamant", "adamantine", "macadam", "prelude", "relucent", "silurian", "gelures"),
    *("resorts", "assorted", "consorting", "stopknot", "laptopkit", "scandal", "broadcasting"),
    *("forecasting", "raycast", "quantities", "quantum", "memorial", "steps", "roped", "tropes"),
    *("europe", "dynamo", "normal", "abnormal", "addition", "gathering", "rescatter", "emmy"),
    *("summer", "comma", "hammer", "battery", "batten", "flashy", "flashlight", "marlinspike"),
    *("internodal", "epidemic", "dispatcher", "combiner", "chunky", "permuted", "recurring"),
    *("copyright", "filler", "landfill", "refilled", "lion", "million", "slamb", "muons", "sgdx"),
    *("headscarf", "matted", "format", "climate", "material", "scanner", "router", "expertise"),
)
_SYLLABLES = (
    "ba",
    "ke",
    "li",
    "mo",
    "nu",
    "ra",
    "si",
    "to",
    "ve",
    "zu",
    "dor",
    "fin",
    "gal",
    "hem",
)
_FRAMES = (
    "{}",
    "{}_kernel",
    "void {}<float, 128>(float*, int)",
    "void {}::launch<4>(Params)",
    "{}Kernel",
    "k_{}_v2",
    "_{}_fwd",
    "triton_{}",
)


def drawn_names(count: int, seed: int) -> Iterator[str]:
    """Yield names of one to three words, which are nonsense or English."""
    generator = random.Random(seed)
    for _ in range(count):
        words = []
        for _ in range(generator.randint(1, 3)):
            nonsense = "".join(generator.choices(_SYLLABLES, k=generator.randint(2, 4)))
            words.append(generator.choice([nonsense, generator.choice(_TRAPS)]))
        yield generator.choice(_FRAMES).format("_".join(words))
