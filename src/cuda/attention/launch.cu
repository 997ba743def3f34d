/* launch.cu - the functions of cuda.h about attention: checks the problem, chooses the kernel,
 * launches it.
 *
 * The choice depends on two facts. One is the shared memory that the device gives a thread block.
 * The second is the PTX version that the loaded code of a kernel was made from
 * (cudaFuncGetAttributes). The compute capability tells neither. A new device may run code made
 * from old PTX, and it may have less shared memory than an old device. */
#include "../any/any.h"
#include "../centers.h"
#include "../checks.h"
#include "../papers/chunks.cuh"
#include "../launch.h"
#include "../table.h"
#include "../tiles/tiles.h"
#include "../trellis/trellis.cuh"
#include "attention.h"
#include "attention_pairs.h"
#include "wide_keys.cuh"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <iterator>

using namespace kvant;

namespace
{

constexpr uint32_t MAX_HEADS = 65536, MAX_GROUPS = 1 << 20;

std::atomic<size_t> limit_of_shared{ 0 }; /* 0: none */

struct Device {
    int multiprocessors,
        shared_bytes; /* the most shared memory a block may have; both 0 on an error */
};

Device current_device()
{
    Device d{};
    if (device_attribute(cudaDevAttrMultiProcessorCount, d.multiprocessors) != cudaSuccess ||
        most_shared(d.shared_bytes) != cudaSuccess) {
        cudaGetLastError();
        return Device{};
    }
    return d;
}

template <class K, class V> AttentionKernel of_head_dim(uint32_t head_dim, KernelChoice choice)
{
    switch (head_dim) {
    case 64: return pair_attention<K, V, 64>(choice);
    case 96: return pair_attention<K, V, 96>(choice);
    case 128: return pair_attention<K, V, 128>(choice);
    case 256: return pair_attention<K, V, 256>(choice);
    default: return AttentionKernel{};
    }
}

bool is_open(const kvant_cuda_params &codec)
{
    return codec.codes == KVANT_CUDA_CODES_OPEN;
}

/* kernel is NULL for a pair that attention_pairs.h does not have. All kernels read exact pages in
 * the same way, so one kernel serves all problems without sealed pages. */
AttentionKernel find_kernel(const kvant_cuda_params &k, const kvant_cuda_params &v,
                            KernelChoice choice)
{
    if (is_open(k) && is_open(v))
        return of_head_dim<Codebook4, Uniform4>(k.head_dim, choice);
    for (const bool other : { false, true }) {
        const kvant_cuda_kind k_kind = other && k.decoder ? k.decoder : k.kind,
                              v_kind = other && v.decoder ? v.decoder : v.kind;
#define KVANT_FIND_PAIR(K, V)                                                                      \
    if (k_kind == K::KIND && v_kind == V::KIND)                                                    \
        return of_head_dim<K, V>(k.head_dim, choice);
        KVANT_CUDA_ATTENTION_PAIRS(KVANT_FIND_PAIR)
#undef KVANT_FIND_PAIR
    }
    return AttentionKernel{};
}

/* As many blocks as run at once, `blocks` on a multiprocessor: every further one would start with a
 * cold ring. */
uint32_t grid_of(const Device &device, int blocks = 1)
{
    return std::min((uint32_t)(blocks * device.multiprocessors), MAX_BLOCKS);
}

/* The most thread blocks of a decode kernel. */
uint32_t most_blocks(const Device &device)
{
    return grid_of(device, 2);
}

/* The thread blocks of attention for which no multiprocessor has room at first, if the kernel
 * before stores new rows. That kernel has a block for each kv head of the keys and of the values,
 * and for each matrix of queries. 0 if it leaves no room. A call that follows no such kernel has
 * the same parts, so that its sums are the same. */
int late_blocks(const kvant_cuda_kernel_attention_args &args, uint32_t grid, int blocks,
                const Device &device)
{
    const uint64_t before = (uint64_t)args.batch * args.n_kv_heads *
                            (2 + (args.q_matrix_stride > 0 ? std::max(args.n_matrices, 1u) : 0)),
                   at_once = grid_of(device, blocks);
    return before < at_once && grid + before > at_once ? (int)(grid + before - at_once) : 0;
}

/* No more blocks than can have work: LEAST_PAGES for each, as find_piece shares pages out. */
uint32_t grid_for(const AttentionArgs &p, const AttentionKernel &kernel, const Device &device)
{
    const uint32_t groups = ((uint32_t)(p.heads_a_kv * p.query_tokens) + kernel.columns - 1) /
                            kernel.columns,
                   parts = (p.max_tokens / KVANT_PAGE_TOKENS + LEAST_PAGES - 1) / LEAST_PAGES;
    return (uint32_t)std::min<uint64_t>((uint64_t)p.batch * p.kv_heads * groups * parts,
                                        grid_of(device, kernel.blocks));
}

/* Checks that the loaded code has a body and that the kernel fits the device. */
kvant_status check_kernel(const AttentionKernel &kernel, const Device &device)
{
    if (!kernel.kernel || std::max(kernel.shared_bytes, kernel.shared_least) > device.shared_bytes)
        return KVANT_ERR_UNSUPPORTED;
    cudaFuncAttributes code;
    const cudaError_t error = cudaFuncGetAttributes(&code, kernel.kernel);
    if (error != cudaSuccess)
        return from_cuda(error);
    if (code.ptxVersion < kernel.ptx_least || code.maxThreadsPerBlock < kernel.threads)
        return KVANT_ERR_UNSUPPORTED;
    return from_cuda(cudaFuncSetAttribute(
        kernel.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes));
}

uint32_t columns_of(const kvant_cuda_kernel_attention_args &args)
{
    return args.n_heads / args.n_kv_heads * args.query_tokens;
}

/* Whether thread blocks that are alone on their multiprocessors would have several pairs of a
 * sequence and a kv head each. */
bool has_many_pairs(const kvant_cuda_kernel_attention_args &args, const Device &device)
{
    return (uint64_t)args.batch * args.n_kv_heads > grid_of(device);
}

bool is_general(const kvant_cuda_kernel_attention_args &args)
{
    return args.query_tokens > 1 || args.window || args.mask || args.sinks ||
           args.logit_softcap > 0 || args.max_bias > 0;
}

/* The large shape before the small one, the wide kernel before the narrow one. */
kvant_status choose_kernel(const kvant_cuda_kernel_attention_args &args, const Device &device,
                           AttentionKernel &kernel)
{
    const bool general = is_general(args), wide = columns_of(args) > TILE_COLUMNS;
    kvant_status status = KVANT_ERR_UNSUPPORTED;
    for (int i = 0; i < 4 && status == KVANT_ERR_UNSUPPORTED; i++) {
        const KernelChoice choice{ i < 2,
                                   args.k_open.base != NULL,
                                   args.n_matrices > 1 || args.k_center || args.page_offsets,
                                   general,
                                   i % 2 == 0,
                                   has_many_pairs(args, device) };
        if (choice.wide && !wide)
            continue;
        kernel = find_kernel(args.k_codec->params, args.v_codec->params, choice);
        status = check_kernel(kernel, device);
    }
    return status;
}

/* Whether it is faster to unpack a page once for all query rows (tiles/) than once for every 8 or
 * 16 rows. The time was measured on an H200, for 8 sequences of 32768 tokens. With int-4 it is 350
 * us for 64 rows in passes of 16. It is 457 us with turboquant-4, 749 us with trellis-4 and 815 us
 * with octopus-4. Tiles take as long for 17 rows as for 64. */
bool prefers_tiles(const kvant_cuda_kernel_attention_args &args)
{
    const uint32_t few_rows = args.k_codec->params.codes == KVANT_CUDA_CODES_TRIPLETS ? 48 : 32;
    return columns_of(args) > few_rows;
}

/* schedule.cuh counts pages and pairs in 32 bits. */
bool valid_shape(const kvant_cuda_kernel_attention_args &args)
{
    if (args.batch == 0 || args.n_kv_heads == 0 || args.n_heads == 0 ||
        args.n_heads % args.n_kv_heads != 0 || args.blocks_per_row == 0 ||
        args.blocks_per_row > INT_MAX / 64 || args.n_heads > MAX_HEADS ||
        args.query_tokens > INT_MAX / MAX_HEADS)
        return false;
    const uint64_t groups =
        (uint64_t)args.n_kv_heads * ((columns_of(args) + TILE_COLUMNS - 1) / TILE_COLUMNS);
    return groups <= MAX_GROUPS && args.batch <= INT_MAX / 2 / groups / args.blocks_per_row;
}

bool valid_pools(const kvant_cuda_kernel_attention_args &args)
{
    const kvant_cuda_params &k = args.k_codec->params, &v = args.v_codec->params;
    const uint32_t heads = args.n_kv_heads;
    if (is_open(k))
        return valid_pages(args.k_open, open_bytes(k), heads) &&
               valid_pages(args.v_open, open_bytes(v), heads);
    if (!valid_pages(args.k, k.page_bytes, heads) || !valid_pages(args.v, v.page_bytes, heads))
        return false;
    return (!args.k_open.base && !args.v_open.base) ||
           (valid_pages(args.k_open, open_bytes(k), heads) &&
            valid_pages(args.v_open, open_bytes(v), heads));
}

bool valid_matrices(const kvant_cuda_kernel_attention_args &args)
{
    return args.n_matrices <= KVANT_CUDA_MOST_MATRICES && (args.n_matrices <= 1 || args.matrices) &&
           !((args.k_center || args.page_offsets) && args.logit_softcap > 0) &&
           !(args.k_center && args.page_offsets);
}

kvant_cuda_page_offsets_args offsets_args(const kvant_cuda_kernel_attention_args &args)
{
    const kvant_cuda_plain_queries &plain_queries = args.plain_queries;
    kvant_cuda_page_offsets_args of{};
    of.size = sizeof of;
    of.q = plain_queries.q;
    of.type = plain_queries.type;
    of.q_batch_stride = plain_queries.q_batch_stride;
    of.q_token_stride = plain_queries.q_token_stride;
    of.q_head_stride = plain_queries.q_head_stride;
    of.batch = args.batch;
    of.n_heads = args.n_heads;
    of.n_kv_heads = args.n_kv_heads;
    of.head_dim = args.k_codec->params.head_dim;
    of.query_tokens = args.query_tokens;
    of.query_starts = args.query_starts;
    of.lengths = args.lengths;
    of.table_stride = args.table_stride;
    of.block_centers = plain_queries.block_centers;
    of.offsets = plain_queries.offsets;
    return of;
}

bool not_negative(float x)
{
    return x >= 0 && std::isfinite(x);
}

kvant_status check_attention(kvant_cuda_kernel_attention_args &args)
{
    if (!args.k_codec || !args.v_codec || !args.block_table || !args.lengths || !args.q ||
        !args.out || !args.workspace || !valid_type(args.type) || !valid_type(args.out_type) ||
        !not_negative(args.logit_softcap) || !not_negative(args.max_bias))
        return KVANT_ERR_ARGUMENT;
    const kvant_status status =
        kvant_cuda_table_attention_check(args.k_codec, args.v_codec, NULL, 0);
    if (status != KVANT_OK)
        return status;
    args.query_tokens = std::max(args.query_tokens, 1u);
    if (!valid_shape(args) || !valid_pools(args) || !valid_matrices(args) ||
        (args.plain_queries.q && !valid_offsets(offsets_args(args))) ||
        (args.query_tokens > 1 && args.out_token_stride == 0))
        return KVANT_ERR_ARGUMENT;
    const size_t needed =
        kvant_cuda_table_attention_workspace(args.k_codec->params.head_dim, args.n_matrices);
    if (needed == 0)
        return KVANT_ERR_CUDA;
    const bool fits =
        reinterpret_cast<uintptr_t>(args.workspace) % 256 == 0 && args.workspace_bytes >= needed;
    return fits ? KVANT_OK : KVANT_ERR_ARGUMENT;
}

PageSource source_of(const kvant_cuda_pages &pages, size_t bytes)
{
    return PageSource{ static_cast<const uint8_t *>(pages.base), pages.block_stride,
                       pages.head_stride, (uint32_t)bytes };
}

/* The offset of the tiles of queries in the workspace: behind counters and partial results. */
size_t tiles_at(uint32_t head_dim, const Device &device)
{
    return COUNTER_BYTES +
           std::max((size_t)most_blocks(device) * 2 * partial_floats(head_dim) * sizeof(float),
                    tile_workspace(head_dim, grid_of(device)));
}

AttentionArgs launch_args(const kvant_cuda_kernel_attention_args &args,
                          const AttentionKernel &kernel, const Device &device)
{
    const kvant_cuda_params &k = args.k_codec->params, &v = args.v_codec->params;
    const int heads_a_kv = (int)(args.n_heads / args.n_kv_heads),
              groups = (heads_a_kv + kernel.columns - 1) / kernel.columns;
    AttentionArgs p{};
    const kvant_codec_info &k_info = args.k_codec->info, &v_info = args.v_codec->info;
    p.k = source_of(args.k, k_info.metadata_offset + k_info.metadata_bytes);
    p.v = source_of(args.v, v_info.metadata_offset + v_info.metadata_bytes);
    p.k_open = source_of(args.k_open, open_bytes(k));
    p.v_open = source_of(args.v_open, open_bytes(v));
    p.table = args.block_table;
    p.table_stride = args.table_stride;
    p.lengths = args.lengths;
    p.batch = (int)args.batch;
    p.max_tokens = (int)args.blocks_per_row * 64;
    p.kv_heads = (int)args.n_kv_heads;
    p.groups = groups;
    p.heads_a_kv = heads_a_kv;
    p.heads_a_group = (heads_a_kv + groups - 1) / groups;
    p.type = args.type;
    p.q = args.q;
    p.q_batch_stride = args.q_batch_stride;
    p.q_head_stride = args.q_head_stride;
    p.out = args.out;
    p.out_type = args.out_type == KVANT_CUDA_F32 ? args.type : args.out_type;
    p.out_batch_stride = args.out_batch_stride;
    p.out_head_stride = args.out_head_stride;
    p.lse = args.lse;
    p.v_center = args.v_center;
    p.k_center = args.k_center;
    p.page_offsets = args.page_offsets;
    p.matrices = args.n_matrices > 1 ? args.matrices : NULL;
    p.n_matrices = (int)std::max(args.n_matrices, 1u);
    p.q_matrix_stride = args.q_matrix_stride;
    std::copy_n(args.q_ids, KVANT_CUDA_MOST_MATRICES, p.q_ids);
    p.k_scale = args.k_scale;
    p.v_scale = args.v_scale;
    p.scale_log2 = args.scale * 1.44269504088896341f;
    p.counters = static_cast<uint32_t *>(args.workspace);
    p.partials = reinterpret_cast<float *>(static_cast<uint8_t *>(args.workspace) + COUNTER_BYTES);
    p.further_tiles = static_cast<uint8_t *>(args.workspace) + tiles_at(k.head_dim, device);
    p.k_rotation = k.rotation;
    p.v_rotation = v.rotation;
    /* bytes of keys are signed; values, halves and a trellis are small numbers above 0 */
    const uint32_t to_signed =
        kernel.byte_keys && k.bias == 128 && k.codes != KVANT_CUDA_CODES_TRELLIS ? 0x80808080u : 0;
    for (uint32_t i = 0; i < KVANT_CUDA_TABLE_WORDS; i++)
        p.k_bytes[i] = k.bytes[i] ^ to_signed, p.v_bytes[i] = v.bytes[i];
    p.one = 1;
    p.table_ready = args.table_ready != 0;
    p.newest = NewTokens{ args.new_cells, args.new_first, args.new_stride };
    p.k_step = k.step, p.v_step = v.step, p.k_bias = to_signed ? 0 : k.bias, p.v_bias = v.bias;
    p.k_symmetric = (int)k.symmetric, p.v_symmetric = (int)v.symmetric;
    p.k_offset = k.offset, p.v_offset = v.offset;
    p.k_groups = GroupPlaces{ (int)k.group_log, (int)k.n_scales, (int)k.hybrid };
    p.v_groups = GroupPlaces{ (int)v.group_log, (int)v.n_scales, (int)v.hybrid };
    p.query_tokens = (int)args.query_tokens;
    p.query_starts = args.query_starts;
    p.q_token_stride = args.q_token_stride;
    p.out_token_stride = args.out_token_stride;
    p.causal = args.causal != 0;
    p.window = args.window == 0 || args.window > INT_MAX ? INT_MAX : (int)args.window;
    p.softcap_log2 = args.logit_softcap * 1.44269504088896341f;
    p.max_bias = args.max_bias;
    p.mask = args.mask;
    p.mask_token_stride = args.mask_token_stride;
    p.sinks = args.sinks;
    return p;
}

/* Kernels that are not general find offsets of pages themselves, from rows of floats. Small shapes
 * and wide kernels are general whatever the problem is. */
bool finds_offsets(const kvant_cuda_kernel_attention_args &args, const AttentionKernel &kernel)
{
    return kernel.finds_offsets && args.plain_queries.q &&
           args.plain_queries.type == KVANT_CUDA_F32 &&
           args.plain_queries.q_head_stride <= UINT32_MAX && !args.query_starts;
}

void copy_plain_queries(AttentionArgs &p, const kvant_cuda_plain_queries &plain_queries)
{
    p.block_centers = plain_queries.block_centers;
    p.own_offsets = plain_queries.offsets;
    p.plain_q = static_cast<const float *>(plain_queries.q);
    p.plain_batch_stride = plain_queries.q_batch_stride,
    p.plain_head_stride = plain_queries.q_head_stride;
    p.queries_ready = plain_queries.ready != 0;
}

/* Both codecs with their tables on the device. */
kvant_status place_codecs(const kvant_cuda_kernel_attention_args &args, kvant_cuda_codec &keys,
                          kvant_cuda_codec &values)
{
    const kvant_status status =
        kvant_cuda_codec_with_tables(args.k_codec, args.centroids[KVANT_ROLE_K], &keys);
    return status == KVANT_OK
               ? kvant_cuda_codec_with_tables(args.v_codec, args.centroids[KVANT_ROLE_V], &values)
               : status;
}

/* Kernels of any/: their arguments hold all of both codecs. */
kvant_status launch_any(kvant_cuda_kernel_attention_args args, const AttentionArgs &common,
                        const Device &device, cudaStream_t stream)
{
    kvant_cuda_codec keys, values;
    const kvant_status status = place_codecs(args, keys, values);
    args.k_codec = &keys, args.v_codec = &values;
    const cudaError_t cleared = clear_counters(args, stream);
    if (cleared != cudaSuccess)
        return from_cuda(cleared);
    return status == KVANT_OK ? launch_attention_any(args, common, (int)grid_of(device),
                                                     device.shared_bytes, stream)
                              : status;
}

/* Kernels of any/ and tile kernels; the former where the latter have no shape. */
kvant_status launch_others(const kvant_cuda_kernel_attention_args &args, bool any,
                           const Device &device, cudaStream_t stream)
{
    AttentionKernel none{};
    none.columns = TILE_COLUMNS;
    none.blocks = 1;
    const AttentionArgs common = launch_args(args, none, device);
    const int multiprocessors = (int)grid_of(device);
    const size_t scratch_at = tiles_at(args.k_codec->params.head_dim, device);
    const kvant_status status =
        any || prefers_any(args, columns_of(args))
            ? KVANT_ERR_UNSUPPORTED
            : launch_tiles(args, common, multiprocessors, device.shared_bytes, scratch_at, stream);
    return status == KVANT_ERR_UNSUPPORTED ? launch_any(args, common, device, stream) : status;
}

} // namespace

kvant_status kvant_cuda_table_attention_check(const kvant_cuda_codec *k_codec,
                                              const kvant_cuda_codec *v_codec, char *err,
                                              size_t errlen)
{
    const kvant_cuda_error error = { err, errlen };
    if (!k_codec || !v_codec)
        return kvant_cuda_refuse(&error, KVANT_ERR_ARGUMENT, "k_codec or v_codec is NULL");
    const kvant_cuda_params &k = k_codec->params, &v = v_codec->params;
    if (k.role != KVANT_ROLE_K || v.role != KVANT_ROLE_V)
        return kvant_cuda_refuse(&error, KVANT_ERR_ARGUMENT,
                                 "the first codec must be of keys, the second codec of values");
    if (k.head_dim != v.head_dim)
        return kvant_cuda_refuse(&error, KVANT_ERR_ARGUMENT, "keys and values differ in head_dim");
    if (is_open(k) != is_open(v))
        return kvant_cuda_refuse(&error, KVANT_ERR_ARGUMENT,
                                 "one codec is of exact pages, the other codec of sealed pages");
    return KVANT_OK;
}

size_t kvant_cuda_table_attention_workspace(uint32_t head_dim, uint32_t n_matrices)
{
    const Device device = current_device();
    const uint32_t blocks = most_blocks(device);
    if (blocks == 0 || head_dim == 0 || head_dim > KVANT_CUDA_MOST_DIM ||
        n_matrices > KVANT_CUDA_MOST_MATRICES)
        return 0;
    return tiles_at(head_dim, device) +
           (size_t)blocks * (std::max(n_matrices, 1u) - 1) * query_tile_bytes(head_dim);
}

void kvant_cuda_table_limit_shared_memory(size_t bytes)
{
    limit_of_shared.store(bytes, std::memory_order_relaxed);
}

size_t kvant::shared_limit()
{
    return limit_of_shared.load(std::memory_order_relaxed);
}

kvant_status kvant_cuda_table_attention(const kvant_cuda_kernel_attention_args *given,
                                        kvant_cuda_stream stream)
{
    if (!given || given->size != sizeof *given)
        return KVANT_ERR_ARGUMENT;
    kvant_cuda_kernel_attention_args args = *given;
    if (args.plain_queries.q && args.page_offsets)
        return KVANT_ERR_ARGUMENT;
    if (args.plain_queries.q)
        args.page_offsets = args.plain_queries.offsets;
    kvant_status status = check_attention(args);
    if (status != KVANT_OK)
        return status;
    const Device device = current_device();
    AttentionKernel kernel{};
    const bool any =
        kvant_cuda_needs_any(&args.k_codec->params) || kvant_cuda_needs_any(&args.v_codec->params);
    status = prefers_tiles(args) || prefers_codes(args, device.shared_bytes)
                 ? KVANT_ERR_UNSUPPORTED
                 : choose_kernel(args, device, kernel);
    const bool finds = status == KVANT_OK && finds_offsets(args, kernel);
    if (args.plain_queries.q && !finds && (status == KVANT_OK || status == KVANT_ERR_UNSUPPORTED)) {
        const kvant_status made = launch_page_offsets(
            offsets_args(args), args.plain_queries.ready != 0, static_cast<cudaStream_t>(stream));
        if (made != KVANT_OK)
            return made;
    }
    if (status == KVANT_ERR_UNSUPPORTED)
        return launch_others(args, any, device, static_cast<cudaStream_t>(stream));
    if (status != KVANT_OK)
        return status;
    ChunkAttentionArgs p{};
    static_cast<AttentionArgs &>(p) = launch_args(args, kernel, device);
    if (finds)
        copy_plain_queries(p, args.plain_queries);
    if (args.k_codec->params.decoder == KVANT_CUDA_CODEBOOK6)
        std::copy_n(args.k_codec->wide.values, std::size(p.k_levels), p.k_levels);
    if (kvant_cuda_has_chunks(&args.k_codec->params))
        p.k_directions = args.k_codec->directions;
    if (kvant_cuda_has_chunks(&args.v_codec->params))
        p.v_directions = args.v_codec->directions;
    const uint32_t grid = grid_for(p, kernel, device);
    p.n_late = late_blocks(args, grid, kernel.blocks, device);
    const cudaError_t cleared = clear_counters(args, static_cast<cudaStream_t>(stream));
    if (cleared != cudaSuccess)
        return from_cuda(cleared);
    void *parameters[] = { &p };
    return from_cuda(launch_early(kernel.kernel, grid, (unsigned)kernel.threads, parameters,
                                  (size_t)kernel.shared_bytes, static_cast<cudaStream_t>(stream)));
}
