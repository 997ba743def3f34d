/* fa3_bench.cu - FlashAttention-3's forward pass for bench_attention.py, without its PyTorch
 * extension. fa3.sh builds it.
 *
 * It does the work of mha_fwd in hopper/flash_api.cpp for causal attention with head_dim 128, in
 * bf16 and e4m3. The number of splits, the packing of query heads, the scheduler and the combine
 * kernel are the same. Only the kernels of these calls are instantiated. Keys and values have one
 * of two layouts, both [.., kv head, token, channel]. The layout "Plain" is one run of tokens per
 * sequence, as in a call without lengths. The layout "Paged" is blocks of page_size tokens found
 * through a table, with lengths, as engines call it. The paged scheduler's metadata is made once
 * per plan, because engines make it once per step for all layers. */
#include "flash_fwd_combine_launch_template.h"
#include "flash_fwd_launch_template.h"
#include "flash_prepare_scheduler.cu"
#include "heuristics.h"

#include <cstdint>
#include <memory>

enum { HEAD_DIM = 128, MOST_SPLITS = 128 };

extern "C" struct fa3_problem {
    int32_t e4m3, batch, heads, kv_heads, tokens, queries;
    int32_t page_size, n_pages; /* 0: plain */
    void *q, *k, *v;            /* q: [sequence, token, head, channel] */
    void *out;                  /* bf16, as q */
    float *descale[3];          /* of q, k, v: one number each; for e4m3 */
    int32_t *table, *lengths;   /* paged only */
};

struct fa3_plan {
    Flash_fwd_params params = {};
    void *memory[4] = {};
    bool bad = false;

    template <typename T> T *take(int which, size_t n)
    {
        bad = bad || cudaMalloc(&memory[which], n * sizeof(T)) != cudaSuccess;
        return static_cast<T *>(memory[which]);
    }
    ~fa3_plan()
    {
        for (void *p : memory)
            cudaFree(p);
    }
};

static int round_up(int n, int multiple)
{
    return (n + multiple - 1) / multiple * multiple;
}

static void set_shape(Flash_fwd_params &p, const fa3_problem &x)
{
    const int64_t inner = x.page_size ? x.page_size : x.tokens;
    p.b = p.b_k = x.batch, p.h = x.heads, p.h_k = x.kv_heads;
    p.d = p.dv = p.d_rounded = p.dv_rounded = HEAD_DIM;
    p.seqlen_q = x.queries, p.seqlen_q_rounded = round_up(x.queries, 128);
    p.seqlen_k = x.page_size ? round_up(x.tokens, x.page_size) : x.tokens;
    p.seqlen_k_rounded = round_up(p.seqlen_k, 128);
    p.total_q = x.batch * x.queries, p.total_k = x.batch * (int)inner;
    p.q_row_stride = p.o_row_stride = (int64_t)x.heads * HEAD_DIM;
    p.q_head_stride = p.o_head_stride = HEAD_DIM;
    p.q_batch_stride = p.o_batch_stride = x.queries * p.q_row_stride;
    p.k_row_stride = p.v_row_stride = HEAD_DIM;
    p.k_head_stride = p.v_head_stride = inner * HEAD_DIM;
    p.k_batch_stride = p.v_batch_stride = x.kv_heads * p.k_head_stride;
    p.v_dim_stride = 1;
    p.page_size = x.page_size ? x.page_size : 1, p.num_pages = x.n_pages;
    p.page_table = x.table, p.page_table_batch_stride = x.page_size ? p.seqlen_k / x.page_size : 0;
    p.seqused_k = x.lengths;
}

static void set_numbers(Flash_fwd_params &p, const fa3_problem &x)
{
    p.is_e4m3 = x.e4m3 != 0, p.is_bf16 = !x.e4m3;
    p.q_ptr = x.q, p.k_ptr = x.k, p.v_ptr = x.v, p.o_ptr = x.out;
    if (x.e4m3) /* strides of 0: per tensor */
        p.q_descale_ptr = x.descale[0], p.k_descale_ptr = x.descale[1],
        p.v_descale_ptr = x.descale[2];
    p.scale_softmax = 1 / sqrtf(HEAD_DIM);
    p.p_dropout = p.rp_dropout = 1, p.p_dropout_in_uint8_t = 255;
    p.is_causal =
        x.queries > 1 || x.page_size; /* mha_fwd: causality of one query counts for pages only */
    p.window_size_left = p.seqlen_k - 1, p.window_size_right = p.is_causal ? 0 : p.seqlen_q - 1;
    p.arch = 90;
}

/* get_pagedkv_tma, get_num_splits and get_pack_gqa of flash_api.cpp. */
static void choose(Flash_fwd_params &p)
{
    const bool paged = p.page_table != nullptr;
    const int group = p.h / p.h_k, bytes = p.is_e4m3 ? 1 : 2;
    const auto tma = tile_size_fwd_sm90(HEAD_DIM, HEAD_DIM, p.is_causal, false, bytes);
    p.pagedkv_tma =
        paged && p.page_size % std::get<1>(tma) == 0 && p.seqlen_q * group > std::get<0>(tma);
    const auto tile = tile_size_fwd_sm90(HEAD_DIM, HEAD_DIM, p.is_causal, false, bytes, false,
                                         paged && !p.pagedkv_tma);
    const int block_m = std::get<0>(tile), block_n = std::get<1>(tile);
    const int m_blocks = (p.seqlen_q * group + block_m - 1) / block_m;
    const int n_blocks = (p.seqlen_k + block_n - 1) / block_n,
              blocks = (p.seqused_k ? 1 : p.b) * p.h_k * m_blocks;
    p.num_splits =
        num_splits_heuristic(blocks, p.num_sm, n_blocks, m_blocks,
                             p.seqlen_k * 2 * HEAD_DIM * bytes, p.is_causal, MOST_SPLITS);
    p.pack_gqa = (paged && !p.pagedkv_tma) || p.num_splits > 1 ||
                 (group > 1 && should_pack_gqa(false, p.seqlen_q, group, block_m));
}

static void take_workspace(fa3_plan &plan)
{
    Flash_fwd_params &p = plan.params;
    const int batch = round_up(p.b, 4);
    const int64_t rows = (int64_t)p.h * p.seqlen_q;
    p.softmax_lse_ptr = plan.take<float>(0, p.b * rows);
    int *metadata = plan.take<int>(1, 4 * batch + 1);
    if (p.seqused_k || (p.is_causal && p.num_splits == 1))
        p.tile_count_semaphore = metadata + 4 * batch, p.tile_count_semaphore_offset = 4 * batch;
    p.varlen_sort_batches = true, p.head_swizzle = p.is_causal;
    if (p.seqused_k) {
        p.num_splits_dynamic_ptr = metadata, p.num_m_blocks_ptr = metadata + batch;
        p.varlen_batch_idx_ptr = metadata + 2 * batch;
        p.num_nheads_in_l2_ptr = p.head_swizzle ? metadata + 3 * batch : nullptr;
        p.skip_scheduler_metadata_computation = true;
    }
    if (p.num_splits == 1)
        return;
    p.oaccum_ptr = plan.take<float>(2, p.num_splits * p.b * rows * HEAD_DIM);
    p.softmax_lseaccum_ptr = plan.take<float>(3, p.num_splits * p.b * rows);
    p.lseaccum_head_stride = p.seqlen_q, p.lseaccum_batch_stride = rows,
    p.lseaccum_split_stride = p.b * rows;
    p.oaccum_row_stride = HEAD_DIM, p.oaccum_head_stride = (int64_t)p.seqlen_q * HEAD_DIM;
    p.oaccum_batch_stride = rows * HEAD_DIM, p.oaccum_split_stride = p.b * rows * HEAD_DIM;
}

template <typename T, bool CAUSAL, bool PAGED, bool PACK, bool SPLIT>
static void forward(Flash_fwd_params &p, cudaStream_t stream)
{
    run_flash_fwd<90, HEAD_DIM, HEAD_DIM, 1, T, cutlass::bfloat16_t, CAUSAL, false, false, PAGED,
                  PAGED, false, false, PACK, SPLIT, false>(p, stream);
}

using forward_fn = void (*)(Flash_fwd_params &, cudaStream_t);

template <typename T> static forward_fn find_kernel(const Flash_fwd_params &p)
{
    const bool split = p.num_splits > 1;
    if (p.pagedkv_tma)
        return nullptr;
    if (p.page_table)
        return split ? forward<T, true, true, true, true> : forward<T, true, true, true, false>;
    if (split)
        return p.is_causal ? forward<T, true, false, true, true>
                           : forward<T, false, false, true, true>;
    if (p.pack_gqa)
        return p.is_causal ? forward<T, true, false, true, false>
                           : forward<T, false, false, true, false>;
    return p.is_causal ? forward<T, true, false, false, false> : nullptr;
}

static forward_fn kernel_of(const Flash_fwd_params &p)
{
    return p.is_e4m3 ? find_kernel<cutlass::float_e4m3_t>(p) : find_kernel<cutlass::bfloat16_t>(p);
}

static void make_metadata(Flash_fwd_params &p)
{
    const auto tile =
        tile_size_fwd_sm90(HEAD_DIM, HEAD_DIM, p.is_causal, false, p.is_e4m3 ? 1 : 2, false, true);
    prepare_varlen_num_blocks(p, nullptr, p.pack_gqa, std::get<0>(tile), std::get<1>(tile), false);
}

/* Makes a plan with at most *splits parts per sequence. NULL when there is no kernel for this
 * problem, or no memory. */
extern "C" fa3_plan *fa3_plan_create(const fa3_problem *x, int32_t *splits)
{
    auto plan = std::make_unique<fa3_plan>();
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&plan->params.num_sm, cudaDevAttrMultiProcessorCount, device) !=
            cudaSuccess)
        return nullptr;
    set_shape(plan->params, *x);
    set_numbers(plan->params, *x);
    choose(plan->params);
    *splits = plan->params.num_splits;
    take_workspace(*plan);
    if (plan->bad || !kernel_of(plan->params))
        return nullptr;
    if (x->page_size)
        make_metadata(plan->params);
    return cudaDeviceSynchronize() == cudaSuccess ? plan.release() : nullptr;
}

extern "C" int fa3_plan_run(const fa3_plan *plan, cudaStream_t stream)
{
    Flash_fwd_params p = plan->params;
    int *semaphore = p.tile_count_semaphore;
    if (semaphore && !p.seqused_k)
        cudaMemsetAsync(semaphore, 0, sizeof *semaphore, stream);
    kernel_of(p)(p, stream);
    if (p.num_splits > 1) {
        p.is_bf16 = true; /* the output */
        run_mha_fwd_combine_<cutlass::bfloat16_t, float, HEAD_DIM>(p, stream, true);
    } else if (p.seqused_k) {
        cudaMemsetAsync(semaphore, 0, sizeof *semaphore, stream);
    }
    return cudaGetLastError();
}

extern "C" void fa3_plan_free(fa3_plan *plan)
{
    delete plan;
}
